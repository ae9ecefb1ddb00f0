"""The command `g4conformance`: the same run as pytest's, for people who do not know pytest."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest

from g4conformance import __version__
from g4conformance.options import (
    SCHEMES,
    add_options,
    add_reference_options,
    add_report_option,
    non_negative,
    positive,
    positive_number,
)
from g4conformance.report.progress import progress_bar


class Parser(argparse.ArgumentParser):
    """Tells a wrong option in one line, with the exit status that wrong usage has in pytest."""

    def error(self, message: str) -> NoReturn:
        self.exit(int(pytest.ExitCode.USAGE_ERROR), f"{self.prog}: {message}\n")


def main(argv: list[str] | None = None) -> int:
    """Runs one command and returns the exit status: 0 conforms, 1 does not, 2 stopped, 4 wrong usage or input."""
    parser = Parser(prog="g4conformance", description=__doc__)
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    verify = commands.add_parser("verify", help="judge a runtime at all eight stages, and against itself")
    add_options(verify.add_argument)
    add_faults_options(commands.add_parser("faults", help="plant known faults and show that the suite sees each"))
    fuzz = commands.add_parser("fuzz", help="judge the shipped runtime on random configs and cases")
    add_fuzz_options(fuzz)
    add_record_options(commands.add_parser("record", help="write the reference's traces and inputs as vectors"))
    add_compare_options(commands.add_parser("compare", help="judge a folder of traces against recorded vectors"))
    add_describe_options(commands.add_parser("describe", help="say what each quantization scheme covers"))
    add_checkpoint_options(commands.add_parser("checkpoint", help="write a checkpoint in another layout"))
    commands.add_parser("checks", help="list every check with its statement")
    commands.add_parser("cases", help="list the bundled cases and what they exercise")
    argv = sys.argv[1:] if argv is None else argv
    args = parser.parse_args(argv)
    if args.command == "verify":
        return run_verify(argv[argv.index("verify") + 1 :])
    guarded = {
        "faults": run_faults_command,
        "fuzz": run_fuzz,
        "describe": run_describe,
        "record": run_record,
        "compare": run_compare,
        "checkpoint": run_checkpoint,
    }
    if args.command in guarded:
        return told(guarded[args.command], args)
    for line in check_lines() if args.command == "checks" else case_lines():
        print(line)
    return 0


def add_describe_options(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `describe`: whose graphs to count in."""
    quantized = [scheme for scheme in SCHEMES if scheme != "none"]
    parser.add_argument(
        "--quant", choices=quantized, help="also quantize a checkpoint and count what its graphs really hold"
    )
    parser.add_argument("--model", metavar="PATH_OR_ID", help="with --quant: which (default: the bundled tiny one)")


def run_describe(args: argparse.Namespace) -> int:
    """Prints schemes and coverage, and what the graphs of one scheme hold."""
    from g4conformance.errors import ConformanceError
    from g4conformance.report.describe import counted, description

    if args.model is not None and args.quant is None:
        raise ConformanceError("--quant together with --model", "--model alone", "Name a scheme, or leave it out.")
    print(description())
    if args.quant is not None:
        from g4conformance.shipped import load_quantization

        print("\n" + counted(load_quantization(args.model, args.quant)))
    return 0


