"""One entry of conformance.toml, and which verdicts it is about."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path

from g4conformance.budgets import Budget
from g4conformance.checks.registry import BudgetKind
from g4conformance.errors import ConformanceError

FILE_NAME = "conformance.toml"
CATEGORIES = ("bug", "unsupported", "by design", "reference")
ANY = "*"


@dataclass(frozen=True)
class Scope:
    """Which verdicts an entry is about: those of one check, on some cases, under a scheme, in a dtype.

    Attributes:
        cases: names of cases; `*` alone is every case. Likewise a `*` as scheme or dtype.
    """

    check: str
    cases: tuple[str, ...] = (ANY,)
    scheme: str = ANY
    dtype: str = ANY

    def within(self, scheme: str, dtype: str) -> bool:
        """Whether a run with this scheme and dtype is meant."""
        return self.scheme in (ANY, scheme) and self.dtype in (ANY, dtype)

    def covers(self, check: str, case: str) -> bool:
        """Whether a verdict of this check on this case is meant, in a run that is."""
        return check == self.check and (self.cases == (ANY,) or case in self.cases)

    def overlaps(self, other: Scope) -> bool:
        """Whether there can be a verdict that both are about."""
        return (
            self.check == other.check
            and _meet(self.cases, other.cases)
            and _meet((self.scheme,), (other.scheme,))
            and _meet((self.dtype,), (other.dtype,))
        )


def _meet(one: Collection[str], other: Collection[str]) -> bool:
    return ANY in one or ANY in other or not set(one).isdisjoint(other)


@dataclass(frozen=True)
class KnownFailure:
    """A check that is known to fail.

    Attributes:
        place: the entry in words, such as `[[known]] entry 2 (G4-GEN-05)`.
        category: whose failure it is, one of `CATEGORIES`.
    """

    place: str
    scope: Scope
    reason: str
    category: str
    link: str


@dataclass(frozen=True)
class WiderBudget:
    """A budget that an adopter needs to be wider than ours.

    Attributes:
        factor: instead of the budget's multiple of the reference's noise; of a check about a quantized grid, the
            multiple of all that is allowed.
        limit: instead of what a scheme may lose. One of both is None.
    """

    place: str
    scope: Scope
    reason: str
    factor: float | None = None
    limit: float | None = None

    @property
    def number(self) -> float:
        number = self.factor if self.factor is not None else self.limit
        assert number is not None
        return number

    def applied(self, budget: Budget) -> Budget:
        """`budget` with this entry's number.

        Raises:
            ConformanceError: that would not be wider.
        """
        usual = budget.number
        if self.number <= usual:
            raise ConformanceError(
                f"a number above {usual:g}, the budget as it is, in {FILE_NAME}, {self.place}",
                f"{self.number:g}",
                "Budgets can only be widened; remove the entry.",
            )
        if budget.kind is BudgetKind.QUALITY:
            return replace(budget, quality=self.number)
        wider = self.number / usual
        return replace(
            budget,
            factor=budget.factor * wider,
            gain_factor=budget.gain_factor * wider,
            steps=budget.steps * wider,
        )


@dataclass(frozen=True)
class Declared:
    """All that conformance.toml declares; no two of its entries of one kind are about the same verdict."""

    path: Path | None = None
    failures: tuple[KnownFailure, ...] = ()
    budgets: tuple[WiderBudget, ...] = ()

    @property
    def entries(self) -> tuple[KnownFailure | WiderBudget, ...]:
        return (*self.failures, *self.budgets)

    def within(self, scheme: str, dtype: str) -> Declared:
        """What it declares about runs with this scheme and dtype."""
        return replace(
            self,
            failures=tuple(entry for entry in self.failures if entry.scope.within(scheme, dtype)),
            budgets=tuple(entry for entry in self.budgets if entry.scope.within(scheme, dtype)),
        )

    def failure(self, check: str, case: str) -> KnownFailure | None:
        return next((entry for entry in self.failures if entry.scope.covers(check, case)), None)

    def budget(self, check: str, case: str) -> WiderBudget | None:
        return next((entry for entry in self.budgets if entry.scope.covers(check, case)), None)


NOTHING = Declared()
