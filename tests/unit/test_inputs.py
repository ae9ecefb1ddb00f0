"""From ids to static buffers: which ids are valid, where the image lies, what padding holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from g4conformance.errors import LayoutError
from g4conformance.prompts import ResolvedCase
from g4conformance.runtime.contract import StaticInputs
from g4conformance.runtime.inputs import (
    derive_layout,
    grid_position_ids,
    image_span,
    normalize_valid_token_mask,
    pad_right,
    patch_grid,
    static_inputs,
    validate_padding_layout,
)
from g4conformance.runtime.layout import StaticLayout

from .asserting import told

pytestmark = pytest.mark.unit

PAD, IMAGE, VIDEO = 0, 90, 91


def ids(*rows: list[int]) -> Tensor:
    return torch.tensor(rows)


# --- which ids are valid --------------------------------------------------------------------------------------------


def test_an_attention_mask_decides_even_against_the_pad_id() -> None:
    valid = normalize_valid_token_mask(ids([5, 0, 7]), torch.tensor([[1, 1, 0]]), pad_token_id=PAD)
    assert valid.tolist() == [[True, True, False]]
    assert valid.dtype == torch.bool


def test_without_mask_the_pad_id_decides() -> None:
    valid = normalize_valid_token_mask(ids([5, 6, 0], [7, 0, 0]), pad_token_id=PAD)
    assert valid.tolist() == [[True, True, False], [True, False, False]]


def test_a_pad_id_other_than_zero() -> None:
    assert normalize_valid_token_mask(ids([0, 3]), pad_token_id=3).tolist() == [[True, False]]


def test_with_neither_every_id_is_valid() -> None:
    valid = normalize_valid_token_mask(ids([5, 0, 0]))
    assert valid.tolist() == [[True, True, True]]
    assert valid.dtype == torch.bool


@pytest.mark.parametrize("shape", [(1, 4), (2, 3), (3,), (1, 1, 3)])
def test_a_mask_of_another_shape_names_both_shapes(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="attention_mask") as caught:
        normalize_valid_token_mask(ids([5, 6, 7]), torch.ones(shape))
    assert str(shape) in str(caught.value)
    assert "(1, 3)" in str(caught.value)


# --- where padding may be -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", [[3], [1], [5], [2, 5, 1]])
def test_right_padding_yields_the_lengths(lengths: list[int]) -> None:
    valid = torch.arange(5) < torch.tensor(lengths)[:, None]
    assert validate_padding_layout(valid).tolist() == lengths


@pytest.mark.parametrize(
    ("rows", "culprit"),
    [
        ([[0, 1, 1]], 0),
        ([[1, 0, 1]], 0),
        ([[1, 1, 0], [0, 0, 1]], 1),
        ([[1, 0, 0], [1, 1, 1], [0, 1, 0]], 2),
        ([[1, 0, 0], [0, 1, 0], [0, 0, 1]], 1),
    ],
)
def test_padding_elsewhere_is_refused_by_row(rows: list[list[int]], culprit: int) -> None:
    with told(
        LayoutError,
        expected="currently supports right padding only",
        found=f"row {culprit} with a valid token after padding",
        remedy="on the right",
    ):
        validate_padding_layout(torch.tensor(rows).bool())


def test_an_empty_row_is_refused() -> None:
    with told(LayoutError, expected="at least one valid token", found="padding only", remedy="prompt"):
        validate_padding_layout(torch.tensor([[True, False], [False, False]]))


def test_another_padding_side_is_refused_whatever_the_mask() -> None:
    with told(
        LayoutError,
        expected="padding_side='right'",
        found="currently supports right padding only, got 'left'",
        remedy="on the right",
    ):
        validate_padding_layout(torch.ones(1, 3, dtype=torch.bool), padding_side="left")


def test_pad_right() -> None:
    assert pad_right(ids([5, 6]), 4, PAD).tolist() == [[5, 6, 0, 0]]
    assert pad_right(torch.tensor([[True]]), 3, False).tolist() == [[True, False, False]]
    assert pad_right(ids([5, 6]), 2, PAD).tolist() == [[5, 6]]
    assert pad_right(ids([5, 6]), 4, 3).tolist() == [[5, 6, 3, 3]], "a pad id need not be 0"


# --- where the image lies -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "span"),
    [
        ([1, 2, 3], (0, 0)),
        ([IMAGE, IMAGE, 3], (0, 2)),
        ([1, IMAGE, 3], (1, 1)),
        ([1, IMAGE, IMAGE], (1, 2)),
        ([IMAGE], (0, 1)),
    ],
)
def test_image_span(row: list[int], span: tuple[int, int]) -> None:
    assert image_span(ids(row), IMAGE) == span


def test_placeholders_in_two_places_are_refused() -> None:
    with told(
        LayoutError,
        expected="one contiguous run",
        found="3 placeholders spread over rows 1 to 4",
        remedy="one image per prompt",
    ):
        image_span(ids([1, IMAGE, IMAGE, 2, IMAGE]), IMAGE)


def positions(columns: int, rows: int, padding: int) -> Tensor:
    """(x, y) of each patch, row by row, then padding patches: [1, N, 2]."""
    patches = [[x, y] for y in range(rows) for x in range(columns)]
    return torch.tensor([patches + [[-1, -1]] * padding])


@pytest.mark.parametrize("padding", [0, 4])
def test_patch_grid_is_columns_then_rows(padding: int) -> None:
    assert patch_grid(positions(6, 3, padding)) == (6, 3)


@pytest.mark.parametrize(("grid", "patches"), [((6, 3), 18), ((3, 6), 27), ((1, 1), 9)])
def test_the_positions_of_a_grid_run_row_by_row(grid: tuple[int, int], patches: int) -> None:
    columns, rows = grid
    found = grid_position_ids(grid, patches)
    assert torch.equal(found, positions(columns, rows, patches - columns * rows))
    assert patch_grid(found) == grid


@pytest.mark.parametrize("name", ["image-middle", "image-wide", "image-tall"])
def test_the_positions_of_a_grid_are_the_processors(resolved: Callable[[str], ResolvedCase], name: str) -> None:
    request = resolved(name).request
    theirs = request.inputs["image_position_ids"]
    assert request.layout.patch_grid is not None
    assert torch.equal(grid_position_ids(request.layout.patch_grid, theirs.shape[1]), theirs)


def test_derive_layout_of_text() -> None:
    assert derive_layout({"input_ids": ids([1, 2])}, IMAGE, 8) == StaticLayout(8)


def test_derive_layout_of_an_image() -> None:
    output = {"input_ids": ids([1, IMAGE, IMAGE, 2]), "image_position_ids": positions(6, 3, 9)}
    derived = derive_layout(output, IMAGE, 8)
    assert {derived} == {StaticLayout(8, 1, 2, patch_grid=(6, 3))}, "equal, and found again as a key"


def test_derive_layout_without_positions_or_without_placeholders() -> None:
    assert derive_layout({"input_ids": ids([1, IMAGE, IMAGE, 2])}, IMAGE, 8) == StaticLayout(8, 1, 2)
    assert derive_layout(
        {"input_ids": ids([1, 2]), "image_position_ids": positions(6, 3, 9)}, IMAGE, 8
    ) == StaticLayout(8)


def test_derive_layout_takes_the_batch_size() -> None:
    assert derive_layout({"input_ids": ids([1, 2])}, IMAGE, 8, batch_size=2) == StaticLayout(8, batch_size=2)


# --- the request ----------------------------------------------------------------------------------------------------


def build(output: dict[str, Any], layout: StaticLayout, dtype: torch.dtype = torch.float32) -> StaticInputs:
    return static_inputs(
        output,
        layout,
        pad_token_id=PAD,
        image_token_id=IMAGE,
        placeholder_ids=frozenset((IMAGE, VIDEO)),
        dtype=dtype,
    )


def test_every_kind_of_placeholder_becomes_padding() -> None:
    inputs = build({"input_ids": ids([1, IMAGE, IMAGE, VIDEO, 2])}, StaticLayout(8, 1, 2))
    assert inputs.input_ids.tolist() == [[1, IMAGE, IMAGE, VIDEO, 2, PAD, PAD, PAD]]
    assert inputs.llm_input_ids.tolist() == [[1, PAD, PAD, PAD, 2, PAD, PAD, PAD]]
    assert inputs.attention_mask.tolist() == [[True] * 5 + [False] * 3]
    assert inputs.valid_length == 5
    assert isinstance(inputs.valid_length, int)
    assert inputs.pixel_values is None
    assert inputs.image_position_ids is None


def test_the_processors_own_padding_is_not_the_prompts() -> None:
    output = {"input_ids": ids([1, 2, PAD]), "attention_mask": torch.tensor([[1, 1, 0]])}
    inputs = build(output, StaticLayout(5))
    assert inputs.valid_length == 2
    assert inputs.attention_mask.tolist() == [[True, True, False, False, False]]


def test_a_pad_id_inside_the_prompt_is_the_prompts_own() -> None:
    output = {"input_ids": ids([1, PAD, 2]), "attention_mask": torch.ones(1, 3)}
    assert build(output, StaticLayout(4)).valid_length == 3


def test_pixels_take_the_models_dtype_and_the_output_is_kept() -> None:
    output = {
        "input_ids": ids([IMAGE, 2]),
        "pixel_values": torch.rand(1, 9, 12),
        "image_position_ids": positions(3, 3, 0),
    }
    inputs = build(output, StaticLayout(4, 0, 1), torch.bfloat16)
    assert inputs.pixel_values is not None
    assert inputs.pixel_values.dtype == torch.bfloat16
    assert inputs.image_position_ids is output["image_position_ids"]
    assert inputs.processor_output is output


def test_a_prompt_may_fill_the_buffer() -> None:
    inputs = build({"input_ids": ids([1, 2, 3])}, StaticLayout(3))
    assert inputs.valid_length == 3
    assert bool(inputs.attention_mask.all())


def test_a_prompt_that_is_too_long_is_refused() -> None:
    with told(LayoutError, expected="at most max_seq=3", found="4 tokens", remedy="--max-seq"):
        build({"input_ids": ids([1, 2, 3, 4])}, StaticLayout(3))


@pytest.mark.parametrize(
    ("row", "layout", "expected", "found"),
    [
        ([1, IMAGE, IMAGE], StaticLayout(8, 2, 2), "2 image placeholders from row 2", "2 from row 1"),
        ([1, IMAGE, IMAGE], StaticLayout(8, 1, 3), "3 image placeholders from row 1", "2 from row 1"),
        ([1, 2, 3], StaticLayout(8, 1, 2), "2 image placeholders from row 1", "0 from row 0"),
        ([1, IMAGE, 3], StaticLayout(8), "0 image placeholders from row 0", "1 from row 1"),
        ([IMAGE, 3], StaticLayout(8), "0 image placeholders from row 0", "1 from row 0"),
    ],
)
def test_an_image_elsewhere_than_in_the_layout_is_refused(
    row: list[int], layout: StaticLayout, expected: str, found: str
) -> None:
    with told(LayoutError, expected=expected, found=found, remedy="for_layout"):
        build({"input_ids": ids(row)}, layout)


def test_without_image_the_slots_start_is_meaningless() -> None:
    assert build({"input_ids": ids([1, 2])}, StaticLayout(4, visual_start_idx=3)).valid_length == 2
