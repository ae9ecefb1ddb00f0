"""Attention masks and their additive form: pure functions of positions, on the CPU side of a static runtime."""

from __future__ import annotations

import torch
from torch import Tensor

SLIDING = "sliding_attention"


def attention_mask(
    layer_type: str,
    query_positions: Tensor,
    key_valid: Tensor,
    *,
    sliding_window: int,
    image_block: range = range(0),
) -> Tensor:
    """Which keys each query may attend: bool [1, Q, K].

    A key is visible if it is valid, not later than the query, and, on sliding layers, one of the `sliding_window`
    latest keys, the query itself included. On sliding layers of models with bidirectional vision attention, the rows
    of `image_block` also see each other, still within the window.

    Args:
        query_positions: int64 [Q], absolute.
        key_valid: bool [K], false at padding and at slots not yet written.
    """
    queries, keys = query_positions[:, None], torch.arange(len(key_valid), device=key_valid.device)[None, :]
    allowed = keys <= queries
    if layer_type == SLIDING:
        in_block = (_inside(queries, image_block)) & (_inside(keys, image_block))
        allowed = (allowed | in_block) & (keys > queries - sliding_window)
    return (allowed & key_valid)[None]


def mask_bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """What is added to attention scores: 0 where bool `mask` [B, Q, K] allows, else the dtype's most negative value.

    Returns [B, 1, Q, K]. The value is finite, so that a row without any allowed key yields no NaN.
    """
    bias = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
    return bias.masked_fill(~mask, torch.finfo(dtype).min)[:, None]


def _inside(positions: Tensor, block: range) -> Tensor:
    return (positions >= block.start) & (positions < block.stop)
