"""Budgets: how far a check lets a tensor be off, with the reason for that number."""

from __future__ import annotations

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
    """What one check allows in one dtype: nothing, or `factor` times the reference's own rounding noise.

    Attributes:
        gain_factor: the factor for gains.
        evidence: what was measured to arrive at the factor.
    """

    kind: BudgetKind
    factor: float
    gain_factor: float
    evidence: str

    def limit(self, noise: Noise, tensor: str, found: Difference) -> Limit:
        """The limit for a tensor of this trace name, given the magnitudes of its reference."""
        if self.kind is BudgetKind.EXACT:
            return Limit(0.0, 0.0, 0.0)
        return Limit(
            self.factor * noise.allowed_largest(tensor, found.base_max_abs),
            self.factor * noise.allowed_mean(tensor, found.base_mean_abs),
            self.gain_factor * noise.allowed_gain(tensor, max(found.count, 1)),
        )


_EXACT = Budget(BudgetKind.EXACT, 0.0, 0.0, "integers, booleans and copies have one right value")


def budget_of(check: Check, dtype: str, scheme: str = "none") -> Budget:
    """The budget of `check` in `dtype` under the quantization `scheme`.

    Raises:
        KeyError: budgets.toml has no entry for a check that is not exact.
    """
    if check.budget is BudgetKind.EXACT:
        return _EXACT
    factor = rounding_factor(check.id, dtype, scheme)
    gain_factor = factor * float(_entries()["gain_tail"][dtype])
    return Budget(check.budget, factor, gain_factor, str(_entries()[scheme][check.id]["evidence"]))


def rounding_factor(check_id: str, dtype: str, scheme: str = "none") -> float:
    """How many times the noise a rounding check allows.

    Raises:
        KeyError: budgets.toml has no such entry.
    """
    try:
        return float(_entries()[scheme][check_id][dtype])
    except KeyError:
        raise KeyError(f"budgets.toml has no [{scheme}.{check_id}] with {dtype}") from None


@cache
def _entries() -> Mapping[str, Any]:
    return tomllib.loads(_FILE.read_text())
