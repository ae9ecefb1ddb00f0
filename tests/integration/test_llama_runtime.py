"""llama.cpp under test: what the suite finds in it, and at which stage, on the bundled checkpoint.

`G4_LLAMA_PYTHON` names the interpreter of an environment that has it, `G4_LLAMA_MODEL` the files that the checkpoint
was converted to, as the side is told them: "--mmproj mmproj.gguf text.gguf". What is found is pinned: a new version
that finds more or less must be looked at.
"""

from __future__ import annotations

import pytest

from g4conformance.judging.verdict import Status
from tools.runtimes.findings import Finding, load_findings

from .behind_commands import failing, verdicts

pytestmark = pytest.mark.selftest

FINDINGS = [finding for finding in load_findings() if finding.runtime == "llama" and finding.instead]
_TEXT = {"G4-PREFILL-02", "G4-PREFILL-03", "G4-PREFILL-04", "G4-PREFILL-05", "G4-DECODE-07", "G4-DECODE-08"}
# Checks that fail, their own fault or inherited.
WRONG = {
    "text-only": _TEXT | {"G4-DECODE-09"},
    "odd-text": _TEXT | {"G4-DECODE-09"},
    "fills-while-decoding": _TEXT | {"G4-GEN-04", "G4-GEN-05"},
}


@pytest.mark.parametrize("case", WRONG)
def test_the_suite_finds_and_localises_what_differs(case: str) -> None:
    found = verdicts("llama", case)
    assert failing(found) == WRONG[case]
    assert {verdict.check for verdict in found if verdict.status is Status.PASS} > {"G4-INPUTS-01", "G4-ROPE-01"}


@pytest.mark.parametrize("finding", FINDINGS, ids=lambda finding: finding.id)
def test_an_intervention_makes_its_check_pass_and_no_other_worse(finding: Finding) -> None:
    before, after = verdicts("llama", finding.case), verdicts("llama", finding.case, finding.instead)
    assert finding.check in failing(before)
    assert finding.check not in failing(after)
    assert failing(after) <= failing(before)


def test_with_gelu_and_k_and_v_in_float32_nothing_is_wrong() -> None:
    assert not failing(verdicts("llama", "odd-text", ("gelu", "kv-f32")))


def test_a_tower_with_heads_of_another_width_ends_the_process() -> None:
    found = verdicts("llama", "image-middle")
    assert Status.PASS not in {verdict.status for verdict in found}
    assert any("SIGABRT" in verdict.where for verdict in found)


def test_a_runtime_that_is_broken_turns_red_at_its_stage() -> None:
    found = verdicts("llama", "text-only", ("first-key-hidden",))
    own = {verdict.check for verdict in found if verdict.status is Status.FAIL}
    assert own >= {"G4-MASK-01"}
    assert "G4-DECODE-03" in failing(found)
