"""Declares checks: id, stage, kind of budget, what a case or checkpoint needs for the check to apply."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum

from g4conformance.checks.compare import Comparison
from g4conformance.checks.run import CaseRun, Mode
from g4conformance.stages import Stage

CheckFunction = Callable[[CaseRun], Comparison | list[Comparison]]


class BudgetKind(StrEnum):
    """How far a check lets a tensor be off: not at all; as far as rounding takes it; one quantization step in few
    places; or as far as a scheme's limit says, whatever a quantized runtime loses.
    """

    EXACT = "exact"
    ROUNDING = "rounding"
    STEP = "step"
    QUALITY = "quality"


class Needs(StrEnum):
    """What must be there for a check to apply; its value says so in a report."""

    NOTHING = "nothing"
    PROMPT = "a prompt in the case"
    IMAGE = "an image in the case"
    PER_LAYER_INPUTS = "per-layer embeddings in the checkpoint"
    PROBES = "self_consistency: true in the case"
    REFUSALS = "something that the runtime declares not to support; asked once, with the first case"
    FLOATING = "a runtime in floating point"
    QUANTIZED = "a quantized runtime"
    QUANTIZED_IMAGE = "a quantized runtime and an image in the case"
    QUANTIZED_ONCE = "a quantized runtime; asked once, with the first case"


QUANTIZED = frozenset((Needs.QUANTIZED, Needs.QUANTIZED_IMAGE, Needs.QUANTIZED_ONCE))


@dataclass(frozen=True)
class Check:
    """One numbered statement that must hold.

    Attributes:
        foreign_budget: that of a runtime with kernels of its own.
        alone: whether it is about pieces of its stage that were run by themselves.
    """

    id: str
    stage: Stage
    budget: BudgetKind
    needs: Needs
    modes: tuple[Mode, ...]
    function: CheckFunction
    foreign_budget: BudgetKind
    alone: bool

    @property
    def statement(self) -> str:
        """The first sentence of the function's docstring."""
        return " ".join((self.function.__doc__ or "").split("\n\n")[0].split())

    def of_foreign(self) -> Check:
        """The same as it is judged on a runtime with kernels of its own."""
        return replace(self, budget=self.foreign_budget)

    def __call__(self, run: CaseRun) -> list[Comparison]:
        found = self.function(run)
        return found if isinstance(found, list) else [found]


CHECKS: dict[str, Check] = {}


def check(
    id: str,
    *,
    stage: Stage,
    budget: str,
    needs: Needs = Needs.NOTHING,
    modes: tuple[Mode, ...] = (Mode.ISOLATED, Mode.ACCUMULATED),
    foreign_budget: str | None = None,
    alone: bool = False,
) -> Callable[[CheckFunction], CheckFunction]:
    """Registers the decorated function as the check `id`.

    Raises:
        ValueError: the id is taken.
    """

    def register(function: CheckFunction) -> CheckFunction:
        if id in CHECKS:
            raise ValueError(f"two checks are called {id}")
        foreign = BudgetKind(foreign_budget or budget)
        CHECKS[id] = Check(id, stage, BudgetKind(budget), needs, modes, function, foreign, alone)
        return function

    return register


def checks_of(stage: Stage) -> list[Check]:
    """The stage's checks in the order of their declaration."""
    return [declared for declared in CHECKS.values() if declared.stage is stage]
