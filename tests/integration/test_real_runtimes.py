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
from tools.runtimes.run import RUNTIMES

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
    assert own == OWN[name, case]
    assert any(v.status is Status.PASS for v in found)


@pytest.mark.parametrize(
    "finding",
    [finding for finding in load_findings() if finding.runtime in RUNTIMES],
    ids=lambda finding: finding.id,
)
def test_an_intervention_makes_its_check_better_and_no_other_worse(finding: Any) -> None:
    if finding.id not in INTERVENTIONS:
        pytest.skip("there is no intervention: the runtime refuses, or cannot be changed from outside")
    before = {(v.check, v.mode): v for v in as_it_is(finding.runtime, finding.case)}
    with Patch() as patch:
        changed = made(finding.runtime)
        INTERVENTIONS[finding.id](changed, bundled(), patch)
        after = {(v.check, v.mode): v for v in verdicts(changed, finding.case)}
    mine = [key for key in before if key[0] == finding.check and before[key].failed]
    assert mine
    for key in mine:
        was, now = before[key].measurement, after[key].measurement
        assert was is not None
        assert now is not None
        assert not after[key].failed or now.max_abs < was.max_abs / 10
    assert {check for (check, _), v in after.items() if v.failed} <= {c for (c, _), v in before.items() if v.failed}
