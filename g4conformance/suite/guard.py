"""Guards an adopter's module against a suite that was cut short: what is not judged must be declared, not dropped."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import pytest

from g4conformance.plugin import is_ours

_DROPPING = ("skip", "skipif")
_FIXED = ("conformance", "judged")  # fixtures that judge; `runtime` and `checkpoint` are an adopter's to override
_REMEDY = (
    "Import all of it with `from g4conformance.suite import *`. What the runtime does not have is not observed, what "
    "it fails is declared in conformance.toml or by an xfail with a reason. Choose with --case and -k."
)


@pytest.mark.integration
def test_suite_is_whole(request: pytest.FixtureRequest) -> None:
    fixtures = [f"the fixture {name} is overridden" for name in _FIXED if not is_ours(request.node, name)]
    if problems := [*cut_short(vars(request.module)), *dropped_by_marks(_marks(request)), *fixtures]:
        pytest.fail("\n".join(["the suite is cut short:", *(f"  {p}" for p in problems), _REMEDY]), pytrace=False)


def standard_tests() -> Mapping[str, Callable[..., None]]:
    """The suite's tests by name, one a stage."""
    from g4conformance import suite

    return {name: getattr(suite, name) for name in suite.__all__ if name.startswith("test_") and name != _NAME}


def cut_short(namespace: Mapping[str, object]) -> list[str]:
    """A line for each of the suite's tests that a module with this namespace does not have, or has replaced."""
    return [
        f"{name} is {'overridden' if name in namespace else 'missing'}"
        for name, test in standard_tests().items()
        if namespace.get(name) is not test
    ]


def dropped_by_marks(marks: Mapping[str, Iterable[pytest.Mark]]) -> list[str]:
    """A line for each of the suite's tests that a mark keeps from being judged, or excuses without a reason."""
    found: dict[str, None] = {}
    for name, mark in ((name, mark) for name, own in marks.items() for mark in own):
        if mark.name in _DROPPING:
            found[f"{name} is marked {mark.name}"] = None
        if mark.name == "xfail" and (not mark.kwargs.get("reason") or mark.kwargs.get("run") is False):
            found[f"{name} is marked xfail without a reason, or is not run"] = None
    return list(found)


def _marks(request: pytest.FixtureRequest) -> dict[str, list[pytest.Mark]]:
    """The marks of the suite's tests, and those that a conftest has put on what was collected of them here."""
    marks = {name: list(getattr(test, "pytestmark", [])) for name, test in standard_tests().items()}
    for item in request.session.items:
        if isinstance(item, pytest.Function) and item.module is request.module and item.originalname in marks:
            marks[item.originalname] += item.own_markers
    return marks


def guards_of(module: pytest.Module, collected: Sequence[object]) -> list[pytest.Function]:
    """The guard, for a module that has some of the suite's tests but did not import it."""
    functions = [item.function for item in collected if isinstance(item, pytest.Function)]
    some = any(test in functions for test in standard_tests().values())
    if not some or test_suite_is_whole in functions or module.obj.__name__.startswith("g4conformance.suite."):
        return []
    return [pytest.Function.from_parent(module, name=_NAME, callobj=test_suite_is_whole)]


_NAME = test_suite_is_whole.__name__
