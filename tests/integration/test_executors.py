"""The suite on what executors run: a runtime of a small checkpoint, its graphs exported and loaded, or in ONNX."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from g4conformance.checkpoints.checkpoint import Checkpoint
from g4conformance.checkpoints.seeded import SeededSpec, VisionSpec, seeded_checkpoint
from g4conformance.executors import EXECUTORS
from g4conformance.judging.verdict import Status, Verdict
from g4conformance.session import ConformanceSession, RunOptions
from g4conformance.shipped import execute_with, shipped_runtime
from g4conformance.stages import Stage

pytestmark = pytest.mark.selftest

SLIDING, FULL = "sliding_attention", "full_attention"


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    layers = (SLIDING, FULL, SLIDING, FULL)
    vision = VisionSpec(num_hidden_layers=1)
    spec = SeededSpec(layer_types=layers, num_kv_shared_layers=2, sliding_window=32, vision=vision)
    return seeded_checkpoint(spec, seed=5)


@pytest.mark.parametrize(
    ("executor", "scheme"), [("export", "w8a16"), ("onnxruntime", "w8a8"), ("onnxruntime", "none")]
)
def test_what_an_executor_runs_conforms(checkpoint: Checkpoint, executor: str, scheme: str) -> None:
    """What an untrained model loses by quantization is no matter here; that it is computed right is."""
    missing = [name for name in EXECUTORS[executor].packages if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"g4conformance[{EXECUTORS[executor].extra}] is not installed")
    runtime = shipped_runtime(checkpoint, checkpoint.facts.default_max_seq, scheme, execute_with(executor))
    options = RunOptions(quant=scheme, executor=executor, decode_steps=2, gen_steps=2, case_names=("text-only",))
    verdicts = ConformanceSession(checkpoint, runtime, options).verdicts("text-only")
    judged = [verdict for verdict in verdicts if verdict.stage is not Stage.QUANTIZATION]
    assert not [told(verdict) for verdict in judged if verdict.failed]
    assert sum(verdict.status is Status.PASS for verdict in judged) > 30


def told(verdict: Verdict) -> tuple[str, str, str]:
    return verdict.check, str(verdict.mode), verdict.where


def test_a_pair_that_cannot_be_is_one_line(tmp_path: Path) -> None:
    options = ("--executor", "onnxruntime", "--dtype", "bfloat16")
    done = subprocess.run(
        [sys.executable, "-m", "g4conformance.cli", "verify", *options], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "something that executor onnxruntime can express, found bfloat16" in done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
