"""Views: how a runtime's own layout becomes the contract's. Each is a pure function of one tensor.

A runtime declares them by trace name, and the suite looks at what it reports and returns through them:

    views = {"*/key": unpacked_heads(4), "*/value": unpacked_heads(4), "*/hidden": with_batch}
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from g4conformance.errors import ConformanceError

View = Callable[[Tensor], Tensor]
Views = Mapping[str, View]


def in_turn(*views: View) -> View:
    """The first view, then the second on what it made, and so on."""

    def view(tensor: Tensor) -> Tensor:
        for one in views:
            tensor = one(tensor)
        return tensor

    return view


def transposed(*axes: int) -> View:
    """Axis i of the result is axis `axes[i]`."""
    return lambda tensor: tensor.permute(axes)


def heads_first(tensor: Tensor) -> Tensor:
    """[B, S, KV, D] -> [B, KV, S, D], and back."""
    return tensor.transpose(1, 2)


def unpacked_heads(heads: int) -> View:
    """[B, S, heads * D] -> [B, heads, S, D]."""
    return lambda tensor: tensor.unflatten(-1, (heads, -1)).transpose(1, 2)


def packed_heads(tensor: Tensor) -> Tensor:
    """[B, KV, S, D] -> [B, S, KV * D], what `unpacked_heads` undoes."""
    return tensor.transpose(1, 2).flatten(-2)


def with_batch(tensor: Tensor) -> Tensor:
    """[...] -> [1, ...]."""
    return tensor[None]


def without_batch(tensor: Tensor) -> Tensor:
    """[1, ...] -> [...]."""
    return tensor.squeeze(0) if tensor.shape[0] == 1 else _refused(tensor, "a batch of one")


def cast(dtype: torch.dtype) -> View:
    """The same values, rounded to `dtype`."""
    return lambda tensor: tensor.to(dtype)


def padded(rows: int, axis: int, fill: float = 0.0) -> View:
    """`fill` behind the last row, up to `rows` of them, of a runtime that keeps no padding.

    For caches and masks, whose padding holds nothing. What an embedding of padding is, only a runtime that makes one
    can say.
    """

    def view(tensor: Tensor) -> Tensor:
        shape = list(tensor.shape)
        shape[axis] = rows - shape[axis]
        if shape[axis] < 0:
            return _refused(tensor, f"at most {rows} rows on axis {axis}")
        return torch.cat([tensor, tensor.new_full(shape, fill)], dim=axis)

    return view


def unpadded(rows: int, axis: int) -> View:
    """The first `rows` rows, of a buffer that is longer."""
    return lambda tensor: tensor.narrow(axis, 0, rows)


def viewed(views: Views, name: str, tensor: Tensor) -> Tensor:
    """The tensor of this trace name through the first view whose pattern (`*` is any text) fits the name.

    Raises:
        ConformanceError: the tensor is not what the view takes.
    """
    for pattern, view in views.items():
        if fnmatchcase(name, pattern):
            try:
                return view(tensor)
            except (RuntimeError, IndexError, ValueError) as error:
                raise ConformanceError(
                    f"a {name} that the view of {pattern!r} takes",
                    f"shape {tuple(tensor.shape)} ({str(error).splitlines()[0]})",
                    "Mend the runtime's `views`.",
                ) from None
    return tensor


def _refused(tensor: Tensor, wanted: str) -> Tensor:
    raise ValueError(f"{wanted} is needed, the shape is {tuple(tensor.shape)}")
