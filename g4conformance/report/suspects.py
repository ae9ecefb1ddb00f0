"""Which known mistakes a runtime that does not conform looks like, in words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from g4conformance.judging.verdict import Verdict

if TYPE_CHECKING:
    from g4conformance.faults.diagnosis import Suspect

_NAMED = 3
_LEAST_RESEMBLANCE = 0.5


def likely(verdicts: Sequence[Verdict]) -> list[Suspect]:
    """The few known faults that the verdicts resemble most; none if nothing is wrong or nothing resembles it."""
    if not any(verdict.failed for verdict in verdicts):
        return []
    from g4conformance.faults.diagnosis import suspects  # the catalogue is needed only when something is wrong

    return [s for s in suspects(verdicts)[:_NAMED] if s.resemblance >= _LEAST_RESEMBLANCE]


def suspect_lines(found: Sequence[Suspect]) -> list[str]:
    """One line a suspect: how similar, which, what it is, where it was reported."""
    return [
        f"  {suspect.resemblance:.0%} {suspect.fault.id}: {suspect.fault.mechanism} {' '.join(suspect.fault.links[:1])}"
        for suspect in found
    ]


def suspect_data(found: Sequence[Suspect]) -> list[dict[str, Any]]:
    """The same as plain data."""
    return [
        {
            "fault": suspect.fault.id,
            "resemblance": round(suspect.resemblance, 3),
            "mechanism": suspect.fault.mechanism,
            "links": list(suspect.fault.links),
        }
        for suspect in found
    ]
