"""Damages of the stages before the decoder. Text case: 33 tokens, window 32. Image case: text on both sides."""

from __future__ import annotations

import torch

from ..recording import Recorded
from .registry import Tensors, damage, miss, nudge, set_mask, swap

FULL, SLIDING = "full_attention", "sliding_attention"


def slot(r: Recorded) -> slice:
    return slice(r.case.request.layout.visual_start_idx, r.case.request.layout.visual_end_idx)


def valid(r: Recorded) -> int:
    return int(r.reference["valid_length"])


# --- build_static_inputs --------------------------------------------------------------------------------------------


@damage("G4-INPUTS-01", "first in input_ids, most at (0, 5)")
def one_id_is_another(t: Tensors, r: Recorded) -> None:
    t["input_ids"][0, 5] += 1


@damage("G4-INPUTS-01", "first in input_ids, most at (0, 133)")
def padding_is_not_the_pad_id(t: Tensors, r: Recorded) -> None:
    t["input_ids"][0, -1] = 1


@damage("G4-INPUTS-01", "input_ids.shape=(1, 133), but should be (1, 134)")
def the_buffer_lacks_a_row(t: Tensors, r: Recorded) -> None:
    t["input_ids"] = t["input_ids"][:, :-1]


@damage("G4-INPUTS-01", "first in attention_mask, most at (0, 33)")
def one_bit_too_many_is_valid(t: Tensors, r: Recorded) -> None:
    t["attention_mask"][0, valid(r)] = True


@damage("G4-INPUTS-01", "attention_mask.dtype=torch.float32, but should be torch.bool")
def the_attention_mask_is_additive(t: Tensors, r: Recorded) -> None:
    t["attention_mask"] = t["attention_mask"].float()


@damage("G4-INPUTS-01", "first in valid_length")
def the_length_is_short_by_one(t: Tensors, r: Recorded) -> None:
    t["valid_length"] -= 1


@damage("G4-INPUTS-02", "first in llm_input_ids", case="image")
def one_placeholder_stays(t: Tensors, r: Recorded) -> None:
    t["llm_input_ids"][0, slot(r).stop - 1] = r.bench.facts.image_token_id


@damage("G4-INPUTS-02", "first in llm_input_ids, most at (0, 4)")
def one_word_becomes_padding(t: Tensors, r: Recorded) -> None:
    t["llm_input_ids"][0, 4] = r.bench.facts.pad_token_id


@damage("G4-INPUTS-03", "2 beginning-of-sequence ids, the first id is 2", also="G4-INPUTS-01")
def the_beginning_of_sequence_comes_twice(t: Tensors, r: Recorded) -> None:
    t["input_ids"][0, 1] = r.bench.facts.bos_token_id


@damage("G4-INPUTS-03", "0 beginning-of-sequence ids, the first id is 300", also="G4-INPUTS-01")
def the_beginning_of_sequence_is_missing(t: Tensors, r: Recorded) -> None:
    t["input_ids"][0, 0] = 300


@damage("G4-INPUTS-04", "first in input_ids", case="image", also="G4-INPUTS-01")
def one_placeholder_too_many(t: Tensors, r: Recorded) -> None:
    t["input_ids"][0, slot(r).stop] = r.bench.facts.image_token_id


@damage("G4-INPUTS-04", "first in input_ids", case="image", also="G4-INPUTS-01")
def one_placeholder_too_few(t: Tensors, r: Recorded) -> None:
    t["input_ids"][0, slot(r).start] = 300


@damage("G4-INPUTS-05", "first in pixel_values, most at (0, 7, 11)", case="image")
def one_pixel_by_the_smallest_step(t: Tensors, r: Recorded) -> None:
    nudge(t["pixel_values"], (0, 7, 11))


@damage("G4-INPUTS-05", "first in pixel_values", case="image")
def a_padding_patch_is_not_empty(t: Tensors, r: Recorded) -> None:
    t["pixel_values"][0, -1, 0] += 1


@damage("G4-INPUTS-05", "first in pixel_values", case="image")
def two_patches_are_swapped(t: Tensors, r: Recorded) -> None:
    swap(t["pixel_values"], 1, 0, 30)


@damage("G4-INPUTS-06", "first in image_position_ids", case="image")
def x_and_y_are_swapped(t: Tensors, r: Recorded) -> None:
    t["image_position_ids"] = t["image_position_ids"].flip(-1)


@damage("G4-INPUTS-06", "first in image_position_ids", case="image")
def a_padding_patch_has_a_place(t: Tensors, r: Recorded) -> None:
    t["image_position_ids"][0, -1] = 0


# --- token_embedding ------------------------------------------------------------------------------------------------


@damage("G4-EMBED-01", "first in text_embeds, most at (0, 4, 7)", also="G4-EMBED-02")
def one_embedding_by_the_smallest_step(t: Tensors, r: Recorded) -> None:
    nudge(t["text_embeds"], (0, 4, 7))


