"""`record`, `compare` and `--runtime-command` as their users call them, and the example of docs/vectors.md."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from g4conformance.checks import CHECKS
from g4conformance.foreign import INDEX, TRACE

from .test_from_anywhere import REPOSITORY, run

pytestmark = pytest.mark.selftest

SHIPPED = REPOSITORY / "tests" / "foreign" / "shipped.py"
PYTHON = shlex.quote(sys.executable)


def documented(language: str) -> list[str]:
    """The code blocks of docs/vectors.md in this language."""
    text = (REPOSITORY / "docs" / "vectors.md").read_text()
    return [code for found, code in re.findall(r"```(\w*)\n(.*?)```", text, flags=re.DOTALL) if found == language]


def call(line: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Runs one documented command line."""
    program, *arguments = shlex.split(line)
    here = [re.sub(r"^python ", f"{PYTHON} ", argument) for argument in arguments]
    if program == "python":
        return run(here[0].removesuffix(".py"), *here[1:], cwd=cwd, path=REPOSITORY)
    return run(f"{program}.cli", *here, cwd=cwd, path=REPOSITORY)


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The documented example, run up to the answers."""
    folder = tmp_path_factory.mktemp("example")
    (folder / "masks.py").write_text(documented("python")[0])
    record, answer, _ = documented("sh")[0].splitlines()
    for line in (record, answer):
        done = call(line, folder)
        assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_the_documented_example_is_judged(example: Path) -> None:
    done = call(documented("sh")[0].splitlines()[2], example)
    assert done.returncode == 0, done.stdout + done.stderr
    printed = [" ".join(line.split()) for line in done.stdout.splitlines()]
    shown = [" ".join(line.split()) for line in documented("")[-1].splitlines() if line != "..."]
    assert [line for line in shown if line not in printed] == []


def test_the_documented_command_is_judged(example: Path) -> None:
    done = call(documented("sh")[1], example)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "python masks.py against the Hugging Face reference" in done.stdout.replace(sys.executable, "python")
    assert "2 checks on 1 cases" in done.stdout


def test_the_documented_mistake_is_found(example: Path, tmp_path: Path) -> None:
    (tmp_path / "masks.py").write_text(documented("python")[0].replace("(causal & near)", "causal"))
    done = call(f"python masks.py {shlex.quote(str(example / 'vectors'))} mine", tmp_path)
    assert done.returncode == 0, done.stderr
    report = tmp_path / "report.json"
    done = run("g4conformance.cli", "compare", str(example / "vectors"), "mine", "--report", str(report), cwd=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "wrong first at masks_and_rope (G4-MASK-01, case window+1)" in done.stdout
    assert "repeat: g4conformance compare" in done.stdout
    assert json.loads(report.read_text())["stages"]["masks_and_rope"] == "fail"


def test_refusals_are_one_line(example: Path, tmp_path: Path) -> None:
    vectors, mine = example / "vectors", example / "mine"
    for arguments, message in (
        ((str(tmp_path), str(mine)), "found none: they were not recorded to the end"),
        ((str(vectors), str(tmp_path)), "expected at least one <case>/trace.safetensors"),
        ((str(vectors), str(mine), "--case", "x"), "expected a recorded case, found 'x'"),
        ((str(vectors), str(mine), "--report", "r.txt"), "a file ending in .json or .html"),
    ):
        done = run("g4conformance.cli", "compare", *arguments, cwd=tmp_path)
        assert done.returncode == pytest.ExitCode.USAGE_ERROR, done.stdout + done.stderr
        assert done.stderr.count("\n") == 1
        assert message in done.stderr


def test_there_are_no_vectors_of_a_quantized_reference(tmp_path: Path) -> None:
    done = run("g4conformance.cli", "record", "--out", str(tmp_path), "--quant", "w8a8", cwd=tmp_path)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "expected --quant none" in done.stderr


def test_a_killed_recording_goes_on(tmp_path: Path) -> None:
    out = tmp_path / "vectors"
    options = ("--case", "text-only", "--case", "window", "--out", str(out))
    command = [sys.executable, "-m", "g4conformance.cli", "record", *options]
    process = subprocess.Popen(command, cwd=REPOSITORY, env=os.environ | {"PYTHONPATH": str(REPOSITORY)})
    while process.poll() is None and not (out / "text-only" / "manifest.json").exists():
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (out / INDEX).exists(), "it was killed before the end"
    done = run("g4conformance.cli", "record", *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "1 cases recorded, 1 kept" in done.stdout
    assert sorted(path.name for path in out.rglob(TRACE)) == [TRACE, TRACE]


def test_the_shipped_runtime_conforms_from_another_process(tmp_path: Path) -> None:
    """And a case in which it crashes costs nothing but itself."""
    side = tmp_path / "side.py"
    side.write_text(
        f"import sys; sys.path.insert(0, {str(SHIPPED.parent)!r})\n"
        "from g4conformance.foreign import serve\nfrom shipped import run\n"
        "def crashing(request):\n"
        "    if request.case == 'window':\n        sys.exit('the device is gone')\n    return run(request)\n"
        "serve(crashing)\n"
    )
    report = tmp_path / "report.json"
    cases = [part for case in ("text-only", "image-first", "window") for part in ("--case", case)]
    done = run(
        *("g4conformance.cli", "verify", "--runtime-command", f"{PYTHON} {side}", "--report", str(report), *cases),
        cwd=tmp_path,
        path=REPOSITORY,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "exit status 1; its last words: the device is gone" in done.stdout
    verdicts = json.loads(report.read_text())["verdicts"]
    statuses = {
        case: {v["status"] for v in verdicts if v["case"] == case and not CHECKS[v["check"]].alone} - {"not_applicable"}
        for case in ("text-only", "image-first", "window")
    }
    assert statuses["text-only"] == statuses["image-first"] == {"pass"}
    assert statuses["window"] == {"error", "inherited", "not_observed"}


BAD_OPTIONS = {
    "no such program": (["--runtime-command", "no-such-program"], "a program to start with --runtime-command"),
    "quantization": (
        ["--runtime-command", PYTHON, "--quant", "w8a8"],
        "or the shipped runtime's --quant, found both",
    ),
    "executor": (
        ["--runtime-command", PYTHON, "--executor", "export"],
        "or the shipped runtime's --executor, found both",
    ),
    "timeout": (["--runtime-command", PYTHON, "--runtime-timeout", "0"], "must be a positive number, got 0"),
}


@pytest.mark.parametrize("kind", BAD_OPTIONS)
def test_a_bad_option_is_one_clear_line(tmp_path: Path, kind: str) -> None:
    options, message = BAD_OPTIONS[kind]
    done = run("g4conformance.cli", "verify", *options, cwd=tmp_path, path=REPOSITORY)
    output = done.stdout + done.stderr
    assert done.returncode == pytest.ExitCode.USAGE_ERROR, output
    assert output.count(message) == 1
    assert "Traceback" not in output
