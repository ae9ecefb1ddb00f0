"""Lengths: expressions against Python's own arithmetic, texts against a count of every beginning."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from g4conformance.errors import CaseError
from g4conformance.fixtures import bundled_checkpoint
from g4conformance.fuzz.strategies import texts
from g4conformance.lengths import evaluate_length, fit_text

pytestmark = pytest.mark.property

NAMES = {"W": 32, "max_seq": 134}

expressions = st.recursive(
    st.integers(0, 50).map(str) | st.sampled_from(sorted(NAMES)),
    lambda inner: st.tuples(inner, st.sampled_from(["+", "-", "*", "//"]), inner).map(lambda p: f"({' '.join(p)})"),
    max_leaves=6,
)


@given(expressions)
def test_expressions_mean_what_they_mean_in_python(expression: str) -> None:
    try:
        expected = eval(expression, {"__builtins__": {}}, NAMES)
    except ZeroDivisionError:
        expected = 0
    if expected >= 1:
        assert evaluate_length(expression, NAMES) == expected
    else:
        with pytest.raises(CaseError):
            evaluate_length(expression, NAMES)


@given(st.text(alphabet="Wmax_seq0123456789+-*/%()[]., '\n", max_size=12) | st.text(max_size=8))
def test_whatever_is_written_gives_a_length_or_a_case_error(expression: str) -> None:
    with suppress(CaseError):
        assert evaluate_length(expression, NAMES) >= 1


@given(st.integers(-5, 5))
def test_plain_integers_are_lengths(value: int) -> None:
    if value >= 1:
        assert evaluate_length(value, {}) == value
    else:
        with pytest.raises(CaseError):
            evaluate_length(value, {})


COUNTERS: dict[str, Callable[[str], int]] = {
    "characters": len,
    "characters after a beginning of sequence": lambda text: 1 + len(text),
    "words": lambda text: len(text.split()),
}


@given(texts().filter(str.strip), st.integers(1, 60), st.sampled_from(sorted(COUNTERS)))
def test_texts_are_repeated_and_cut_to_length(text: str, length: int, counter: str) -> None:
    text += " "  # so that words do not run together
    fitted = fit_text(text, length, COUNTERS[counter])
    assert COUNTERS[counter](fitted) == length
    assert (text * (len(fitted) // len(text) + 1)).startswith(fitted)


@pytest.fixture(scope="module")
def count_tokens() -> Callable[[str], int]:
    tokenizer: Any = AutoTokenizer.from_pretrained(bundled_checkpoint(), local_files_only=True)
    return lambda text: len(tokenizer("<bos>" + text).input_ids)


@given(text=texts(), length=st.integers(1, 40))
def test_texts_have_exactly_as_many_tokens_as_asked_for(
    count_tokens: Callable[[str], int], text: str, length: int
) -> None:
    """Of the bundled tokenizer; a text is refused only if no beginning of it has that many."""
    try:
        assert count_tokens(fit_text(text, length, count_tokens)) == length
    except CaseError:
        whole = text * (length + 1)
        counts = [count_tokens(whole[:end]) for end in range(min(len(whole), 60 * length) + 1)]
        assert length not in counts
