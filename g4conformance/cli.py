"""The command `g4conformance`: the same run as pytest's, for people who do not know pytest."""

from __future__ import annotations

import argparse
import sys

import pytest
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from g4conformance import __version__
from g4conformance.plugin import add_options


def main(argv: list[str] | None = None) -> int:
    """Runs one command and returns the exit status: 0 conforms, 1 does not, 2 stopped, 4 wrong usage or input."""
    parser = argparse.ArgumentParser(prog="g4conformance", description=__doc__)
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    verify = commands.add_parser("verify", help="judge a runtime at all eight stages")
    add_options(verify.add_argument)
    add_faults_options(commands.add_parser("faults", help="plant known faults and show that the suite sees each"))
    commands.add_parser("checks", help="list every check with its statement")
    commands.add_parser("cases", help="list the bundled cases and what they exercise")
    argv = sys.argv[1:] if argv is None else argv
    args = parser.parse_args(argv)
    if args.command == "verify":
        return run_verify(argv[argv.index("verify") + 1 :])
    if args.command == "faults":
        return run_faults_command(args)
    for line in check_lines() if args.command == "checks" else case_lines():
        print(line)
    return 0


def run_verify(options: list[str]) -> int:
    """The packaged suite under pytest, without pytest's own talk: progress while it runs, then failures and summary."""
    quiet = [
        "-q",
        "--no-header",
        "-rN",
        "-W",
        "ignore::pytest.PytestAssertRewriteWarning",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:stepwise",
    ]
    suite = ["--pyargs", "g4conformance.suite", "-m", "integration"]
    return int(pytest.main([*suite, *quiet, *options], plugins=[ProgressDisplay()]))


def add_faults_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--fault", action="append", default=[], metavar="ID", help="try only this fault; may be repeated")
    add("--stage", action="append", default=[], metavar="NAME", help="try only faults of this stage; may be repeated")
    add(
        "--runtime",
        metavar="MODULE:FACTORY",
        help="a runtime of yours: faults at the contract's boundary are put into it",
    )
    add("--model", metavar="PATH_OR_ID", help="with --runtime: the checkpoint (default: the bundled tiny one)")
    add("--report", metavar="FILE", help="also write the matrix to FILE, as JSON (.json) or Markdown (.md)")


def run_faults_command(args: argparse.Namespace) -> int:
    from g4conformance.errors import ConformanceError
    from g4conformance.faults.command import FaultOptions, run_faults

    options = FaultOptions(tuple(args.fault), tuple(args.stage), args.runtime, args.model, args.report)
    try:
        return run_faults(options)
    except ConformanceError as error:
        print(f"g4conformance: {error}", file=sys.stderr)
        return int(pytest.ExitCode.USAGE_ERROR)


def check_lines() -> list[str]:
    from g4conformance.checks import CHECKS

    return [f"{check.id:<14} {check.stage:<20} {check.budget:<9} {check.statement}" for check in CHECKS.values()]


def case_lines() -> list[str]:
    from g4conformance.session import RunOptions

    return [f"{case.name:<22} {case.exercises}" for case in RunOptions().all_cases()]


class ProgressDisplay:
    """A pytest plugin that shows a bar in place of dots."""

    def __init__(self) -> None:
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
        self.progress = Progress(*columns, transient=True)
        self.task = self.progress.add_task("judging", total=None)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.progress.update(self.task, total=len(session.items))
        self.progress.start()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        _, _, parameters = nodeid.partition("[")
        self.progress.update(self.task, description=parameters.rstrip("]") or nodeid)

    def pytest_runtest_logfinish(self) -> None:
        self.progress.advance(self.task)

    def pytest_sessionfinish(self) -> None:
        self.progress.stop()

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, str] | None:
        """No dots: the bar says as much."""
        if report.when == "call" or report.outcome != "passed":
            return report.outcome, "", ""
        return None


if __name__ == "__main__":
    sys.exit(main())
