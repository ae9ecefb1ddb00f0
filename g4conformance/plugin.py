"""The pytest plugin: options, markers, session fixtures, and the summary.

It is an entry point, because options that only a conftest brings are unknown while pytest still reads its arguments
(`--model /some/path` would be taken for a test file). It imports nothing heavy until a test needs it.
"""

from __future__ import annotations

import argparse
import math
import os
import shlex
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import pytest

if TYPE_CHECKING:
    from g4conformance.checkpoints.checkpoint import Checkpoint
    from g4conformance.judging.verdict import Verdict
    from g4conformance.runtime.contract import Runtime
    from g4conformance.session import ConformanceSession, RunOptions
    from g4conformance.vectors.elsewhere import Elsewhere

if "PYTEST_XDIST_WORKER" in os.environ:  # one thread a worker, set before any conftest imports torch
    os.environ.setdefault("OMP_NUM_THREADS", "1")

_T = TypeVar("_T")
MARKERS = {
    "unit": "fast tests without a model, or with the bundled one",
    "property": "hypothesis tests against independent oracles",
    "integration": "the conformance suite: a runtime against the reference",
    "selftest": "the suite on itself: planted faults, the wheel, bad options",
    "stage(name): the stage that a test of the conformance suite judges": "",
}
SCHEMES = ("w8a16", "w8a8", "w4a16", "w8", "none")
EXECUTORS = ("eager", "export", "onnxruntime", "executorch", "inductor")
DTYPES = ("float32", "bfloat16", "float16")
_PATH_OPTIONS = ("--model", "--cases", "--image", "--report", "--known")
_SUITE_OPTIONS = (*_PATH_OPTIONS, "--runtime", "--runtime-command", "--quant", "--executor", "--case", "--prompt")
_KNOWN = "conformance.toml"
_Around = Generator[None, _T, _T]  # what a hook wrapper is: it hands on what the hooks inside it have returned
_EARLY = pytest.StashKey["RunOptions"]()
_WRONG = pytest.StashKey[pytest.UsageError]()
_COLLECTOR = "g4conformance-collector"
_UNASKED = "unasked"  # the property of a test that turned out to ask what only a quantized runtime can answer


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def non_negative(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"must not be negative, got {value}")
    return value


