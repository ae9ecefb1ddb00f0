"""Faults of stage 5: a query attends other keys, or is rotated by another angle."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from g4conformance.faults.parts import (
    FULL,
    SLIDING,
    change_positional,
    change_positions,
    with_masks,
    with_rope,
)
from g4conformance.faults.patching import Patch
from g4conformance.faults.registry import At, fault
from g4conformance.faults.subjects import Subject
from g4conformance.runtime.contract import MasksAndRope, Runtime
from g4conformance.runtime.static import StaticGemma4Runtime
from g4conformance.stages import Stage

_fault = partial(fault, stage=Stage.MASKS_AND_ROPE)

# --- the sliding window -----------------------------------------------------------------------------------------------


@_fault(
    "sliding-mask-ignored",
    at=At.ORCHESTRATION,
    check="G4-MASK-01",
    case="window+1",
    source="labscommunity/cascadia/pull/151 vllm-project/vllm/pull/5908",
)
def window_ignored(runtime: StaticGemma4Runtime, patch: Patch) -> None:
    """Sliding layers attend causally without a window."""
    patch(runtime, "facts", replace(runtime.facts, sliding_window=runtime.layout.max_seq))


@_fault(
    "sliding-window-off-by-one",
    at=At.ORCHESTRATION,
    check="G4-MASK-01",
    case="window+1",
    source="pegainfer-project/pegainfer/pull/832 quic/efficient-transformers/pull/1250",
)
def window_one_too_wide(runtime: StaticGemma4Runtime, patch: Patch) -> None:
    """The window admits as many earlier keys as it is wide, and the query itself on top."""
    patch(runtime, "facts", replace(runtime.facts, sliding_window=runtime.facts.sliding_window + 1))


@_fault("sliding-window-one-too-narrow", at=At.ORCHESTRATION, check="G4-MASK-01", case="window")
def window_one_too_narrow(runtime: StaticGemma4Runtime, patch: Patch) -> None:
    """The window admits one key less than it is wide."""
    patch(runtime, "facts", replace(runtime.facts, sliding_window=runtime.facts.sliding_window - 1))


@_fault(
    "window-default-wrong",
    at=At.ORCHESTRATION,
    check="G4-MASK-01",
    case="window-twice",
    source="sgl-project/sglang/pull/4823",
)
def window_of_another_model(runtime: StaticGemma4Runtime, patch: Patch) -> None:
    """The window's width is a default in place of the config's: half as wide again."""
    patch(runtime, "facts", replace(runtime.facts, sliding_window=runtime.facts.sliding_window * 3 // 2))


@_fault(
    "masks-swapped-by-layer-type",
    at=At.ORCHESTRATION,
    check="G4-MASK-01",
    case="window-twice",
    source="huggingface/transformers/pull/48482",
    boundary=True,
)
def masks_swapped(runtime: Runtime, patch: Patch) -> None:
    """Sliding layers get the full layers' mask, and full layers the sliding one."""
    change_positions(
        runtime, patch, lambda built: with_masks(built, {SLIDING: built.masks[FULL], FULL: built.masks[SLIDING]})
    )


@_fault(
    "mask-sized-for-window-cache",
    at=At.ORCHESTRATION,
    check="G4-MASK-01",
    case="window-twice",
    source="lablup/mlxcel/pull/405",
)
def only_the_last_window_of_keys(runtime: StaticGemma4Runtime, patch: Patch) -> None:
    """The sliding mask covers only as many keys as the sliding cache keeps, so that early queries lose theirs."""
    window = runtime.facts.sliding_window

    def trimmed(built: MasksAndRope, positions: Tensor) -> MasksAndRope:
        mask = built.masks[SLIDING]
        last = int(mask.any(dim=1)[0].nonzero().max())  # the last key that anyone sees
        recent = torch.arange(mask.shape[-1]) > last - window
        return with_masks(built, {SLIDING: mask & recent})

    change_positional(runtime, patch, trimmed, decode=False)


