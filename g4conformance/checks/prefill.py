"""Stage 6: the prompt runs through the decoder; its K/V fill the cache, its last row gives the first logits."""

from __future__ import annotations

from g4conformance.checks.alone import moved, of_decoder, of_layers
from g4conformance.checks.compare import Comparison, compare
from g4conformance.checks.registry import Needs, check
from g4conformance.checks.run import CaseRun, Mode
from g4conformance.stages import Stage

_STAGE = Stage.PREFILL


@check("G4-PREFILL-01", stage=_STAGE, budget="rounding", needs=Needs.PER_LAYER_INPUTS)
def per_layer_inputs(run: CaseRun) -> Comparison:
    """The per-layer inputs of every row of the prompt, image rows included, equal the reference's: [B, n, L, P]."""
    rows = run.observed("per_layer_inputs")[:, : run.valid_length]
    return compare("per_layer_inputs", run.reference["per_layer_inputs"], rows)


@check("G4-PREFILL-02", stage=_STAGE, budget="rounding")
def keys_and_values(run: CaseRun) -> list[Comparison]:
    """K (after norm and RoPE) and V (after norm) of every storing layer equal the reference's: [B, KV, n, head_dim]."""
    names = [f"prefill/layer/{i}/{part}" for i in run.facts.storing_layers for part in ("key", "value")]
    return [compare(name, run.reference[name], run.observed(name)[:, :, : run.valid_length]) for name in names]


@check("G4-PREFILL-03", stage=_STAGE, budget="rounding")
def layer_outputs(run: CaseRun) -> list[Comparison]:
    """The output of every decoder layer equals the reference's at every row of the prompt: [B, n, H]."""
    names = [f"prefill/layer/{i}/hidden" for i in range(len(run.facts.layer_types))]
    return [compare(name, run.reference[name], run.observed(name)[:, : run.valid_length]) for name in names]


@check("G4-PREFILL-04", stage=_STAGE, budget="rounding")
def logits(run: CaseRun) -> Comparison:
    """The logits of the prompt's last row, after the softcap, equal the reference's over the whole vocabulary."""
    return compare("prefill/logits", run.reference["prefill/logits"], run.observed("prefill/logits"))


@check("G4-PREFILL-05", stage=_STAGE, budget="exact")
def cache_holds_the_prompt(run: CaseRun) -> list[Comparison]:
    """The cache's first rows are the prompt's K/V as they came from the layer, to the last bit."""
    found = []
    for layer in run.facts.storing_layers:
        for part in ("key", "value"):
            rows = run.observed(f"prefill/layer/{layer}/{part}")[:, :, : run.valid_length]
            name = f"prefill/cache/{layer}/{part}"
            found.append(compare(name, rows, run.observed(name)[:, :, : run.valid_length]))
    return found


@check("G4-PREFILL-06", stage=_STAGE, budget="exact")
def cache_beyond_the_prompt_is_untouched(run: CaseRun) -> list[Comparison]:
    """Cache rows beyond the prompt are zero: no K/V of padding is written, and nothing of an earlier request remains.

    The whole buffer must have max_seq rows and the layer's own KV heads and head dim.
    """
    found = []
    for layer in run.facts.storing_layers:
        for part in ("key", "value"):
            rows = run.reference[f"prefill/layer/{layer}/{part}"]
            expected = rows.new_zeros(*rows.shape[:2], run.layout.max_seq - run.valid_length, rows.shape[3])
            name = f"prefill/cache/{layer}/{part}"
            found.append(compare(name, expected, run.buffer(name)[:, :, run.valid_length :]))
    return found


@check("G4-PREFILL-07", stage=_STAGE, budget="step", needs=Needs.QUANTIZED, modes=(Mode.ISOLATED,), alone=True)
def graphs_alone(run: CaseRun) -> list[Comparison]:
    """Each quantized graph, fed with what enters the reference's, returns the same up to one quantization step."""
    return of_decoder(run, "", "prefill/", rows=run.valid_length)


@check("G4-PREFILL-08", stage=_STAGE, budget="quality", needs=Needs.QUANTIZED, modes=(Mode.ISOLATED,), alone=True)
def few_elements_move(run: CaseRun) -> list[Comparison]:
    """Of each tensor that a quantized graph returns by itself, few elements are not the reference's value."""
    return moved(run, of_decoder(run, "", "prefill/", rows=run.valid_length))


@check("G4-PREFILL-09", stage=_STAGE, budget="rounding", needs=Needs.FLOATING, modes=(Mode.ISOLATED,), alone=True)
def layers_alone(run: CaseRun) -> list[Comparison]:
    """Each decoder layer, fed with what enters the reference's, returns the same hidden states, K and V.

    A layer that is slightly off hides in what the layers before it have rounded; alone, it does not.
    """
    return of_layers(run, "prefill/", rows=run.valid_length)
