"""Gathers the verdicts of a pytest run; at its end reviews what was declared, reports, and sets the exit status."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from g4conformance.judging.verdict import Verdict
    from g4conformance.known.review import Review


class VerdictCollector:
    """Takes verdicts from test reports, which xdist carries from the workers."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.verdicts: list[Verdict] = []
        self.setting: dict[str, Any] = {}
        self.failed = 0
        self.review: Review | None = None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.failed += report.failed
        if report.when != "call":
            return
        from g4conformance.judging.verdict import Verdict

        properties: list[tuple[str, Any]] = list(report.user_properties)
        self.verdicts += [Verdict.from_dict(value) for name, value in properties if name == "verdict"]
        self.setting = dict(properties).get("setting", self.setting)

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """A declaration that is not true fails a run that would have passed."""
        if not self.verdicts:
            return
        from g4conformance.known.review import review
        from g4conformance.options import run_options

        options = run_options(self.config)
        scheme, dtype = self.setting["quant"], self.setting["dtype"]
        self.review = review(options.declared(), self.verdicts, scheme, dtype, options.all_cases())
        if self.review.problems and exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self.review is None:
            return
        from g4conformance.report.files import write_report
        from g4conformance.report.summary import summary_text

        if report := self.config.getoption("--report"):
            write_report(Path(report), self.verdicts, self.setting, self.review)
        terminalreporter.section("g4conformance")
        colour = bool(terminalreporter._tw.hasmarkup)
        terminalreporter.write(summary_text(self.verdicts, self.setting, self.failed, colour, self.review))
