"""The search itself, over examples whose outcome is a matter of one line instead of a forward pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from g4conformance.fuzz import search as module
from g4conformance.fuzz.conformance import Outcome, Plant
from g4conformance.fuzz.example import FuzzExample
from g4conformance.fuzz.search import Budget, Tally, search

from .test_fuzz_conformance import EXAMPLE

pytestmark = pytest.mark.unit

CONFORMS, UNSOUND = Outcome(), Outcome(unsound="NaN")
ALARM, OTHER_ALARM = Outcome(raised="ValueError: 6 layers"), Outcome(raised="TypeError: 6 layers")
Rule = Callable[[FuzzExample], Outcome]


@pytest.fixture
def examined(monkeypatch: pytest.MonkeyPatch) -> Callable[[Rule], list[FuzzExample]]:
    """Gives examples the outcome of a rule; what it returns lists the examples that were examined."""

    def give(rule: Rule) -> list[FuzzExample]:
        seen: list[FuzzExample] = []

        def examine(example: FuzzExample, plant: Plant | None) -> Outcome:
            seen.append(example)
            return rule(example)

        monkeypatch.setattr(module, "examine", examine)
        return seen

    return give


def wide_window(example: FuzzExample) -> Outcome:
    return ALARM if example.spec.sliding_window > 5 else CONFORMS


def test_a_search_ends_with_its_examples_each_of_them_another(examined: Callable[[Rule], list[FuzzExample]]) -> None:
    """More than a batch, so that the smallest example, with which each begins, is met twice."""
    seen = examined(lambda example: CONFORMS)
    tally, found = search(Budget(examples=60), seed=1)
    assert found is None
    assert tally.tried == len(seen) == 60
    assert len({(example.spec, example.seed) for example in seen}) == 60, "configs, not cases of the same config"
    assert set(tally.judged) == {"float32", "bfloat16", "float16"}


def test_a_search_without_time_examines_nothing(examined: Callable[[Rule], list[FuzzExample]]) -> None:
    seen = examined(lambda example: ALARM)
    assert search(Budget(minutes=0), seed=1) == (Tally(), None)
    assert not seen


def test_a_seed_says_which_examples_are_drawn(examined: Callable[[Rule], list[FuzzExample]]) -> None:
    seen = examined(lambda example: CONFORMS)
    for seed in (1, 1, 2):
        search(Budget(examples=20), seed)
    assert seen[:20] == seen[20:40]
    assert seen[:20] != seen[40:]


def test_examples_with_an_unsound_reference_are_counted_apart(examined: Callable[[Rule], list[FuzzExample]]) -> None:
    examined(lambda example: UNSOUND if example.dtype == "float16" else CONFORMS)
    tally, found = search(Budget(examples=30), seed=1)
    assert found is None
    assert set(tally.unsound) == {"float16"}
    assert tally.judged.total() + tally.unsound["float16"] == tally.tried == 30


def test_what_is_found_is_shrunk(examined: Callable[[Rule], list[FuzzExample]]) -> None:
    seen = examined(wide_window)
    tally, found = search(Budget(examples=100), seed=1)
    assert found is not None
    assert found.outcome is ALARM
    assert found.example.spec.sliding_window == 6
    assert found.example.spec.layer_types == ("full_attention",)
    assert tally.tried + tally.candidates == len(seen)


def test_another_alarm_is_not_taken_for_a_smaller_one(examined: Callable[[Rule], list[FuzzExample]]) -> None:
    examined(lambda example: wide_window(example) if example.spec.sliding_window > 3 else OTHER_ALARM)
    condition = module._Condition(Budget(), None, lambda tally: None)
    wide, narrow = (replace(EXAMPLE, spec=replace(EXAMPLE.spec, sliding_window=width)) for width in (9, 2))
    assert condition(wide)
    assert not condition(narrow)


def test_without_time_to_shrink_the_first_find_is_told(examined: Callable[[Rule], list[FuzzExample]]) -> None:
    seen = examined(wide_window)
    tally, found = search(Budget(shrink_seconds=0), seed=1)
    assert found is not None
    assert found.example == seen[-1]
    assert tally.candidates == 0


def test_progress_is_told_after_every_example(examined: Callable[[Rule], list[FuzzExample]]) -> None:
    examined(wide_window)
    steps: list[tuple[int, int]] = []
    tally, _ = search(Budget(), seed=1, on_step=lambda tally: steps.append((tally.tried, tally.candidates)))
    tried = [(n, 0) for n in range(1, tally.tried + 1)]
    assert steps == tried + [(tally.tried, n) for n in range(1, tally.candidates + 1)]
