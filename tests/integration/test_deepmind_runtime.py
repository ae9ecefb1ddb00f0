"""google-deepmind's gemma under test: what the suite finds in it, and at which stage, on the bundled checkpoint.

`G4_DEEPMIND_PYTHON` names the interpreter of an environment that has it. What is found is pinned: a new version that
finds more or less must be looked at.
"""

from __future__ import annotations

from functools import cache

import pytest

from g4conformance.checkpoints.checkpoint import Checkpoint, load_checkpoint
from g4conformance.errors import ConformanceError
from g4conformance.fixtures import bundled_checkpoint
from g4conformance.judging.verdict import Status, Verdict
from g4conformance.session import ConformanceSession, RunOptions
from g4conformance.vectors.elsewhere import CommandRuntime
from tools.runtimes.commands import command
from tools.runtimes.findings import Finding, load_findings

pytestmark = pytest.mark.selftest

FINDINGS = [finding for finding in load_findings() if finding.runtime == "deepmind"]
# Checks that fail or raise, their own fault or inherited.
WRONG: dict[str, set[str]] = {}


@cache
def bundled() -> Checkpoint:
    return load_checkpoint(bundled_checkpoint())


def started(instead: tuple[str, ...] = ()) -> CommandRuntime:
    try:
        return command("deepmind", bundled(), instead)
    except ConformanceError as missing:
        pytest.skip(str(missing))


@cache
def verdicts(case: str, instead: tuple[str, ...] = ()) -> list[Verdict]:
    options = RunOptions(quant="none", case_names=(case,))
    return ConformanceSession(bundled(), started(instead), options).verdicts(case)


def failing(found: list[Verdict]) -> set[str]:
    return {verdict.check for verdict in found if verdict.failed}


@pytest.mark.parametrize("case", WRONG)
def test_the_suite_finds_and_localises_what_differs(case: str) -> None:
    found = verdicts(case)
    assert failing(found) == WRONG[case]
    assert any(verdict.status is Status.PASS for verdict in found)


@pytest.mark.parametrize("finding", FINDINGS, ids=lambda finding: finding.id)
def test_an_intervention_makes_its_check_better_and_no_other_worse(finding: Finding) -> None:
    before, after = verdicts(finding.case), verdicts(finding.case, finding.instead)
    assert finding.check in failing(before)
    assert finding.check not in failing(after)
    assert failing(after) <= failing(before)


def test_a_runtime_that_is_broken_turns_red() -> None:
    """Layers of a kind take turns with their frequencies; from there on, nothing is right."""
    found = verdicts("text-only", ("frequencies-exchanged",))
    own = {verdict.check for verdict in found if verdict.status is Status.FAIL}
    assert "G4-ROPE-01" in own
    assert failing(found) > failing(verdicts("text-only"))
