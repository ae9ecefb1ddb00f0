"""Fingerprints: what each fault of the catalogue looks like, recorded from runs of the kill matrix over all cases."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from g4conformance.checks import CHECKS
from g4conformance.checks.run import Mode
from g4conformance.faults.registry import Fault
from g4conformance.faults.trial import Workbench
from g4conformance.judging.traits import Traits
from g4conformance.judging.verdict import Status, Verdict
from g4conformance.stages import Stage

FILE = Path(__file__).with_name("fingerprints.json")
Fingerprint = Mapping[str, Mapping[str, Traits]]  # by case, then by check; a case without an entry is green

_RAISED = "an exception"
_DIGITS = 3


def fingerprint_of(verdicts: Iterable[Verdict]) -> dict[str, dict[str, Traits]]:
    """What is wrong by itself, by case and check: in isolation, or blamed on its own stage in accumulation only."""
    found: dict[str, dict[str, Traits]] = {}
    for verdict in verdicts:
        by_itself = verdict.mode is Mode.ISOLATED or Mode.ISOLATED not in CHECKS[verdict.check].modes
        if by_itself and verdict.status in (Status.FAIL, Status.ERROR):
            traits = verdict.traits or Traits(_RAISED, math.inf)
            found.setdefault(verdict.case, {})[verdict.check] = traits
    return found


def record(bench: Workbench, fault: Fault) -> dict[str, dict[str, Traits]]:
    """The fingerprint of `fault` over every case of the workbench."""
    found: dict[str, dict[str, Traits]] = {}
    for name in bench.session.cases:
        prepared = bench.prepared(name, probes=fault.stage is Stage.SELF_CONSISTENCY)
        found |= fingerprint_of(bench.judged(*bench.observed(fault, prepared)))
    return found


def save(fingerprints: Mapping[str, Fingerprint], path: Path = FILE) -> None:
    """Writes one line a fault, so that a change of one shows as such."""
    lines = [f"{json.dumps(id)}: {json.dumps(_plain(found))}" for id, found in fingerprints.items()]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


@cache
def load(path: Path = FILE) -> Mapping[str, Fingerprint]:
    """What `save` wrote."""
    return {
        id: {case: {check: _traits(entry) for check, entry in checks.items()} for case, checks in cases.items()}
        for id, cases in json.loads(path.read_text()).items()
    }


def _plain(found: Fingerprint) -> dict[str, dict[str, list[Any]]]:
    return {case: {check: _entry(traits) for check, traits in checks.items()} for case, checks in found.items()}


def _entry(traits: Traits) -> list[Any]:
    """A size that is infinite is null."""
    size = _rounded(traits.size) if math.isfinite(traits.size) else None
    spread = list(map(_rounded, traits.spread))
    return [traits.tensor, size, _rounded(traits.gain), spread, list(traits.first), _rounded(traits.share)]


def _traits(entry: list[Any]) -> Traits:
    tensor, size, gain, spread, first, share = entry
    return Traits(tensor, math.inf if size is None else size, gain, tuple(spread), tuple(first), share)


def _rounded(number: float) -> float:
    return float(f"{number:.{_DIGITS}g}") if math.isfinite(number) else 0.0
