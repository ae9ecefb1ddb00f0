"""Stage 7: one token at a time, over fixed buffers. Every step has the checks that prefill has."""

from __future__ import annotations

import torch
from torch import Tensor

from g4conformance.checks.alone import moved_on_average, of_decode_steps, of_layers_in_decode
from g4conformance.checks.compare import Comparison, compare
from g4conformance.checks.masks_and_rope import explain_mask, fill_comparison
from g4conformance.checks.registry import Needs, check
from g4conformance.checks.run import CaseRun, Mode
from g4conformance.stages import Stage

_STAGE = Stage.DECODE


@check("G4-DECODE-01", stage=_STAGE, budget="exact")
def tokens_and_positions(run: CaseRun) -> list[Comparison]:
    """Each step feeds its token at the position that follows the last one."""
    names = [prefix + part for prefix in run.decode_prefixes for part in ("token", "position")]
    return [compare(name, run.reference[name].flatten(), run.observed(name).flatten()) for name in names]


@check("G4-DECODE-02", stage=_STAGE, budget="exact")
def embeddings(run: CaseRun) -> list[Comparison]:
    """Each step's embedding equals the reference's of that token, to the last bit: [B, 1, H]."""
    names = [prefix + "text_embeds" for prefix in run.decode_prefixes]
    return _compare_all(run, names)


@check("G4-DECODE-03", stage=_STAGE, budget="exact")
def mask_patterns(run: CaseRun) -> list[Comparison]:
    """At each step and for each layer type, the token attends exactly the positions that the reference allows."""
    return [_mask(run, prefix, layer_type) for prefix in run.decode_prefixes for layer_type in run.layer_types]


@check("G4-DECODE-04", stage=_STAGE, budget="exact")
def mask_fill(run: CaseRun) -> list[Comparison]:
    """What each step adds to attention scores is 0 where the mask allows, else at most -10,000."""
    return [fill_comparison(run, prefix, kind) for prefix in run.decode_prefixes for kind in run.layer_types]


@check("G4-DECODE-05", stage=_STAGE, budget="exact", foreign_budget="rounding")
def rotary_tables(run: CaseRun) -> list[Comparison]:
    """At each step and for each layer type, cos and sin equal the reference's: [B, 1, head_dim]."""
    parts = [f"rope/{layer_type}/{part}" for layer_type in run.layer_types for part in ("cos", "sin")]
    names = [prefix + part for prefix in run.decode_prefixes for part in parts]
    return _compare_all(run, names)


@check("G4-DECODE-06", stage=_STAGE, budget="rounding", needs=Needs.PER_LAYER_INPUTS)
def per_layer_inputs(run: CaseRun) -> list[Comparison]:
    """Each step's per-layer inputs equal the reference's: [B, 1, L, P]."""
    names = [prefix + "per_layer_inputs" for prefix in run.decode_prefixes]
    return _compare_all(run, names)


@check("G4-DECODE-07", stage=_STAGE, budget="rounding")
def keys_and_values(run: CaseRun) -> list[Comparison]:
    """Each step's new K and V of every storing layer equal the reference's: [B, KV, 1, head_dim]."""
    parts = [f"layer/{i}/{part}" for i in run.facts.storing_layers for part in ("key", "value")]
    names = [prefix + part for prefix in run.decode_prefixes for part in parts]
    return _compare_all(run, names)


@check("G4-DECODE-08", stage=_STAGE, budget="rounding")
def layer_outputs(run: CaseRun) -> list[Comparison]:
    """Each step's output of every decoder layer equals the reference's: [B, 1, H]."""
    layers = range(len(run.facts.layer_types))
    names = [f"{prefix}layer/{i}/hidden" for prefix in run.decode_prefixes for i in layers]
    return _compare_all(run, names)


@check("G4-DECODE-09", stage=_STAGE, budget="rounding")
def logits(run: CaseRun) -> list[Comparison]:
    """Each step's logits, after the softcap, equal the reference's over the whole vocabulary: [B, vocab]."""
    names = [prefix + "logits" for prefix in run.decode_prefixes]
    return _compare_all(run, names)


@check("G4-DECODE-10", stage=_STAGE, budget="exact")
def cache_grows_by_one_row(run: CaseRun) -> list[Comparison]:
    """Each step writes its own K/V into the next row of the cache and leaves every other row as it was."""
    found = []
    for layer in run.facts.storing_layers:
        for part in ("key", "value"):
            expected = _cache_before_decode(run, layer, part)
            for step, prefix in enumerate(run.decode_prefixes):
                row = run.valid_length + step
                expected[:, :, row] = run.observed(f"{prefix}layer/{layer}/{part}")[:, :, 0]
                name = f"{prefix}cache/{layer}/{part}"
                found.append(compare(name, expected.clone(), run.buffer(name)))
    return found


@check("G4-DECODE-11", stage=_STAGE, budget="step", needs=Needs.QUANTIZED, modes=(Mode.ISOLATED,), alone=True)
def graphs_alone(run: CaseRun) -> list[Comparison]:
    """Each quantized graph, fed with what enters the reference's, returns the same up to one quantization step.

    Asked at the first and the last decode step.
    """
    return of_decode_steps(run)


@check("G4-DECODE-12", stage=_STAGE, budget="quality", needs=Needs.QUANTIZED, modes=(Mode.ISOLATED,), alone=True)
def few_elements_move(run: CaseRun) -> list[Comparison]:
    """Of each tensor that a quantized graph returns by itself, few elements on average are not the reference's value.

    Asked at the first and the last decode step.
    """
    return moved_on_average(run, of_decode_steps(run))


@check("G4-DECODE-13", stage=_STAGE, budget="rounding", needs=Needs.FLOATING, modes=(Mode.ISOLATED,), alone=True)
def layers_alone(run: CaseRun) -> list[Comparison]:
    """Each decoder layer, fed with what enters the reference's, returns the same hidden state, K and V.

    Asked at the first and the last decode step.
    """
    return of_layers_in_decode(run)


def _compare_all(run: CaseRun, names: list[str]) -> list[Comparison]:
    """Single rows have no padding: the runtime's tensors are compared as they are."""
    return [compare(name, run.reference[name], run.observed(name)) for name in names]


def _cache_before_decode(run: CaseRun, layer: int, part: str) -> Tensor:
    """The buffer [B, KV, max_seq, head_dim] that decoding starts from: what `load_state` was given, or prefill left."""
    if run.mode is Mode.ACCUMULATED:
        return run.buffer(f"prefill/cache/{layer}/{part}").clone()
    rows = run.reference[f"prefill/layer/{layer}/{part}"]
    return torch.nn.functional.pad(rows, (0, 0, 0, run.layout.max_seq - rows.shape[2]))


def _mask(run: CaseRun, prefix: str, layer_type: str) -> Comparison:
    name = f"{prefix}mask/{layer_type}"
    mask = run.reference[name]
    padding = 0 if name in run.unpadded else run.layout.max_seq - mask.shape[2]
    expected = torch.nn.functional.pad(mask, (0, padding), value=False)
    actual = run.observed(name)
    return explain_mask(compare(name, expected, actual), expected, actual, int(run.reference[prefix + "position"]))
