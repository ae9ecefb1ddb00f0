"""Declares faults: deliberate mistakes that porters have made, each with the check that must see it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from g4conformance.faults.patching import Patch
from g4conformance.faults.subjects import Subject
from g4conformance.stages import Stage

Plant = Callable[[Any, Patch], None]
DERIVED = "derived"


class At(StrEnum):
    """Which part of a runtime the mistake is in."""

    PROCESSOR = "processor"
    WEIGHTS = "weights"
    GRAPH = "graph"
    ORCHESTRATION = "orchestration"
    STATE = "state"


@dataclass(frozen=True)
class Fault:
    """One mistake that can be put into a runtime.

    Attributes:
        id: unique; that of the public catalogue where it is one of its faults.
        stage: the first stage whose own tensor is wrong.
        check: the check of that stage that must turn red.
        case: the bundled case that shows it.
        needs: the checkpoint and dtype on which it can show.
        sources: addresses of public reports, or "derived" for one that nobody has reported.
        boundary: it touches only the contract's methods, so that it can be put into any runtime.
        raises: whether what people saw of it was an exception; of all others an exception is no kill.
        plant: puts it into a runtime that is already built for the case's layout.
    """

    id: str
    stage: Stage
    at: At
    check: str
    case: str
    needs: Subject
    sources: tuple[str, ...]
    boundary: bool
    raises: bool
    plant: Plant

    @property
    def mechanism(self) -> str:
        """The docstring of the function that plants it: one sentence."""
        return " ".join((self.plant.__doc__ or "").split())

    @property
    def links(self) -> tuple[str, ...]:
        return tuple(f"https://github.com/{source}" for source in self.sources if source != DERIVED)

    @contextmanager
    def applied(self, runtime: Any) -> Iterator[None]:
        """The fault is in `runtime` inside this context; afterwards everything is as it was.

        Raises:
            AttributeError: the runtime has no such part.
        """
        with Patch() as patch:
            if hasattr(runtime, "vision"):  # graphs are built for a picture: a fault goes in before that
                patch(runtime, "vision", None)
            self.plant(runtime, patch)
            try:
                yield
            finally:
                if hasattr(runtime, "reset"):
                    runtime.reset()


FAULTS: dict[str, Fault] = {}


def fault(
    id: str,
    *,
    stage: Stage,
    at: At,
    check: str,
    case: str = "text-only",
    needs: Subject = Subject.BUNDLED,
    source: str = DERIVED,
    boundary: bool = False,
    raises: bool = False,
) -> Callable[[Plant], Plant]:
    """Registers the decorated function, which plants the fault `id`.

    Args:
        source: addresses below github.com, separated by spaces.

    Raises:
        ValueError: the id is taken.
    """

    def register(plant: Plant) -> Plant:
        if id in FAULTS:
            raise ValueError(f"two faults are called {id}")
        FAULTS[id] = Fault(id, stage, at, check, case, needs, tuple(source.split()), boundary, raises, plant)
        return plant

    return register
