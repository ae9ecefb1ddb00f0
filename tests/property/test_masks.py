"""Masks against their definition, one (query, key) pair at a time."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from g4conformance.fuzz.strategies import FULL, SLIDING
from g4conformance.reference.hooks import absolute_mask
from g4conformance.runtime.masks import attention_mask, mask_bias

pytestmark = pytest.mark.property

layer_kinds = st.sampled_from([SLIDING, FULL])
windows = st.integers(1, 12)
buffers = st.integers(1, 24).flatmap(lambda max_seq: st.tuples(st.just(max_seq), st.integers(1, max_seq)))


def may_attend(layer_type: str, query: int, key: int, window: int, image: range) -> bool:
    """The definition: causal; on sliding layers only the last `window` keys, but the image's rows see each other."""
    if layer_type == SLIDING and query - key >= window:
        return False
    if layer_type == SLIDING and query in image and key in image:
        return True
    return key <= query


def defined_mask(layer_type: str, queries: range, keys: int, valid: int, window: int, image: range) -> list[list[bool]]:
    return [[k < valid and may_attend(layer_type, q, k, window, image) for k in range(keys)] for q in queries]


def built_mask(
    layer_type: str, queries: range, keys: int, valid: int, window: int, image: range = range(0)
) -> list[list[bool]]:
    mask = attention_mask(
        layer_type, torch.tensor(queries), torch.arange(keys) < valid, sliding_window=window, image_block=image
    )
    assert mask.shape == (1, len(queries), keys)
    return mask[0].tolist()


@given(layer_kinds, buffers, windows, st.integers(0, 12), st.integers(0, 12))
def test_prefill_masks_are_as_defined(
    layer_type: str, buffer: tuple[int, int], window: int, image_start: int, image_rows: int
) -> None:
    max_seq, valid_length = buffer
    image = range(min(image_start, valid_length), min(image_start + image_rows, valid_length))
    arguments = (layer_type, range(max_seq), max_seq, valid_length, window, image)
    assert built_mask(*arguments) == defined_mask(*arguments)


@given(layer_kinds, buffers, windows)
def test_decode_masks_are_as_defined(layer_type: str, buffer: tuple[int, int], window: int) -> None:
    """One query at the last written row, over all slots of the buffer."""
    max_seq, written = buffer
    arguments = (layer_type, range(written - 1, written), max_seq, written, window)
    assert built_mask(*arguments) == defined_mask(*arguments, range(0))


@given(layer_kinds, buffers, windows)
def test_decoding_a_token_sees_what_prefilling_it_sees(layer_type: str, buffer: tuple[int, int], window: int) -> None:
    max_seq, valid_length = buffer
    prefill = built_mask(layer_type, range(max_seq), max_seq, valid_length, window)
    decode = built_mask(layer_type, range(valid_length - 1, valid_length), max_seq, valid_length, window)
    assert decode[0] == prefill[valid_length - 1]


@given(buffers, windows)
def test_layer_types_differ_only_where_the_window_has_passed(buffer: tuple[int, int], window: int) -> None:
    max_seq, valid_length = buffer
    sliding, full = (built_mask(t, range(valid_length), max_seq, valid_length, window) for t in (SLIDING, FULL))
    assert (sliding == full) == (valid_length <= window)


@given(
    st.lists(st.lists(st.booleans(), min_size=3, max_size=3), min_size=1, max_size=5),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_bias_is_zero_where_allowed_and_vanishes_in_softmax_elsewhere(
    rows: list[list[bool]], dtype: torch.dtype
) -> None:
    bias = mask_bias(torch.tensor([rows]), dtype)
    assert bias.shape == (1, 1, len(rows), 3)
    assert bias.dtype == dtype
    for row, allowed in enumerate(rows):
        for key, may in enumerate(allowed):
            assert (bias[0, 0, row, key] == 0) if may else (-torch.inf < bias[0, 0, row, key] <= -1e4)
        weights = torch.softmax(bias[0, 0, row].float(), dim=-1)
        assert torch.isfinite(weights).all(), "also where no key is allowed"
        assert not any(allowed) or all((w > 0) == may for w, may in zip(weights.tolist(), allowed, strict=True))


@given(st.integers(0, 10), st.integers(1, 6), windows, st.sampled_from(["eager", "sdpa"]))
def test_a_sliding_caches_mask_becomes_absolute(past_len: int, queries: int, window: int, implementation: str) -> None:
    """Hugging Face's masks cover what its sliding cache still has, W - 1 rows of the past, and the new rows."""
    keys = past_len + queries
    expected = defined_mask(SLIDING, range(past_len, keys), keys, keys, window, range(0))
    kept = min(past_len, window - 1) + queries
    given_mask = torch.tensor(expected)[:, keys - kept :][None, None]
    found = absolute_mask(as_hugging_face_gives_it(given_mask, implementation), queries, past_len)
    assert found[0].tolist() == expected


@given(st.integers(0, 10), st.integers(1, 6))
def test_no_mask_means_causal(past_len: int, queries: int) -> None:
    keys = past_len + queries
    expected = defined_mask(FULL, range(past_len, keys), keys, keys, 1, range(0))
    assert absolute_mask(None, queries, past_len)[0].tolist() == expected


def as_hugging_face_gives_it(allowed: Tensor, implementation: str) -> Tensor:
    """Boolean for sdpa; for eager 0 or the most negative number, to be added to scores."""
    if implementation == "sdpa":
        return allowed
    return torch.where(allowed, 0.0, torch.finfo(torch.float32).min)
