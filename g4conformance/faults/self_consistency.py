"""Faults of the ninth group: at every stage they agree with the reference, and only with themselves they do not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from g4conformance.faults.parts import with_masks
from g4conformance.faults.patching import Patch
from g4conformance.faults.registry import At, fault
from g4conformance.runtime.cache import SlotCache
from g4conformance.runtime.contract import Generation, MasksAndRope, StaticInputs, StopReason
from g4conformance.runtime.static import StaticGemma4Runtime
from g4conformance.stages import Stage

_fault = partial(fault, stage=Stage.SELF_CONSISTENCY, case="window-twice")
_IMAGE = "image-middle"


def _count_calls(call: Callable[..., Tensor], change: Callable[[Tensor, int], Tensor]) -> Callable[..., Tensor]:
    """`call`, its result changed by the number of calls before it."""
    calls: list[None] = []

    def counted(*args: Any) -> Tensor:
        calls.append(None)
        return change(call(*args), len(calls) - 1)

    return counted


def _one_step_up(logits: Tensor) -> Tensor:
    """As another order of summation would have it."""
    return torch.nextafter(logits, torch.tensor(torch.inf))


def _scaled_and_back(hidden: Tensor, scale: Tensor) -> Tensor:
    """As a runtime that scales activations before it multiplies: off by rounding only."""
    return hidden / scale * scale


# --- one computation in two ways --------------------------------------------------------------------------------------


@_fault("odd-lengths-rounded-up", at=At.STATE, check="G4-SELF-01")
def odd_lengths_rounded_up(runtime: StaticGemma4Runtime, patch: Patch) -> None:
    """Rows are kept in pairs: after a prompt of odd length, decode begins one row late."""
    prefill = runtime.prefill

    def prefilled(*args: Any) -> Tensor:
        logits = prefill(*args)
        runtime.past_len += runtime.past_len % 2
        return logits

    patch(runtime, "prefill", prefilled)


@_fault("larger-buffers-stretch-positions", at=At.ORCHESTRATION, check="G4-SELF-02")
def larger_buffers_stretch_positions(runtime: StaticGemma4Runtime, patch: Patch) -> None:
    """More rows than the first layout has are taken for a longer context, whose positions are interpolated."""
    build = StaticGemma4Runtime._positional

    def stretched(self: StaticGemma4Runtime, positions: Tensor, count: int, block: range) -> MasksAndRope:
        built = build(self, positions, count, block)
        if self.layout.max_seq <= runtime.layout.max_seq:
            return built
        return replace(built, rope=build(self, positions / 2, count, block).rope)

    patch(StaticGemma4Runtime, "_positional", stretched)


@_fault("last-row-of-the-buffers-masked", at=At.ORCHESTRATION, check="G4-SELF-03")
def last_row_of_the_buffers_masked(runtime: StaticGemma4Runtime, patch: Patch) -> None:
    """The mask ends one row before the buffers do."""
    build = StaticGemma4Runtime._positional

    def shortened(self: StaticGemma4Runtime, positions: Tensor, count: int, block: range) -> MasksAndRope:
        return build(self, positions, min(count, self.layout.max_seq - 1), block)

    patch(StaticGemma4Runtime, "_positional", shortened)


# --- what must not matter ---------------------------------------------------------------------------------------------


@_fault("rows-merged-by-arithmetic", at=At.GRAPH, check="G4-SELF-04")
def rows_merged_by_arithmetic(runtime: StaticGemma4Runtime, patch: Patch) -> None:
    """New rows are multiplied by a mask and added, which keeps out every padding row but one that is not a number."""

    def update(self: SlotCache, key: Tensor, value: Tensor, layer_idx: int, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.new = key, value
        new, old = self.slot.to(key.dtype), (~self.slot).to(key.dtype)
        return key * new + self.past_key * old, value * new + self.past_value * old

    patch(SlotCache, "update", update)


@_fault("length-counted-by-pad-ids", at=At.ORCHESTRATION, check="G4-SELF-05")
def length_counted_by_pad_ids(runtime: StaticGemma4Runtime, patch: Patch) -> None:
    """Whatever is not the pad id is taken for a part of the prompt."""
    prefill = runtime.prefill

    def prefilled(inputs: Any, *args: Any) -> Tensor:
        counted = int((inputs.input_ids != runtime.facts.pad_token_id).sum())
        return prefill(replace(inputs, valid_length=counted), *args)

    patch(runtime, "prefill", prefilled)


def _plant_scale(runtime: StaticGemma4Runtime, patch: Patch, layer: int, scale_of: Callable[[Tensor], Tensor]) -> None:
    """Scales what enters a layer, [B, Q, H], by a scale that is taken from all of it."""
    layers: list[Any] = list(runtime.layers)
    graph = layers[layer]
    layers[layer] = lambda hidden, *args: graph(_scaled_and_back(hidden, scale_of(hidden)), *args)
    patch(runtime, "layers", layers)


@_fault("scale-of-the-whole-buffer", at=At.GRAPH, check="G4-SELF-06")
def scale_of_the_whole_buffer(runtime: StaticGemma4Runtime, patch: Patch) -> None:
    """Activations are scaled dynamically by what all rows hold, padding included."""
    _plant_scale(runtime, patch, 3, lambda hidden: hidden.abs().mean())


@_fault("scale-of-the-whole-prompt", at=At.GRAPH, check="G4-SELF-07")
def scale_of_the_whole_prompt(runtime: StaticGemma4Runtime, patch: Patch) -> None:
    """Activations are scaled dynamically by what all rows of the prompt hold, later ones included."""
    _plant_scale(runtime, patch, 3, lambda hidden: hidden[:, : max(1, runtime.valid_length)].abs().mean())


@_fault("scale-of-all-rows-before", at=At.GRAPH, check="G4-SELF-08")
def scale_of_all_rows_before(runtime: StaticGemma4Runtime, patch: Patch) -> None:
    """Activations are scaled dynamically by what a row and all rows before it hold, whatever the window."""

    def running_mean(hidden: Tensor) -> Tensor:
        rows = torch.arange(1, hidden.shape[1] + 1, device=hidden.device)
        return hidden.abs().mean(-1, keepdim=True).cumsum(1) / rows[:, None]

    _plant_scale(runtime, patch, 0, running_mean)


# --- what must not remain ---------------------------------------------------------------------------------------------


@_fault("prefill-differs-from-run-to-run", at=At.GRAPH, check="G4-SELF-09")
def prefill_differs_from_run_to_run(runtime: StaticGemma4Runtime, patch: Patch) -> None:
    """Partial sums are added in the order in which they arrive."""
    changed = _count_calls(runtime.prefill, lambda logits, calls: _one_step_up(logits) if calls % 2 else logits)
    patch(runtime, "prefill", changed)


@_fault("decode-differs-from-run-to-run", at=At.GRAPH, check="G4-SELF-10")
def decode_differs_from_run_to_run(runtime: StaticGemma4Runtime, patch: Patch) -> None:
    """The same in decode: every third step comes out otherwise."""
    changed = _count_calls(runtime.decode_one, lambda logits, calls: logits if calls % 3 else _one_step_up(logits))
    patch(runtime, "decode_one", changed)


@_fault("repetitions-remembered", at=At.STATE, check="G4-SELF-11")
def repetitions_remembered(runtime: StaticGemma4Runtime, patch: Patch) -> None:
    """What one generation said is forbidden in the next: the history of a repetition penalty is never emptied."""
    generate, select = runtime.generate, runtime.select
    said: list[int] = []
    forbidden: list[int] = []

    def generated(inputs: StaticInputs, max_new_tokens: int) -> Generation:
        forbidden[:] = said
        done = generate(inputs, max_new_tokens)
        forbidden.clear()
        said.extend(done.token_ids[inputs.valid_length :])
        return done

    def selected(logits: Tensor) -> tuple[int, StopReason | None]:
        return select(logits.index_fill(1, torch.tensor(forbidden, dtype=torch.long), -torch.inf))

    patch(runtime, "generate", generated)
    patch(runtime, "select", selected)


@_fault("picture-of-the-request-before", at=At.STATE, check="G4-SELF-12", case=_IMAGE)
def picture_of_the_request_before(runtime: StaticGemma4Runtime, patch: Patch) -> None:
    """Two buffers for soft tokens take turns, and fusion reads the one that was filled before."""
    vision = runtime.vision_prefill
    filled: list[Tensor] = []

    def embedded(*args: Any) -> Tensor:
        filled.append(vision(*args))
        return filled[-2] if len(filled) > 1 else filled[-1]

    patch(runtime, "vision_prefill", embedded)


@_fault("decode-sees-the-longest-prompt-so-far", at=At.STATE, check="G4-SELF-13")
def decode_sees_the_longest_prompt_so_far(runtime: StaticGemma4Runtime, patch: Patch) -> None:
    """A decode step may attend every row that a prompt has ever reached."""
    prefill, build, lengths = runtime.prefill, runtime._positional, [0]

    def prefilled(inputs: Any, *args: Any) -> Tensor:
        lengths.append(inputs.valid_length)
        return prefill(inputs, *args)

    def positional(positions: Tensor, count: int, block: range) -> MasksAndRope:
        built = build(positions, count, block)
        if len(positions) > 1:
            return built
        rows = torch.arange(runtime.layout.max_seq)
        stale = (rows >= count) & (rows < max(lengths))
        return with_masks(built, {layer_type: mask | stale for layer_type, mask in built.masks.items()})

    patch(runtime, "prefill", prefilled)
    patch(runtime, "_positional", positional)


@_fault("only-the-first-rows-cleared", at=At.STATE, check="G4-SELF-14")
def only_the_first_rows_cleared(runtime: StaticGemma4Runtime, patch: Patch) -> None:
    """A block of rows is cleared between requests, not all of them."""

    def cleared() -> None:
        for pair in runtime.cache.buffers.values():
            for buffer in pair:
                buffer[:, :, :100] = 0

    patch(runtime.cache, "reset", cleared)


@_fault("state-of-one-length-loaded-once", at=At.STATE, check="G4-SELF-15")
def state_of_one_length_loaded_once(runtime: StaticGemma4Runtime, patch: Patch) -> None:
    """A loaded state is known by its length, and one that is known is not loaded again."""
    load = runtime.load_state
    known: set[int] = set()

    def loaded(key_values: Any, past_len: int) -> None:
        if past_len not in known:
            load(key_values, past_len)
        known.add(past_len)

    patch(runtime, "load_state", loaded)


def _plant_reset(runtime: StaticGemma4Runtime, patch: Patch, reset: Callable[[], None]) -> None:
    """Another `reset`; prefill and `load_state` still begin a new request."""
    forget, prefill, load = runtime.reset, runtime.prefill, runtime.load_state

    def prefilled(*args: Any) -> Tensor:
        forget()
        return prefill(*args)

    def loaded(*args: Any) -> None:
        forget()
        load(*args)

    patch(runtime, "prefill", prefilled)
    patch(runtime, "load_state", loaded)
    patch(runtime, "reset", reset)


@_fault("reset-does-nothing", at=At.STATE, check="G4-SELF-16")
def reset_does_nothing(runtime: StaticGemma4Runtime, patch: Patch) -> None:
    """`reset` forgets nothing."""
    _plant_reset(runtime, patch, lambda: None)


@_fault("reset-forgets-the-length-only", at=At.STATE, check="G4-SELF-17")
def reset_forgets_the_length_only(runtime: StaticGemma4Runtime, patch: Patch) -> None:
    """`reset` forgets how many rows are filled, but leaves them as they are."""

    def reset() -> None:
        runtime.valid_length = runtime.past_len = 0

    _plant_reset(runtime, patch, reset)


# --- where generation stops -------------------------------------------------------------------------------------------


@_fault("stops-only-when-certain", at=At.ORCHESTRATION, check="G4-SELF-18")
def stops_only_when_certain(runtime: StaticGemma4Runtime, patch: Patch) -> None:
    """A stop token counts as one only if it has a tenth of the probability."""
    select = runtime.select

    def selected(logits: Tensor) -> tuple[int, StopReason | None]:
        token, stop = select(logits)
        return token, stop if float(logits[0].softmax(-1)[token]) > 0.1 else None

    patch(runtime, "select", selected)


@_fault("at-least-two-tokens", at=At.ORCHESTRATION, check="G4-SELF-19")
def at_least_two_tokens(runtime: StaticGemma4Runtime, patch: Patch) -> None:
    """`max_new_tokens` is looked at only after the first decode step."""
    generate = runtime.generate
    patch(runtime, "generate", lambda inputs, max_new_tokens: generate(inputs, max(2, max_new_tokens)))


@_fault("last-draft-of-a-short-generation-unverified", at=At.ORCHESTRATION, check="G4-SELF-20")
def last_draft_of_a_short_generation_unverified(runtime: StaticGemma4Runtime, patch: Patch) -> None:
    """Fewer than four tokens are drafted in one go, and nobody verifies the last of them."""
    generate = runtime.generate

    def generated(inputs: Any, max_new_tokens: int) -> Generation:
        done = generate(inputs, max_new_tokens)
        if not 1 < max_new_tokens < 4:
            return done
        return replace(done, token_ids=(*done.token_ids[:-1], done.token_ids[inputs.valid_length - 1]))

    patch(runtime, "generate", generated)
