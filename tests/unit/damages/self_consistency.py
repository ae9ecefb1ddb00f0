"""Damages of what the probes recorded; they exist in accumulation only. Text: 33 tokens, window 32, 3 new tokens."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps

import torch

from ..recording import Recorded
from .before_the_decoder import valid
from .registry import Apply, Tensors, damage, nudge, stray

LOGITS, STEP = "prefill/logits", "decode/1/logits"
KEY, VALUE, HIDDEN = (f"prefill/layer/3/{part}" for part in ("key", "value", "hidden"))
CACHE, FIRST_CACHE = "prefill/cache/3/key", "decode/0/cache/3/value"


def probed(check: str, where: str, also: str = "") -> Callable[[Apply], Apply]:
    """A damage of the traces in which the probes are."""

    def register(apply: Apply) -> Apply:
        @wraps(apply)
        def where_probes_are(t: Tensors, r: Recorded) -> None:
            if f"self/base/{LOGITS}" in t:
                apply(t, r)

        return damage(check, where, also=also)(where_probes_are)

    return register


# --- one computation in two ways ------------------------------------------------------------------------------------


@probed("G4-SELF-01", "first in self/shortened/decode/0/logits, most at (0, 99)")
def a_decoded_last_token_is_off(t: Tensors, r: Recorded) -> None:
    stray("G4-SELF-01", t, r, f"self/base/{LOGITS}", "self/shortened/decode/0/logits", (0, 99))


@probed("G4-SELF-01", "first in self/shortened/decode/0/logits, most at (0, 0)")
def a_decoded_last_token_is_not_a_number(t: Tensors, r: Recorded) -> None:
    t["self/shortened/decode/0/logits"].fill_(torch.nan)


@probed("G4-SELF-02", "most at (0, 7); max_seq=166 against max_seq=134")
def larger_buffers_move_a_logit(t: Tensors, r: Recorded) -> None:
    stray("G4-SELF-02", t, r, f"self/base/{LOGITS}", f"self/larger/{LOGITS}", (0, 7))


@probed("G4-SELF-02", "max_seq=35 against max_seq=134")
def smaller_buffers_scale_logits(t: Tensors, r: Recorded) -> None:
    t[f"self/smaller/{LOGITS}"] *= 1.01


@probed("G4-SELF-02", "max_seq=166 against max_seq=134; self/larger/prefill/logits.shape=")
def larger_buffers_cut_the_vocabulary(t: Tensors, r: Recorded) -> None:
    t[f"self/larger/{LOGITS}"] = t[f"self/larger/{LOGITS}"][:, 1:]


@probed("G4-SELF-03", f"first in self/smaller/{STEP}, most at (0, 7); max_seq=35 against max_seq=134")
def smaller_buffers_move_a_steps_logit(t: Tensors, r: Recorded) -> None:
    stray("G4-SELF-03", t, r, f"self/base/{STEP}", f"self/smaller/{STEP}", (0, 7))


@probed("G4-SELF-03", f"first in self/larger/{STEP}")
def larger_buffers_repeat_a_step(t: Tensors, r: Recorded) -> None:
    t[f"self/larger/{STEP}"] = t["self/larger/decode/0/logits"].clone()


# --- what must not matter -------------------------------------------------------------------------------------------


@probed("G4-SELF-04", f"first in self/nan_padding/{LOGITS}, most at (0, 5)")
def padding_makes_a_logit_not_a_number(t: Tensors, r: Recorded) -> None:
    t[f"self/nan_padding/{LOGITS}"][0, 5] = torch.nan


@probed("G4-SELF-04", f"first in self/nan_padding/{LOGITS}, most at (0, 5)")
def padding_moves_a_logit_by_the_smallest_step(t: Tensors, r: Recorded) -> None:
    nudge(t[f"self/nan_padding/{LOGITS}"], (0, 5))


@probed("G4-SELF-05", f"first in self/other_padding/{LOGITS}, most at (0, 5)")
def words_in_padding_move_a_logit_by_the_smallest_step(t: Tensors, r: Recorded) -> None:
    nudge(t[f"self/other_padding/{LOGITS}"], (0, 5))


@probed("G4-SELF-06", f"first in self/nan_padding/{HIDDEN}, most at (0, 32, 1)")
def padding_makes_a_row_not_a_number(t: Tensors, r: Recorded) -> None:
    t[f"self/nan_padding/{HIDDEN}"][0, valid(r) - 1, 1] = torch.nan


@probed("G4-SELF-06", f"first in self/other_padding/{KEY}, most at (0, 1, 0, 2)")
def words_in_padding_move_a_key_by_the_smallest_step(t: Tensors, r: Recorded) -> None:
    nudge(t[f"self/other_padding/{KEY}"], (0, 1, 0, 2))


@probed("G4-SELF-07", f"first in self/last_exchanged/{HIDDEN}, most at (0, 31, 4)")
def the_last_token_moves_the_row_before_it(t: Tensors, r: Recorded) -> None:
    nudge(t[f"self/last_exchanged/{HIDDEN}"], (0, valid(r) - 2, 4))


@probed("G4-SELF-07", f"first in self/last_exchanged/{VALUE}, most at (0, 0, 0, 0)")
def the_last_token_moves_the_first_value(t: Tensors, r: Recorded) -> None:
    nudge(t[f"self/last_exchanged/{VALUE}"], (0, 0, 0, 0))


@probed("G4-SELF-07", "another last token leaves the logits as they were")
def the_last_token_is_not_read(t: Tensors, r: Recorded) -> None:
    t[f"self/last_exchanged/{LOGITS}"] = t[f"self/base/{LOGITS}"].clone()


@probed("G4-SELF-08", "layer/0/hidden, most at (32,); rows after 31 changed, which row 0 does not reach")
def a_row_beyond_the_window_is_reached(t: Tensors, r: Recorded) -> None:
    nudge(t["self/first_exchanged/prefill/layer/0/hidden"], (0, 32, 9))


@probed("G4-SELF-08", "layer/0/hidden, most at (1,); of rows [0, 31], which row 0 reaches, one did not change")
def the_last_row_of_the_window_is_not_reached(t: Tensors, r: Recorded) -> None:
    t["self/first_exchanged/prefill/layer/0/hidden"][0, 31] = t["self/base/prefill/layer/0/hidden"][0, 31]


@probed("G4-SELF-08", "layer/2/hidden, most at (0,); of rows [32], which row 0 reaches, one did not change")
def a_full_layer_does_not_reach_the_last_row(t: Tensors, r: Recorded) -> None:
    t["self/first_exchanged/prefill/layer/2/hidden"][0, 32] = t["self/base/prefill/layer/2/hidden"][0, 32]


@probed("G4-SELF-08", "layer/1/hidden, most at (4,)")
def a_reached_row_is_not_a_number(t: Tensors, r: Recorded) -> None:
    t["self/first_exchanged/prefill/layer/1/hidden"][0, 4, 0] = torch.nan


# --- what must not remain -------------------------------------------------------------------------------------------


@probed("G4-SELF-09", f"first in self/again/{LOGITS}, most at (0, 5)")
def a_second_prefill_is_off_by_the_smallest_step(t: Tensors, r: Recorded) -> None:
    nudge(t[f"self/again/{LOGITS}"], (0, 5))


@probed("G4-SELF-10", f"first in self/again/{STEP}, most at (0, 5)")
def a_second_decode_is_off_by_the_smallest_step(t: Tensors, r: Recorded) -> None:
    nudge(t[f"self/again/{STEP}"], (0, 5))


@probed("G4-SELF-11", "first in self/generate/3/token_ids, most at (35,)")
def a_second_generation_ends_otherwise(t: Tensors, r: Recorded) -> None:
    t["self/generate/3/token_ids"][-1] += 1


@probed("G4-SELF-11", "first in self/generate/3/stop_reason", also="G4-SELF-19")
def a_second_generation_tells_another_reason(t: Tensors, r: Recorded) -> None:
    t["self/generate/3/stop_reason"].fill_(2)


@probed("G4-SELF-12", f"first in self/after_longer/{LOGITS}, most at (0, 5)")
def another_request_remains_in_a_logit(t: Tensors, r: Recorded) -> None:
    nudge(t[f"self/after_longer/{LOGITS}"], (0, 5))


@probed("G4-SELF-12", "the longer request has the same logits")
def another_request_is_not_read(t: Tensors, r: Recorded) -> None:
    t[f"self/longer/{LOGITS}"] = t[f"self/base/{LOGITS}"].clone()


@probed("G4-SELF-13", f"first in self/after_longer/{STEP}, most at (0, 5)")
def another_request_remains_in_a_steps_logit(t: Tensors, r: Recorded) -> None:
    nudge(t[f"self/after_longer/{STEP}"], (0, 5))


@probed("G4-SELF-14", f"first in self/after_longer/{CACHE}, most at (0, 0, 133, 0)")
def another_request_remains_in_the_cache(t: Tensors, r: Recorded) -> None:
    t[f"self/after_longer/{CACHE}"][0, 0, -1, 0] = 1e-30


@probed("G4-SELF-15", f"first in self/loaded/{STEP}, most at (0, 5)")
def a_step_after_loading_is_off_by_the_smallest_step(t: Tensors, r: Recorded) -> None:
    nudge(t[f"self/loaded/{STEP}"], (0, 5))


@probed("G4-SELF-16", "first in self/reset_after_longer/decode/0/logits, most at (0, 5)")
def a_reset_keeps_something(t: Tensors, r: Recorded) -> None:
    nudge(t["self/reset_after_longer/decode/0/logits"], (0, 5))


@probed("G4-SELF-16", f"first in self/after_reset/{STEP}, most at (0, 5)")
def a_reset_spoils_the_next_request(t: Tensors, r: Recorded) -> None:
    nudge(t[f"self/after_reset/{STEP}"], (0, 5))


@probed("G4-SELF-17", f"first in self/reset_after_longer/{FIRST_CACHE}, most at (0, 0, 133, 0)")
def a_reset_leaves_the_cache_dirty(t: Tensors, r: Recorded) -> None:
    t[f"self/reset_after_longer/{FIRST_CACHE}"][0, 0, -1, 0] = 1e-30


@probed("G4-SELF-17", f"first in self/after_reset/{CACHE}, most at (0, 0, 133, 0)")
def a_request_after_a_reset_leaves_the_cache_dirty(t: Tensors, r: Recorded) -> None:
    t[f"self/after_reset/{CACHE}"][0, 0, -1, 0] = 1e-30


# --- where generation stops -----------------------------------------------------------------------------------------


@probed("G4-SELF-18", "first in self/select/stops, most at (1,)")
def the_second_stop_token_does_not_stop(t: Tensors, r: Recorded) -> None:
    t["self/select/stops"][1] = False


@probed("G4-SELF-18", "first in self/select/stops, most at (2,)")
def an_ordinary_favoured_token_stops(t: Tensors, r: Recorded) -> None:
    t["self/select/stops"][2] = True


@probed("G4-SELF-18", "first in self/select/token_ids, most at (0,)")
def a_favoured_stop_token_is_not_selected(t: Tensors, r: Recorded) -> None:
    t["self/select/token_ids"][0] = 0


@probed("G4-SELF-19", "asked for 1, it ended by max_new_tokens after 2 new tokens")
def one_token_asked_for_becomes_two(t: Tensors, r: Recorded) -> None:
    t["self/generate/1/token_ids"] = t["self/generate/2/token_ids"].clone()


@probed("G4-SELF-19", "asked for 2, it ended by stop_token after 2 new tokens")
def an_ordinary_token_is_called_a_stop_token(t: Tensors, r: Recorded) -> None:
    t["self/generate/2/stop_reason"].fill_(0)


@probed("G4-SELF-19", "after 2 new tokens, one of them a stop token before the last; 1 later", also="G4-SELF-11")
def generation_runs_over_a_stop_token(t: Tensors, r: Recorded) -> None:
    for asked in (1, 2, 3):
        t[f"self/generate/{asked}/token_ids"][valid(r)] = min(r.bench.facts.stop_token_ids)
    t["self/generate/1/stop_reason"].fill_(0)


@probed("G4-SELF-20", "first in self/generate/2/token_ids, most at (34,)")
def a_shorter_generation_goes_another_way(t: Tensors, r: Recorded) -> None:
    t["self/generate/2/token_ids"][-1] += 1


# --- what the runtime says of itself ----------------------------------------------------------------------------------


@probed("G4-SELF-21", "it declares no batches (Several prompts may be served at a time")
def a_batch_is_served_that_was_to_be_refused(t: Tensors, r: Recorded) -> None:
    t["self/refused/batches"].fill_(False)