def positive_number(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a positive number, got {text}")
    return value


def add_options(add: Any) -> None:
    """Declares the suite's options with `add`, which takes what `argparse`'s add_argument takes."""
    add_reference_options(add)
    add("--quant", choices=SCHEMES, help=f"quantization scheme of the shipped runtime (default: {SCHEMES[0]})")
    add("--executor", choices=EXECUTORS, help=f"what runs the shipped runtime's graphs (default: {EXECUTORS[0]})")
    add("--runtime", metavar="MODULE:FACTORY", help="judge a runtime of yours: what factory(checkpoint) makes")
    add("--runtime-command", metavar="COMMAND", help="judge what this command answers to each case's folder")
    add(
        "--runtime-timeout",
        type=positive_number,
        metavar="SECONDS",
        default=600.0,
        help="how long the command may take for one case (default: 600)",
    )
    add("--known", metavar="FILE", help=f"known failures (default: {_KNOWN} where pytest is called, or in its rootdir)")
    add("--prompt", help="judge this prompt instead of the cases; {image} marks a picture's place")
    add("--image", action="append", default=[], metavar="FILE", help="a picture for --prompt; may be repeated")
    add_report_option(add)


def add_report_option(add: Any) -> None:
    add("--report", metavar="FILE", help="also write the verdicts to FILE, as JSON (.json) or a page (.html)")


def add_reference_options(add: Any) -> None:
    """Declares what the reference is, and which cases it runs."""
    add("--model", metavar="PATH_OR_ID", help="checkpoint folder or Hub id (default: the bundled tiny checkpoint)")
    add("--dtype", choices=DTYPES, default="float32", help="dtype of reference and runtime (default: float32)")
    add("--device", default="cpu", help="torch device of reference and runtime (default: cpu)")
    add("--attn", choices=("eager", "sdpa"), default="eager", help="attention implementation (default: eager)")
    add("--image-backend", choices=("torchvision", "pil"), default="torchvision", help="which image processor resizes")
    add("--max-seq", type=positive, help="rows of the static buffers (default: 2 windows + soft-token budget)")
    add("--case", action="append", default=[], metavar="NAME", help="judge only this case; may be repeated")
    add("--cases", metavar="FILE", help="a cases file of your own (YAML, see the bundled cases.yaml)")
    add("--decode-steps", type=non_negative, default=6, help="teacher-forced decode steps a case (default: 6)")
    add("--gen-steps", type=positive, default=8, help="new tokens to generate a case (default: 8)")


def pytest_addoption(parser: pytest.Parser) -> None:
    add_options(parser.getgroup("g4conformance", "Gemma 4 conformance").addoption)


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> int | pytest.ExitCode | None:
    """Starts over with `--model=PATH` where `--model PATH` was given.

    pytest fixes its rootdir before it knows a plugin's options, takes PATH for a test path, and then misses the ini
    file and conftest of the folder that it was called from.
    """
    args = list(config.invocation_params.args)
    joined = join_path_options(args)
    if joined == args:
        return None
    return pytest.main(joined, plugins=config.invocation_params.plugins)


def join_path_options(args: list[str]) -> list[str]:
    """`--model PATH` as `--model=PATH`, and likewise the other options that take a path, where PATH exists."""
    joined: list[str] = []
    for arg in args:
        if joined and joined[-1] in _PATH_OPTIONS and Path(arg).expanduser().exists():
            joined[-1] += f"={arg}"
        else:
            joined.append(arg)
    return joined


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    for name, meaning in MARKERS.items():
        config.addinivalue_line("markers", f"{name}: {meaning}" if meaning else name)
    if hasattr(config, "workerinput"):
        return
    if getattr(config.option, "dist", "no") == "load":
        config.option.dist = "loadgroup"  # a case is recorded once: all its checks go to one worker
    from g4conformance.report.collector import VerdictCollector

    config.pluginmanager.register(VerdictCollector(config), _COLLECTOR)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config) -> None:
    """Looks at the options before workers start: each of them would stumble over the same one."""
    _check_given_options(config)


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """Looks at the options before tests are collected: each stage would stumble over the same one."""
    _check_given_options(session.config)


def _check_given_options(config: pytest.Config) -> None:
    """Checks early if the run speaks of the suite at all; a run of other tests imports nothing heavy for it."""
    if any(config.getoption(name) for name in _SUITE_OPTIONS):
        _checked_early(config)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test a case and check of the stage that the test function is marked with."""
    marker = metafunc.definition.get_closest_marker("stage")
    if marker is None or "judged" not in metafunc.fixturenames:
        return
    from g4conformance.checks import checks_of
    from g4conformance.checks.needs import may_apply
    from g4conformance.stages import Stage

    try:
        options = _checked_early(metafunc.config)
        quantized = _may_be_quantized(metafunc, options)
    except pytest.UsageError as error:
        _stop_collection(metafunc, error)
        return
    stage, cases = Stage(marker.args[0]), options.selected_cases()
    metafunc.parametrize(
        "judged",
        [
            pytest.param((case.name, check.id), id=f"{stage}-{case.name}-{check.id}", marks=_group(case.name))
            for case in cases
            for check in checks_of(stage)
            if may_apply(check, case, first=case is cases[0], quantized=quantized)
        ],
        indirect=True,
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselects stages that no selected case reaches, such as vision in a run of text cases.

    Raises:
        pytest.UsageError: what was found to be wrong when tests were generated.
    """
    if _WRONG in config.stash:
        raise config.stash[_WRONG]
    unreached = [item for item in items if item.get_closest_marker("stage") and "[NOTSET]" in item.name]
    if unreached:
        config.hook.pytest_deselected(items=unreached)
        items[:] = [item for item in items if item not in unreached]


