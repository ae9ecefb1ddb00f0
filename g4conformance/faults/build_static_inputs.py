"""Faults of stage 1: the prompt and its pictures become something else than the processor makes of them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from g4conformance.faults.parts import change_inputs, change_picture
from g4conformance.faults.patching import Patch
from g4conformance.faults.registry import At, fault
from g4conformance.runtime.contract import Runtime, StaticInputs
from g4conformance.runtime.inputs import derive_layout, grid_position_ids, patch_grid, static_inputs
from g4conformance.runtime.static import StaticGemma4Runtime
from g4conformance.stages import Stage

_fault = partial(fault, stage=Stage.BUILD_STATIC_INPUTS)
_BOS = "<bos>"

# --- text -------------------------------------------------------------------------------------------------------------


@_fault(
    "bos-missing",
    at=At.PROCESSOR,
    check="G4-INPUTS-03",
    source="ggml-org/llama.cpp/pull/21500 vllm-project/vllm/pull/52304 lablup/mlxcel/issues/686",
    boundary=True,
)
def bos_missing(runtime: Runtime, patch: Patch) -> None:
    """No beginning-of-sequence token is put before the prompt."""
    build = runtime.build_static_inputs
    patch(runtime, "build_static_inputs", lambda prompt, images: build(prompt.removeprefix(_BOS), images))


@_fault(
    "bos-double",
    at=At.PROCESSOR,
    check="G4-INPUTS-03",
    source="ollama/ollama/pull/15252 EleutherAI/lm-evaluation-harness/issues/3333",
    boundary=True,
)
def bos_double(runtime: Runtime, patch: Patch) -> None:
    """The tokenizer puts a second beginning-of-sequence token before the chat template's."""
    build = runtime.build_static_inputs
    patch(runtime, "build_static_inputs", lambda prompt, images: build(_BOS + prompt, images))


@_fault(
    "special-tokens-as-text",
    at=At.PROCESSOR,
    check="G4-INPUTS-01",
    source="DenisovAV/flutter_gemma/issues/92",
    boundary=True,
)
def special_tokens_as_text(runtime: Runtime, patch: Patch) -> None:
    """Turn markers are encoded as ordinary text."""
    build = runtime.build_static_inputs
    patch(
        runtime,
        "build_static_inputs",
        lambda prompt, images: build(prompt.replace("<|turn>", "< |turn>").replace("<turn|>", "<turn| >"), images),
    )


@_fault("text-stripped", at=At.PROCESSOR, check="G4-INPUTS-01", case="window", boundary=True)
def text_stripped(runtime: Runtime, patch: Patch) -> None:
    """White space at the end of the prompt, such as the newline that opens the model's turn, is stripped."""
    build = runtime.build_static_inputs
    patch(runtime, "build_static_inputs", lambda prompt, images: build(prompt.rstrip(), images))


@_fault(
    "left-pad-positions",
    at=At.ORCHESTRATION,
    check="G4-INPUTS-01",
    source="unslothai/unsloth/issues/9708 unslothai/unsloth/issues/3699 ml-explore/mlx-lm/pull/1396",
    boundary=True,
)
def padded_on_the_left(runtime: Runtime, patch: Patch) -> None:
    """The static buffer is padded on the left, while everything later counts rows from its start."""

    def on_the_left(inputs: StaticInputs) -> StaticInputs:
        padding = inputs.input_ids.shape[1] - inputs.valid_length
        names = ("input_ids", "llm_input_ids", "attention_mask")
        rolled: dict[str, Any] = {name: getattr(inputs, name).roll(padding, dims=1) for name in names}
        return replace(inputs, **rolled)

    change_inputs(runtime, patch, on_the_left)


@_fault("padded-with-eos", at=At.ORCHESTRATION, check="G4-INPUTS-01", boundary=True)
def padded_with_eos(runtime: Runtime, patch: Patch) -> None:
    """The static buffer is filled up with the end-of-sequence token in place of the pad token."""

    def filled(inputs: StaticInputs) -> StaticInputs:
        padding = ~inputs.attention_mask
        eos = 1
        return replace(
            inputs,
            input_ids=inputs.input_ids.masked_fill(padding, eos),
            llm_input_ids=inputs.llm_input_ids.masked_fill(padding, eos),
        )

    change_inputs(runtime, patch, filled)


@_fault("mask-all-valid", at=At.ORCHESTRATION, check="G4-INPUTS-01", boundary=True)
def padding_counted_as_valid(runtime: Runtime, patch: Patch) -> None:
    """The attention mask of the unpadded prompt is stretched over the padding, though `valid_length` is right."""
    change_inputs(runtime, patch, lambda i: replace(i, attention_mask=torch.ones_like(i.attention_mask)))


