"""Registers faults that are put into the shipped runtime by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from g4conformance.runtime.static import StaticGemma4Runtime

MonkeyPlant = Callable[[StaticGemma4Runtime, pytest.MonkeyPatch], None]


@dataclass(frozen=True)
class Planted:
    """A mistake, the case that shows it, and the check that must see it in isolation or first."""

    name: str
    case: str
    check: str
    plant: MonkeyPlant


FAULTS: list[Planted] = []


def planted(case: str, check: str) -> Callable[[MonkeyPlant], MonkeyPlant]:
    def register(plant: MonkeyPlant) -> MonkeyPlant:
        FAULTS.append(Planted(plant.__name__, case, check, plant))
        return plant

    return register
