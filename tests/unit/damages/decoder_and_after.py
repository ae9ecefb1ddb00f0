"""Damages of prefill, decode and generation. Layers 0 to 4 store K/V; the text has 33 tokens and 2 decode steps."""

from __future__ import annotations

import torch

from ..recording import DECODE_STEPS, Recorded
from .before_the_decoder import FULL, SLIDING, slot, valid
from .registry import Tensors, damage, miss, nudge, set_mask, swap

KEY, VALUE = "prefill/layer/3/key", "prefill/layer/3/value"


# --- prefill --------------------------------------------------------------------------------------------------------


@damage("G4-PREFILL-01", "first in per_layer_inputs, most at (0, 7, 3, 5)")
def one_per_layer_input_is_off(t: Tensors, r: Recorded) -> None:
    miss("G4-PREFILL-01", t, r, "per_layer_inputs", (0, 7, 3, 5))


@damage("G4-PREFILL-01", "first in per_layer_inputs")
def per_layer_inputs_go_to_the_wrong_layers(t: Tensors, r: Recorded) -> None:
    swap(t["per_layer_inputs"], 2, 2, 3)


@damage("G4-PREFILL-01", "first in per_layer_inputs", case="image")
def image_rows_lack_their_per_layer_inputs(t: Tensors, r: Recorded) -> None:
    t["per_layer_inputs"][:, slot(r)] = 0


@damage("G4-PREFILL-01", "per_layer_inputs.shape=(1, 33, 8, 12), but should be (1, 33, 9, 12)")
def the_last_layer_lacks_its_per_layer_input(t: Tensors, r: Recorded) -> None:
    t["per_layer_inputs"] = t["per_layer_inputs"][:, :, :-1]


@damage("G4-PREFILL-02", f"first in {KEY}, most at (0, 1, 32, 5)", also="G4-PREFILL-05")
def one_key_is_off(t: Tensors, r: Recorded) -> None:
    miss("G4-PREFILL-02", t, r, KEY, (0, 1, valid(r) - 1, 5))


@damage("G4-PREFILL-02", f"first in {KEY}, most at (0, 0, 0, 0); 1 later tensors too", also="G4-PREFILL-05")
def keys_and_values_are_not_numbers(t: Tensors, r: Recorded) -> None:
    t[KEY][0, 0, 0, 0] = t[VALUE][0, 0, 0, 0] = torch.nan


@damage("G4-PREFILL-02", f"first in {VALUE}", also="G4-PREFILL-05")
def two_heads_are_swapped(t: Tensors, r: Recorded) -> None:
    swap(t[VALUE], 1, 0, 1)


@damage("G4-PREFILL-02", f"{KEY}.shape=(1, 1, 33, 20), but should be (1, 2, 33, 20)", also="G4-PREFILL-05")
def a_head_is_missing(t: Tensors, r: Recorded) -> None:
    t[KEY] = t[KEY][:, :1]


@damage("G4-PREFILL-03", "first in prefill/layer/6/hidden, most at (0, 7, 9)")
def one_value_of_a_layer_is_off(t: Tensors, r: Recorded) -> None:
    miss("G4-PREFILL-03", t, r, "prefill/layer/6/hidden", (0, 7, 9))


@damage("G4-PREFILL-03", "first in prefill/layer/0/hidden")
def two_rows_of_a_layer_are_swapped(t: Tensors, r: Recorded) -> None:
    swap(t["prefill/layer/0/hidden"], 1, 30, 31)


@damage("G4-PREFILL-03", "first in prefill/layer/8/hidden, most at (0, 0, 0)")
def the_last_layer_is_not_a_number(t: Tensors, r: Recorded) -> None:
    t["prefill/layer/8/hidden"][0, 0, 0] = torch.nan


@damage("G4-PREFILL-09", "first in prefill/alone/layer/6/hidden, most at (0, 32, 9)")
def a_layer_is_off_by_itself(t: Tensors, r: Recorded) -> None:
    if (name := "prefill/alone/layer/6/hidden") in t:
        miss("G4-PREFILL-09", t, r, name, (0, valid(r) - 1, 9))


@damage("G4-PREFILL-09", "first in prefill/alone/layer/3/key, most at")
def a_layer_by_itself_is_another_ones(t: Tensors, r: Recorded) -> None:
    if "prefill/alone/layer/3/key" in t:
        for part in ("key", "value"):
            t[f"prefill/alone/layer/3/{part}"] = t[f"prefill/alone/layer/1/{part}"].clone()


