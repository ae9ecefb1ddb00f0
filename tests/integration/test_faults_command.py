"""`g4conformance faults` as its users see it: on the shipped runtime, and on one of their own."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from g4conformance.checks import CHECKS
from g4conformance.checks.run import Mode
from g4conformance.cli import main
from g4conformance.faults import FAULTS, command
from g4conformance.faults.patching import Patch
from g4conformance.stages import Stage

pytestmark = [pytest.mark.selftest, pytest.mark.xdist_group("faults command")]

OWN_RUNTIMES = '''
from g4conformance.runtime.layout import StaticLayout
from g4conformance.runtime.static import StaticGemma4Runtime


def whole(checkpoint):
    return StaticGemma4Runtime(checkpoint, StaticLayout(checkpoint.facts.default_max_seq))


class PrefillOnly:
    """All that the contract requires: one method, for one layout, with nothing to see inside."""

    def __init__(self, checkpoint):
        self.inner = whole(checkpoint)
        self.on_tensor = None

    def prefill(self, inputs, fused_embeds=None, masks_and_rope=None):
        return self.inner.prefill(inputs, fused_embeds, masks_and_rope)


class Wrong(PrefillOnly):
    def prefill(self, inputs, fused_embeds=None, masks_and_rope=None):
        return super().prefill(inputs, fused_embeds, masks_and_rope) * 2


def nothing(checkpoint):
    raise RuntimeError("no engine")
'''


@pytest.fixture
def own_runtimes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module of the user's, importable from where the command is called."""
    (tmp_path / "own_runtimes.py").write_text(OWN_RUNTIMES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))


def test_chosen_faults_are_tried_and_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "matrix.json"
    chosen = ["--fault", "gelu-exact", "--fault", "bos-missing"]
    assert main(["faults", *chosen, "--report", str(report)]) == 0
    output = capsys.readouterr().out
    assert "2 of 2 faults killed at their stage" in output
    gelu, bos = json.loads(report.read_text())
    assert (gelu["fault"], gelu["stage"], gelu["outcome"]) == ("gelu-exact", "prefill", "killed")
    assert gelu["killers"]["G4-PREFILL-03"] > 1
    assert gelu["shown_in"] == "prefill/layer/0/hidden"
    assert "argmax of a short prompt" in gelu["missed_by"]
    assert bos["killers"]["G4-INPUTS-03"] is None, "an exact check has no margin"


