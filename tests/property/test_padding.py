"""Padding and placeholders against their definition, one id at a time."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from g4conformance.errors import LayoutError
from g4conformance.runtime.contract import StaticInputs
from g4conformance.runtime.inputs import (
    derive_layout,
    image_span,
    normalize_valid_token_mask,
    pad_right,
    static_inputs,
    validate_padding_layout,
)
from g4conformance.runtime.layout import StaticLayout

pytestmark = pytest.mark.property

PAD, IMAGE, VIDEO, AUDIO = 0, 7, 8, 9
PLACEHOLDERS = frozenset({IMAGE, VIDEO, AUDIO})

token_ids = st.integers(0, 9)
text_ids = st.sampled_from([1, 2, 3, VIDEO, AUDIO])


def matrices(elements: st.SearchStrategy) -> st.SearchStrategy[list[list]]:
    """Lists of rows of one length."""
    widths = st.integers(1, 6)
    return widths.flatmap(lambda w: st.lists(st.lists(elements, min_size=w, max_size=w), min_size=1, max_size=4))


right_padded_rows = st.lists(st.integers(0, 6), min_size=1, max_size=3).map(
    lambda lengths: [[column < length for column in range(6)] for length in lengths]
)


def is_right_padded(row: list[bool]) -> bool:
    """The definition: something valid, and nothing valid after something that is not."""
    return any(row) and all(row[i] or not row[i + 1] for i in range(len(row) - 1))


@given(matrices(st.booleans()) | right_padded_rows)
def test_right_padding_is_measured_and_everything_else_refused(rows: list[list[bool]]) -> None:
    valid = torch.tensor(rows)
    if all(is_right_padded(row) for row in rows):
        assert validate_padding_layout(valid).tolist() == [row.count(True) for row in rows]
    else:
        with pytest.raises(LayoutError):
            validate_padding_layout(valid)


@given(right_padded_rows, st.text().filter(lambda side: side != "right"))
def test_only_the_right_side_is_taken(rows: list[list[bool]], side: str) -> None:
    with pytest.raises(LayoutError, match="currently supports right padding only"):
        validate_padding_layout(torch.tensor(rows), side)


@given(matrices(token_ids), st.randoms(use_true_random=False))
def test_an_attention_mask_says_what_is_valid(ids: list[list[int]], random) -> None:
    mask = [[random.randint(0, 1) for _ in row] for row in ids]
    found = normalize_valid_token_mask(torch.tensor(ids), torch.tensor(mask), pad_token_id=PAD)
    assert found.tolist() == [[value == 1 for value in row] for row in mask]


@given(matrices(token_ids))
def test_without_a_mask_padding_is_told_by_its_id_or_not_at_all(ids: list[list[int]]) -> None:
    by_id = normalize_valid_token_mask(torch.tensor(ids), pad_token_id=PAD)
    assert by_id.tolist() == [[value != PAD for value in row] for row in ids]
    assert normalize_valid_token_mask(torch.tensor(ids)).tolist() == [[True for _ in row] for row in ids]


@given(matrices(token_ids), matrices(st.integers(0, 1)))
def test_a_mask_of_another_shape_is_refused_with_both_shapes(ids: list[list[int]], mask: list[list[int]]) -> None:
    ids_tensor, mask_tensor = torch.tensor(ids), torch.tensor(mask)
    assume(ids_tensor.shape != mask_tensor.shape)
    with pytest.raises(ValueError, match="shape") as caught:
        normalize_valid_token_mask(ids_tensor, mask_tensor)
    assert str(tuple(ids_tensor.shape)) in str(caught.value)
    assert str(tuple(mask_tensor.shape)) in str(caught.value)


@given(matrices(token_ids), st.integers(0, 5), token_ids)
def test_pad_right_appends_and_changes_nothing(ids: list[list[int]], extra: int, value: int) -> None:
    padded = pad_right(torch.tensor(ids), len(ids[0]) + extra, value)
    assert padded.tolist() == [row + [value] * extra for row in ids]


@given(st.lists(token_ids, min_size=1, max_size=12))
def test_image_span_is_one_run_or_refused(ids: list[int]) -> None:
    rows = [row for row, value in enumerate(ids) if value == IMAGE]
    if rows and rows != list(range(rows[0], rows[0] + len(rows))):
        with pytest.raises(LayoutError, match="contiguous"):
            image_span(torch.tensor([ids]), IMAGE)
    else:
        assert image_span(torch.tensor([ids]), IMAGE) == (rows[0] if rows else 0, len(rows))


prompts = st.tuples(st.lists(text_ids, min_size=1, max_size=5), st.integers(0, 4), st.lists(text_ids, max_size=5)).map(
    lambda parts: [*parts[0], *[IMAGE] * parts[1], *parts[2]]
)


def built_inputs(ids: list[int], layout: StaticLayout) -> StaticInputs:
    return static_inputs(
        {"input_ids": torch.tensor([ids])},
        layout,
        pad_token_id=PAD,
        image_token_id=IMAGE,
        placeholder_ids=PLACEHOLDERS,
        dtype=torch.float32,
    )


@given(prompts, st.integers(0, 6))
def test_static_inputs_hold_the_prompt_then_padding(ids: list[int], room: int) -> None:
    max_seq = len(ids) + room
    inputs = built_inputs(ids, derive_layout({"input_ids": torch.tensor([ids])}, IMAGE, max_seq))
    assert inputs.valid_length == len(ids)
    assert inputs.input_ids.tolist() == [ids + [PAD] * room]
    assert inputs.llm_input_ids.tolist() == [[PAD if i in PLACEHOLDERS else i for i in ids] + [PAD] * room]
    assert inputs.attention_mask.tolist() == [[row < len(ids) for row in range(max_seq)]]


@given(prompts, prompts, st.integers(0, 6))
def test_static_inputs_take_only_what_fits_the_layout(ids: list[int], others: list[int], room: int) -> None:
    """A layout made for `others` takes `ids` if they are short enough and have the same image rows."""
    layout = derive_layout({"input_ids": torch.tensor([others])}, IMAGE, len(others) + room)
    image_rows, other_rows = ([row for row, i in enumerate(prompt) if i == IMAGE] for prompt in (ids, others))
    if len(ids) <= layout.max_seq and image_rows == other_rows:
        assert built_inputs(ids, layout).valid_length == len(ids)
    else:
        with pytest.raises(LayoutError):
            built_inputs(ids, layout)