@_fault("prompt-truncated", at=At.ORCHESTRATION, check="G4-INPUTS-01", case="window-twice", boundary=True)
def prompt_truncated(runtime: Runtime, patch: Patch) -> None:
    """The last token of the prompt is cut off, as by a limit that is counted without the beginning of sequence."""

    def cut(inputs: StaticInputs) -> StaticInputs:
        last = inputs.valid_length - 1
        pad = int(inputs.input_ids[0, -1])
        shorter: dict[str, Any] = {"attention_mask": inputs.attention_mask.clone()}
        shorter |= {name: getattr(inputs, name).clone() for name in ("input_ids", "llm_input_ids")}
        for name, tensor in shorter.items():
            tensor[0, last] = False if name == "attention_mask" else pad
        return replace(inputs, valid_length=last, **shorter)

    change_inputs(runtime, patch, cut)


# --- placeholders -----------------------------------------------------------------------------------------------------


@_fault(
    "image-id-not-padded-in-llm-ids",
    at=At.ORCHESTRATION,
    check="G4-INPUTS-02",
    case="image-first",
    source="apple/coreai-models/issues/83 AI-Hypercomputer/maxtext/pull/4790",
    boundary=True,
)
def placeholders_left_in_llm_ids(runtime: Runtime, patch: Patch) -> None:
    """The language model's ids keep their placeholders, so that per-layer embeddings are looked up under them."""
    change_inputs(runtime, patch, lambda inputs: replace(inputs, llm_input_ids=inputs.input_ids))


@_fault(
    "image-token-id-from-text-config",
    at=At.ORCHESTRATION,
    check="G4-INPUTS-02",
    case="image-first",
    source="Samsung/TICO/pull/828",
)
def image_token_id_missing(runtime: StaticGemma4Runtime, patch: Patch) -> None:
    """The image token's id is looked for in the text config, found to be None, and nothing is replaced."""
    others = runtime.facts.placeholder_ids - {runtime.facts.image_token_id}
    patch(runtime, "facts", replace(runtime.facts, placeholder_ids=others))


@_fault(
    "soft-token-count-hardcoded",
    at=At.PROCESSOR,
    check="G4-INPUTS-04",
    case="image-middle",
    source="quic/efficient-transformers/pull/1159 quic/efficient-transformers/pull/1163 kekzl/imp/pull/490",
)
def soft_token_count_fixed(runtime: StaticGemma4Runtime, patch: Patch) -> None:
    """Every picture gets as many placeholders as the budget allows, whatever its shape."""
    facts = runtime.facts

    def stretched(inputs: StaticInputs) -> StaticInputs:
        start, end = runtime.layout.visual_start_idx, runtime.layout.visual_end_idx
        if start == end:
            return inputs
        extra = facts.max_soft_tokens - (end - start)

        def longer(ids: Tensor, id: int) -> Tensor:
            more = ids.new_full((1, extra), id)
            return torch.cat([ids[:, :end], more, ids[:, end:]], dim=1)[:, : ids.shape[1]]

        return replace(
            inputs,
            input_ids=longer(inputs.input_ids, facts.image_token_id),
            llm_input_ids=longer(inputs.llm_input_ids, facts.pad_token_id),
            attention_mask=longer(inputs.attention_mask, 1),
            valid_length=inputs.valid_length + extra,
        )

    change_inputs(runtime, patch, stretched)


# --- pictures ---------------------------------------------------------------------------------------------------------


