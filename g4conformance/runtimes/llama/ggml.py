"""How a tensor lies in ggml's memory, and how to copy it out of there."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from numpy.typing import NDArray

_DIMS, _OP_PARAMS, _SOURCES, _NAME = 4, 16, 10, 64
_DTYPES: dict[int, np.dtype[Any]] = {
    0: np.dtype(np.float32),
    1: np.dtype(np.float16),
    26: np.dtype(np.int32),
}  # by `enum ggml_type`


class Tensor(ctypes.Structure):
    """`struct ggml_tensor`: the first dimension of `ne` is the one that lies together in memory."""

    _fields_ = [
        ("type", ctypes.c_int),
        ("buffer", ctypes.c_void_p),
        ("ne", ctypes.c_int64 * _DIMS),
        ("nb", ctypes.c_size_t * _DIMS),
        ("op", ctypes.c_int),
        ("op_params", ctypes.c_int32 * _OP_PARAMS),
        ("flags", ctypes.c_int32),
        ("src", ctypes.c_void_p * _SOURCES),
        ("view_src", ctypes.c_void_p),
        ("view_offs", ctypes.c_size_t),
        ("data", ctypes.c_void_p),
        ("name", ctypes.c_char * _NAME),
    ]


def tensor_at(address: int) -> Tensor:
    """The tensor that lies there: no copy, so it is true for as long as llama.cpp leaves it alone."""
    return Tensor.from_address(address)


def name_of(tensor: Tensor) -> str:
    return bytes(tensor.name).decode()


def source_of(tensor: Tensor, i: int) -> Tensor:
    """What enters the operation that made `tensor`, in ggml's order."""
    return tensor_at(tensor.src[i])


def values_of(tensor: Tensor) -> NDArray[Any]:
    """A copy, dimensions in numpy's order: ne = (d, c, b, a) becomes [a, b, c, d]. float16 comes as float32.

    Raises:
        ValueError: it is quantized, or of another type that numpy does not have.
    """
    found = _memory_of(tensor)
    return found.astype(np.float32) if found.dtype == np.float16 else found.copy()


def overwrite(tensor: Tensor, values: NDArray[Any]) -> None:
    """Changes it where it lies, for all that is computed of it later."""
    _memory_of(tensor)[...] = values


def _memory_of(tensor: Tensor) -> NDArray[Any]:
    dtype = _DTYPES.get(tensor.type)
    if dtype is None:
        raise ValueError(f"{name_of(tensor)} is of ggml's type {tensor.type}, which numpy does not have")
    shape, strides = tuple(tensor.ne)[::-1], tuple(tensor.nb)[::-1]
    size = dtype.itemsize + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
    return np.ndarray(shape, dtype, (ctypes.c_char * size).from_address(tensor.data), strides=strides)
