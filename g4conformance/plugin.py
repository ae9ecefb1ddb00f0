"""The pytest plugin: hooks, markers and session fixtures.

It is an entry point, because options that only a conftest brings are unknown while pytest still reads its arguments
(`--model /some/path` would be taken for a test file). It imports nothing heavy until a test needs it.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import pytest

from g4conformance.options import add_options, check_given_options, checked_early, join_path_options

if TYPE_CHECKING:
    from g4conformance.checkpoints.checkpoint import Checkpoint
    from g4conformance.runtime.contract import Runtime
    from g4conformance.session import ConformanceSession, RunOptions
    from g4conformance.suite.judged import Judged
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
_Around = Generator[None, _T, _T]  # what a hook wrapper is: it hands on what the hooks inside it have returned
_WRONG = pytest.StashKey[pytest.UsageError]()
_COLLECTOR = "g4conformance-collector"
_UNASKED = "unasked"  # the property of a test that turned out to ask what only a quantized runtime can answer


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
    check_given_options(config)


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """Looks at the options before tests are collected: each stage would stumble over the same one."""
    check_given_options(session.config)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test a case and check of the stage that the test function is marked with."""
    marker = metafunc.definition.get_closest_marker("stage")
    if marker is None or "judged" not in metafunc.fixturenames:
        return
    from g4conformance.checks import checks_of
    from g4conformance.checks.needs import may_apply
    from g4conformance.stages import Stage

    try:
        options = checked_early(metafunc.config)
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


# --- fixtures -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def checkpoint(request: pytest.FixtureRequest, pytestconfig: pytest.Config) -> Checkpoint:
    """The checkpoint of `--model`, loaded once a worker."""
    from g4conformance.checkpoints.checkpoint import load_checkpoint
    from g4conformance.errors import ConformanceError

    options = checked_early(pytestconfig)
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
    options = checked_early(pytestconfig)
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
        session = ConformanceSession(checkpoint, runtime, checked_early(request.config))
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
    from g4conformance.suite.judged import Judged

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
