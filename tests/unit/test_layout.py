"""StaticLayout refuses what cannot be laid out."""

from __future__ import annotations

import dataclasses

import pytest

from g4conformance.errors import LayoutError
from g4conformance.runtime.layout import StaticLayout

from .asserting import told

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("side", ["left", "both", "", "Right"])
def test_only_right_padding_is_supported(side: str) -> None:
    with told(
        LayoutError,
        expected="padding_side='right'",
        found=f"currently supports right padding only, got {side!r}",
        remedy="on the right",
    ):
        StaticLayout(8, padding_side=side)


@pytest.mark.parametrize(("max_seq", "batch_size"), [(0, 1), (-1, 1), (8, 0), (8, -2)])
def test_sizes_are_positive(max_seq: int, batch_size: int) -> None:
    with told(
        LayoutError, expected="at least 1", found=f"max_seq={max_seq}, batch_size={batch_size}", remedy="positive"
    ):
        StaticLayout(max_seq, batch_size=batch_size)


@pytest.mark.parametrize(("start", "count"), [(-1, 2), (0, 9), (7, 2), (9, 0), (0, -1), (2, -1)])
def test_the_image_lies_inside_the_buffer(start: int, count: int) -> None:
    with told(
        LayoutError,
        expected="8 rows",
        found=f"visual_start_idx={start}, num_visual_tokens={count}",
        remedy="larger max_seq",
    ):
        StaticLayout(8, start, count)


@pytest.mark.parametrize(("start", "count", "end"), [(0, 0, 0), (0, 8, 8), (0, 3, 3), (5, 3, 8), (8, 0, 8)])
def test_an_image_may_touch_both_ends(start: int, count: int, end: int) -> None:
    assert StaticLayout(8, start, count).visual_end_idx == end


def test_layouts_are_values() -> None:
    layout = StaticLayout(8, 1, 3, patch_grid=(3, 9))
    assert layout == StaticLayout(8, 1, 3, patch_grid=(3, 9))
    assert len({layout, StaticLayout(8, 1, 3, patch_grid=(3, 9)), StaticLayout(8, 1, 3, patch_grid=(9, 3))}) == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        layout.max_seq = 9  # type: ignore[misc]


def test_a_buffer_of_one_row_is_a_buffer() -> None:
    assert StaticLayout(1).max_seq == 1
    assert StaticLayout(1, 0, 1).visual_end_idx == 1
