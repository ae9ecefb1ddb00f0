"""Checks the reference against itself before it judges anyone, and calibrates rounding noise on the way.

Several ways of computing what a recording holds must agree up to rounding: another attention implementation; the prompt
and its continuation in one pass, with and without a cache (so cached = uncached, and prefill(n + 1) = prefill(n) + one
decode step); and the prompt padded on the right, as a static runtime pads it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from filelock import FileLock
from torch import Tensor

from g4conformance.checkpoints.checkpoint import Checkpoint
from g4conformance.errors import UnsoundReferenceError
from g4conformance.expected import greedy_tokens
from g4conformance.prompts import ResolvedCase
from g4conformance.reference.hooks import Listener
from g4conformance.reference.layers import attention_of, expected_alone, layers_alone, passes_of
from g4conformance.reference.noise import FORMAT_VERSION, Noise, NoiseMeter
from g4conformance.reference.record import model_inputs, record_reference
from g4conformance.runtime.inputs import pad_right
from g4conformance.trace import Recorder

Tensors = Mapping[str, Tensor]


def calibrated_noise(checkpoint: Checkpoint, cases: Sequence[ResolvedCase], cache_folder: Path) -> Noise:
    """The noise of `checkpoint` in its setting, measured on `cases` once and then read from `cache_folder`."""
    path = cache_folder / f"noise-{_setting(checkpoint, cases)}.json"
    cache_folder.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_suffix(".lock")):
        noise = Noise.load(path)
        if noise is None:
            noise = measure_noise(checkpoint, cases)
            noise.save(path)
    return noise


def measure_noise(checkpoint: Checkpoint, cases: Sequence[ResolvedCase]) -> Noise:
    """Runs all ways of computing `cases` and returns their distances."""
    meter = NoiseMeter(checkpoint.dtype)
    for case in cases:
        base = record_reference(checkpoint, case.request.inputs, case.reference_steps, case.case.name)
        for way, other in _other_ways(checkpoint, case, base):
            meter.add(way, base, other)
        if checkpoint.on_key_value is None:  # layers alone are asked of runtimes in floating point
            _measure_layers_alone(meter, checkpoint, case, base)
    return meter.noise()


def require_sound(noise: Noise) -> None:
    """Rounding moves logits by less than twice the square root of eps, a wrong computation by far more.

    Two sound ways were measured to differ by a PEIR of up to 0.15 in bfloat16 on random configs of the seeded family,
    and by 4e-7 in float32 on the bundled checkpoint.

    Raises:
        UnsoundReferenceError: the PEIR of logits between two ways is above that.
    """
    limit = 2 * math.sqrt(noise.eps)
    for way, found in noise.worst_peir.items():
        if not found <= limit:
            raise UnsoundReferenceError(
                f"a reference that agrees with itself to a PEIR of {limit:.2g} on logits",
                f"{found:.2g} between its plain prefill and {way}",
                "No runtime was judged. Choose another --dtype or --attn, or another version of transformers.",
            )


def _other_ways(checkpoint: Checkpoint, case: ResolvedCase, base: Tensors) -> Iterator[tuple[str, Tensors]]:
    inputs, steps = case.request.inputs, case.reference_steps
    tokens = greedy_tokens(base)[:steps]
    yield "another attention implementation", _other_attention(checkpoint, inputs, tokens)
    for way, model in checkpoint.other_ways.items():
        yield way, record_reference(replace(checkpoint, model=model), inputs, steps, tokens=tokens)
    length = int(base["valid_length"])
    continued = _continued(checkpoint, inputs, tokens)
    # A quantized cache is part of what is computed: without one, nothing rounds K/V.
    for use_cache in (True, False) if checkpoint.on_key_value is None else (True,):
        whole = _one_pass(checkpoint, continued, use_cache, first_logits=length - 1)
        yield f"one pass {'with' if use_cache else 'without'} a cache", split_pass(whole, length)
    if (max_seq := case.request.layout.max_seq) > length:
        padded = _one_pass(checkpoint, _padded(checkpoint, inputs, max_seq), True, length - 1, last_logits=length - 1)
        yield "a prompt padded on the right", split_pass(padded, length, decode=False)


def _measure_layers_alone(meter: NoiseMeter, checkpoint: Checkpoint, case: ResolvedCase, base: Tensors) -> None:
    """Each decoder layer by itself, in padded buffers, by both attention implementations and every other way."""
    passes = passes_of(base, case.request.layout, checkpoint.facts, case.reference_steps)
    alone = expected_alone(base, checkpoint.facts, passes)
    for way, model in (("", checkpoint.model), *checkpoint.other_ways.items()):
        for attention in ("eager", "sdpa"):
            with attention_of(model, attention):
                meter.add(way, alone, layers_alone(model, base, case.request.layout, checkpoint.facts, passes))


def _other_attention(checkpoint: Checkpoint, inputs: Mapping[str, Any], tokens: Sequence[int]) -> Tensors:
    own = checkpoint.options.attn_implementation
    with attention_of(checkpoint.model, "sdpa" if own == "eager" else "eager"):
        return record_reference(checkpoint, inputs, len(tokens), tokens=tokens)


def _one_pass(
    checkpoint: Checkpoint,
    inputs: Mapping[str, Any],
    use_cache: bool,
    first_logits: int,
    last_logits: int | None = None,
) -> Tensors:
    """All that one forward pass yields; `logits` [B, n, vocab] only of rows `first_logits` to `last_logits`."""
    record = Recorder()
    listener = Listener(checkpoint, record)
    cache = listener.new_cache() if use_cache else None
    end = inputs["input_ids"].shape[1] if last_logits is None else last_logits + 1
    rows = torch.arange(first_logits, end, device=checkpoint.device)
    with torch.no_grad(), listener.listening():
        listener.begin("", "", past_len=0)
        given = model_inputs(inputs, checkpoint.dtype)
        output = checkpoint.model(**given, cache=cache, use_cache=use_cache, logits_to_keep=rows)
        record("logits", output.logits)
    return record.tensors


def split_pass(whole: Tensors, length: int, decode: bool = True) -> dict[str, Tensor]:
    """Cuts one pass into what prefill of `length` rows and decode steps over the others would have yielded.

    `logits` begin at row `length - 1`; every other tensor with a row axis begins at row 0.
    """
    tensors: dict[str, Tensor] = {}
    for name, tensor in whole.items():
        axis = _row_axis(name)
        if axis is None:
            tensors[name] = tensor
        elif name == "logits":
            tensors |= {_logits_name(i): tensor[:, i] for i in range(tensor.shape[1] if decode else 1)}
        else:
            tensors[("prefill/" if name.startswith("layer/") else "") + name] = tensor.narrow(axis, 0, length)
            for row in range(length, tensor.shape[axis]) if decode else ():
                tensors[f"decode/{row - length}/{name}"] = tensor.narrow(axis, row, 1)
    return tensors


def _logits_name(row: int) -> str:
    return f"decode/{row - 1}/logits" if row else "prefill/logits"


def _row_axis(name: str) -> int | None:
    """The axis of prompt rows of a one-pass tensor; None for vision tensors and masks, which are not cut."""
    if name.startswith(("vision/", "visual_embeds", "mask/")):
        return None
    return 2 if name.endswith(("/key", "/value")) else 1


def _continued(checkpoint: Checkpoint, inputs: Mapping[str, Any], tokens: Sequence[int]) -> dict[str, Any]:
    """The prompt with `tokens` appended, for one pass; a placeholder among them is padding, as decode takes it."""
    facts = checkpoint.facts
    fed = [facts.pad_token_id if token in facts.placeholder_ids else token for token in tokens]
    extra = torch.tensor([fed], dtype=torch.long, device=inputs["input_ids"].device)
    longer = {
        "input_ids": extra,
        "attention_mask": torch.ones_like(extra),
        "mm_token_type_ids": torch.zeros_like(extra),
    }
    return {k: torch.cat([v, longer[k].to(v.dtype)], dim=1) if k in longer else v for k, v in inputs.items()}


def _padded(checkpoint: Checkpoint, inputs: Mapping[str, Any], max_seq: int) -> dict[str, Any]:
    fill = {"input_ids": checkpoint.facts.pad_token_id, "attention_mask": 0, "mm_token_type_ids": 0}
    return {k: pad_right(v, max_seq, fill[k]) if k in fill else v for k, v in inputs.items()}


def _setting(checkpoint: Checkpoint, cases: Sequence[ResolvedCase]) -> str:
    """A file name that says all that the noise depends on."""
    options = checkpoint.options
    parts = [
        str(FORMAT_VERSION),
        checkpoint.digest,
        *(f"{case.digest}:{case.reference_steps}:{case.request.layout.max_seq}" for case in cases),
        torch.__version__,
        transformers.__version__,
        str(torch.get_num_threads()),
    ]
    digest = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
    return f"{options.dtype}-{options.device}-{options.attn_implementation}-{options.image_backend}-{digest}"
