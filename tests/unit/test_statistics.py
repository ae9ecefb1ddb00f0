"""Statistics of logits against a brute-force computation in plain Python."""

from __future__ import annotations

import math
from statistics import fmean, pstdev

import pytest
import torch

from g4conformance.statistics import QUANTILES, logit_statistics

pytestmark = pytest.mark.unit

ROWS = [
    [0.5, -3.0, 2.25, 7.0, -1.0, 6.5, 0.0],
    [float(value) for value in torch.randn(512, generator=torch.Generator().manual_seed(4)) * 3],
]


def interpolated(row: list[float], q: float) -> float:
    """numpy's default: linearly between the two order statistics around q (n - 1)."""
    ordered, place = sorted(row), q * (len(row) - 1)
    below = math.floor(place)
    above = min(below + 1, len(row) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def entropy(row: list[float]) -> float:
    total = sum(math.exp(value - max(row)) for value in row)
    chances = [math.exp(value - max(row)) / total for value in row]
    return -sum(p * math.log(p) for p in chances)


@pytest.mark.parametrize("row", ROWS)
def test_numbers_are_those_of_plain_python(row: list[float]) -> None:
    expected = {"mean": fmean(row), "std": pstdev(row), "min": min(row), "max": max(row), "entropy": entropy(row)}
    expected |= {name: interpolated(row, q) for name, q in QUANTILES.items()}
    assert logit_statistics(torch.tensor(row)).numbers == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("row", ROWS)
def test_top_ids_and_margins_are_those_of_plain_python(row: list[float]) -> None:
    ids = sorted(range(len(row)), key=lambda id: -row[id])
    found = logit_statistics(torch.tensor(row))
    assert found.top_ids == tuple(ids[:5])
    assert found.margins == pytest.approx([row[ids[k]] - row[ids[k + 1]] for k in range(5)], rel=1e-6)


def test_equal_logits_have_no_margin_and_the_greatest_entropy() -> None:
    found = logit_statistics(torch.full((8,), 3.0))
    assert found.margins == (0.0,) * 5
    assert found.numbers["entropy"] == pytest.approx(math.log(8))
    assert found.numbers["std"] == 0.0


def test_a_certain_token_has_no_entropy() -> None:
    assert logit_statistics(torch.tensor([0.0] * 9 + [1e4])).numbers["entropy"] == 0.0


def test_low_precision_is_counted_in_double_precision() -> None:
    row = torch.full((300,), 257.0, dtype=torch.float16)
    assert logit_statistics(row).numbers["mean"] == 257.0  # their sum is beyond float16
    assert logit_statistics(row.bfloat16()).numbers["mean"] == 256.0


def test_a_batch_of_one_is_a_row() -> None:
    row = torch.tensor(ROWS[0])
    assert logit_statistics(row[None]) == logit_statistics(row)


@pytest.mark.parametrize("shape", [(2, 8), (1, 1, 8), (5,), ()])
def test_other_shapes_are_refused_by_name(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"one row of more than 5 logits expected, got shape \("):
        logit_statistics(torch.zeros(shape))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_logits_that_are_not_finite_are_refused(value: float) -> None:
    with pytest.raises(ValueError, match="2 of 8 logits are not finite"):
        logit_statistics(torch.tensor([0.0] * 6 + [value] * 2))
