"""How mlx-vlm's arrays become the contract's: pure functions of numpy arrays."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
# What its attention takes: None attends every key, "causal" those up to the query's own; else bool [..., Q, K].
AttentionMask = Array | Literal["causal"] | None


def patches_of(pixels: Array, patch_size: int) -> tuple[Array, Array]:
    """A whole picture [1, 3, H, W] as patches [1, N, 3 * patch_size ** 2], and their (x, y), int64 [1, N, 2]."""
    _, channels, height, width = pixels.shape
    rows, columns = height // patch_size, width // patch_size
    cut = pixels.reshape(channels, rows, patch_size, columns, patch_size).transpose(1, 3, 2, 4, 0)
    y, x = np.divmod(np.arange(rows * columns), columns)
    return cut.reshape(1, rows * columns, -1), np.stack([x, y], axis=-1)[None]


def padded(array: Array, rows: int, axis: int, fill: Any = 0) -> Array:
    """With rows behind it that hold `fill`, a number or an array of one row, up to `rows`."""
    shape = list(array.shape)
    shape[axis] = rows - shape[axis]
    return np.concatenate([array, np.broadcast_to(np.asarray(fill, array.dtype), shape)], axis=axis)


def key_positions(keys: Array, written: Array) -> Array:
    """Where each of a cache's `keys` [1, KV, K, D] stands in the text, int64 [K], -1 for one that was never written.

    A cache that rolls has its own order. Which key is which is read off its bits: rotated by its position, no key
    equals another.

    Args:
        written: the keys of all positions so far, in their order: [1, KV, n, D].
    """
    known = {row.tobytes(): position for position, row in enumerate(_rows(written))}
    return np.array([known.get(row.tobytes(), -1) for row in _rows(keys)], dtype=np.int64)


def visible(mask: AttentionMask, positions: Array, queries: int, total: int) -> Array:
    """Which positions each query attends: bool [1, Q, total].

    Args:
        positions: of each key, int64 [K].

    Raises:
        ValueError: a query attends a key that was never written.
    """
    attends = _attended(mask, queries, len(positions))
    if attends[:, positions < 0].any():
        raise ValueError("attention sees a key that was never written")
    found = np.zeros((1, queries, total), dtype=bool)
    query, key = attends.nonzero()
    found[0, query, positions[key]] = True
    return found


def tables_of(rotated: Array) -> tuple[Array, Array]:
    """cos and sin [1, n, D] of a rotation that made `rotated` [1, 1, n, D] of ones in half a head, and zeros behind."""
    cos, sin = np.split(rotated[:, 0], 2, axis=-1)
    return np.concatenate([cos, cos], axis=-1), np.concatenate([sin, sin], axis=-1)


def _attended(mask: AttentionMask, queries: int, keys: int) -> Array:
    """bool [Q, K]."""
    if mask is None:
        return np.ones((queries, keys), dtype=bool)
    if isinstance(mask, str):  # the queries are the last of the keys
        return np.arange(keys)[None] <= np.arange(keys - queries, keys)[:, None]
    if mask.dtype != np.bool_:
        raise ValueError(f"expected a boolean mask, found {mask.dtype}")
    return np.broadcast_to(mask.reshape(-1, *mask.shape[-2:])[0] if mask.ndim > 1 else mask, (queries, keys))


def _rows(keys: Array) -> Array:
    """[1, KV, K, D] -> [K, KV * D]."""
    return np.ascontiguousarray(keys[0].transpose(1, 0, 2)).reshape(keys.shape[2], -1)