def add_record_options(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `record`: of which reference and cases, and where to."""
    add_reference_options(parser.add_argument)
    parser.add_argument("--out", metavar="FOLDER", required=True, help="where to; an interrupted recording goes on")
    parser.add_argument("--quant", choices=SCHEMES, default="none", help="only none: vectors are in floating point")


def run_record(args: argparse.Namespace) -> int:
    """Records, and prints how many cases."""
    from g4conformance.vectors import command

    status, text = command.run_record(args)
    print(text)
    return status


def add_compare_options(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `compare`: what to judge against what."""
    parser.add_argument("vectors", metavar="VECTORS", help="folder that `record` has written")
    parser.add_argument("mine", metavar="MINE", help="folder with a <case>/trace.safetensors for each case")
    parser.add_argument("--case", action="append", default=[], metavar="NAME", help="judge only this case; repeatable")
    parser.add_argument("--model", metavar="PATH_OR_ID", help="refuse vectors of another checkpoint than this one")
    add_report_option(parser.add_argument)


def run_compare(args: argparse.Namespace) -> int:
    """Judges, and prints failures and summary."""
    from g4conformance.vectors import command

    status, text = command.run_compare(args, colour=command.colour_wanted())
    print(text)
    return status


def add_checkpoint_options(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `checkpoint`: which one to write, how and where."""
    parser.add_argument(
        "--layout",
        choices=("legacy", "per_layer"),
        default="legacy",
        help="legacy: as the published checkpoints lie on disk, which most other readers need (the default); "
        "per_layer: as transformers writes them",
    )
    parser.add_argument("--out", metavar="FOLDER", required=True, help="a folder that does not exist yet")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--model", metavar="PATH_OR_ID", help="which checkpoint (default: the bundled tiny one)")
    which.add_argument(
        "--large-scores", action="store_true", help="a random one whose attention scores are about a hundred"
    )


def run_checkpoint(args: argparse.Namespace) -> int:
    """Writes the checkpoint and says where."""
    from g4conformance.checkpoints.files import checkpoint_folder
    from g4conformance.checkpoints.large_scores import write_large_scores
    from g4conformance.checkpoints.published import SavedLayout, write_published
    from g4conformance.errors import ConformanceError
    from g4conformance.fixtures import bundled_checkpoint

    layout, out = SavedLayout(args.layout), Path(args.out)
    if args.large_scores:
        write_large_scores(out, layout)
    elif layout is SavedLayout.LEGACY:
        write_published(checkpoint_folder(args.model or str(bundled_checkpoint())), out)
    else:
        remedy = "transformers writes that layout with save_pretrained; leave --layout out, or add --large-scores."
        raise ConformanceError("--layout legacy for a checkpoint that exists", "per_layer", remedy)
    print(f"wrote {out}")
    return 0


def add_fuzz_options(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `fuzz`: how long to search, or what to replay."""
    budget = parser.add_mutually_exclusive_group(required=True)
    budget.add_argument("--minutes", type=positive_number, metavar="N", help="search for N minutes")
    budget.add_argument("--examples", type=positive, metavar="N", help="search through N configs")
    budget.add_argument("--replay", metavar="FILE", help="judge the config that a search has saved to FILE")
    parser.add_argument("--fault", metavar="ID", help="put this fault into every runtime: the search must find it")
    parser.add_argument("--seed", type=non_negative, help="which configs to draw (default: others every time)")
    parser.add_argument("--out", metavar="FOLDER", default=".", help="where to save a config that does not conform")
    parser.add_argument(
        "--shrink-seconds",
        type=non_negative,
        metavar="N",
        default=120,
        help="how long to look for a smaller config that does not conform either (default: 120, at most 300)",
    )


def run_fuzz(args: argparse.Namespace) -> int:
    """Searches or replays, and prints how it ended."""
    from g4conformance.fuzz import command

    status, text = command.run_fuzz(args)
    print(text)
    return status


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
    """Declares the options of `faults`: which ones, in which runtime."""
    add = parser.add_argument
    add("--fault", action="append", default=[], metavar="ID", help="try only this fault; may be repeated")
    add("--stage", action="append", default=[], metavar="NAME", help="try only faults of this stage; may be repeated")
    add(
        "--runtime",
        metavar="MODULE:FACTORY",
        help="a runtime of yours: faults at the contract's boundary are put into it",
    )
    quantized = [scheme for scheme in SCHEMES if scheme != "none"]
    add("--quant", choices=quantized, help="the shipped runtime in this scheme, made anew for each fault (slow)")
    add("--model", metavar="PATH_OR_ID", help="with --runtime: the checkpoint (default: the bundled tiny one)")
    add("--record", metavar="FILE", help="record every fault's fingerprint over all cases instead, for the diagnosis")
    add("--report", metavar="FILE", help="also write the matrix to FILE, as JSON (.json) or Markdown (.md)")


def run_faults_command(args: argparse.Namespace) -> int:
    """Plants faults, and prints the matrix."""
    from g4conformance.faults.command import FaultOptions, run_faults

    ids, stages = tuple(args.fault), tuple(args.stage)
    return run_faults(FaultOptions(ids, stages, args.runtime, args.quant, args.model, args.report, args.record))


def told(run: Callable[[argparse.Namespace], int], args: argparse.Namespace) -> int:
    """Runs a command; an input that it cannot use ends it with one line."""
    from g4conformance.errors import ConformanceError

    try:
        return run(args)
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
        self.progress = progress_bar()
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
