"""llama.cpp's names and layouts become those of the contract (n rows of a pass, K keys, D head dim)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from g4conformance.runtimes.llama.listening import Heard

Array = NDArray[Any]
Trace = dict[str, Array]

# By name without the layer's number: which of the operation's inputs are of interest too.
_WANTED: dict[str, tuple[int, ...]] = {
    "embd": (1,),  # the ids
    "inp_scaled": (),
    "inp_per_layer": (),
    "Qcur_normed": (),
    "Qcur_pos": (1,),  # the positions
    "Kcur_pos": (),
    "Vcur_normed": (),
    "kq": (0,),  # the key cache
    "kq_soft_max": (1,),  # the mask
    "kqv": (0,),  # the value cache, transposed
    "l_out": (),
    "result_output": (),
}
# The axis of rows, by the trace name's last part or, of those that have a layer type, its first.
_ROWS = {"key": 2, "value": 2, "mask_bias": 2, "token": 1, "position": 0}


def wanted(name: str) -> tuple[int, ...] | None:
    """What `Listener` is to look at."""
    return _WANTED.get(re.sub(r"-\d+$", "", name))


def pass_trace(heard: Heard, layer_types: Sequence[str]) -> Trace:
    """One pass under the contract's names, without `prefill/` or `decode/<t>/`.

    Masks and caches have as many keys as llama.cpp has made room for.
    """
    trace = {"text_embeds": heard["inp_scaled"][0], "position": heard["Qcur_pos-0:1"].flatten().astype(np.int64)}
    if "embd" in heard:
        trace["token"] = heard["embd:1"][0, 0].astype(np.int64)
    if "inp_per_layer" in heard:
        trace["per_layer_inputs"] = heard["inp_per_layer"]
    if "result_output" in heard:
        trace["logits"] = heard["result_output"][0, 0, -1:]
    for i, kind in enumerate(layer_types):
        trace[f"layer/{i}/hidden"] = heard[f"l_out-{i}"][0]
        if i == layer_types.index(kind):
            trace |= _mask(kind, heard[f"kq_soft_max-{i}:1"])
            trace |= _rope(kind, heard[f"Qcur_normed-{i}"][0], heard[f"Qcur_pos-{i}"][0])
        if f"Kcur_pos-{i}" in heard:  # it stores K and V
            trace[f"layer/{i}/key"] = heard[f"Kcur_pos-{i}"].swapaxes(1, 2)
            trace[f"layer/{i}/value"] = heard[f"Vcur_normed-{i}"].swapaxes(1, 2)
            trace[f"cache/{i}/key"] = heard[f"kq-{i}:0"]
            trace[f"cache/{i}/value"] = heard[f"kqv-{i}:0"].swapaxes(2, 3)
    return trace


def _mask(kind: str, bias: Array) -> Trace:
    """[1, 1, n, K]: what is added to the scores."""
    return {f"mask/{kind}": bias[0] == 0, f"mask_bias/{kind}": bias}


def _rope(kind: str, before: Array, after: Array) -> Trace:
    """The table that it does not have: the angles by which it has turned queries, [n, heads, D], all heads together."""
    (a, b), (x, y) = (np.split(part.astype(np.float64), 2, axis=-1) for part in (before, after))
    length = (a * a + b * b).sum(axis=1)
    cos, sin = (a * x + b * y).sum(axis=1) / length, (a * y - b * x).sum(axis=1) / length
    return {
        f"rope/{kind}/{part}": np.tile(half, 2)[None].astype(np.float32) for part, half in (("cos", cos), ("sin", sin))
    }


def joined(passes: Sequence[Trace]) -> Trace:
    """Passes over pieces of a prompt as one pass: rows one after the other, keys and logits of the last piece."""
    rows = sum(len(one["position"]) for one in passes)
    trace = {}
    for name in passes[-1]:
        pieces = [known_keys(name, one[name], rows) for one in passes]
        last_only = name == "logits" or name.startswith("cache/")
        trace[name] = pieces[-1] if last_only else np.concatenate(pieces, axis=_row_axis(name))
    return trace


def known_keys(name: str, array: Array, keys: int) -> Array:
    """Masks and caches with the keys that there are; a mask that was made with fewer hides the others."""
    if name.startswith("cache/"):
        return array[:, :, :keys]
    if not name.startswith(("mask/", "mask_bias/")):
        return array
    missing = max(keys - array.shape[-1], 0)
    fill = False if array.dtype == bool else -np.inf
    widths = [(0, 0)] * (array.ndim - 1) + [(0, missing)]
    return np.pad(array, widths, constant_values=fill)[..., :keys]


def _row_axis(name: str) -> int:
    parts = name.split("/")
    return _ROWS.get(parts[-1], _ROWS.get(parts[0], 1))


def inputs_trace(ids: Sequence[int], rows: int, pad: int) -> Trace:
    """A prompt's ids as a static buffer of `rows` has them: llama.cpp has none, and padding is the suite's."""
    seen = np.arange(max(rows, len(ids)))[None] < len(ids)
    return {"input_ids": _padded([ids], rows, pad), "attention_mask": seen, "valid_length": np.array([len(ids)])}


def prefill_trace(trace: Trace, rows: int, pad: int) -> Trace:
    """The contract's names of a prompt's pass."""
    entering = ("text_embeds", "fused_embeds", "per_layer_inputs", "mask", "rope")
    told = {name: array for name, array in trace.items() if name not in ("token", "position")}
    named = {name if name.startswith(entering) else f"prefill/{name}": array for name, array in told.items()}
    return named | {"llm_input_ids": _padded(trace["token"], rows, pad)}


def _padded(ids: Any, rows: int, pad: int) -> Array:
    ids = np.asarray(ids)
    return np.pad(ids, [(0, 0), (0, max(rows - ids.shape[1], 0))], constant_values=pad)


def step_trace(trace: Trace, step: int) -> Trace:
    """The contract's names of a single token's pass, the decode step `step`."""
    keys = int(trace["position"][0]) + 1
    return {f"decode/{step}/{name}": known_keys(name, array, keys) for name, array in trace.items()}