def is_ours(node: pytest.Item, fixture: str) -> bool:
    """Whether a test there gets this fixture from the plugin, and not from a conftest or module that overrides it."""
    definitions = node.session._fixturemanager.getfixturedefs(fixture, node) or ()
    return [definition.func.__module__ for definition in definitions][-1:] == [__name__]


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> _Around[pytest.CollectReport]:
    """Adds the guard of the suite to a module that imports some of its tests without it."""
    report = yield
    if isinstance(collector, pytest.Module) and report.passed and any(map(_has_stage, report.result)):
        from g4conformance.suite.guard import guards_of

        report.result += guards_of(collector, report.result)
    return report


def _has_stage(node: pytest.Item | pytest.Collector) -> bool:
    return node.get_closest_marker("stage") is not None


@pytest.hookimpl(wrapper=True)
def pytest_report_teststatus(report: pytest.TestReport) -> _Around[Any]:
    """Counts no test that asks a runtime in floating point about its quantization: there is nothing to ask."""
    status = yield
    return ("", "", "") if report.skipped and (_UNASKED, True) in report.user_properties else status


def _may_be_quantized(metafunc: pytest.Metafunc, options: RunOptions) -> bool:
    """Whether to ask the runtime what is asked of quantized ones: one that is not the shipped one is known only later.

    Raises:
        pytest.UsageError: an option that a `runtime` fixture of the adopter's would leave without effect.
    """
    brought = not is_ours(metafunc.definition, "runtime")
    if brought and (ignored := [name for name in ("--runtime", "--executor") if metafunc.config.getoption(name)]):
        raise pytest.UsageError(
            f"g4conformance: expected the runtime of the fixture `runtime`, found {ignored[0]} too. Leave one out."
        )
    known_later = (brought or options.runtime is not None) and not metafunc.config.getoption("--quant")
    return known_later or options.quant != "none"


def _group(case: str) -> pytest.MarkDecorator:
    return pytest.mark.xdist_group(case)


def _checked_early(config: pytest.Config) -> RunOptions:
    """The run's options, after everything that can be known to be wrong without loading a model has been looked at.

    Raises:
        pytest.UsageError: one line, no traceback, as long as collection has not begun.
    """
    if _EARLY not in config.stash:
        config.stash[_EARLY] = _check_early(config)
    return config.stash[_EARLY]


def _check_early(config: pytest.Config) -> RunOptions:
    import psutil

    from g4conformance.checkpoints.files import checkpoint_folder, require_supported
    from g4conformance.errors import ConformanceError
    from g4conformance.executors.registry import require_expressible, require_installed
    from g4conformance.factory import load_factory
    from g4conformance.report.files import require_writable
    from g4conformance.session import require_enough_memory
    from g4conformance.vectors.elsewhere import require_command

    options = run_options(config)
    try:
        _require_one_runtime(config)
        if report := config.getoption("--report"):
            require_writable(Path(report))
        for case in options.selected_cases():
            case.load_images()
        if options.runtime_command is not None:
            require_command(options.runtime_command)
        require_expressible(options.executor, options.quant, options.load.dtype)
        require_installed(options.executor)
        if options.runtime is not None:
            load_factory(options.runtime)
        options.declared()
        require_supported(checkpoint_folder(options.checkpoint))
        workers = int(getattr(config.option, "numprocesses", None) or 1)
        require_enough_memory(options, workers, psutil.virtual_memory().available)
    except ConformanceError as error:
        raise pytest.UsageError(f"g4conformance: {error}") from None
    return options


def _require_one_runtime(config: pytest.Config) -> None:
    """Raises ConformanceError if several runtimes are asked for, or what only the shipped one can be told."""
    from g4conformance.errors import ConformanceError

    brought = [name for name in ("--runtime", "--runtime-command") if config.getoption(name)]
    shipped = [name for name in ("--quant", "--executor") if config.getoption(name)]
    if len(brought) > 1:
        raise ConformanceError(f"either {brought[0]} or {brought[1]}", "both", "Leave one out.")
    if brought and shipped:
        remedy = "A runtime of yours says itself whether it is quantized; leave one out."
        raise ConformanceError(f"either {brought[0]}, or the shipped runtime's {shipped[0]}", "both", remedy)


