"""The guard that comes with the suite: what it takes for a suite that was cut short."""

from __future__ import annotations

import pytest

from g4conformance import suite
from g4conformance.stages import Stage
from g4conformance.suite.guard import cut_short, dropped_by_marks, standard_tests

pytestmark = pytest.mark.unit

STAR = {name: getattr(suite, name) for name in suite.__all__}


def test_every_stage_has_its_test_and_the_guard_comes_with_them() -> None:
    assert list(standard_tests()) == [f"test_{stage}" for stage in Stage]
    assert "test_suite_is_whole" in suite.__all__


def test_all_of_it_is_whole_whatever_else_is_there() -> None:
    assert cut_short({**STAR, "test_mine": lambda: None}) == []


@pytest.mark.parametrize("name", sorted(standard_tests()))
def test_a_test_that_is_dropped_or_overridden_is_named(name: str) -> None:
    assert cut_short({other: test for other, test in STAR.items() if other != name}) == [f"{name} is missing"]
    assert cut_short({**STAR, name: lambda judged: None}) == [f"{name} is overridden"]


MARKS = {
    "none": (None, []),
    "the stage's own": (pytest.mark.stage("prefill"), []),
    "xfail with a reason": (pytest.mark.xfail(reason="no such op"), []),
    "skip": (pytest.mark.skip(reason="slow"), ["test_prefill is marked skip"]),
    "skipif": (pytest.mark.skipif(True, reason="slow"), ["test_prefill is marked skipif"]),
    "xfail": (pytest.mark.xfail, ["test_prefill is marked xfail without a reason, or is not run"]),
    "xfail that is not run": (
        pytest.mark.xfail(reason="crashes", run=False),
        ["test_prefill is marked xfail without a reason, or is not run"],
    ),
}


@pytest.mark.parametrize("kind", MARKS)
def test_a_mark_may_excuse_with_a_reason_and_never_drop(kind: str) -> None:
    mark, problems = MARKS[kind]
    marks = [] if mark is None else [mark.mark]
    assert dropped_by_marks({"test_prefill": [*marks, *marks], "test_decode": []}) == problems
