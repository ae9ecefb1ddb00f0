"""Budgets: how far a check lets a tensor be off, with the reason for that number."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from g4conformance.checks.registry import BudgetKind, Check
from g4conformance.reference.noise import Noise

_FILE = Path(__file__).with_name("budgets.toml")


@dataclass(frozen=True)
class Limit:
    """The largest and the mean |difference| that are allowed for one tensor."""

    largest: float
    mean: float


@dataclass(frozen=True)
class Budget:
    """What one check allows in one dtype: nothing, or `factor` times the reference's own rounding noise.

    `evidence` says what was measured to arrive at the factor.
    """

    kind: BudgetKind
    factor: float
    evidence: str

    def limit(self, noise: Noise, tensor: str, base_max_abs: float, base_mean_abs: float) -> Limit:
        """The limit for a tensor of this trace name, given the largest and the mean magnitude of its reference."""
        if self.kind is BudgetKind.EXACT:
            return Limit(0.0, 0.0)
        return Limit(
            self.factor * noise.allowed_largest(tensor, base_max_abs),
            self.factor * noise.allowed_mean(tensor, base_mean_abs),
        )


_EXACT = Budget(BudgetKind.EXACT, 0.0, "integers, booleans and copies have one right value")


def budget_of(check: Check, dtype: str, scheme: str = "none") -> Budget:
    """The budget of `check` in `dtype` under the quantization `scheme`.

    Raises:
        KeyError: budgets.toml has no entry for a check that is not exact.
    """
    if check.budget is BudgetKind.EXACT:
        return _EXACT
    try:
        entry = _entries()[scheme][check.id]
        return Budget(check.budget, float(entry[dtype]), str(entry["evidence"]))
    except KeyError:
        raise KeyError(f"budgets.toml has no [{scheme}.{check.id}] with {dtype}") from None


@cache
def _entries() -> Mapping[str, Mapping[str, Mapping[str, str | float]]]:
    return tomllib.loads(_FILE.read_text())
