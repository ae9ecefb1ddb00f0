"""Comparison: one tensor of the runtime against what it should be."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from g4conformance.metrics import Difference, difference


@dataclass(frozen=True)
class Comparison:
    """What a check found out about one tensor.

    Attributes:
        tensor: trace name; budgets look up their noise under it.
        difference: None where the shapes differ, which no budget forgives.
        detail: the mismatch in words, where words say more than an index.
        expected, actual: what was compared.
    """

    tensor: str
    difference: Difference | None
    expected: Tensor = field(repr=False, compare=False)
    actual: Tensor = field(repr=False, compare=False)
    detail: str = ""

    def explained(self, detail: str) -> Comparison:
        return replace(self, detail=detail)


def compare(tensor: str, expected: Tensor, actual: Tensor) -> Comparison:
    """Compares all elements; a difference of shape or of kind (floating, integer, boolean) is a mismatch of its own."""
    if expected.shape != actual.shape:
        shapes = f"{tensor}.shape={tuple(actual.shape)}, but should be {tuple(expected.shape)}"
        return Comparison(tensor, None, expected, actual, shapes)
    if _kind(expected) != _kind(actual):
        kinds = f"{tensor}.dtype={actual.dtype}, but should be {expected.dtype}"
        return Comparison(tensor, None, expected, actual, kinds)
    return Comparison(tensor, difference(expected, actual), expected, actual)


def holds(tensor: str, true_where_right: Tensor, detail: str) -> Comparison:
    """A comparison that is exact equality with all true; `detail` says what was to hold."""
    found = compare(tensor, torch.ones_like(true_where_right), true_where_right)
    right = found.difference is None or found.difference.equal
    return found if right else found.explained(detail)


def nothing(tensor: str, why: str) -> Comparison:
    """What a check returns where a case has nothing to compare; a verdict that says why becomes of it."""
    empty = torch.zeros(0, dtype=torch.bool)
    return compare(tensor, empty, empty).explained(why)


def _kind(tensor: Tensor) -> str:
    if tensor.dtype == torch.bool:
        return "bool"
    return "floating" if tensor.is_floating_point() else "integer"
