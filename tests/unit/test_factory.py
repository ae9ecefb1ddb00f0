"""`package.module:factory`: what makes a runtime, and what is told where it does not."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from g4conformance.errors import ConformanceError
from g4conformance.factory import load_factory, made_by

from .asserting import told

pytestmark = pytest.mark.unit

MODULE = """
class Runtime:
    def __init__(self, checkpoint):
        self.checkpoint = checkpoint

    def prefill(self, inputs):
        return None

def nothing(checkpoint):
    return checkpoint

def broken(checkpoint):
    raise RuntimeError("no\\nengine")

number = 3
"""
CHECKPOINT: Any = "checkpoint"


@pytest.fixture(autouse=True)
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module where the command is called, which is on no path yet."""
    (tmp_path / "made_here.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [entry for entry in sys.path if entry])
    monkeypatch.delitem(sys.modules, "made_here", raising=False)


def test_a_class_or_function_is_called_with_the_checkpoint() -> None:
    runtime: Any = made_by("made_here:Runtime", CHECKPOINT)
    assert runtime.checkpoint is CHECKPOINT


@pytest.mark.parametrize(
    ("spec", "found"),
    [
        ("made_here", "'made_here'"),
        (":Runtime", "':Runtime'"),
        ("made_here:", "'made_here:'"),
        ("nowhere:make", "No module named 'nowhere'"),
        ("made_here:absent", "AttributeError"),
        ("made_here:number", "which is a int"),
    ],
)
def test_what_names_no_factory_is_told_before_anything_is_made(spec: str, found: str) -> None:
    with told(ConformanceError, expected="--runtime package.module:factory", found=found, remedy="Check it."):
        load_factory(spec)


def test_a_factory_that_raises_is_told_in_one_line() -> None:
    with told(ConformanceError, expected="makes a runtime", found="RuntimeError: no engine", remedy="Check it."):
        made_by("made_here:broken", CHECKPOINT)


def test_what_is_made_must_be_a_runtime() -> None:
    with told(
        ConformanceError, expected="a method `prefill`", found="a str of made_here:nothing", remedy="contract.py"
    ):
        made_by("made_here:nothing", CHECKPOINT)
