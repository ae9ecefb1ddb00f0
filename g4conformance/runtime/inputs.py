"""From a prompt and pictures to one request in the shape of the static buffers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from g4conformance.errors import LayoutError
from g4conformance.runtime.contract import StaticInputs
from g4conformance.runtime.layout import StaticLayout, require_right_padding


def normalize_valid_token_mask(
    input_ids: Tensor, attention_mask: Tensor | None = None, pad_token_id: int | None = None
) -> Tensor:
    """Which ids are the prompt's own: bool [B, S].

    Taken from `attention_mask` if given, else from `pad_token_id` (everything that is not padding), else all true.

    Raises:
        ValueError: `attention_mask` has another shape than `input_ids`; the message names both.
    """
    if attention_mask is not None:
        if attention_mask.shape != input_ids.shape:
            raise ValueError(
                f"attention_mask has shape {tuple(attention_mask.shape)}, input_ids has {tuple(input_ids.shape)}"
            )
        return attention_mask.bool()
    if pad_token_id is not None:
        return input_ids != pad_token_id
    return torch.ones_like(input_ids, dtype=torch.bool)


def validate_padding_layout(valid: Tensor, padding_side: str = "right") -> Tensor:
    """Number of valid ids a row, int64 [B], of a mask bool [B, S] that is padded on the right only.

    Raises:
        LayoutError: another `padding_side`, an empty row, or a valid id after padding.
    """
    require_right_padding(padding_side)
    lengths = valid.sum(dim=-1)
    expected = torch.arange(valid.shape[-1], device=valid.device) < lengths[:, None]
    if not bool((lengths > 0).all()):
        raise LayoutError("at least one valid token in each row", "a row of padding only", "Give a prompt.")
    if not torch.equal(valid, expected):
        row = int((valid != expected).any(dim=-1).nonzero()[0])
        raise LayoutError(
            "valid tokens first, then padding (currently supports right padding only)",
            f"row {row} with a valid token after padding",
            "Pad prompts on the right.",
        )
    return lengths


def pad_right(tensor: Tensor, length: int, value: int | bool) -> Tensor:
    """`tensor` [B, S] extended to [B, length] with `value`."""
    return torch.nn.functional.pad(tensor, (0, length - tensor.shape[-1]), value=value)


def image_span(input_ids: Tensor, image_token_id: int) -> tuple[int, int]:
    """Start and number of the image placeholders in ids [1, S]; (0, 0) if there are none.

    Raises:
        LayoutError: the placeholders are not one contiguous run.
    """
    rows = (input_ids[0] == image_token_id).nonzero().flatten()
    if len(rows) == 0:
        return 0, 0
    start, count = int(rows[0]), len(rows)
    if int(rows[-1]) != start + count - 1:
        raise LayoutError(
            "one contiguous run of image placeholders",
            f"{count} placeholders spread over rows {start} to {int(rows[-1])}",
            "A static layout has one image slot: use one image per prompt.",
        )
    return start, count


def patch_grid(image_position_ids: Tensor) -> tuple[int, int]:
    """(columns, rows) of the patches in ids [1, N, 2], whose padding patches hold -1."""
    columns, rows = (image_position_ids[0].amax(dim=0) + 1).tolist()
    return columns, rows


def grid_position_ids(grid: tuple[int, int], patches: int) -> Tensor:
    """(x, y) of each patch of a grid of (columns, rows), row by row, then -1 up to `patches`: int64 [1, patches, 2]."""
    columns, rows = grid
    ys, xs = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    positions = torch.stack([xs, ys], dim=-1).reshape(1, rows * columns, 2)
    return torch.nn.functional.pad(positions, (0, 0, 0, patches - rows * columns), value=-1)


def derive_layout(
    processor_output: Mapping[str, Any], image_token_id: int, max_seq: int, batch_size: int = 1
) -> StaticLayout:
    """The layout that one processed prompt asks for."""
    start, count = image_span(processor_output["input_ids"], image_token_id)
    positions = processor_output.get("image_position_ids")
    grid = patch_grid(positions) if count and positions is not None else None
    return StaticLayout(max_seq, start, count, batch_size=batch_size, patch_grid=grid)


def static_inputs(
    processor_output: Mapping[str, Any],
    layout: StaticLayout,
    *,
    pad_token_id: int,
    image_token_id: int,
    placeholder_ids: frozenset[int],
    dtype: torch.dtype,
) -> StaticInputs:
    """Pads a processed prompt to `layout` and replaces placeholders.

    Args:
        processor_output: `input_ids` [1, n], and where given `attention_mask`, `pixel_values`, `image_position_ids`.
        placeholder_ids: every id (image, video, audio) that the language model must see as padding.
        dtype: the model's; `pixel_values` are cast to it.

    Raises:
        LayoutError: the prompt is too long, or its image span is not where the layout has it.
    """
    input_ids = processor_output["input_ids"]
    valid = normalize_valid_token_mask(input_ids, processor_output.get("attention_mask"))
    valid_length = int(validate_padding_layout(valid, layout.padding_side)[0])
    _require_fit(input_ids, layout, image_token_id)
    padded = pad_right(input_ids, layout.max_seq, pad_token_id)
    is_placeholder = torch.isin(padded, torch.tensor(sorted(placeholder_ids), device=padded.device))
    pixel_values = processor_output.get("pixel_values")
    return StaticInputs(
        input_ids=padded,
        llm_input_ids=padded.masked_fill(is_placeholder, pad_token_id),
        attention_mask=pad_right(valid, layout.max_seq, False),
        valid_length=valid_length,
        pixel_values=None if pixel_values is None else pixel_values.to(dtype),
        image_position_ids=processor_output.get("image_position_ids"),
        processor_output=processor_output,
    )


def _require_fit(input_ids: Tensor, layout: StaticLayout, image_token_id: int) -> None:
    length = input_ids.shape[-1]
    if length > layout.max_seq:
        raise LayoutError(
            f"a prompt of at most max_seq={layout.max_seq} tokens",
            f"{length} tokens",
            "Shorten the prompt or raise --max-seq.",
        )
    span = image_span(input_ids, image_token_id)
    expected = (layout.visual_start_idx, layout.num_visual_tokens)
    if span != expected and (span[1] or expected[1]):
        raise LayoutError(
            f"{expected[1]} image placeholders from row {expected[0]}, as the layout says",
            f"{span[1]} from row {span[0]}",
            "Ask for the runtime of this prompt's layout with for_layout.",
        )
