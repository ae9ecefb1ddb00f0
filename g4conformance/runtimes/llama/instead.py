"""Interventions: what is done instead of what llama.cpp does, by writing into its tensors as they come into being.

They argue whose a disagreement is: what vanishes with one of them came from there.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from pathlib import Path

import llama_cpp
import numpy as np
from llama_cpp._ctypes_extensions import load_shared_library

from g4conformance.runtimes.llama.ggml import Tensor, name_of, overwrite, source_of, values_of
from g4conformance.runtimes.llama.names import Array

_base = load_shared_library("ggml-base", Path(llama_cpp.__file__).parent / "lib")
_base.ggml_op_desc.argtypes, _base.ggml_op_desc.restype = [ctypes.c_void_p], ctypes.c_char_p


def gelu(x: Array) -> Array:
    """By tanh, as the config's `gelu_pytorch_tanh` says; ggml looks it up in a table of float16."""
    x = x.astype(np.float32)
    return np.float32(0.5) * x * (1 + np.tanh(np.float32(np.sqrt(2 / np.pi)) * (x + np.float32(0.044715) * x**3)))


def geglu(x: Array, factor: Array) -> Array:
    return gelu(x) * factor


# By the name on the command line, what is done instead; `pictures.py` does those that are no operation's.
INSTEAD: dict[str, str] = {
    "gelu": "GELU in float32, not from a table of float16",
    "image-tokens": "the processor's number of soft tokens, for which the chat handler has no argument",
    "pixels": "the reference's pixels, resized already",
    "causal": "rows of a picture see no later row",
}
_OPERATIONS: dict[str, Callable[..., Array]] = {"GELU": gelu, "GEGLU": geglu}
_PRODUCT = "MUL_MAT"  # makes all that enters them


class Interventions:
    """Those of these names that a `Listener` can do."""

    def __init__(self, names: Sequence[str]) -> None:
        self._operations = _OPERATIONS if "gelu" in names else {}
        self._causal = "causal" in names
        self._positions = np.zeros(0, np.int32)
        self._products: dict[int, Array] = {}

    def prepare(self, tensor: Tensor) -> None:
        """What must happen before `tensor` is computed: scores are masked as their softmax is."""
        if not self._causal:
            return
        name = name_of(tensor)
        if name.startswith("Qcur_pos-"):
            self._positions = values_of(source_of(tensor, 1)).flatten()
        elif name.startswith("kq_soft_max-"):
            mask = source_of(tensor, 1)
            later = np.arange(mask.ne[0])[None] > self._positions[:, None]
            overwrite(mask, np.where(later, -np.inf, values_of(mask)))

    def concern(self, tensor: Tensor) -> bool:
        return bool(self._operations) and _operation(tensor) in (_PRODUCT, *self._operations)

    def happen(self, tensor: Tensor) -> None:
        """Writes over what ggml has just computed. It may have done so in its inputs' place, so those were kept."""
        operation = _operation(tensor)
        if operation == _PRODUCT:
            self._products[ctypes.addressof(tensor)] = values_of(tensor)
        else:
            entered = [self._products[address] for address in tensor.src if address]
            overwrite(tensor, self._operations[operation](*entered))


def _operation(tensor: Tensor) -> str:
    described: bytes = _base.ggml_op_desc(ctypes.addressof(tensor))
    return described.decode()
