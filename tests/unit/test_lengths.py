"""Lengths are arithmetic, and nothing but."""

from __future__ import annotations

import pytest

from g4conformance.cases import Case
from g4conformance.checkpoints.checkpoint import Checkpoint
from g4conformance.errors import CaseError
from g4conformance.lengths import evaluate_length, fit_text

from .asserting import told

pytestmark = pytest.mark.unit

NAMES = {"W": 32, "max_seq": 134}


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("W", 32),
        ("W-1", 31),
        ("W + 1", 33),
        ("2*W", 64),
        ("W//2", 16),
        ("max_seq", 134),
        ("max_seq-2", 132),
        ("(max_seq - W) // 3", 34),
        ("12", 12),
        (7, 7),
    ],
)
def test_an_expression_of_the_checkpoints_lengths(expression: str | int, value: int) -> None:
    assert evaluate_length(expression, NAMES) == value


BOOLEAN = "True"  # which Python takes for the integer 1
NOT_LENGTHS = ["W/2", "W**2", "w", "W.real", "max_seq(1)", "", "W-", "1.5", "'a'", "W//0", "-W", "W if 1 else 2"]


@pytest.mark.parametrize("expression", [*NOT_LENGTHS, "__import__('os')", BOOLEAN])
def test_anything_else_is_refused(expression: str) -> None:
    with told(
        CaseError, expected="integers, W, max_seq and + - * //", found=repr(expression), remedy="Mend the case's length"
    ):
        evaluate_length(expression, NAMES)


@pytest.mark.parametrize(("expression", "value"), [("W-32", 0), ("W-40", -8), ("0", 0)])
def test_a_length_is_at_least_one(expression: str, value: int) -> None:
    with told(CaseError, expected="at least 1", found=f"{expression!r} = {value}", remedy="Mend"):
        evaluate_length(expression, NAMES)


def words(text: str) -> int:
    return len(text.split())


@pytest.mark.parametrize("length", [1, 3, 4, 5, 11])
def test_a_text_is_cut_or_repeated_to_its_length(length: int) -> None:
    passage = "One two three four. "
    fitted = fit_text(passage, length, words)
    assert words(fitted) == length
    assert (passage * 4).startswith(fitted)


def test_a_length_that_no_beginning_has_is_an_error() -> None:
    with told(CaseError, expected="'abc'... with 3 tokens", found="none", remedy="Change the case's prompt"):
        fit_text("abc", 3, lambda text: 2 * len(text))


@pytest.mark.parametrize("length", [8, 31, 33, 64, 134])
def test_real_tokenizers_are_hit_exactly(
    tiny_checkpoint: Checkpoint, bundled_cases: tuple[Case, ...], length: int
) -> None:
    passage = next(case.prompt for case in bundled_cases if case.name == "window")
    tokenizer = tiny_checkpoint.processor.tokenizer
    fitted = fit_text(passage, length, lambda text: len(tokenizer(text).input_ids))
    assert len(tokenizer(fitted).input_ids) == length
