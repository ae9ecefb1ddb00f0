"""Arrays of other libraries as torch tensors and torch tensors as numpy arrays: the one place where that is done."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from g4conformance.errors import ConformanceError

_AS_IT_CAME = "processor_output"  # the runtime's own affair


def as_tensor(value: Any) -> Tensor:
    """`value` as a tensor of its own shape and dtype; a tensor is returned as it is, anything else is copied.

    Takes whatever numpy can read, bfloat16 of ml_dtypes included.

    Raises:
        ConformanceError: it holds no numbers.
    """
    if isinstance(value, Tensor):
        return value
    array = np.array(value, order="C")
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    try:
        return torch.from_numpy(array)
    except TypeError:
        raise ConformanceError(
            "a tensor or a numpy array of numbers from the runtime",
            f"{type(value).__name__} of dtype {array.dtype}",
            "Return one of the two.",
        ) from None


def as_numpy(tensor: Tensor) -> np.ndarray[Any, Any]:
    """`tensor` as an array of its own shape and dtype.

    Raises:
        ConformanceError: it is bfloat16, which numpy has only with ml_dtypes, and that is not installed.
    """
    tensor = tensor.detach().cpu().contiguous()
    if tensor.dtype is not torch.bfloat16:
        return tensor.numpy()
    try:
        from ml_dtypes import bfloat16
    except ImportError:
        raise ConformanceError(
            "ml_dtypes, without which numpy has no bfloat16",
            "none",
            "Install it, or choose another --dtype.",
        ) from None
    return tensor.view(torch.int16).numpy().view(bfloat16)


def is_array(value: Any) -> bool:
    """Whether it is a tensor or an array of any library that numpy can read; single numbers are none."""
    return isinstance(value, Tensor) or (hasattr(value, "__array__") and not isinstance(value, np.generic))


def mapped(convert: Callable[[Any], Any], value: Any) -> Any:
    """`value` with every array in it converted: in tuples, lists, mappings and the contract's data classes."""
    if is_array(value):
        return convert(value)
    if isinstance(value, tuple | list):
        return tuple(mapped(convert, item) for item in value)
    if isinstance(value, Mapping):
        return {key: mapped(convert, item) for key, item in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in fields(value) if field.name != _AS_IT_CAME]
        return replace(value, **{name: mapped(convert, getattr(value, name)) for name in names})
    return value
