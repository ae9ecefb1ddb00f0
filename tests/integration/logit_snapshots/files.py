"""Where the snapshots lie, what they say that decode steps are fed, and which of them belong to no test."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from .record import from_text
from .settings import SETTINGS, Setting

SNAPSHOTS = Path(__file__).parent.parent / "__snapshots__" / "test_logit_snapshots"


def snapshot_file(setting: Setting, case: str) -> Path:
    """As syrupy names it, after the test."""
    return SNAPSHOTS / f"test_logits[{setting.name}-{case}].json"


def fed_tokens(setting: Setting, case: str, steps: int) -> tuple[int, ...] | None:
    """The tokens of the setting's snapshot, or else of another setting's; none if no snapshot has `steps` of them.

    They are recorded and not chosen anew: a near tie would choose another token on another machine, and everything
    after it would be another text.
    """
    recorded = (recorded_tokens(snapshot_file(one, case)) for one in (setting, *SETTINGS))
    return next((fed for fed in recorded if fed is not None and len(fed) == steps), None)


def recorded_tokens(path: Path) -> tuple[int, ...] | None:
    """What a snapshot was fed; none if it is missing or damaged, of which the comparison tells."""
    try:
        return from_text(path.read_text(encoding="utf-8")).fed
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def orphans(folder: Path, expected: Iterable[Path]) -> list[Path]:
    """Files below `folder` that are none of `expected`."""
    return sorted({path for path in folder.rglob("*") if path.is_file()} - set(expected))