@damage("G4-PREFILL-04", "first in prefill/logits, most at (0, 99)")
def one_logit_is_off(t: Tensors, r: Recorded) -> None:
    miss("G4-PREFILL-04", t, r, "prefill/logits", (0, 99))


@damage("G4-PREFILL-04", "first in prefill/logits")
def logits_are_a_little_flat(t: Tensors, r: Recorded) -> None:
    t["prefill/logits"] *= 0.999


@damage("G4-PREFILL-04", "prefill/logits.shape=(1, 511), but should be (1, 512)")
def the_vocabulary_is_cut(t: Tensors, r: Recorded) -> None:
    t["prefill/logits"] = t["prefill/logits"][:, :-1]


@damage("G4-PREFILL-05", "first in prefill/cache/1/value, most at (0, 1, 32, 5)", also="G4-DECODE-10")
def one_cached_value_by_the_smallest_step(t: Tensors, r: Recorded) -> None:
    nudge(t["prefill/cache/1/value"], (0, 1, valid(r) - 1, 5))


@damage("G4-PREFILL-05", "first in prefill/cache/4/key", also="G4-DECODE-10")
def two_cached_rows_are_swapped(t: Tensors, r: Recorded) -> None:
    swap(t["prefill/cache/4/key"], 2, 0, 1)


@damage("G4-PREFILL-05", "first in prefill/cache/0/key", also="G4-DECODE-10")
def a_cached_layer_is_anothers(t: Tensors, r: Recorded) -> None:
    t["prefill/cache/0/key"] = t["prefill/cache/3/key"].clone()


@damage("G4-PREFILL-06", "first in prefill/cache/2/key, most at (0, 0, 0, 0)")
def the_first_padding_row_is_cached(t: Tensors, r: Recorded) -> None:
    t["prefill/cache/2/key"][0, 0, valid(r), 0] = 1


@damage("G4-PREFILL-06", "first in prefill/cache/2/value, most at (0, 1, 100, 55)", also="G4-DECODE-10")
def an_earlier_request_remains(t: Tensors, r: Recorded) -> None:
    t["prefill/cache/2/value"][0, -1, -1, -1] = 1e-30


@damage(
    "G4-PREFILL-06",
    "prefill/cache/0/key.shape=(1, 2, 100, 20), but should be (1, 2, 101, 20)",
    also="G4-DECODE-10",
)
def a_buffer_lacks_a_row(t: Tensors, r: Recorded) -> None:
    t["prefill/cache/0/key"] = t["prefill/cache/0/key"][:, :, :-1]


@damage("G4-PREFILL-04", "first in prefill/logits, most at (0, 5)")
def a_logit_is_beyond_the_softcap(t: Tensors, r: Recorded) -> None:
    t["prefill/logits"][0, 5] = -1.001 * r.bench.facts.final_logit_softcapping


@damage("G4-PREFILL-04", "first in prefill/logits")
def the_softcap_is_missing(t: Tensors, r: Recorded) -> None:
    cap = r.bench.facts.final_logit_softcapping
    t["prefill/logits"] = torch.atanh(t["prefill/logits"].double() / cap).float() * cap


@damage("G4-PREFILL-04", "first in prefill/logits, most at (0, 5)")
def a_logit_is_not_a_number(t: Tensors, r: Recorded) -> None:
    t["prefill/logits"][0, 5] = torch.nan


# --- decode ---------------------------------------------------------------------------------------------------------


@damage("G4-DECODE-01", "first in decode/1/position")
def the_position_is_frozen(t: Tensors, r: Recorded) -> None:
    t["decode/1/position"] = t["decode/0/position"].clone()


@damage("G4-DECODE-01", "first in decode/0/position, most at (0,); 1 later tensors too")
def positions_are_one_late(t: Tensors, r: Recorded) -> None:
    for step in range(DECODE_STEPS):
        t[f"decode/{step}/position"] += 1


@damage("G4-DECODE-02", "first in decode/1/text_embeds, most at (0, 0, 7)")
def one_steps_embedding_by_the_smallest_step(t: Tensors, r: Recorded) -> None:
    nudge(t["decode/1/text_embeds"], (0, 0, 7))


@damage("G4-DECODE-02", "first in decode/0/text_embeds")
def a_steps_embedding_is_not_scaled(t: Tensors, r: Recorded) -> None:
    t["decode/0/text_embeds"] /= t["decode/0/text_embeds"].shape[-1] ** 0.5


