"""Traits: what the first wrong tensor looks like, so that mistakes can be recognised by it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

import torch
from torch import Tensor

from g4conformance.checks.compare import Comparison

_NOTABLE = 0.01  # of the greatest difference: what is smaller is taken for rounding that came along


@dataclass(frozen=True)
class Traits:
    """How a tensor differs from what it should be.

    Attributes:
        tensor: trace name.
        size: greatest |difference| in units of the expected tensor's greatest magnitude; infinite for another shape or
            values that are not finite.
        gain: the factor that scales the expected tensor closest onto the actual one.
        spread: for each axis, the share of its indices at which something notable differs.
        first: the first index at which something notable differs.
        share: how many of the check's tensors are wrong, of all that it compared.
    """

    tensor: str
    size: float
    gain: float = 1.0
    spread: tuple[float, ...] = ()
    first: tuple[int, ...] = ()
    share: float = 1.0

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        return cls(**{**data, "spread": tuple(data["spread"]), "first": tuple(data["first"])})


def traits_of(comparison: Comparison, share: float = 1.0) -> Traits:
    """The traits of a comparison that failed, the first of a `share` of the check's."""
    found = comparison.difference
    if found is None or not math.isfinite(found.max_abs):
        return Traits(comparison.tensor, math.inf, share=share)
    delta = (comparison.actual.to(comparison.expected.device).double() - comparison.expected.double()).abs()
    notable = delta > _NOTABLE * found.max_abs
    size = found.max_abs / found.base_max_abs if found.base_max_abs else math.inf
    return Traits(comparison.tensor, size, found.gain, _spread(notable), _first(notable), share)


def _spread(notable: Tensor) -> tuple[float, ...]:
    axes = range(notable.ndim)
    return tuple(
        float(notable.movedim(axis, 0).reshape(notable.shape[axis], -1).any(dim=1).float().mean()) for axis in axes
    )


def _first(notable: Tensor) -> tuple[int, ...]:
    flat = int(notable.flatten().int().argmax())
    return tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), notable.shape))