@damage("G4-EMBED-01", "first in text_embeds", also="G4-EMBED-02")
def the_scale_is_rounded(t: Tensors, r: Recorded) -> None:
    root = torch.tensor(t["text_embeds"].shape[-1]).sqrt()
    t["text_embeds"][:, : valid(r)] *= root.to(torch.bfloat16).float() / root


@damage("G4-EMBED-01", "first in text_embeds", also="G4-EMBED-02")
def two_prompt_rows_are_swapped(t: Tensors, r: Recorded) -> None:
    swap(t["text_embeds"], 1, 1, 2)


@damage("G4-EMBED-01", "most at (0, 32, 95)", also="G4-EMBED-02")
def an_embedding_is_not_a_number(t: Tensors, r: Recorded) -> None:
    t["text_embeds"][0, valid(r) - 1, -1] = torch.nan


@damage("G4-EMBED-02", "first in text_embeds")
def padding_is_embedded_as_zeros(t: Tensors, r: Recorded) -> None:
    t["text_embeds"][:, valid(r) :] = 0


@damage("G4-EMBED-02", "most at (0, 133, 0)")
def padding_is_not_a_number(t: Tensors, r: Recorded) -> None:
    t["text_embeds"][0, -1, 0] = torch.nan


@damage("G4-EMBED-02", "text_embeds.shape=(1, 33, 96), but should be (1, 134, 96)")
def padding_is_not_embedded(t: Tensors, r: Recorded) -> None:
    t["text_embeds"] = t["text_embeds"][:, : valid(r)]


# --- vision_prefill -------------------------------------------------------------------------------------------------


@damage("G4-VISION-01", "first in vision/patch_embeds, most at (0, 3, 5)", case="image")
def one_patch_embedding_is_off(t: Tensors, r: Recorded) -> None:
    miss("G4-VISION-01", t, r, "vision/patch_embeds", (0, 3, 5))


@damage("G4-VISION-01", "first in vision/patch_embeds", case="image")
def padding_patches_get_a_position(t: Tensors, r: Recorded) -> None:
    t["vision/patch_embeds"][0, -1] += 0.5


@damage("G4-VISION-02", "first in vision/layer/1/hidden", case="image")
def one_value_of_an_encoder_layer_is_off(t: Tensors, r: Recorded) -> None:
    miss("G4-VISION-02", t, r, "vision/layer/1/hidden", (0, 3, 5))


@damage("G4-VISION-02", "first in vision/layer/0/hidden", case="image")
def an_encoder_layer_is_not_a_number(t: Tensors, r: Recorded) -> None:
    t["vision/layer/0/hidden"][0, 0, 0] = torch.nan


@damage("G4-VISION-02", "first in vision/layer/1/hidden", case="image")
def an_encoder_layer_is_skipped(t: Tensors, r: Recorded) -> None:
    t["vision/layer/1/hidden"] = t["vision/layer/0/hidden"].clone()


@damage("G4-VISION-03", "first in vision/soft_tokens", case="image")
def soft_tokens_are_scaled(t: Tensors, r: Recorded) -> None:
    t["vision/soft_tokens"] *= 1.01


@damage("G4-VISION-03", "vision/soft_tokens.shape=(62, 84), but should be (63, 84)", case="image")
def a_soft_token_is_missing(t: Tensors, r: Recorded) -> None:
    t["vision/soft_tokens"] = t["vision/soft_tokens"][1:]


@damage("G4-VISION-03", "first in vision/soft_tokens, most at (9, 4)", case="image")
def one_soft_token_is_off(t: Tensors, r: Recorded) -> None:
    miss("G4-VISION-03", t, r, "vision/soft_tokens", (9, 4))


@damage("G4-VISION-04", "first in visual_embeds, most at (9, 4)", case="image", also="G4-FUSION-01")
def one_visual_embedding_is_off(t: Tensors, r: Recorded) -> None:
    miss("G4-VISION-04", t, r, "visual_embeds", (9, 4))


@damage("G4-VISION-04", "first in visual_embeds", case="image", also="G4-FUSION-01")
def two_soft_tokens_are_swapped(t: Tensors, r: Recorded) -> None:
    swap(t["visual_embeds"], 0, 0, 1)


# --- mm_fusion ------------------------------------------------------------------------------------------------------


@damage("G4-FUSION-01", "first in fused_embeds, most at (2, 3)", case="image")
def one_image_row_by_the_smallest_step(t: Tensors, r: Recorded) -> None:
    nudge(t["fused_embeds"], (0, slot(r).start + 2, 3))


@damage("G4-FUSION-01", "first in fused_embeds", case="image", also="G4-FUSION-03")
def two_image_rows_are_swapped(t: Tensors, r: Recorded) -> None:
    swap(t["fused_embeds"], 1, slot(r).start, slot(r).start + 1)


