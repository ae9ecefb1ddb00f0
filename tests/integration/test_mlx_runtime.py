"""mlx-vlm under test, behind a command: what the suite finds in it, and at which stage, on the bundled checkpoint.

The variable G4_MLX_PYTHON names the interpreter of its environment; docs/runtimes.md says how that is made. What is
found is pinned: a new version that finds more or less must be looked at.
"""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from g4conformance.judging.verdict import Status, Verdict
from g4conformance.vectors.elsewhere import CommandRuntime
from tools.runtimes.findings import Finding, load_findings

from .behind_commands import judged, started, verdicts

pytestmark = pytest.mark.selftest

_PLACEHOLDER = {"G4-INPUTS-02"}
_PIXELS = _PLACEHOLDER | {"G4-INPUTS-05"}

# Checks that fail, or raise, in isolation.
OWN: dict[str, set[str]] = {
    "text-only": set(),
    "window-twice": set(),
    "odd-text": set(),
    "vocabulary-1": set(),
    "image-first": _PIXELS,
    "image-middle": _PLACEHOLDER,
    "image-panorama": _PIXELS,
    "image-tower": _PIXELS,
    "system-turn": _PLACEHOLDER,
    "fills-while-decoding": set(),
    "picture-turned": _PIXELS | {"G4-INPUTS-06"},
    "picture-transparent": _PIXELS,
}
FINDINGS = [finding for finding in load_findings() if finding.runtime == "mlx"]


def own(found: list[Verdict]) -> set[str]:
    return {verdict.check for verdict in found if verdict.status in (Status.FAIL, Status.ERROR)}


@pytest.mark.parametrize("case", OWN)
def test_the_suite_finds_and_localises_what_differs(case: str) -> None:
    found = verdicts("mlx", case)
    assert own(found) == OWN[case]
    passed = {verdict.stage for verdict in found if verdict.status is Status.PASS}
    assert {"masks_and_rope", "decode"} <= passed  # of another picture, all of prefill may be another


@pytest.mark.parametrize("finding", FINDINGS, ids=lambda finding: finding.id)
def test_an_intervention_makes_its_check_better_and_no_other_worse(finding: Finding) -> None:
    before = verdicts("mlx", finding.case)
    after = verdicts("mlx", finding.case, finding.instead)
    was, now = (next(v.measurement for v in found if v.check == finding.check) for found in (before, after))
    assert was is not None
    assert now is not None
    assert now.max_abs < was.max_abs / 10
    assert {v.check for v in after if v.failed} <= {v.check for v in before if v.failed}


def test_a_broken_one_turns_red(tmp_path: Path) -> None:
    """Sliding layers' caches are one key short, which the prompt's last row, a pass of its own, and every step miss."""
    python, side, *told = shlex.split(started("mlx").name)
    broken = tmp_path / "broken.py"
    broken.write_text(
        "import runpy\nfrom mlx_vlm.models.gemma4 import language\nright = language.RotatingKVCache\n"
        "language.RotatingKVCache = lambda max_size, keep: right(max_size - 1, keep)\n"
        f"runpy.run_path({side!r}, run_name='__main__')\n"
    )
    found = judged("window-twice", CommandRuntime(shlex.join([python, str(broken), *told]), timeout=600.0))
    assert own(found) == {"G4-MASK-01"}
    assert "G4-DECODE-03" in {verdict.check for verdict in found if verdict.status is Status.INHERITED}
