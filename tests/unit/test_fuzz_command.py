"""`g4conformance fuzz` as its users see it: what it prints, what it saves, its exit status."""

from __future__ import annotations

from argparse import Namespace
from collections import Counter
from pathlib import Path

import pytest

from g4conformance.cli import main
from g4conformance.fuzz import search
from g4conformance.fuzz.command import run_fuzz
from g4conformance.fuzz.conformance import examine
from g4conformance.fuzz.example import FuzzExample
from g4conformance.fuzz.report import tally_line
from g4conformance.fuzz.search import Tally

from .test_fuzz_conformance import EXAMPLE, embedding_scaled

pytestmark = pytest.mark.unit


def options(folder: Path, **changes: object) -> Namespace:
    return Namespace(
        **{"minutes": None, "examples": 1, "replay": None, "seed": 7, "out": folder, "shrink_seconds": 0, "fault": None}
        | changes
    )


def test_the_last_line_counts_what_was_tried() -> None:
    tally = Tally(judged=Counter(float16=1250, float32=400), unsound=Counter(bfloat16=2, float16=1))
    assert tally_line(tally, seed=7, alarms=0) == (
        "1,650 configs (text and picture each, float32 400, float16 1,250), 0 false alarms, "
        "3 more not judged: reference unsound (bfloat16 2, float16 1), seed 7"
    )


def test_a_clean_search_ends_well(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fuzz", "--examples", "1", "--seed", "7", "--out", str(tmp_path / "new")]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == (
        "1 config (text and picture each, float32 1), 0 false alarms, seed 7"
    )
    assert not any((tmp_path / "new").iterdir())


def test_a_find_is_told_and_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "examine", lambda example, plant: examine(example, embedding_scaled))
    status, text = run_fuzz(options(tmp_path))
    (path,) = tmp_path.iterdir()
    assert status == 1
    lines = text.splitlines()
    assert lines[0] == "1 config (text and picture each, float32 1), 1 false alarm, seed 7"
    assert lines[1].startswith("G4-EMBED-01 token_embedding, case text: ")
    assert f"  repeat: g4conformance fuzz --replay {path}" in lines
    assert any(line.startswith("  text config: layer_types ('full_attention',)") for line in lines)
    assert lines[-1] == f"saved as {path}"


def test_a_planted_fault_must_be_found(tmp_path: Path) -> None:
    status, text = run_fuzz(options(tmp_path, fault="embed-scale-twice"))
    assert status == 0
    assert text.startswith("embed-scale-twice, planted in every runtime, was found after 1 config, seed 7")
    (path,) = tmp_path.iterdir()
    assert run_fuzz(options(tmp_path, fault="embed-scale-twice", replay=path))[0] == 1


def test_a_planted_fault_that_cannot_show_is_not_found(tmp_path: Path) -> None:
    """The smallest example has no per-layer inputs; the fault is left out there, and nothing is found."""
    status, text = run_fuzz(options(tmp_path, fault="ple-rsqrt2-missing"))
    assert status == 1
    assert text == "ple-rsqrt2-missing, planted in every runtime, was not found in 1 config, seed 7"
    assert not any(tmp_path.iterdir())


def test_a_replay_conforms_or_tells_what_was_raised(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = EXAMPLE.save(tmp_path)
    assert main(["fuzz", "--replay", str(path)]) == 0
    assert capsys.readouterr().out == f"{path} conforms\n"
    illegal = tmp_path / "illegal.json"
    illegal.write_text(path.read_text().replace('"num_kv_shared_layers": 0', '"num_kv_shared_layers": 2'))
    assert main(["fuzz", "--replay", str(illegal)]) == 1
    assert f"all 2 layers reuse K/V, but some must store them\n  repeat: g4conformance fuzz --replay {illegal}" in (
        capsys.readouterr().out
    )


BAD_OPTIONS = {
    "no budget": ([], "one of the arguments --minutes --examples --replay is required"),
    "two budgets": (["--minutes", "1", "--examples", "1"], "not allowed with argument"),
    "no time": (["--minutes", "0"], "must be a positive number, got 0"),
    "no number": (["--minutes", "soon"], "invalid positive_number value: 'soon'"),
    "no examples": (["--examples", "0"], "must be at least 1, got 0"),
    "missing reproducer": (["--replay", "nowhere.json"], "expected a readable reproducer at nowhere.json"),
    "no such fault": (["--examples", "1", "--fault", "no-such"], "expected the id of a fault, found 'no-such'"),
    "a file for a folder": (["--examples", "1", "--out", __file__], "expected a folder for reproducers at"),
}


@pytest.mark.parametrize("kind", BAD_OPTIONS)
def test_a_bad_option_is_one_clear_line(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, message = BAD_OPTIONS[kind]
    try:
        status = main(["fuzz", *arguments])
    except SystemExit as stopped:
        status = int(stopped.code or 0)
    output = capsys.readouterr()
    assert status == pytest.ExitCode.USAGE_ERROR
    assert message in output.err
    assert output.err.count("\n") == 1
    assert not output.out


def test_an_example_that_cannot_be_judged_is_no_success(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from g4conformance.fuzz import command
    from g4conformance.fuzz.conformance import Outcome

    monkeypatch.setattr(command, "examine", lambda example, plant: Outcome(unsound="Too much noise."))
    path = EXAMPLE.save(tmp_path)
    assert FuzzExample.load(path) == EXAMPLE
    assert main(["fuzz", "--replay", str(path)]) == pytest.ExitCode.USAGE_ERROR
    assert capsys.readouterr().err.endswith("found an unsound reference. Too much noise.\n")