@damage("G4-DECODE-03", "query 34 attends keys 2..34, the reference allows 3..34")
def the_window_is_one_too_wide_in_decode(t: Tensors, r: Recorded) -> None:
    set_mask(t, "decode/1/", SLIDING, lambda mask: mask.__setitem__((0, 0, 2), True))


@damage("G4-DECODE-03", "query 33 attends keys 0..32, the reference allows 0..33")
def a_token_does_not_see_itself(t: Tensors, r: Recorded) -> None:
    set_mask(t, "decode/0/", FULL, lambda mask: mask.__setitem__((0, 0, valid(r)), False))


@damage("G4-DECODE-03", "query 34 attends keys 0..34, 133, the reference allows 0..34")
def a_row_not_yet_written_is_seen(t: Tensors, r: Recorded) -> None:
    set_mask(t, "decode/1/", FULL, lambda mask: mask.__setitem__((0, 0, -1), True))


@damage("G4-DECODE-04", "first in decode/1/mask_bias/full_attention")
def a_steps_masked_score_gets_not_a_number(t: Tensors, r: Recorded) -> None:
    t[f"decode/1/mask_bias/{FULL}"][..., -1] = torch.nan


@damage("G4-DECODE-04", "first in decode/0/mask_bias/sliding_attention, most at (0, 0, 33)")
def a_steps_allowed_score_is_moved(t: Tensors, r: Recorded) -> None:
    t[f"decode/0/mask_bias/{SLIDING}"][..., valid(r)] = 1.0


@damage("G4-DECODE-05", "first in decode/1/rope/sliding_attention/cos")
def the_rotary_table_is_frozen(t: Tensors, r: Recorded) -> None:
    for part in ("cos", "sin"):
        t[f"decode/1/rope/{SLIDING}/{part}"] = t[f"decode/0/rope/{SLIDING}/{part}"].clone()


@damage("G4-DECODE-05", "first in decode/0/rope/full_attention/sin, most at (0, 0, 0)")
def a_steps_sine_by_the_smallest_step(t: Tensors, r: Recorded) -> None:
    nudge(t[f"decode/0/rope/{FULL}/sin"], (0, 0, 0))


@damage("G4-DECODE-06", "first in decode/1/per_layer_inputs, most at (0, 0, 8, 5)")
def a_steps_per_layer_input_is_off(t: Tensors, r: Recorded) -> None:
    miss("G4-DECODE-06", t, r, "decode/1/per_layer_inputs", (0, 0, 8, 5))


@damage("G4-DECODE-06", "first in decode/0/per_layer_inputs")
def a_steps_per_layer_inputs_go_to_the_wrong_layers(t: Tensors, r: Recorded) -> None:
    swap(t["decode/0/per_layer_inputs"], 2, 0, 1)


@damage("G4-DECODE-07", "first in decode/1/layer/4/key, most at (0, 1, 0, 5)", also="G4-DECODE-10")
def a_steps_key_is_off(t: Tensors, r: Recorded) -> None:
    miss("G4-DECODE-07", t, r, "decode/1/layer/4/key", (0, 1, 0, 5))


@damage("G4-DECODE-07", "first in decode/0/layer/0/value", also="G4-DECODE-10")
def a_steps_heads_are_swapped(t: Tensors, r: Recorded) -> None:
    swap(t["decode/0/layer/0/value"], 1, 0, 1)


@damage("G4-DECODE-08", "first in decode/1/layer/8/hidden, most at (0, 0, 5)")
def a_steps_layer_is_off(t: Tensors, r: Recorded) -> None:
    miss("G4-DECODE-08", t, r, "decode/1/layer/8/hidden", (0, 0, 5))


@damage("G4-DECODE-08", "first in decode/0/layer/5/hidden, most at (0, 0, 0)")
def a_steps_layer_is_not_a_number(t: Tensors, r: Recorded) -> None:
    t["decode/0/layer/5/hidden"][0, 0, 0] = torch.nan


@damage("G4-DECODE-13", "first in decode/1/alone/layer/2/value, most at (0, 1, 0, 3)")
def a_steps_layer_is_off_by_itself(t: Tensors, r: Recorded) -> None:
    if (name := "decode/1/alone/layer/2/value") in t:  # pieces alone are fed the reference's own, in isolation only
        miss("G4-DECODE-13", t, r, name, (0, 1, 0, 3))


