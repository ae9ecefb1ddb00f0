"""Metrics against numpy, and what no tensor may make them say."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from g4conformance.metrics import difference, peir, top_two_gap

pytestmark = pytest.mark.property

shapes = hnp.array_shapes(min_dims=1, max_dims=3, min_side=1, max_side=5)
finite = st.floats(-1e6, 1e6, width=32)
anything = st.floats(width=32)


def pairs(elements: st.SearchStrategy[float], shape: st.SearchStrategy = shapes) -> st.SearchStrategy:
    """Two float32 arrays of one shape."""
    return shape.flatmap(lambda s: st.tuples(*(hnp.arrays(np.float32, s, elements=elements) for _ in range(2))))


def interval(base: np.ndarray) -> float:
    return float(base.astype(np.float64).max() - base.astype(np.float64).min())


@given(pairs(finite))
def test_peir_is_the_peak_error_over_the_references_interval(pair: tuple[np.ndarray, np.ndarray]) -> None:
    base, target = pair
    if interval(base) == 0:
        with pytest.raises(ValueError, match="constant"):
            peir(torch.from_numpy(base), torch.from_numpy(target))
    else:
        expected = np.abs(base.astype(np.float64) - target.astype(np.float64)).max() / interval(base)
        assert peir(torch.from_numpy(base), torch.from_numpy(target)) == expected


@given(pairs(finite))
def test_difference_of_finite_tensors_is_numpys(pair: tuple[np.ndarray, np.ndarray]) -> None:
    base, target = pair
    delta = np.abs(target.astype(np.float64) - base.astype(np.float64))
    found = difference(torch.from_numpy(base), torch.from_numpy(target))
    assert found.count == base.size
    assert found.mismatched == np.count_nonzero(base != target)
    assert found.equal == np.array_equal(base, target)
    assert found.max_abs == delta.max()
    assert found.mean_abs == pytest.approx(delta.mean(), rel=1e-12)
    assert found.base_max_abs == np.abs(base).max()
    assert found.peir == (delta.max() / interval(base) if interval(base) else None)
    assert delta[found.where] == delta.max()
    power = np.square(base.astype(np.float64)).sum()
    chance = np.sqrt(np.square(delta).mean() / power) if power else 0.0
    assert found.chance_gain == pytest.approx(chance, rel=1e-12)


@given(pairs(finite))
def test_argmax_is_compared_row_by_row(pair: tuple[np.ndarray, np.ndarray]) -> None:
    assume(all(len(set(row)) == len(row) for side in pair for row in side.reshape(-1, side.shape[-1]).tolist()))
    base, target = pair
    found = difference(torch.from_numpy(base), torch.from_numpy(target))
    assert found.argmax_equal == np.array_equal(base.argmax(-1), target.argmax(-1))


@given(pairs(anything), st.integers(0, 1), st.integers(0, 99), st.sampled_from([np.nan, np.inf, -np.inf]))
def test_nothing_that_is_not_finite_is_ever_equal(
    pair: tuple[np.ndarray, np.ndarray], side: int, place: int, value: float
) -> None:
    """Not even where both sides hold the same infinity."""
    base, target = (tensor.copy() for tensor in pair)
    (base, target)[side].flat[place % base.size] = value
    wrong = ~np.isfinite(base) | ~np.isfinite(target)
    found = difference(torch.from_numpy(base), torch.from_numpy(target))
    assert found.mismatched == np.count_nonzero(wrong | (base != target))
    assert found.max_abs == found.mean_abs == math.inf
    assert wrong[found.where]
    assert not found.equal


@given(hnp.arrays(np.float32, shapes, elements=finite))
def test_a_tensor_equals_itself_in_any_dtype_that_holds_it(base: np.ndarray) -> None:
    tensor = torch.from_numpy(base)
    for same in (tensor, tensor.clone(), tensor.double()):
        assert difference(tensor, same).equal
        assert difference(tensor, same).max_abs == 0.0


@given(hnp.arrays(np.float32, shapes, elements=finite), hnp.arrays(np.float32, shapes, elements=finite))
def test_other_shapes_are_refused(base: np.ndarray, target: np.ndarray) -> None:
    assume(base.shape != target.shape)
    for metric in (peir, difference):
        with pytest.raises(ValueError, match="shapes differ"):
            metric(torch.from_numpy(base), torch.from_numpy(target))


@given(hnp.arrays(np.float32, hnp.array_shapes(min_dims=1, max_dims=3, min_side=2, max_side=5), elements=finite))
def test_the_gap_is_that_of_the_row_closest_to_a_tie(logits: np.ndarray) -> None:
    rows = np.sort(logits.astype(np.float64).reshape(-1, logits.shape[-1]), axis=-1)
    assert top_two_gap(torch.from_numpy(logits)) == min(rows[:, -1] - rows[:, -2])