def test_a_quantized_runtime_is_exported_with_the_fault_in_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One in a graph, one in what feeds the graphs, and one in scales, which only converted graphs have."""
    report = tmp_path / "matrix.json"
    chosen = ["gelu-exact", "bos-missing", "weight-scale-10-percent"]
    options = [option for id in chosen for option in ("--fault", id)]
    assert main(["faults", "--quant", "w8a16", *options, "--report", str(report)]) == 0
    assert "3 of 3 faults killed at their stage" in capsys.readouterr().out
    for entry in json.loads(report.read_text()):
        assert entry["check"] in entry["killers"]
        assert CHECKS[entry["check"]].stage == entry["stage"]


def test_the_matrix_is_rendered_as_a_page(tmp_path: Path) -> None:
    page = tmp_path / "matrix.md"
    assert main(["faults", "--stage", "generation", "--report", str(page)]) == 0
    text = page.read_text()
    for fault in FAULTS.values():
        assert (f"`{fault.id}`" in text) == (fault.stage is Stage.GENERATION)
    assert "| `moe-path-dropped` |" in text


@pytest.mark.usefixtures("own_runtimes")
def test_faults_at_the_boundary_go_into_a_runtime_of_ones_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "matrix.json"
    assert main(["faults", "--runtime", "own_runtimes:whole", "--report", str(report)]) == 0
    found = {entry["fault"]: entry["outcome"] for entry in json.loads(report.read_text())}
    assert found == {id: "killed" for id, fault in FAULTS.items() if fault.boundary}


@pytest.mark.usefixtures("own_runtimes")
def test_what_a_runtime_does_not_have_is_not_applicable(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "matrix.json"
    assert main(["faults", "--runtime", "own_runtimes:PrefillOnly", "--report", str(report)]) == 0
    entries = json.loads(report.read_text())
    assert {entry["fault"] for entry in entries if entry["outcome"] == "killed"} == {
        "logits-half-precision",
        "logits-scaled",
        "prefill-differs-from-run-to-run",
    }
    others = [entry for entry in entries if entry["outcome"] != "killed"]
    assert {entry["outcome"] for entry in others} == {"not applicable"}
    assert any("'build_static_inputs'" in entry["detail"] for entry in others)
    assert "not applicable" in capsys.readouterr().out


@pytest.mark.usefixtures("own_runtimes")
def test_a_check_that_is_red_anyway_cannot_be_tried(capsys: pytest.CaptureFixture[str]) -> None:
    """And where nothing could be tried, nothing was shown."""
    assert main(["faults", "--runtime", "own_runtimes:Wrong", "--fault", "logits-scaled"]) == 1
    assert "G4-PREFILL-04 is red without it" in capsys.readouterr().out


def test_the_shipped_runtime_has_every_part(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A fault that can no longer be planted there has lost its place; it does not count as not applicable."""

    def moved(runtime: object, patch: Patch) -> None:
        patch(runtime, "part_that_was_renamed", None)

    monkeypatch.setitem(FAULTS, "gelu-exact", replace(FAULTS["gelu-exact"], plant=moved))
    assert main(["faults", "--fault", "gelu-exact"]) == 1
    assert "part_that_was_renamed" in capsys.readouterr().out


BAD_OPTIONS = {
    "unknown fault": (["--fault", "no-such"], "expected the id of a fault, found 'no-such'"),
    "unknown stage": (["--stage", "attention"], "expected one of build_static_inputs, "),
    "no factory": (["--runtime", "own_runtimes"], "expected --runtime package.module:factory"),
    "no module": (["--runtime", "nowhere:make"], "No module named 'nowhere'"),
    "no runtime": (["--runtime", "own_runtimes:nothing"], "no engine"),
    "no format": (["--report", "matrix.pdf"], "expected a file ending in .json or .md"),
    "a model alone": (["--model", "/nowhere"], "expected --runtime together with --model"),
    "two runtimes": (["--runtime", "own_runtimes:whole", "--quant", "w8a8"], "expected either --quant or --runtime"),
    "nothing to try": (
        ["--quant", "w8a8", "--fault", "bidirectional-crosses-window"],
        "expected a fault that needs no special checkpoint",
    ),
    "no place to record": (["--record", "/nowhere/prints.json"], "Check --record."),
    "no checkpoint": (["--runtime", "own_runtimes:whole", "--model", "/nowhere"], "/nowhere"),
}


@pytest.mark.usefixtures("own_runtimes")
@pytest.mark.parametrize("kind", BAD_OPTIONS)
def test_a_bad_option_is_one_clear_line(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, message = BAD_OPTIONS[kind]
    assert main(["faults", *arguments]) == pytest.ExitCode.USAGE_ERROR
    output = capsys.readouterr()
    assert message in output.err
    assert output.err.count("\n") == 1
    assert not output.out


def test_a_check_that_is_blind_is_told_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "select_faults", lambda ids, stages: [FAULTS["gelu-exact"]])
    check = CHECKS["G4-ROPE-01"]
    monkeypatch.setitem(CHECKS, check.id, replace(check, modes=(Mode.ISOLATED,)))
    assert main(["faults"]) == 1
    told = [line for line in capsys.readouterr().out.splitlines() if "is blind" in line]
    assert told == [
        "G4-ROPE-01 is blind to 8 of the smallest wrong values that it must see, the first in "
        "rope/full_attention/cos: first, accumulated"
    ]
