"""Budgets: how far a check lets a tensor be off, with the reason for that number."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from g4conformance.checks.registry import BudgetKind, Check
from g4conformance.metrics import Difference
from g4conformance.reference.noise import Noise

_FILE = Path(__file__).with_name("budgets.toml")


@dataclass(frozen=True)
class Limit:
    """The largest and the mean |difference| that are allowed for one tensor, and how far its gain may be from 1."""

    largest: float
    mean: float
    gain: float


@dataclass(frozen=True)
class Budget:
    """What one check allows in one dtype.

    Attributes:
        factor: how many times the reference's own rounding noise.
        steps: how many quantization steps on top of that, where the check is about a quantized grid.
        gain_factor: the factor for gains.
        chances: how many times what independent differences of that size yield by chance a gain may always be off.
            Only under a scheme, where few bins flip, and others than in calibration.
        quality: what a scheme may lose, in the unit of the check; every such loss is 0 at best.
        evidence: what was measured to arrive at these numbers.
    """

    kind: BudgetKind
    evidence: str
    factor: float = 0.0
    gain_factor: float = 0.0
    chances: float = 0.0
    steps: float = 0.0
    quality: float = 0.0

    def limit(self, noise: Noise, tensor: str, found: Difference, step: float = 0.0) -> Limit:
        """The limit for a tensor of this trace name, given the magnitudes of its reference.

        Args:
            step: distance of two neighbouring values of its quantized grid, 0 where it is on none.
        """
        if self.kind is BudgetKind.EXACT:
            return Limit(0.0, 0.0, 0.0)
        if self.kind is BudgetKind.QUALITY:
            return Limit(self.quality, self.quality, math.inf)
        largest = self.factor * noise.allowed_largest(tensor, found.base_max_abs)
        mean = self.factor * noise.allowed_mean(tensor, found.base_mean_abs)
        if self.kind is BudgetKind.STEP:
            return Limit(self.steps * step + largest, math.inf, math.inf)
        gain = self.gain_factor * noise.allowed_gain(tensor, max(found.count, 1))
        return Limit(largest, mean, max(gain, self.chances * found.chance_gain))

    @property
    def number(self) -> float:
        """The budget itself, in its unit."""
        return {BudgetKind.QUALITY: self.quality, BudgetKind.STEP: 1.0}.get(self.kind, self.factor)

    def would_pass(self, ratio: float) -> float:
        """What would have allowed a difference that is `ratio` times the limit, in the budget's unit."""
        return ratio * self.number

    @property
    def unit(self) -> str:
        """What `would_pass` is a multiple of."""
        units = {BudgetKind.QUALITY: "as the limit", BudgetKind.STEP: "x that"}
        return units.get(self.kind, "x the reference's noise")


_EXACT = Budget(BudgetKind.EXACT, "integers, booleans and copies have one right value")


def budget_of(check: Check, dtype: str, scheme: str = "none") -> Budget:
    """The budget of `check` in `dtype` under the quantization `scheme`.

    Raises:
        KeyError: budgets.toml has no entry for a check that is not exact.
    """
    if check.budget is BudgetKind.EXACT:
        return _EXACT
    entry = _entry(check.id, scheme)
    evidence = str(entry["evidence"])
    if check.budget is BudgetKind.QUALITY:
        return Budget(check.budget, evidence, quality=float(entry.get(dtype, entry.get("limit"))))
    if check.budget is BudgetKind.STEP:
        return Budget(check.budget, evidence, float(entry[dtype]), steps=float(entry["steps"]))
    factor = rounding_factor(check.id, dtype, scheme)
    tail, by_chance = float(_entries()["gain_tail"][dtype]), float(_entries()["gain_by_chance"]["schemes"])
    gain_factor = math.inf if entry.get("any_gain") else factor * tail
    return Budget(check.budget, evidence, factor, gain_factor, chances=0.0 if scheme == "none" else by_chance)


def rounding_factor(check_id: str, dtype: str, scheme: str = "none") -> float:
    """How many times the noise a rounding check allows.

    Raises:
        KeyError: budgets.toml has no such entry.
    """
    try:
        return float(_entry(check_id, scheme)[dtype]) * float(_entries()["flipped_bins"].get(scheme, 1.0))
    except KeyError:
        raise KeyError(f"budgets.toml has no [{scheme}.{check_id}] with {dtype}") from None


def quality_tie(scheme: str) -> float:
    """The gap between two logits, as a fraction of their interval, that the scheme's errors typically close."""
    return float(_entries()[scheme].get("near_tie", 0.0))


def _entry(check_id: str, scheme: str) -> Mapping[str, Any]:
    """The scheme's own entry, or that which all schemes share."""
    entries = _entries()
    entry: Mapping[str, Any] = entries.get(scheme, {}).get(check_id) or entries["none"][check_id]
    return entry


@cache
def _entries() -> Mapping[str, Any]:
    return tomllib.loads(_FILE.read_text())
