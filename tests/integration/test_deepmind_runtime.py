"""google-deepmind's gemma under test: what the suite finds in it, and at which stage, on the bundled checkpoint.

`G4_DEEPMIND_PYTHON` names the interpreter of an environment that has it. What is found is pinned: a new version that
finds more or less must be looked at.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from g4conformance.checkpoints.published import published_folder
from g4conformance.fixtures import bundled_checkpoint
from g4conformance.judging.verdict import Status, Verdict
from g4conformance.session import cache_folder
from tools.runtimes.findings import Finding, load_findings

from .behind_commands import failing, judged, started, verdicts

pytestmark = pytest.mark.selftest

FINDINGS = [finding for finding in load_findings() if finding.runtime == "deepmind"]
# Checks that fail or raise, their own fault or inherited.
_CACHE = {"G4-PREFILL-06", "G4-DECODE-10"}
_LAYERS = {"G4-PREFILL-02", "G4-PREFILL-03", "G4-PREFILL-04", "G4-DECODE-07", "G4-DECODE-08", "G4-DECODE-09"}
_POSITIONS = {"G4-DECODE-01", "G4-DECODE-03", "G4-DECODE-05"}
_NEWLINES = {"G4-INPUTS-01", "G4-INPUTS-02", "G4-INPUTS-04", "G4-MASK-02", "G4-PREFILL-01", "G4-GEN-03", "G4-GEN-04"}
_PICTURE = {f"G4-{stage}-0{i}" for stage, last in (("EMBED", 2), ("FUSION", 3)) for i in range(1, last + 1)}
_TOWER = {"G4-VISION-02", "G4-VISION-03", "G4-VISION-04"}
WRONG: dict[str, set[str]] = {
    "text-only": _CACHE,
    "window-twice": _CACHE,
    "odd-text": _CACHE,
    "vocabulary-1": _CACHE | _LAYERS | _POSITIONS | {"G4-MASK-01", "G4-ROPE-01", "G4-GEN-04"},
    "image-middle": _CACHE | _LAYERS | _POSITIONS | _NEWLINES | _PICTURE | _TOWER,
    "image-panorama": _CACHE | _LAYERS | _POSITIONS | _NEWLINES | _PICTURE | _TOWER | {"G4-INPUTS-05", "G4-VISION-01"},
    "fills-while-decoding": _CACHE | {"G4-GEN-04"},
}


@pytest.mark.parametrize("case", WRONG)
def test_the_suite_finds_and_localises_what_differs(case: str) -> None:
    found = verdicts("deepmind", case)
    assert failing(found) == WRONG[case]
    assert any(verdict.status is Status.PASS for verdict in found)


@pytest.mark.parametrize("finding", FINDINGS, ids=lambda finding: finding.id)
def test_an_intervention_makes_its_check_better_and_no_other_worse(finding: Finding) -> None:
    before = {(v.check, v.mode): v for v in verdicts("deepmind", finding.case)}
    changed = verdicts("deepmind", finding.case, finding.instead)
    after = {(v.check, v.mode): v for v in changed}
    mine = [key for key in before if key[0] == finding.check and before[key].failed]
    assert mine
    for key in mine:
        now = after.get(key)
        assert now is None or not now.failed or greatest(now) < greatest(before[key]) / 10
    assert failing(changed) <= failing(list(before.values()))


def test_a_runtime_that_is_broken_turns_red(tmp_path: Path) -> None:
    """One norm of one layer is off by a hundredth."""
    source = published_folder(str(bundled_checkpoint()), cache_folder())
    folder = tmp_path / "checkpoint"
    shutil.copytree(source, folder)
    weights = load_file(folder / "model.safetensors")
    weights["model.language_model.layers.1.input_layernorm.weight"] *= 1.01
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    right = started("deepmind")
    broken = replace(right, name=right.name.replace(str(source), str(folder)))
    found = judged("text-only", broken)
    assert {"G4-PREFILL-02", "G4-PREFILL-03"} <= failing(found) - failing(verdicts("deepmind", "text-only"))


def greatest(verdict: Verdict) -> float:
    assert verdict.measurement is not None
    return verdict.measurement.max_abs
