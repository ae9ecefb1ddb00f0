"""Views against loops over single elements, and what a view undoes against what was there before."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from g4conformance.adopting.arrays import as_numpy, as_tensor, mapped
from g4conformance.adopting.reporting import at_step
from g4conformance.adopting.views import (
    cast,
    heads_first,
    in_turn,
    packed_heads,
    padded,
    transposed,
    unpacked_heads,
    unpadded,
    with_batch,
    without_batch,
)

pytestmark = pytest.mark.property

sizes = st.integers(1, 4)


def counted(*shape: int) -> Tensor:
    """Every element another number."""
    return torch.arange(int(np.prod(shape)), dtype=torch.float32).reshape(shape)


def everywhere(tensor: Tensor) -> list[tuple[int, ...]]:
    return list(itertools.product(*map(range, tensor.shape)))


@given(sizes, sizes, sizes, sizes)
def test_packed_heads_lie_side_by_side_in_a_row(batch: int, rows: int, heads: int, dim: int) -> None:
    packed = counted(batch, rows, heads * dim)
    view = unpacked_heads(heads)(packed)
    assert view.shape == (batch, heads, rows, dim)
    for b, head, row, d in everywhere(view):
        assert view[b, head, row, d] == packed[b, row, head * dim + d]
    assert torch.equal(packed_heads(view), packed)


@given(sizes, sizes, sizes, sizes)
def test_heads_first_exchanges_rows_and_heads(batch: int, rows: int, heads: int, dim: int) -> None:
    given = counted(batch, rows, heads, dim)
    view = heads_first(given)
    assert all(view[b, h, r, d] == given[b, r, h, d] for b, h, r, d in everywhere(view))
    assert torch.equal(heads_first(view), given)


@given(st.permutations(range(3)), st.tuples(sizes, sizes, sizes))
def test_an_axis_of_a_transposed_tensor_is_the_one_that_was_named(axes: list[int], shape: tuple[int, ...]) -> None:
    given = counted(*shape)
    view = transposed(*axes)(given)
    for index in everywhere(view):
        before = [0, 0, 0]
        for axis, at in zip(axes, index, strict=True):
            before[axis] = at
        assert view[index] == given[tuple(before)]


@given(sizes, sizes, st.integers(0, 1), st.integers(0, 3), st.sampled_from([0.0, -7.0]))
def test_padding_is_behind_what_was_there(n: int, m: int, axis: int, more: int, fill: float) -> None:
    given = counted(n, m)
    rows = given.shape[axis] + more
    view = padded(rows, axis, fill)(given)
    for index in everywhere(view):
        assert view[index] == (given[index] if index[axis] < given.shape[axis] else fill)
    assert torch.equal(unpadded(given.shape[axis], axis)(view), given)


@given(sizes, sizes)
def test_a_batch_axis_is_put_and_taken(n: int, m: int) -> None:
    given = counted(n, m)
    assert torch.equal(without_batch(with_batch(given)), given)
    assert with_batch(given).shape == (1, n, m)


def test_views_in_turn_are_applied_from_the_first() -> None:
    given = counted(2, 3)
    assert torch.equal(in_turn(transposed(1, 0), padded(4, 0), cast(torch.int64))(given)[3], torch.zeros(2).long())


@given(st.lists(st.floats(width=32, allow_nan=False), max_size=4), st.sampled_from(["float32", "bfloat16", "float16"]))
def test_arrays_and_tensors_hold_the_same_values(values: list[float], dtype: str) -> None:
    pytest.importorskip("ml_dtypes") if dtype == "bfloat16" else None
    tensor = torch.tensor(values, dtype=getattr(torch, dtype))
    array = as_numpy(tensor)
    assert array.dtype.name == dtype
    assert torch.equal(as_tensor(array), tensor)
    assert np.array_equal(array.astype(np.float64), tensor.double().numpy())


nested = st.recursive(
    st.integers() | st.none() | sizes.map(lambda n: np.arange(n)),
    lambda inner: st.lists(inner, max_size=3).map(tuple) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@given(nested)
def test_whatever_holds_arrays_keeps_its_form(value: object) -> None:
    there = mapped(as_tensor, value)
    back = mapped(as_numpy, there)
    assert repr(back) == repr(value)
    assert "array" not in repr(there)


@given(st.integers(0, 99), st.sampled_from(["layer/3/key", "logits", "cache/0/value"]))
def test_a_step_has_names_of_its_own(step: int, name: str) -> None:
    assert at_step(f"prefill/{name}", step) == f"decode/{step}/{name}"
    assert at_step(f"prefill/{name}", None) == f"prefill/{name}"


@pytest.mark.parametrize("name", ["text_embeds", "per_layer_inputs", "mask/full_attention", "rope/full_attention/cos"])
def test_what_enters_the_decoder_has_no_prefix_in_prefill(name: str) -> None:
    assert at_step(name, None) == name
    assert at_step(name, 2) == f"decode/2/{name}"


@pytest.mark.parametrize("name", ["vision/layer/0/hidden", "visual_embeds", "fused_embeds"])
def test_pictures_are_seen_in_prefill_only(name: str) -> None:
    assert at_step(name, 2) == name