@_fault("full-layers-windowed", at=At.ORCHESTRATION, check="G4-MASK-01", case="window-twice", boundary=True)
def full_layers_windowed(runtime: Runtime, patch: Patch) -> None:
    """Full layers get the sliding mask too."""
    change_positions(runtime, patch, lambda built: with_masks(built, {FULL: built.masks[SLIDING]}))


# --- image rows, padding, fill ----------------------------------------------------------------------------------------


@_fault(
    "bidirectional-on-e2b",
    at=At.ORCHESTRATION,
    check="G4-MASK-01",
    case="image-middle",
    source="ggml-org/llama.cpp/issues/28318 ggml-org/llama.cpp/pull/28335 quic/efficient-transformers/pull/1159",
)
def image_rows_see_each_other(runtime: StaticGemma4Runtime, patch: Patch) -> None:
    """Image rows attend each other both ways although the config does not say so."""
    patch(runtime, "facts", replace(runtime.facts, bidirectional_vision=True))


@_fault(
    "bidirectional-missing-on-large",
    at=At.ORCHESTRATION,
    check="G4-MASK-01",
    case="image-middle",
    needs=Subject.BIDIRECTIONAL,
    source="vllm-project/vllm-gaudi/pull/1797 vllm-project/vllm/pull/40534 ggml-org/llama.cpp/pull/24082",
)
def image_rows_causal(runtime: StaticGemma4Runtime, patch: Patch) -> None:
    """Image rows are causal although the config makes them see each other."""
    patch(runtime, "facts", replace(runtime.facts, bidirectional_vision=False))


@_fault(
    "bidirectional-on-full-layers",
    at=At.ORCHESTRATION,
    check="G4-MASK-01",
    case="image-middle",
    needs=Subject.BIDIRECTIONAL,
    source="huggingface/transformers/issues/46711 ggml-org/llama.cpp/pull/28335",
)
def image_rows_see_each_other_on_full_layers(runtime: StaticGemma4Runtime, patch: Patch) -> None:
    """Image rows see each other on full layers too, which stay causal in Gemma 4."""
    block = _image_block(runtime)
    change_positional(
        runtime, patch, lambda built, _: with_masks(built, {FULL: built.masks[FULL] | block}), decode=False
    )


@_fault(
    "bidirectional-crosses-window",
    at=At.ORCHESTRATION,
    check="G4-MASK-01",
    case="image-middle",
    needs=Subject.BIDIRECTIONAL,
    source="huggingface/transformers/pull/46850 vllm-project/vllm/pull/47217",
)
def image_rows_see_past_the_window(runtime: StaticGemma4Runtime, patch: Patch) -> None:
    """The image's block is laid over the sliding mask without the window's limit."""
    block = _image_block(runtime)
    change_positional(
        runtime, patch, lambda built, _: with_masks(built, {SLIDING: built.masks[SLIDING] | block}), decode=False
    )


@_fault("pad-keys-not-masked", at=At.ORCHESTRATION, check="G4-MASK-02")
def padding_keys_not_masked(runtime: StaticGemma4Runtime, patch: Patch) -> None:
    """Keys of padding are not masked; under right padding and causality no valid row can tell."""
    build = runtime._positional
    patch(runtime, "_positional", lambda p, count, block: build(p, count if len(p) == 1 else len(p), block))


@_fault(
    "padding-mask-replaces-causal",
    at=At.ORCHESTRATION,
    check="G4-MASK-01",
    source="unslothai/unsloth-zoo/pull/963",
    boundary=True,
)
def causality_lost(runtime: Runtime, patch: Patch) -> None:
    """The mask of valid tokens is taken for the whole mask: every query sees every token of the prompt."""

    def unordered(built: MasksAndRope) -> MasksAndRope:
        return with_masks(built, {kind: mask | mask.any(dim=1, keepdim=True) for kind, mask in built.masks.items()})

    change_positions(runtime, patch, unordered)