def run_options(config: pytest.Config) -> RunOptions:
    """The options of this pytest run."""
    from g4conformance.checkpoints.checkpoint import LoadOptions
    from g4conformance.session import RunOptions

    get = config.getoption
    command = get("--runtime-command")
    return RunOptions(
        model=get("--model"),
        load=LoadOptions(get("--dtype"), get("--device"), get("--attn"), get("--image-backend")),
        runtime=get("--runtime"),
        known=get("--known") or _known_nearby(config),
        quant=get("--quant") or ("none" if get("--runtime") or command else SCHEMES[0]),
        executor=get("--executor") or EXECUTORS[0],
        max_seq=get("--max-seq"),
        cases_file=get("--cases"),
        case_names=tuple(get("--case")),
        prompt=get("--prompt"),
        images=tuple(get("--image")),
        decode_steps=get("--decode-steps"),
        gen_steps=get("--gen-steps"),
        runtime_command=command,
        runtime_timeout=get("--runtime-timeout"),
    )


def _known_nearby(config: pytest.Config) -> str | None:
    """The file of known failures in the folder that pytest was called from, or in its rootdir."""
    folders = (config.invocation_params.dir, config.rootpath)
    return next((str(folder / _KNOWN) for folder in folders if (folder / _KNOWN).is_file()), None)


# --- fixtures -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def checkpoint(request: pytest.FixtureRequest, pytestconfig: pytest.Config) -> Checkpoint:
    """The checkpoint of `--model`, loaded once a worker."""
    from g4conformance.checkpoints.checkpoint import load_checkpoint
    from g4conformance.errors import ConformanceError

    options = _checked_early(pytestconfig)
    if hasattr(pytestconfig, "workerinput"):
        import torch

        torch.set_num_threads(1)
    try:
        return load_checkpoint(options.checkpoint, options.load)
    except ConformanceError as error:
        _stop(request.session, f"g4conformance: {error}")


@pytest.fixture(scope="session")
def runtime(request: pytest.FixtureRequest, checkpoint: Checkpoint, pytestconfig: pytest.Config) -> Runtime | Elsewhere:
    """The runtime under test: that of `--runtime` or a command, or the shipped one. Override it to bring another."""
    from g4conformance.errors import ConformanceError
    from g4conformance.factory import made_by
    from g4conformance.shipped import execute_with, shipped_runtime
    from g4conformance.vectors.elsewhere import CommandRuntime

    if command := pytestconfig.getoption("--runtime-command"):
        return CommandRuntime(command, pytestconfig.getoption("--runtime-timeout"))
    options = _checked_early(pytestconfig)
    try:
        if options.runtime is not None:
            return made_by(options.runtime, checkpoint)
        max_seq = options.max_seq or checkpoint.facts.default_max_seq
        return shipped_runtime(checkpoint, max_seq, options.quant, execute_with(options.executor))
    except ConformanceError as error:
        _stop(request.session, f"g4conformance: {error}")


@pytest.fixture(scope="session")
def conformance(
    request: pytest.FixtureRequest, checkpoint: Checkpoint, runtime: Runtime | Elsewhere
) -> ConformanceSession:
    """The run that judges cases, each once."""
    from g4conformance.errors import ConformanceError
    from g4conformance.session import ConformanceSession

    try:
        session = ConformanceSession(checkpoint, runtime, _checked_early(request.config))
        _require_scheme(session, request.config.getoption("--quant"))
        return session
    except ConformanceError as error:
        _stop(request.session, f"g4conformance: {error}")


def _require_scheme(session: ConformanceSession, wanted: str | None) -> None:
    from g4conformance.errors import ConformanceError

    if wanted not in (None, session.bench.scheme):
        remedy = "It is the fixture `runtime` that decides; leave --quant out, or have it heeded there."
        raise ConformanceError(f"a runtime of scheme {wanted}, by --quant", f"one of {session.bench.scheme}", remedy)


