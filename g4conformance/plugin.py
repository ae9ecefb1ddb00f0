"""The pytest plugin: options, markers, session fixtures, and the summary.

It is an entry point, because options that only a conftest brings are unknown while pytest still reads its arguments
(`--model /some/path` would be taken for a test file). It imports nothing heavy until a test needs it.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import pytest

if TYPE_CHECKING:
    from g4conformance.cases import Case
    from g4conformance.checkpoints.checkpoint import Checkpoint
    from g4conformance.checks import Check
    from g4conformance.judging.verdict import Verdict
    from g4conformance.runtime.contract import Runtime
    from g4conformance.session import ConformanceSession, RunOptions

if "PYTEST_XDIST_WORKER" in os.environ:  # one thread a worker, set before any conftest imports torch
    os.environ.setdefault("OMP_NUM_THREADS", "1")

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
_PATH_OPTIONS = ("--model", "--cases", "--image", "--report")
_EARLY = pytest.StashKey["RunOptions"]()
_COLLECTOR = "g4conformance-collector"


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


def add_options(add: Any) -> None:
    """Declares the suite's options with `add`, which takes what `argparse`'s add_argument takes."""
    add("--model", metavar="PATH_OR_ID", help="checkpoint folder or Hub id (default: the bundled tiny checkpoint)")
    add("--dtype", choices=DTYPES, default="float32", help="dtype of reference and runtime (default: float32)")
    add("--device", default="cpu", help="torch device of reference and runtime (default: cpu)")
    add("--attn", choices=("eager", "sdpa"), default="eager", help="attention implementation (default: eager)")
    add("--image-backend", choices=("torchvision", "pil"), default="torchvision", help="which image processor resizes")
    add("--quant", choices=SCHEMES, default="w8a16", help="quantization scheme of the shipped runtime (default: w8a16)")
    add(
        "--executor", choices=EXECUTORS, default="eager", help="what runs the shipped runtime's graphs (default: eager)"
    )
    add("--max-seq", type=positive, help="rows of the static buffers (default: 2 windows + soft-token budget)")
    add("--case", action="append", default=[], metavar="NAME", help="judge only this case; may be repeated")
    add("--cases", metavar="FILE", help="a cases file of your own (YAML, see the bundled cases.yaml)")
    add("--prompt", help="judge this prompt instead of the cases; {image} marks a picture's place")
    add("--image", action="append", default=[], metavar="FILE", help="a picture for --prompt; may be repeated")
    add("--decode-steps", type=non_negative, default=6, help="teacher-forced decode steps a case (default: 6)")
    add("--gen-steps", type=positive, default=8, help="new tokens to generate a case (default: 8)")
    add("--report", metavar="FILE", help="also write the verdicts to FILE, as JSON (.json) or a page (.html)")


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
    given = any(config.getoption(name) for name in ("--model", "--case", "--cases", "--prompt", "--image", "--report"))
    if given or config.getoption("--executor") != EXECUTORS[0] or config.getoption("--quant") != SCHEMES[0]:
        _checked_early(config)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test a case and check of the stage that the test function is marked with."""
    marker = metafunc.definition.get_closest_marker("stage")
    if marker is None or "judged" not in metafunc.fixturenames:
        return
    from g4conformance.checks import checks_of
    from g4conformance.stages import Stage

    stage, options = Stage(marker.args[0]), _checked_early(metafunc.config)
    cases = options.selected_cases()
    metafunc.parametrize(
        "judged",
        [
            pytest.param((case.name, check.id), id=f"{stage}-{case.name}-{check.id}", marks=_group(case.name))
            for case in cases
            for check in checks_of(stage)
            if _may_apply(check, case, first=case is cases[0], quantized=options.quant != "none")
        ],
        indirect=True,
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselects stages that no selected case reaches, such as vision in a run of text cases."""
    unreached = [item for item in items if item.get_closest_marker("stage") and "[NOTSET]" in item.name]
    if unreached:
        config.hook.pytest_deselected(items=unreached)
        items[:] = [item for item in items if item not in unreached]


def _may_apply(check: Check, case: Case, *, first: bool, quantized: bool) -> bool:
    """Whether case and options have what the check needs of them; what it needs of the checkpoint is not known yet."""
    from g4conformance.checks.registry import Needs

    met = {
        Needs.PROMPT: case.vocabulary is None,
        Needs.IMAGE: bool(case.images),
        Needs.PROBES: case.self_consistency,
        Needs.REFUSALS: first,
        Needs.QUANTIZED: quantized,
        Needs.QUANTIZED_IMAGE: quantized and bool(case.images),
        Needs.QUANTIZED_ONCE: quantized and first,
    }
    return met.get(check.needs, True)


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
    from g4conformance.report.files import require_writable
    from g4conformance.session import require_enough_memory

    options = run_options(config)
    try:
        if report := config.getoption("--report"):
            require_writable(Path(report))
        for case in options.selected_cases():
            case.load_images()
        require_expressible(options.executor, options.quant, options.load.dtype)
        require_installed(options.executor)
        require_supported(checkpoint_folder(options.checkpoint))
        workers = int(getattr(config.option, "numprocesses", None) or 1)
        require_enough_memory(options, workers, psutil.virtual_memory().available)
    except ConformanceError as error:
        raise pytest.UsageError(f"g4conformance: {error}") from None
    return options


def run_options(config: pytest.Config) -> RunOptions:
    """The options of this pytest run."""
    from g4conformance.checkpoints.checkpoint import LoadOptions
    from g4conformance.session import RunOptions

    get = config.getoption
    return RunOptions(
        model=get("--model"),
        load=LoadOptions(get("--dtype"), get("--device"), get("--attn"), get("--image-backend")),
        quant=get("--quant"),
        executor=get("--executor"),
        max_seq=get("--max-seq"),
        cases_file=get("--cases"),
        case_names=tuple(get("--case")),
        prompt=get("--prompt"),
        images=tuple(get("--image")),
        decode_steps=get("--decode-steps"),
        gen_steps=get("--gen-steps"),
    )


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
        _stop(request, error)


@pytest.fixture(scope="session")
def runtime(checkpoint: Checkpoint, pytestconfig: pytest.Config) -> Runtime:
    """The runtime under test: the shipped one. Override this fixture to bring another."""
    from g4conformance.shipped import execute_with, shipped_runtime

    max_seq = pytestconfig.getoption("--max-seq") or checkpoint.facts.default_max_seq
    options = _checked_early(pytestconfig)
    return shipped_runtime(checkpoint, max_seq, options.quant, execute_with(options.executor))


@pytest.fixture(scope="session")
def conformance(request: pytest.FixtureRequest, checkpoint: Checkpoint, runtime: Runtime) -> ConformanceSession:
    """The run that judges cases, each once."""
    from g4conformance.errors import ConformanceError
    from g4conformance.session import ConformanceSession

    try:
        return ConformanceSession(checkpoint, runtime, _checked_early(request.config))
    except ConformanceError as error:
        _stop(request, error)


@pytest.fixture
def judged(request: pytest.FixtureRequest, conformance: ConformanceSession) -> Judged:
    """The verdicts of one check on one case, isolated and accumulated."""
    from g4conformance.errors import ConformanceError

    case, check = request.param
    try:
        of_case = conformance.verdicts(case)
    except ConformanceError as error:
        _stop(request, error)
    found = Judged(conformance, of_case, [v for v in of_case if v.check == check], request.config)
    properties = request.node.user_properties
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
        """Fails the test if the check failed, says why if it could not be made, and else returns."""
        from g4conformance.judging.verdict import Status
        from g4conformance.report.failure import failure_text

        __tracebackhide__ = True
        unobserved = [v for v in self.verdicts if v.status is Status.NOT_OBSERVED]
        if any(v.failed for v in self.verdicts) or (unobserved and self._is_shipped()):
            pytest.fail(failure_text(self.verdicts, self.of_case, self._repeat()), pytrace=False)
        if all(v.status in (Status.NOT_APPLICABLE, Status.NOT_OBSERVED) for v in self.verdicts):
            pytest.skip(self.verdicts[0].where)

    def _is_shipped(self) -> bool:
        from g4conformance.runtime.static import is_shipped

        return is_shipped(self.session.runtime)

    def _repeat(self) -> str:
        verdict, options = self.verdicts[0], self.session.options
        model = f" --model {options.model}" if options.model else ""
        quant = f" --quant {options.quant}" if options.quant != SCHEMES[0] else ""
        executor = f" --executor {options.executor}" if options.executor != EXECUTORS[0] else ""
        return f"pytest -m integration{model}{quant}{executor} --case {verdict.case} -k {verdict.check}"


def _stop(request: pytest.FixtureRequest, error: Exception) -> NoReturn:
    """Ends the whole run with one line: what went wrong would go wrong for every test."""
    if hasattr(request.config, "workerinput"):
        request.session.shouldstop = f"g4conformance: {error}"  # xdist carries this to the controller, but not an exit
        pytest.fail(f"g4conformance: {error}", pytrace=False)
    pytest.exit(f"g4conformance: {error}", returncode=pytest.ExitCode.USAGE_ERROR)


# --- summary --------------------------------------------------------------------------------------------------------


class VerdictCollector:
    """Gathers verdicts from test reports, which xdist carries from the workers, and prints the summary."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.verdicts: list[Verdict] = []
        self.setting: dict[str, Any] = {}
        self.failed = 0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.failed += report.failed
        if report.when != "call":
            return
        from g4conformance.judging.verdict import Verdict

        properties: list[tuple[str, Any]] = list(report.user_properties)
        self.verdicts += [Verdict.from_dict(value) for name, value in properties if name == "verdict"]
        self.setting = dict(properties).get("setting", self.setting)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if not self.verdicts:
            return
        from g4conformance.report.files import write_report
        from g4conformance.report.summary import summary_text

        if report := self.config.getoption("--report"):
            write_report(Path(report), self.verdicts, self.setting)
        terminalreporter.section("g4conformance")
        colour = bool(terminalreporter._tw.hasmarkup)
        terminalreporter.write(summary_text(self.verdicts, self.setting, self.failed, colour))