@_fault(
    "mask-fill-value",
    at=At.ORCHESTRATION,
    check="G4-MASK-03",
    source="Samsung/TICO/pull/843 quic/efficient-transformers/pull/1159 ikawrakow/ik_llama.cpp/pull/1985",
    boundary=True,
)
def soft_fill(runtime: Runtime, patch: Patch) -> None:
    """Masked scores get -120 in place of the dtype's most negative number."""
    _change_biases(runtime, patch, lambda bias: bias.clamp(min=-120.0))


@_fault("mask-as-bias", at=At.ORCHESTRATION, check="G4-MASK-03", boundary=True)
def boolean_mask_added(runtime: Runtime, patch: Patch) -> None:
    """The boolean mask is added to the scores as it is, 1 where a key may be seen and 0 where not."""
    _change_biases(runtime, patch, lambda bias: (bias == 0).to(bias.dtype))


@_fault(
    "mask-buffer-stale",
    at=At.STATE,
    check="G4-MASK-02",
    case="a-b-a",
    source="ikawrakow/ik_llama.cpp/pull/1985",
    boundary=True,
)
def masks_of_the_request_before(runtime: Runtime, patch: Patch) -> None:
    """The preallocated mask is filled after the request that it was meant for, and serves the next one."""
    buffer: list[MasksAndRope] = []

    def stale(built: MasksAndRope) -> MasksAndRope:
        before = buffer.pop() if buffer else built
        buffer.append(built)
        return replace(built, masks=before.masks, biases=before.biases)

    change_positions(runtime, patch, stale)


# --- rotary tables ----------------------------------------------------------------------------------------------------


@_fault(
    "rope-theta-not-per-layer-type",
    at=At.GRAPH,
    check="G4-ROPE-01",
    source="ggml-org/llama.cpp/issues/14367 antonellof/ferrox/issues/39",
)
def one_base_for_all_layers(runtime: StaticGemma4Runtime, patch: Patch) -> None:
    """Sliding layers rotate with the full layers' base, 1,000,000 in place of 10,000."""
    frequencies = runtime.rotary.sliding_attention_inv_freq
    patch(runtime.rotary, "sliding_attention_inv_freq", frequencies**1.5)  # 10,000 ** 1.5 is 1,000,000


@_fault("prop-rope-full-rotary", at=At.GRAPH, check="G4-ROPE-01", source="jagmarques/nexusquant/pull/12")
def every_pair_rotates(runtime: StaticGemma4Runtime, patch: Patch) -> None:
    """The partial rotary factor is ignored: every pair of a full layer's head rotates."""
    dim = 2 * len(runtime.rotary.full_attention_inv_freq)
    base = runtime.checkpoint.text_config.rope_parameters[FULL]["rope_theta"]
    patch(runtime.rotary, "full_attention_inv_freq", base ** -(torch.arange(0, dim, 2) / dim))


@_fault(
    "prop-rope-compact-pairing",
    at=At.GRAPH,
    check="G4-ROPE-01",
    source="NVIDIA-NeMo/Megatron-Bridge/issues/4195 NVIDIA-NeMo/Megatron-Bridge/pull/4196 kekzl/imp/pull/20",
)
def pairs_within_the_rotated_part(runtime: StaticGemma4Runtime, patch: Patch) -> None:
    """Frequencies are not padded to half the head, so that the table is as wide as the rotated part only."""
    frequencies = runtime.rotary.full_attention_inv_freq
    patch(runtime.rotary, "full_attention_inv_freq", frequencies[frequencies > 0])