@pytest.fixture
def judged(request: pytest.FixtureRequest, conformance: ConformanceSession) -> Judged:
    """The verdicts of one check on one case, isolated and accumulated."""
    from g4conformance.checks import CHECKS
    from g4conformance.checks.registry import QUANTIZED
    from g4conformance.errors import ConformanceError

    case, check = request.param
    properties = request.node.user_properties
    if conformance.quantized is None and CHECKS[check].needs in QUANTIZED:
        properties.append((_UNASKED, True))
        pytest.skip("asked of quantized runtimes only")
    try:
        of_case = conformance.verdicts(case)
    except ConformanceError as error:
        _stop(request.session, f"g4conformance: {error}")
    found = Judged(conformance, of_case, [v for v in of_case if v.check == check], request.config)
    properties += [("verdict", verdict.as_dict()) for verdict in found.verdicts]
    properties.append(("setting", conformance.setting))
    return found


class Judged:
    """What a test of the suite asserts on."""

    def __init__(
        self, session: ConformanceSession, of_case: list[Verdict], verdicts: list[Verdict], config: pytest.Config
    ) -> None:
        self.session, self.of_case, self.verdicts, self.config = session, of_case, verdicts, config

    def require(self) -> None:
        """Fails the test if the check failed, says why if it could not be made or was known to fail, else returns."""
        from g4conformance.judging.verdict import Status
        from g4conformance.report.failure import failure_text
        from g4conformance.report.known import known_text

        __tracebackhide__ = True
        if told := self._untrue():
            pytest.fail(told, pytrace=False)
        unobserved = [v for v in self.verdicts if v.status is Status.NOT_OBSERVED]
        if any(v.failed for v in self.verdicts) or (unobserved and self._is_shipped()):
            pytest.fail(failure_text(self.verdicts, self.of_case, self._repeat()), pytrace=False)
        if known := next((v for v in self.verdicts if v.known is not None), None):
            pytest.xfail(known_text(known))
            pytest.fail(failure_text(self.verdicts, self.of_case, self._repeat()), pytrace=False)  # under --runxfail
        if all(v.status in (Status.NOT_APPLICABLE, Status.NOT_OBSERVED) for v in self.verdicts):
            pytest.skip(self.verdicts[0].where)

    def _untrue(self) -> str:
        """What is wrong with a known failure that is none."""
        from g4conformance.known.review import stale

        verdict, declared = self.verdicts[0], self.session.bench.declared
        entry = declared.failure(verdict.check, verdict.case)
        told = "" if entry is None else stale(entry, self.verdicts)
        return "" if entry is None or not told else f"{declared.path}, {entry.place}: on {verdict.case} it {told}"

    def _is_shipped(self) -> bool:
        from g4conformance.runtime.static import is_shipped

        return is_shipped(self.session.runtime)

    def _repeat(self) -> str:
        verdict, options = self.verdicts[0], self.session.options
        model = f" --model {options.model}" if options.model else ""
        names = ("--runtime", "--runtime-command", "--quant", "--executor", "--known")
        given = [(name, self.config.getoption(name)) for name in names]
        ours = "".join(f" {name} {shlex.quote(value)}" for name, value in given if value)
        return f"pytest -m integration{model}{ours} --case {verdict.case} -k {verdict.check}"


def _stop_collection(metafunc: pytest.Metafunc, error: pytest.UsageError) -> None:
    """Has the run end with one line once all is collected: until then pytest takes any error for the module's."""
    if hasattr(metafunc.config, "workerinput"):
        _stop(metafunc.definition.session, error)
    metafunc.config.stash[_WRONG] = error
    metafunc.parametrize("judged", [], indirect=True)


def _stop(session: pytest.Session, error: object) -> NoReturn:
    """Ends the whole run with one line: what went wrong would go wrong for every test."""
    if hasattr(session.config, "workerinput"):
        session.shouldstop = str(error)  # xdist carries this to the controller, but not an exit
        raise pytest.fail.Exception(str(error), pytrace=False) from None
    pytest.exit(str(error), returncode=pytest.ExitCode.USAGE_ERROR)