@_fault(
    "resize-does-not-fill-budget",
    at=At.PROCESSOR,
    check="G4-INPUTS-05",
    case="image-first",
    source="ggml-org/llama.cpp/issues/24146",
)
def picture_not_scaled_up(runtime: StaticGemma4Runtime, patch: Patch) -> None:
    """The picture is rounded to whole soft tokens, but not scaled to fill the soft-token budget."""
    sizes = runtime.checkpoint.model.config.vision_config
    unit, k = sizes.patch_size * sizes.pooling_kernel_size, sizes.pooling_kernel_size
    checkpoint, facts = runtime.checkpoint, runtime.facts

    def patches_of(image: Image.Image) -> tuple[np.ndarray[Any, Any], tuple[int, int]]:
        width, height = (max(unit, round(side / unit) * unit) for side in image.size)
        pixels = np.asarray(image.convert("RGB").resize((width, height), Image.Resampling.BICUBIC)) / 255.0
        p = sizes.patch_size
        grid = pixels.reshape(height // p, p, width // p, p, 3).swapaxes(1, 2)
        return grid.reshape(-1, p * p * 3), (width // p, height // p)

    clean = runtime.build_static_inputs

    def build(prompt: str, images: Any) -> StaticInputs:
        if not images:
            return clean(prompt, images)
        output = dict(checkpoint.process(prompt, images))
        capacity = output["pixel_values"].shape[1]
        values, grid = patches_of(images[0])
        pixels = torch.zeros_like(output["pixel_values"])
        pixels[0, : len(values)] = torch.from_numpy(values)
        surplus = int((output["input_ids"] == facts.image_token_id).sum()) - len(values) // k**2
        first = int((output["input_ids"][0] == facts.image_token_id).nonzero()[0])
        for name in ("input_ids", "attention_mask"):
            output[name] = torch.cat([output[name][:, :first], output[name][:, first + surplus :]], dim=1)
        output |= {"pixel_values": pixels, "image_position_ids": grid_position_ids(grid, capacity)}
        return static_inputs(
            output,
            derive_layout(output, facts.image_token_id, runtime.layout.max_seq),
            pad_token_id=facts.pad_token_id,
            image_token_id=facts.image_token_id,
            placeholder_ids=facts.placeholder_ids,
            dtype=checkpoint.dtype,
        )

    patch(runtime, "build_static_inputs", build)


@_fault(
    "resize-filter-mismatch",
    at=At.PROCESSOR,
    check="G4-INPUTS-05",
    case="image-large",
    source="m87-labs/kestrel/pull/163",
    boundary=True,
)
def another_resize_filter(runtime: Runtime, patch: Patch) -> None:
    """The picture is resized bilinearly and without antialiasing before the processor sees it."""
    build = runtime.build_static_inputs

    def resized(image: Image.Image) -> Image.Image:
        half = (image.width * 2 // 3, image.height * 2 // 3)
        return image.resize(half, Image.Resampling.NEAREST).resize(image.size, Image.Resampling.BILINEAR)

    patch(runtime, "build_static_inputs", lambda prompt, images: build(prompt, [resized(i) for i in images]))


@_fault(
    "patch-flatten-chw",
    at=At.PROCESSOR,
    check="G4-INPUTS-05",
    case="image-middle",
    source="lablup/mlxcel/issues/1610",
    boundary=True,
)
def patches_flattened_by_channel(runtime: Runtime, patch: Patch) -> None:
    """A patch is flattened (channel, y, x) in place of (y, x, channel)."""
    change_picture(runtime, patch, lambda v, ids: (v.unflatten(-1, (-1, 3)).transpose(-1, -2).flatten(-2), ids))


@_fault("channel-order-bgr", at=At.PROCESSOR, check="G4-INPUTS-05", case="image-middle", boundary=True)
def channels_reversed(runtime: Runtime, patch: Patch) -> None:
    """Colour channels are in the order blue, green, red."""
    change_picture(runtime, patch, lambda values, ids: (values.unflatten(-1, (-1, 3)).flip(-1).flatten(-2), ids))


@_fault("pixels-divided-by-256", at=At.PROCESSOR, check="G4-INPUTS-05", case="image-middle", boundary=True)
def pixels_divided_by_256(runtime: Runtime, patch: Patch) -> None:
    """Bytes become numbers by a division by 256 in place of 255."""
    change_picture(runtime, patch, lambda values, ids: (values * (255 / 256), ids))


@_fault(
    "position-ids-row-col-swapped",
    at=At.PROCESSOR,
    check="G4-INPUTS-06",
    case="image-wide",
    source="pytorch/torchtitan/pull/4244",
    boundary=True,
)
def positions_row_first(runtime: Runtime, patch: Patch) -> None:
    """Patch positions are (row, column) in place of (x, y)."""
    change_picture(runtime, patch, lambda values, ids: (values, ids.flip(-1)))


@_fault("pad-position-zero", at=At.PROCESSOR, check="G4-INPUTS-06", case="image-wide", boundary=True)
def padding_patches_at_the_origin(runtime: Runtime, patch: Patch) -> None:
    """Padding patches get position (0, 0), so that they count as part of the picture."""
    change_picture(runtime, patch, lambda values, ids: (values, ids.clamp(min=0)))


@_fault(
    "stale-static-profile",
    at=At.STATE,
    check="G4-INPUTS-06",
    case="image-tall",
    source="Samsung/TICO/pull/907 Samsung/TICO/pull/910",
    boundary=True,
)
def profile_of_another_picture(runtime: Runtime, patch: Patch) -> None:
    """Patch positions were recorded for a picture of another shape with as many patches."""

    def stale(values: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        columns, rows = patch_grid(positions)
        return values, grid_position_ids((rows, columns), positions.shape[1])

    change_picture(runtime, patch, stale)
