"""The last resort: the unit tests of the runtime's parts, on mutants that no check sees.

Most mutants of what refuses bad input only show here, since no case is bad input.
"""

from __future__ import annotations

from importlib.metadata import entry_points
from pathlib import Path
from unittest.mock import patch

import pytest

from g4conformance.checkpoints import checkpoint as checkpoints
from g4conformance.checkpoints.checkpoint import Checkpoint
from tools.mutants.outcome import SURVIVED, End, Outcome

REPOSITORY = Path(__file__).resolve().parents[2]
TESTS = ("layout", "inputs", "cache", "masks", "runtime", "runtime_generation")


def load_plugins() -> None:
    """Imports pytest's installed plugins, which takes longer than many a test, once and not in every fork."""
    for plugin in entry_points(group="pytest11"):
        plugin.load()


def tested(module: str, bundled: Checkpoint) -> Outcome:
    """How the unit tests end in this process, whose runtime is a mutant of `module`; that module's own come first.

    They get the bundled checkpoint as it is loaded already.
    """
    names = sorted(TESTS, key=lambda name: name != module)  # keeps the order of the others
    files = [str(REPOSITORY / "tests" / "unit" / f"test_{name}.py") for name in names]
    failures = _Failures()
    with patch.object(checkpoints, "load_checkpoint", lambda name: bundled):
        options = ["-x", "-q", "-p", "no:cacheprovider", "--assert=plain", f"--rootdir={REPOSITORY}"]
        code = pytest.main([*options, *files], plugins=[failures])
    if code is pytest.ExitCode.OK:
        return SURVIVED
    return Outcome(End.UNIT_TEST, failures.first or f"pytest ended with {code!r}")


class _Failures:
    """Remembers the first failure."""

    first = ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and not self.first:
            self.first = report.nodeid.split("/")[-1]

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed and not self.first:
            self.first = f"collecting {report.nodeid}"
