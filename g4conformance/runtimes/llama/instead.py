"""Interventions: what is done instead of what llama.cpp does, some by writing into its tensors as they come into being.

They argue whose a disagreement is: what vanishes with one of them came from there.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from g4conformance.runtimes.llama.ggml import Tensor, name_of, overwrite, source_of, values_of
from g4conformance.runtimes.llama.names import Array


def gelu(x: Array) -> Array:
    """By tanh, as the config's `gelu_pytorch_tanh` says; ggml looks it up in a table of float16."""
    x = x.astype(np.float32)
    return np.float32(0.5) * x * (1 + np.tanh(np.float32(np.sqrt(2 / np.pi)) * (x + np.float32(0.044715) * x**3)))


def geglu(x: Array, factor: Array) -> Array:
    return gelu(x) * factor


# By the name on the command line, what is done instead; `text.py` and `pictures.py` do those that are no operation's.
INSTEAD: dict[str, str] = {
    "kv-f32": "K and V in float32, with the types that `Llama` takes",
    "gelu": "GELU by tanh in float32, not from a table of float16, nor QuickGELU",
    "image-tokens": "the processor's number of soft tokens, for which the chat handler has no argument",
    "pixels": "the reference's pixels, resized already",
    "causal": "rows of a picture see no later row",
    "first-key-hidden": "a fault: no later row sees the first one",
}
_OPERATIONS: dict[str, Callable[..., Array]] = {"GELU": gelu, "GEGLU": geglu, "GEGLU_QUICK": geglu}
_BEFORE = ("MUL_MAT", "CLAMP")  # make all that enters them


class Interventions:
    """Those of these names that a `Listener` can do."""

    def __init__(self, names: Sequence[str]) -> None:
        self._operations = _OPERATIONS if "gelu" in names else {}
        self._causal, self._hides = "causal" in names, "first-key-hidden" in names
        self._positions = np.zeros(0, np.int32)
        self._made: dict[int, Array] = {}

    def prepare(self, tensor: Tensor) -> None:
        """What must happen before `tensor` is computed: scores are masked as their softmax is."""
        if not (self._causal or self._hides):
            return
        name = re.sub(r"-\d+$", "", name_of(tensor))
        if name == "Qcur_pos":
            self._positions = values_of(source_of(tensor, 1)).flatten()
        elif name == "kq_soft_max":
            mask = source_of(tensor, 1)
            keys, rows = np.arange(mask.ne[0])[None], self._positions[:, None]
            hidden = (keys > rows) & self._causal | (keys == 0) & (rows > 0) & self._hides
            overwrite(mask, np.where(hidden, -np.inf, values_of(mask)))

    def concern(self, tensor: Tensor) -> bool:
        return bool(self._operations) and _operation(tensor) in (*_BEFORE, *self._operations)

    def happen(self, tensor: Tensor) -> None:
        """Writes over what ggml has just computed. It may have done so in its inputs' place, so those were kept."""
        operation = _operation(tensor)
        if operation in _BEFORE:
            self._made[ctypes.addressof(tensor)] = values_of(tensor)
        else:
            entered = [self._made[address] for address in tensor.src if address]
            overwrite(tensor, self._operations[operation](*entered))


def _operation(tensor: Tensor) -> str:
    described: bytes = _ggml().ggml_op_desc(ctypes.addressof(tensor))
    return described.decode()


@cache
def _ggml() -> Any:
    """The library, as llama_cpp loads it."""
    import llama_cpp
    from llama_cpp._ctypes_extensions import load_shared_library

    library = load_shared_library("ggml-base", Path(llama_cpp.__file__).parent / "lib")
    library.ggml_op_desc.argtypes, library.ggml_op_desc.restype = [ctypes.c_void_p], ctypes.c_char_p
    return library