@damage("G4-FUSION-02", "first in fused_embeds, most at (0, 2, 3)", case="image")
def one_text_row_by_the_smallest_step(t: Tensors, r: Recorded) -> None:
    nudge(t["fused_embeds"], (0, 2, 3))


@damage("G4-FUSION-02", "first in fused_embeds", case="image", also="G4-FUSION-03")
def a_soft_token_spills_over(t: Tensors, r: Recorded) -> None:
    t["fused_embeds"][:, slot(r).stop] = t["fused_embeds"][:, slot(r).stop - 1]


@damage("G4-FUSION-03", "first in fused_embeds", case="image", also="G4-FUSION-01")
def one_fused_value_is_off(t: Tensors, r: Recorded) -> None:
    miss("G4-FUSION-03", t, r, "fused_embeds", (0, slot(r).start, 0))


@damage("G4-FUSION-03", "first in fused_embeds", case="image", also="G4-FUSION-01 G4-FUSION-02")
def soft_tokens_lie_one_row_late(t: Tensors, r: Recorded) -> None:
    t["fused_embeds"][:, 1:] = t["fused_embeds"][:, :-1].clone()


# --- masks_and_rope -------------------------------------------------------------------------------------------------


@damage("G4-MASK-01", "query 32 attends keys 0..32, the reference allows 1..32")
def the_window_is_one_too_wide(t: Tensors, r: Recorded) -> None:
    set_mask(t, "", SLIDING, lambda mask: mask[:, 32].__setitem__((0, 0), True))


@damage("G4-MASK-01", "query 3 attends keys 0..4, the reference allows 0..3")
def one_query_sees_its_successor(t: Tensors, r: Recorded) -> None:
    set_mask(t, "", FULL, lambda mask: mask.__setitem__((0, 3, 4), True))


@damage("G4-MASK-01", "query 32 attends keys 1..32, the reference allows 0..32")
def full_layers_get_the_sliding_mask(t: Tensors, r: Recorded) -> None:
    set_mask(t, "", FULL, lambda mask: mask.copy_(t[f"mask/{SLIDING}"]))


@damage("G4-MASK-01", "query 9 attends keys none, the reference allows 0..9")
def one_query_sees_nothing(t: Tensors, r: Recorded) -> None:
    set_mask(t, "", SLIDING, lambda mask: mask[0, 9].fill_(False))


@damage("G4-MASK-02", "first in mask/full_attention")
def padding_sees_padding(t: Tensors, r: Recorded) -> None:
    set_mask(t, "", FULL, lambda mask: mask.__setitem__((0, -2, -1), True))


@damage("G4-MASK-02", "first in mask/sliding_attention", also="G4-MASK-01")
def the_prompt_sees_padding(t: Tensors, r: Recorded) -> None:
    set_mask(t, "", SLIDING, lambda mask: mask.__setitem__((0, 5, valid(r)), True))


@damage("G4-MASK-03", "first in mask_bias/full_attention")
def a_row_without_a_key_gets_minus_infinity(t: Tensors, r: Recorded) -> None:
    t[f"mask/{FULL}"][0, -1] = False
    t[f"mask_bias/{FULL}"][0, 0, -1] = -torch.inf


@damage("G4-MASK-03", "masked scores get 0 to -100")
def masked_scores_get_too_little(t: Tensors, r: Recorded) -> None:
    t[f"mask_bias/{SLIDING}"].clamp_(min=-100.0)


@damage("G4-MASK-03", "first in mask_bias/sliding_attention, most at (0, 5, 5)")
def an_allowed_score_is_moved(t: Tensors, r: Recorded) -> None:
    t[f"mask_bias/{SLIDING}"][0, 0, 5, 5] = -1e-3


@damage("G4-MASK-03", "first in mask_bias/full_attention, most at (0, 0, 7)")
def a_fill_is_not_a_number(t: Tensors, r: Recorded) -> None:
    t[f"mask_bias/{FULL}"][0, 0, 0, 7] = torch.nan


@damage("G4-ROPE-01", "first in rope/full_attention/cos, most at (0, 9, 2)")
def one_cosine_by_the_smallest_step(t: Tensors, r: Recorded) -> None:
    nudge(t[f"rope/{FULL}/cos"], (0, 9, 2))


@damage("G4-ROPE-01", "first in rope/sliding_attention/cos")
def positions_begin_at_one(t: Tensors, r: Recorded) -> None:
    for part in ("cos", "sin"):
        t[f"rope/{SLIDING}/{part}"] = t[f"rope/{SLIDING}/{part}"].roll(-1, dims=1)


@damage("G4-ROPE-01", "rope/full_attention/cos.shape=(1, 33, 20), but should be (1, 33, 56)")
def full_layers_get_the_sliding_table(t: Tensors, r: Recorded) -> None:
    for part in ("cos", "sin"):
        t[f"rope/{FULL}/{part}"] = t[f"rope/{SLIDING}/{part}"].clone()
