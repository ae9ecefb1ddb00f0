"""What tests of runtimes behind a command share: the checkpoint, the command, and the verdicts."""

from __future__ import annotations

from functools import cache

import pytest

from g4conformance.checkpoints.checkpoint import Checkpoint, load_checkpoint
from g4conformance.errors import ConformanceError
from g4conformance.fixtures import bundled_checkpoint
from g4conformance.judging.verdict import Verdict
from g4conformance.session import ConformanceSession, RunOptions
from g4conformance.vectors.elsewhere import CommandRuntime
from tools.runtimes.commands import command


@cache
def bundled() -> Checkpoint:
    return load_checkpoint(bundled_checkpoint())


def started(name: str, instead: tuple[str, ...] = ()) -> CommandRuntime:
    """Runtime `name` with interventions; skips the test where nobody has said which interpreter has it."""
    try:
        return command(name, bundled(), instead)
    except ConformanceError as missing:
        pytest.skip(str(missing))


def judged(case: str, runtime: CommandRuntime) -> list[Verdict]:
    options = RunOptions(quant="none", case_names=(case,))
    return ConformanceSession(bundled(), runtime, options).verdicts(case)


@cache
def verdicts(name: str, case: str, instead: tuple[str, ...] = ()) -> list[Verdict]:
    return judged(case, started(name, instead))


def failing(found: list[Verdict]) -> set[str]:
    """Checks that fail or raise, their own fault or inherited."""
    return {verdict.check for verdict in found if verdict.failed}
