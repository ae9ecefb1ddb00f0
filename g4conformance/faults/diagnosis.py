"""Diagnosis: which known mistakes a runtime's verdicts look like."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from g4conformance.checks.run import Mode
from g4conformance.faults import FAULTS, Fault
from g4conformance.faults.fingerprints import Fingerprint, fingerprint_of, load
from g4conformance.judging.traits import Traits
from g4conformance.judging.verdict import Status, Verdict

# Shares of the resemblance of two wrong tensors; they add up to 1.
_TENSOR, _SIZE, _GAIN, _SPREAD, _FIRST, _SHARE = 0.25, 0.2, 0.25, 0.15, 0.05, 0.1
_GREEN_CASE = 0.2  # the weight of a case on which both are green, against 1 where anything is red


@dataclass(frozen=True)
class Suspect:
    """A fault and how much the verdicts look like it, from 0 to 1."""

    fault: Fault
    resemblance: float


def suspects(verdicts: Sequence[Verdict], known: Mapping[str, Fingerprint] | None = None) -> list[Suspect]:
    """Every known fault, the most similar one first; none if nothing is wrong."""
    known = load() if known is None else known
    found = fingerprint_of(verdicts)
    if not found:
        return []
    judged = _judged_checks(verdicts)
    recorded_cases = {case for fingerprint in known.values() for case in fingerprint}
    ranked = [
        Suspect(FAULTS[id], _resemblance(found, fingerprint, judged, recorded_cases))
        for id, fingerprint in known.items()
        if id in FAULTS
    ]
    return sorted(ranked, key=lambda suspect: -suspect.resemblance)


def _judged_checks(verdicts: Iterable[Verdict]) -> dict[str, set[str]]:
    """By case, the checks that were made: what is unobserved or known says nothing of a fault."""
    unmade = (Status.NOT_OBSERVED, Status.NOT_APPLICABLE, Status.KNOWN)
    judged: dict[str, set[str]] = {}
    for verdict in verdicts:
        checks = judged.setdefault(verdict.case, set())
        if verdict.status not in unmade and (verdict.mode is Mode.ISOLATED or verdict.status is not Status.INHERITED):
            checks.add(verdict.check)
    return judged


def _resemblance(
    found: Fingerprint, known: Fingerprint, judged: Mapping[str, set[str]], recorded_cases: Collection[str]
) -> float:
    """The mean over all cases that were judged; a case of the user's own is compared with the one most like it."""
    total = weight = 0.0
    for case, checks in judged.items():
        own = found.get(case, {})
        if case not in recorded_cases and not own:
            continue  # nobody knows what a fault would have done there
        names = [case] if case in recorded_cases else known
        candidates = [_restricted(known.get(name, {}), checks) for name in names]
        weighs = 1.0 if own or any(candidates) else _GREEN_CASE
        total += weighs * max((_of_case(own, candidate) for candidate in candidates), default=0.0)
        weight += weighs
    return total / weight if weight else 0.0


def _restricted(recorded: Mapping[str, Traits], checks: Collection[str]) -> dict[str, Traits]:
    return {check: traits for check, traits in recorded.items() if check in checks}


def _of_case(own: Mapping[str, Traits], recorded: Mapping[str, Traits]) -> float:
    """1 where both are green or equal; each check that is red in only one of them counts as unlike."""
    checks = own.keys() | recorded.keys()
    if not checks:
        return 1.0
    both = own.keys() & recorded.keys()
    return sum(_alike(own[check], recorded[check]) for check in both) / len(checks)


def _alike(one: Traits, other: Traits) -> float:
    """How much two wrong tensors look alike, from 0 to 1."""
    return (
        _TENSOR * _same_place(one.tensor, other.tensor)
        + _SIZE * _near(_logarithm(one.size), _logarithm(other.size))
        + _GAIN * _near(one.gain, other.gain, scale=0.1)
        + _SPREAD * _same_spread(one.spread, other.spread)
        + _FIRST * (one.first == other.first)
        + _SHARE * (1.0 - abs(one.share - other.share))
    )


def _same_place(one: str, other: str) -> float:
    """1 for the same tensor, a half for the same kind of tensor of another layer or step."""
    if one == other:
        return 1.0
    return 0.5 if _kind(one) == _kind(other) else 0.0


def _kind(name: str) -> str:
    return re.sub(r"\d+", "#", name)


def _near(one: float, other: float, scale: float = 1.0) -> float:
    if one == other:
        return 1.0
    distance = abs(one - other)
    return math.exp(-distance / scale) if math.isfinite(distance) else 0.0


def _logarithm(size: float) -> float:
    return math.log10(size) if 0.0 < size < math.inf else math.inf


def _same_spread(one: Sequence[float], other: Sequence[float]) -> float:
    if len(one) != len(other):
        return 0.0
    return 1.0 - sum(abs(a - b) for a, b in zip(one, other, strict=True)) / max(len(one), 1)
