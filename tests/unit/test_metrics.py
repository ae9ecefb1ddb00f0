"""Metrics are strict: about shapes, about NaN, about constants."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from g4conformance.metrics import difference, peir, top_two_gap

pytestmark = pytest.mark.unit

BASE = torch.tensor([[0.0, 4.0], [-4.0, 1.0]])


def test_peir_is_the_peak_error_over_the_bases_interval() -> None:
    target = BASE + torch.tensor([[0.0, 0.5], [-2.0, 0.0]])
    assert peir(BASE, target) == 2.0 / 8.0
    assert peir(BASE, BASE) == 0.0
    assert peir(target, BASE) == 2.0 / 10.5


def test_peir_of_a_constant_base_is_an_error() -> None:
    with pytest.raises(ValueError, match="not constant"):
        peir(torch.ones(3), torch.zeros(3))


@pytest.mark.parametrize("compare", [peir, difference])
def test_shapes_must_agree_and_both_are_named(compare: Callable[[Tensor, Tensor], object]) -> None:
    with pytest.raises(ValueError, match=r"base \(2, 2\), target \(1, 2\)"):
        compare(BASE, BASE[:1])


def test_difference_of_equals() -> None:
    found = difference(BASE, BASE.clone())
    assert found.equal
    assert (found.count, found.mismatched, found.max_abs, found.mean_abs, found.peir) == (4, 0, 0.0, 0.0, 0.0)
    assert found.base_max_abs == 4.0
    assert found.argmax_equal


def test_difference_says_how_many_how_much_and_where() -> None:
    found = difference(BASE, BASE + torch.tensor([[0.0, 0.5], [0.0, -2.0]]))
    assert not found.equal
    assert (found.count, found.mismatched) == (4, 2)
    assert found.max_abs == 2.0
    assert found.mean_abs == 0.625
    assert found.peir == 0.25
    assert found.where == (1, 1)


def test_difference_sees_a_moved_argmax_in_any_row() -> None:
    assert difference(BASE, BASE * 2).argmax_equal
    assert not difference(BASE, BASE.flip(-1)).argmax_equal
    assert not difference(BASE, torch.stack([BASE[0], -BASE[1]])).argmax_equal


def test_a_gain_is_what_scales_base_onto_target() -> None:
    assert difference(BASE, BASE).gain == 1.0
    assert difference(BASE, BASE * 0.75).gain == 0.75
    assert difference(BASE, BASE + torch.tensor([[4.0, 0.0], [0.0, 0.0]])).gain == 1.0, "across base, not along it"
    assert difference(torch.zeros(2), torch.ones(2)).gain == 1.0


def test_chance_alone_moves_a_gain_by_about_its_standard_deviation() -> None:
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(50, 40, generator=generator)
    errors = [0.1 * torch.randn(50, 40, generator=generator) for _ in range(200)]
    found = [difference(base, base + error) for error in errors]
    deviations = torch.tensor([(one.gain - 1) / one.chance_gain for one in found])
    assert 0.8 < float(deviations.std()) < 1.2
    scaled = difference(base, base * 1.001)
    assert abs(scaled.gain - 1) > 40 * scaled.chance_gain, "a factor is no chance: sqrt(2000) deviations"


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("sides", ["base", "target", "both"])
def test_what_is_not_finite_is_infinitely_wrong_even_on_both_sides(value: float, sides: str) -> None:
    broken = BASE.clone()
    broken[1, 0] = value
    base = BASE if sides == "target" else broken
    target = BASE if sides == "base" else broken
    found = difference(base, target)
    assert not found.equal
    assert found.mismatched == 1
    assert found.max_abs == found.mean_abs == math.inf
    assert found.where == (1, 0)


def test_a_constant_base_has_no_peir_but_a_difference() -> None:
    found = difference(torch.ones(3), torch.tensor([1.0, 1.0, 1.5]))
    assert found.peir is None
    assert found.max_abs == 0.5
    assert found.where == (2,)


@pytest.mark.parametrize(
    ("base", "target", "largest"),
    [
        (torch.tensor([True, False]), torch.tensor([True, True]), 1.0),
        (torch.tensor([2**40, 7]), torch.tensor([2**40 + 1, 7]), 1.0),
        (torch.tensor([1.0], dtype=torch.bfloat16), torch.tensor([1.0078125], dtype=torch.bfloat16), 0.0078125),
        (torch.tensor(3), torch.tensor(5), 2.0),
    ],
)
def test_all_kinds_of_numbers_are_compared_without_rounding(base: Tensor, target: Tensor, largest: float) -> None:
    assert difference(base, target).max_abs == largest


def test_nothing_compared_is_a_count_of_zero() -> None:
    found = difference(torch.zeros(0, 3), torch.zeros(0, 3))
    assert (found.count, found.mismatched, found.where) == (0, 0, ())


@pytest.mark.parametrize(
    ("logits", "gap"), [([[1.0, 4.0, 3.5]], 0.5), ([[1.0, 4.0, 3.5], [2.0, 2.0, 1.0]], 0.0), ([5.0, -1.0], 6.0)]
)
def test_top_two_gap_is_the_smallest_over_rows(logits: list[float], gap: float) -> None:
    assert top_two_gap(torch.tensor(logits)) == gap