@_fault("rope-interleaved-layout", at=At.GRAPH, check="G4-ROPE-01")
def neighbours_are_pairs(runtime: StaticGemma4Runtime, patch: Patch) -> None:
    """Tables are laid out for pairs of neighbours in place of pairs half a head apart."""
    change_positional(
        runtime,
        patch,
        lambda built, _: with_rope(built, lambda t: t[..., : t.shape[-1] // 2].repeat_interleave(2, dim=-1)),
    )


@_fault("rope-inv-freq-zeroed", at=At.WEIGHTS, check="G4-ROPE-01", source="pytorch/executorch/pull/19627")
def frequencies_zero(runtime: StaticGemma4Runtime, patch: Patch) -> None:
    """Frequencies, which no checkpoint stores, are left zero after materialisation: nothing rotates."""
    for layer_type in (SLIDING, FULL):
        name = f"{layer_type}_inv_freq"
        patch(runtime.rotary, name, torch.zeros_like(getattr(runtime.rotary, name)))


@_fault(
    "rope-inv-freq-bf16",
    at=At.WEIGHTS,
    check="G4-ROPE-01",
    source="NVIDIA-NeMo/Automodel/pull/2549 huggingface/transformers/pull/29285",
)
def frequencies_rounded(runtime: StaticGemma4Runtime, patch: Patch) -> None:
    """A cast of the whole model has rounded the frequencies to bfloat16."""
    for layer_type in (SLIDING, FULL):
        name = f"{layer_type}_inv_freq"
        patch(runtime.rotary, name, getattr(runtime.rotary, name).bfloat16().float())


@_fault("rope-default-on-full-layers", at=At.GRAPH, check="G4-ROPE-01")
def frequencies_divided_by_the_rotated_part(runtime: StaticGemma4Runtime, patch: Patch) -> None:
    """Full layers divide exponents by the rotated part of the head in place of the whole head."""
    frequencies = runtime.rotary.full_attention_inv_freq
    quarter = runtime.checkpoint.text_config.rope_parameters[FULL]["partial_rotary_factor"]
    patch(runtime.rotary, "full_attention_inv_freq", frequencies ** (1 / quarter))


@_fault("positions-constant-offset", at=At.ORCHESTRATION, check="G4-ROPE-01", case="window-1")
def positions_start_at_one(runtime: StaticGemma4Runtime, patch: Patch) -> None:
    """The prompt's positions start at 1; attention is relative, so that only decoding can tell."""
    build = runtime._positional

    def shifted(positions: Tensor, count: int, block: range) -> MasksAndRope:
        built = build(positions, count, block)
        return built if len(positions) == 1 else replace(built, rope=build(positions + 1, count, block).rope)

    patch(runtime, "_positional", shifted)


@_fault("rope-image-rows-one-position", at=At.ORCHESTRATION, check="G4-ROPE-01", case="image-middle")
def image_rows_share_a_position(runtime: StaticGemma4Runtime, patch: Patch) -> None:
    """All soft tokens of a picture get the position of the first one."""
    start, end = runtime.layout.visual_start_idx, runtime.layout.visual_end_idx

    def shared(table: Tensor) -> Tensor:
        rows = torch.arange(table.shape[1])
        return table[:, torch.where((rows >= start) & (rows < end), start, rows)]

    change_positional(runtime, patch, lambda built, _: with_rope(built, shared), decode=False)


@_fault("rope-turned-backwards", at=At.GRAPH, check="G4-ROPE-01", boundary=True)
def rotation_reversed(runtime: Runtime, patch: Patch) -> None:
    """Sines have the other sign: everything rotates backwards."""

    def reversed_sines(built: MasksAndRope) -> MasksAndRope:
        return replace(built, rope={kind: (cos, -sin) for kind, (cos, sin) in built.rope.items()})

    change_positions(runtime, patch, reversed_sines)


def _image_block(runtime: StaticGemma4Runtime) -> Tensor:
    """Bool [S, S], true between any two rows of the image."""
    rows = torch.arange(runtime.layout.max_seq)
    inside = (rows >= runtime.layout.visual_start_idx) & (rows < runtime.layout.visual_end_idx)
    return inside[:, None] & inside[None, :]


def _change_biases(runtime: Runtime, patch: Patch, change: Callable[[Tensor], Tensor]) -> None:
    change_positions(
        runtime, patch, lambda built: replace(built, biases={kind: change(b) for kind, b in built.biases.items()})
    )
