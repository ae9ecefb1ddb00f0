"""The disagreements that findings.toml tells of."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from g4conformance.checks.run import Mode

_FILE = Path(__file__).with_name("findings.toml")


class Owner(StrEnum):
    """Whose a disagreement is."""

    BUG = "bug"
    UNSUPPORTED = "unsupported"
    BY_DESIGN = "by design"
    REFERENCE = "reference"


@dataclass(frozen=True)
class Finding:
    """One disagreement.

    Attributes:
        runtime: the adapter's module in `g4conformance.runtimes`.
        check, case, mode: where it shows first.
        says: what differs. argument: why it is the owner's.
        intervention: what is changed to make it vanish, in words; empty where nothing can be.
        instead: the interventions of a foreign side that do that.
        also: other checks that fail for the same reason.
        authors: what the code of the model's authors does there, gemma 4.0.1; empty where it has nothing to say.
    """

    id: str
    runtime: str
    check: str
    case: str
    mode: Mode
    owner: Owner
    says: str
    argument: str
    intervention: str = ""
    instead: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    authors: str = ""


def load_findings() -> list[Finding]:
    """All of them, in the order of the file."""
    return [
        Finding(id, **{**entry, "mode": Mode(entry["mode"]), "owner": Owner(entry["owner"]), **_several(entry)})
        for id, entry in tomllib.loads(_FILE.read_text()).items()
    ]


def _several(entry: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    return {name: tuple(entry.get(name, ())) for name in ("also", "instead")}