@damage("G4-DECODE-09", "first in decode/1/logits, most at (0, 99)")
def a_steps_logit_is_off(t: Tensors, r: Recorded) -> None:
    miss("G4-DECODE-09", t, r, "decode/1/logits", (0, 99))


@damage("G4-DECODE-09", "first in decode/0/logits")
def a_step_yields_the_logits_before(t: Tensors, r: Recorded) -> None:
    t["decode/0/logits"] = r.reference["prefill/logits"].clone()


@damage("G4-DECODE-09", "first in decode/1/logits")
def a_steps_logits_are_not_numbers(t: Tensors, r: Recorded) -> None:
    t["decode/1/logits"].fill_(torch.nan)


@damage("G4-DECODE-10", "first in decode/0/cache/3/key")
def a_step_writes_nothing(t: Tensors, r: Recorded) -> None:
    t["decode/0/cache/3/key"][:, :, valid(r)] = 0


@damage("G4-DECODE-10", "first in decode/1/cache/3/value")
def both_steps_write_one_row(t: Tensors, r: Recorded) -> None:
    cache = t["decode/1/cache/3/value"]
    cache[:, :, valid(r)] = cache[:, :, valid(r) + 1]
    cache[:, :, valid(r) + 1] = 0


@damage("G4-DECODE-10", "first in decode/1/cache/0/key, most at (0, 1, 0, 3)")
def an_old_row_moves_by_the_smallest_step(t: Tensors, r: Recorded) -> None:
    nudge(t["decode/1/cache/0/key"], (0, 1, 0, 3))


# --- generation -----------------------------------------------------------------------------------------------------
# Selection exists in isolation only, the generated sequence in accumulation only.

SELECTED, STOPS, LOGITS = (f"generation/select/{part}" for part in ("token_ids", "stops", "logits"))
SEQUENCE, REASON = "generation/token_ids", "generation/stop_reason"


@damage("G4-GEN-01", f"first in {SELECTED}, most at (1,)")
def the_second_best_token_is_selected(t: Tensors, r: Recorded) -> None:
    if SELECTED in t:
        t[SELECTED][1] = t[LOGITS][1].topk(2).indices[1]


@damage("G4-GEN-02", f"first in {STOPS}")
def a_stop_token_is_not_known(t: Tensors, r: Recorded) -> None:
    if STOPS in t:
        t[STOPS][t[STOPS].nonzero()[0]] = False


@damage("G4-GEN-02", f"first in {STOPS}")
def an_ordinary_token_stops(t: Tensors, r: Recorded) -> None:
    if STOPS in t:
        t[STOPS][(~t[STOPS]).nonzero()[0]] = True


@damage("G4-GEN-03", f"first in {SEQUENCE}", case="image", also="G4-SELF-11")
def placeholders_are_returned_as_padding(t: Tensors, r: Recorded) -> None:
    if SEQUENCE in t:
        t[SEQUENCE][slot(r)] = r.bench.facts.pad_token_id


@damage("G4-GEN-03", "shape", also="G4-GEN-04 G4-SELF-11")
def only_new_tokens_are_returned(t: Tensors, r: Recorded) -> None:
    if SEQUENCE in t:
        t[SEQUENCE] = t[SEQUENCE][valid(r) :]


@damage("G4-GEN-04", f"{SEQUENCE}.shape=", also="G4-SELF-11")
def the_last_token_is_missing(t: Tensors, r: Recorded) -> None:
    if SEQUENCE in t:
        t[SEQUENCE] = t[SEQUENCE][:-1]


@damage("G4-GEN-04", f"{SEQUENCE}.shape=", also="G4-SELF-11")
def a_token_too_many(t: Tensors, r: Recorded) -> None:
    if SEQUENCE in t:
        t[SEQUENCE] = torch.cat([t[SEQUENCE], t[SEQUENCE][-1:]])


@damage("G4-GEN-04", f"first in {SEQUENCE}, most at (0,)", also="G4-SELF-11")
def the_first_new_token_is_another(t: Tensors, r: Recorded) -> None:
    if SEQUENCE in t:
        t[SEQUENCE][valid(r)] += 1


@damage("G4-GEN-05", "ended by", also="G4-SELF-11")
def the_stop_reason_is_another(t: Tensors, r: Recorded) -> None:
    if REASON in t:
        t[REASON] = (t[REASON] + 1) % 3
