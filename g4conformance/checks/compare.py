"""Comparison: one tensor of the runtime against what it should be."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from g4conformance.metrics import Difference, difference

if TYPE_CHECKING:
    from g4conformance.checks.run import CaseRun


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


def alone(run: CaseRun, entering: str, leaving: str, rows: int) -> list[Comparison]:
    """What each decoder graph returned by itself against the reference, at the first `rows` rows.

    Args:
        entering, leaving: trace prefixes of what enters the decoder and of what comes out of it.
    """
    found = []
    if run.facts.has_per_layer_inputs:
        observed = run.observed(f"{leaving}alone/per_layer_inputs")[:, :rows]
        found.append(compare(f"{entering}per_layer_inputs", run.reference[f"{entering}per_layer_inputs"], observed))
    for i in range(len(run.facts.layer_types)):
        for part in ("key", "value", "hidden") if i in run.facts.storing_layers else ("hidden",):
            name = f"layer/{i}/{part}"
            observed = run.observed(f"{leaving}alone/{name}")
            observed = observed[:, :rows] if part == "hidden" else observed[:, :, :rows]
            found.append(compare(leaving + name, run.reference[leaving + name], observed))
    raw, cap = run.observed(f"{leaving}alone/raw_logits"), run.facts.final_logit_softcapping
    capped = raw if cap is None else torch.tanh(raw / cap) * cap
    return [*found, compare(f"{leaving}logits", run.reference[f"{leaving}logits"], capped)]


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
