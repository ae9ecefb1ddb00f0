"""Runtimes in another process: what goes wrong there gets a clear verdict, and costs only its own case."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from g4conformance.checkpoints.checkpoint import Checkpoint
from g4conformance.checks import CHECKS
from g4conformance.errors import ConformanceError
from g4conformance.judging.judge import judge
from g4conformance.judging.verdict import Status, Verdict
from g4conformance.stages import Stage
from g4conformance.vectors.elsewhere import CommandRuntime, observe_command, require_command

from .asserting import told
from .recording import Recorded

pytestmark = pytest.mark.unit

PREAMBLE = """
import os, subprocess, sys, time
import numpy as np
from pathlib import Path
from g4conformance.foreign import *
folder = Path(sys.argv[-1])
request = read_request(folder)
"""

Judged = Callable[..., list[Verdict]]


@pytest.fixture
def judged(tiny_checkpoint: Checkpoint, text: Recorded, tmp_path: Path) -> Judged:
    """The verdicts on a foreign side with this body, of checks that apply."""

    def judge_script(body: str, timeout: float = 120.0) -> list[Verdict]:
        script = tmp_path / "side.py"
        script.write_text(PREAMBLE + body)
        runtime = CommandRuntime(f"{shlex.quote(sys.executable)} {shlex.quote(str(script))}", timeout)
        observation = observe_command(runtime, text.case, text.reference, tiny_checkpoint)
        verdicts = judge(text.case, text.reference, observation, text.bench)
        return [verdict for verdict in verdicts if verdict.status is not Status.NOT_APPLICABLE]

    return judge_script


def reason(verdicts: list[Verdict]) -> str:
    """Of a case that gave nothing: every stage is red, and the first one says why."""
    errors = [verdict for verdict in verdicts if verdict.status is Status.ERROR]
    assert {verdict.stage for verdict in errors} == {Stage.BUILD_STATIC_INPUTS}
    assert {verdict.stage for verdict in verdicts if verdict.failed} >= {Stage.DECODE, Stage.GENERATION}
    assert not any(verdict.status is Status.PASS for verdict in verdicts)
    (where,) = {verdict.where for verdict in errors}
    return where


def is_alive(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_a_hang_ends_with_its_whole_process_group(judged: Judged, tmp_path: Path) -> None:
    body = f"""
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
Path({str(tmp_path / "child")!r}).write_text(str(child.pid))
print("waiting for the device", file=sys.stderr, flush=True)
time.sleep(600)
"""
    where = reason(judged(body, timeout=8.0))
    assert "a timeout: no answer within 8 s, so its process group was killed" in where
    assert "its last words: waiting for the device" in where
    child = int((tmp_path / "child").read_text())
    for _ in range(100):  # until whoever adopts it has noticed
        if not is_alive(child):
            break
        time.sleep(0.1)
    assert not is_alive(child)


CRASHES = {
    "an exception": (
        "raise MemoryError('no room on the device')",
        "exit status 1; its last words: MemoryError: no room",
    ),
    "a status": ("sys.exit(3)", "exit status 3"),
    "a signal": ("os.abort()", "signal SIGABRT"),
    "no trace": ("", "nothing, but left no trace.safetensors"),
    "half a file": (
        "path = write_trace(request, {'prefill/logits': np.zeros(512)}); path.write_bytes(path.read_bytes()[:900])",
        "nothing, but wrote what cannot be judged: expected a whole safetensors file",
    ),
    "no safetensors": ("(folder / TRACE).write_text('hello')", "expected a whole safetensors file"),
    "a partial file": ("(folder / (TRACE + '.partial')).write_bytes(b'x' * 9)", "left no trace.safetensors"),
    "an unknown name": ("write_trace(request, {'logits': np.zeros(1)})", "expected trace names of the contract"),
    "a crash behind the trace": (
        "write_trace(request, {'valid_length': np.array([1])}); sys.exit('late')",
        "exit status 1; its last words: late",
    ),
}


@pytest.mark.parametrize("crash", CRASHES)
def test_a_crash_is_an_error_that_says_why(judged: Judged, crash: str) -> None:
    body, expected = CRASHES[crash]
    where = reason(judged(body))
    assert expected in where
    assert "Traceback" not in where


def test_not_a_number_is_a_failure(judged: Judged) -> None:
    verdicts = judged("write_trace(request, {'prefill/logits': np.full((1, 512), np.nan, np.float32)})")
    wrong = [verdict for verdict in verdicts if verdict.failed]
    assert [(verdict.check, verdict.status) for verdict in wrong] == [("G4-PREFILL-04", Status.FAIL)]


def test_another_shape_is_a_failure_that_names_both(judged: Judged) -> None:
    verdicts = judged("write_trace(request, {'prefill/logits': np.zeros((1, 3), np.float32)})")
    (wrong,) = [verdict for verdict in verdicts if verdict.failed]
    assert wrong.where == "prefill/logits.shape=(1, 3), but should be (1, 512)"


def test_given_inputs_make_a_stage_isolated(judged: Judged) -> None:
    """Embeddings of the ids that were given: wrong in isolation; later stages have their own run only."""
    verdicts = judged("write_trace(request, {'text_embeds': np.zeros((1, request.max_seq, 96), np.float32)})")
    assert {str(v.mode) for v in verdicts if v.stage is Stage.TOKEN_EMBEDDING} == {"isolated"}
    later = [v for v in verdicts if v.stage in (Stage.PREFILL, Stage.DECODE) and not CHECKS[v.check].alone]
    assert {str(v.mode) for v in later} == {"accumulated"}
    assert {v.stage for v in verdicts if v.failed} == {Stage.TOKEN_EMBEDDING}


def test_a_command_that_cannot_be_started_is_told_early(tmp_path: Path) -> None:
    for command, found in (("no-such-program --x", "'no-such-program'"), ("", "nothing"), ("a 'b", "No closing")):
        with told(ConformanceError, expected="--runtime-command", found=found, remedy=""):
            require_command(command)
    require_command(f"{shlex.quote(sys.executable)} -V")
    assert os.listdir(tmp_path) == []
