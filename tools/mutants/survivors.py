"""The list of survivors: why each mutant that nothing kills is right to live."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from tools.mutants.mutate import Mutant
from tools.mutants.outcome import End, Outcome

LIST = Path(__file__).with_name("survivors.toml")


class Kind(StrEnum):
    """Whether a survivor computes the same, or something else that is rightly left alone."""

    EQUIVALENT = "equivalent"
    UNOBSERVED = "unobserved"


@dataclass(frozen=True)
class Survivor:
    """One mutant of the list.

    Attributes:
        change: what the mutant does, so that an id which has come to mean another change is noticed.
    """

    id: str
    change: str
    kind: Kind
    why: str


def load_survivors(path: Path = LIST) -> dict[str, Survivor]:
    """The list, by id.

    Raises:
        ValueError: an id that is listed twice.
    """
    listed: dict[str, Survivor] = {}
    for entry in tomllib.loads(path.read_text())["survivors"]:
        for name, change in entry["mutants"].items():
            if name in listed:
                raise ValueError(f"{name} is listed twice")
            listed[name] = Survivor(name, change, Kind(entry["kind"]), " ".join(entry["why"].split()))
    return listed


def gone(listed: Mapping[str, Survivor], mutants: Sequence[Mutant]) -> list[str]:
    """What is wrong with the list before anything is run: mutants that are no more, or not what they were."""
    changes = {mutant.id: mutant.change for mutant in mutants}
    missing = [f"listed, but there is no such mutant: {name}" for name in listed if name not in changes]
    others = [
        f"listed as another change: {survivor.id} is {changes[survivor.id]}"
        for survivor in listed.values()
        if survivor.id in changes and changes[survivor.id] != survivor.change
    ]
    return missing + others


def unexplained(listed: Mapping[str, Survivor], outcomes: Mapping[Mutant, Outcome]) -> list[str]:
    """What a run says against the list: survivors that it lacks, and mutants that do not survive any more."""
    survived = {mutant.id: mutant for mutant, outcome in outcomes.items() if outcome.end is End.SURVIVED}
    new = [
        f"survived, but is not listed: {name}: {mutant.change}"
        for name, mutant in survived.items()
        if name not in listed
    ]
    dead = [
        f"listed, but {outcome}: {mutant.id}"
        for mutant, outcome in outcomes.items()
        if mutant.id in listed and mutant.id not in survived
    ]
    return new + dead
