"""Real runtimes under test: what the suite finds in each, and at which stage, on the bundled checkpoint.

Each needs the extra of its name. What is found is pinned: a new version that finds more or less must be looked at.
"""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any

import pytest

from g4conformance.checkpoints.checkpoint import Checkpoint, load_checkpoint
from g4conformance.errors import ConformanceError
from g4conformance.faults.patching import Patch
from g4conformance.fixtures import bundled_checkpoint
from g4conformance.judging.verdict import Status, Verdict
from g4conformance.session import ConformanceSession, RunOptions
from tools.runtimes.findings import load_findings
from tools.runtimes.interventions import INTERVENTIONS
from tools.runtimes.run import IN_PROCESS

pytestmark = pytest.mark.selftest

_PREFILL = {f"G4-PREFILL-0{i}" for i in range(1, 5)}
_DECODE = {f"G4-DECODE-0{i}" for i in range(6, 10)}
_MASK_FILL = {"G4-MASK-03", "G4-DECODE-04"}

# Checks that fail, or raise, in isolation.
OWN: dict[tuple[str, str], set[str]] = {
    ("codex", "text-only"): _PREFILL | _DECODE | {"G4-GEN-02"},
    ("codex", "image-panorama"): _PREFILL
    | _DECODE
    | {"G4-INPUTS-01", "G4-INPUTS-02", "G4-INPUTS-04", "G4-INPUTS-05", "G4-GEN-02"},
    ("claude", "text-only"): {"G4-GEN-02"},
    ("claude", "image-panorama"): {"G4-INPUTS-05", "G4-GEN-02"},
    ("tico", "text-only"): _MASK_FILL | {"G4-INPUTS-01", "G4-INPUTS-02", "G4-INPUTS-03", "G4-GEN-02"},
    ("tico", "image-panorama"): _MASK_FILL | {"G4-GEN-02"},
}

# What codex's logits are off by after two decode steps; the number of threads decides on which side they fall.
NEAR_ITS_LIMIT = {"G4-DECODE-09"}


@cache
def bundled() -> Checkpoint:
    return load_checkpoint(bundled_checkpoint())


def made(name: str) -> Any:
    try:
        return importlib.import_module(f"g4conformance.runtimes.{name}").make(bundled())
    except ConformanceError as missing:
        pytest.skip(str(missing))


def verdicts(runtime: Any, case: str) -> list[Verdict]:
    options = RunOptions(quant="none", case_names=(case,), decode_steps=2, gen_steps=4)
    return ConformanceSession(bundled(), runtime, options).verdicts(case)


@cache
def as_it_is(name: str, case: str) -> list[Verdict]:
    return verdicts(made(name), case)


@pytest.mark.parametrize(("name", "case"), OWN)
def test_the_suite_finds_and_localises_what_differs(name: str, case: str) -> None:
    found = as_it_is(name, case)
    own = {v.check for v in found if v.status in (Status.FAIL, Status.ERROR)}
    assert own - NEAR_ITS_LIMIT == OWN[name, case] - NEAR_ITS_LIMIT
    assert any(v.status is Status.PASS for v in found)


def wrong(found: list[Verdict]) -> set[str]:
    """Checks that fail, by themselves or for an earlier stage's sake: in which mode depends on what else is wrong."""
    return {v.check for v in found if v.failed or v.status is Status.INHERITED}


def greatest(found: list[Verdict], check: str) -> float:
    """The greatest |difference| of a check in either mode."""
    return max(v.measurement.max_abs for v in found if v.check == check and v.measurement is not None)


@pytest.mark.parametrize(
    "finding", [f for f in load_findings() if f.runtime in IN_PROCESS], ids=lambda finding: finding.id
)
def test_an_intervention_makes_its_check_better_and_no_other_worse(finding: Any) -> None:
    if finding.id not in INTERVENTIONS:
        pytest.skip("there is no intervention: the runtime refuses, or cannot be changed from outside")
    before = as_it_is(finding.runtime, finding.case)
    with Patch() as patch:
        changed = made(finding.runtime)
        INTERVENTIONS[finding.id](changed, bundled(), patch)
        after = verdicts(changed, finding.case)
    assert greatest(before, finding.check) > 0
    still_wrong = finding.check in wrong(after)
    assert not still_wrong or greatest(after, finding.check) < greatest(before, finding.check) / 10
    assert wrong(after) - NEAR_ITS_LIMIT <= wrong(before)
