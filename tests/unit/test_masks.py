"""Attention masks: who sees whom, and what that adds to the scores."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from g4conformance.runtime.masks import attention_mask, mask_bias

pytestmark = pytest.mark.unit

FULL, SLIDING = "full_attention", "sliding_attention"
WINDOW, KEYS, VALID = 4, 10, 8


def mask(layer_type: str, queries: Tensor, valid: int = VALID, image_block: range = range(0)) -> Tensor:
    """bool [Q, K]."""
    allowed = attention_mask(
        layer_type, queries, torch.arange(KEYS) < valid, sliding_window=WINDOW, image_block=image_block
    )
    assert allowed.shape == (1, len(queries), KEYS)
    assert allowed.dtype == torch.bool
    return allowed[0]


def visible(layer_type: str, query: int, valid: int = VALID, image_block: range = range(0)) -> list[int]:
    return mask(layer_type, torch.tensor([query]), valid, image_block)[0].nonzero().flatten().tolist()


@pytest.mark.parametrize("query", range(VALID))
def test_a_full_layer_sees_everything_up_to_itself(query: int) -> None:
    assert visible(FULL, query) == list(range(query + 1))


@pytest.mark.parametrize("query", range(VALID))
def test_a_sliding_layer_sees_window_keys_itself_included(query: int) -> None:
    keys = visible(SLIDING, query)
    assert keys == list(range(max(0, query - WINDOW + 1), query + 1))
    assert len(keys) == min(query + 1, WINDOW)


@pytest.mark.parametrize("layer_type", [FULL, SLIDING])
@pytest.mark.parametrize("query", [VALID, KEYS - 1])
def test_padding_rows_see_no_padding(layer_type: str, query: int) -> None:
    assert all(key < VALID for key in visible(layer_type, query))


def test_a_decode_row_is_the_row_of_the_whole_mask() -> None:
    for layer_type in (FULL, SLIDING):
        whole = mask(layer_type, torch.arange(KEYS), valid=KEYS)
        for position in range(KEYS):
            row = mask(layer_type, torch.tensor([position]), valid=position + 1)[0]
            assert torch.equal(row, whole[position])


def test_an_image_block_looks_ahead_on_sliding_layers_within_the_window() -> None:
    block = range(2, 7)
    assert visible(SLIDING, 2, image_block=block) == [0, 1, 2, 3, 4, 5, 6]
    assert visible(SLIDING, 6, image_block=block) == [3, 4, 5, 6]
    assert visible(SLIDING, 1, image_block=block) == [0, 1]
    assert visible(SLIDING, 7, image_block=block) == [4, 5, 6, 7]
    assert visible(FULL, 2, image_block=block) == [0, 1, 2]


def test_an_image_block_never_makes_invalid_keys_visible() -> None:
    assert visible(SLIDING, 2, valid=4, image_block=range(2, 7)) == [0, 1, 2, 3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_bias_is_zero_or_finite_and_huge(dtype: torch.dtype) -> None:
    allowed = torch.tensor([[[True, False], [False, False]]])
    bias = mask_bias(allowed, dtype)
    assert bias.shape == (1, 1, 2, 2)
    assert bias.dtype == dtype
    assert torch.equal(bias[:, 0] == 0, allowed)
    assert bool((bias[:, 0][~allowed] == torch.finfo(dtype).min).all())
    assert bool(torch.isfinite((bias + torch.randn(2, dtype=dtype)).softmax(-1)).all()), "a hidden row yields no NaN"


def test_each_of_a_batch_has_its_own_bias() -> None:
    allowed = torch.rand(3, 2, 5) > 0.5
    bias = mask_bias(allowed, torch.float32)
    assert bias.shape == (3, 1, 2, 5)
    assert torch.equal(bias[:, 0] == 0, allowed)


def test_masks_lie_where_their_inputs_do() -> None:
    """`meta` stands for any device that is not the default one."""
    queries, valid = torch.arange(3, device="meta"), torch.ones(KEYS, dtype=torch.bool, device="meta")
    for layer_type in (FULL, SLIDING):
        allowed = attention_mask(layer_type, queries, valid, sliding_window=WINDOW)
        assert allowed.device.type == mask_bias(allowed, torch.float32).device.type == "meta"
