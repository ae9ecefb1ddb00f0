"""What a test of the suite asserts on: the verdicts of one check on one case."""

from __future__ import annotations

import shlex

import pytest

from g4conformance.judging.verdict import Status, Verdict
from g4conformance.known.review import stale
from g4conformance.report.failure import failure_text
from g4conformance.report.known import known_text
from g4conformance.runtime.static import is_shipped
from g4conformance.session import ConformanceSession


class Judged:
    """What a test of the suite asserts on."""

    def __init__(
        self, session: ConformanceSession, of_case: list[Verdict], verdicts: list[Verdict], config: pytest.Config
    ) -> None:
        self.session, self.of_case, self.verdicts, self.config = session, of_case, verdicts, config

    def require(self) -> None:
        """Fails the test if the check failed, says why if it could not be made or was known to fail, else returns."""
        __tracebackhide__ = True
        if told := self._untrue():
            pytest.fail(told, pytrace=False)
        unobserved = [v for v in self.verdicts if v.status is Status.NOT_OBSERVED]
        if any(v.failed for v in self.verdicts) or (unobserved and is_shipped(self.session.runtime)):
            pytest.fail(failure_text(self.verdicts, self.of_case, self._repeat()), pytrace=False)
        if known := next((v for v in self.verdicts if v.known is not None), None):
            pytest.xfail(known_text(known))
            pytest.fail(failure_text(self.verdicts, self.of_case, self._repeat()), pytrace=False)  # under --runxfail
        if all(v.status in (Status.NOT_APPLICABLE, Status.NOT_OBSERVED) for v in self.verdicts):
            pytest.skip(self.verdicts[0].where)

    def _untrue(self) -> str:
        """What is wrong with a known failure that is none."""
        verdict, declared = self.verdicts[0], self.session.bench.declared
        entry = declared.failure(verdict.check, verdict.case)
        told = "" if entry is None else stale(entry, self.verdicts)
        return "" if entry is None or not told else f"{declared.path}, {entry.place}: on {verdict.case} it {told}"

    def _repeat(self) -> str:
        verdict, options = self.verdicts[0], self.session.options
        model = f" --model {options.model}" if options.model else ""
        names = ("--runtime", "--runtime-command", "--quant", "--executor", "--known")
        given = [(name, self.config.getoption(name)) for name in names]
        ours = "".join(f" {name} {shlex.quote(value)}" for name, value in given if value)
        return f"pytest -m integration{model}{ours} --case {verdict.case} -k {verdict.check}"
