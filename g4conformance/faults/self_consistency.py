"""Faults of the ninth group: they agree with the reference wherever a stage looks; only the runtime itself tells."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from g4conformance.faults.parts import change_call, change_positional, with_masks, with_rope
from g4conformance.faults.patching import Patch
from g4conformance.faults.registry import At, fault
from g4conformance.runtime import graphs
from g4conformance.runtime.cache import SlotCache
from g4conformance.runtime.contract import Generation, MasksAndRope, Runtime, StaticInputs, StopReason
from g4conformance.runtime.layout import StaticLayout
from g4conformance.runtime.static import StaticGemma4Runtime
from g4conformance.stages import Stage

_fault = partial(fault, stage=Stage.SELF_CONSISTENCY, case="window-twice", at=At.STATE)


# --- one computation in two ways --------------------------------------------------------------------------------------


@_fault("odd-lengths-rounded-up", check="G4-SELF-01")
def odd_lengths_rounded_up(runtime: StaticGemma4Runtime, patch: Patch) -> None:
    """Rows are kept in pairs: after a prompt of odd length, decode begins one row late."""

    def prefilled(prefill: Any, *args: Any) -> Tensor:
        logits: Tensor = prefill(*args)
        runtime.past_len += runtime.past_len % 2
        return logits

    change_call(patch, runtime, "prefill", prefilled)


def change_siblings(
    runtime: StaticGemma4Runtime,
    patch: Patch,
    affected: Callable[[StaticLayout], bool],
    change: Callable[[MasksAndRope, Tensor, StaticLayout], MasksAndRope],
) -> None:
    """Masks and rotary tables are changed in the runtimes of other layouts that `for_layout` hands out."""
    changed: set[StaticLayout] = set()

    def siblings(for_layout: Any, layout: StaticLayout) -> StaticGemma4Runtime:
        sibling: StaticGemma4Runtime = for_layout(layout)
        if affected(layout) and layout not in changed:
            changed.add(layout)
            change_positional(sibling, patch, lambda built, positions: change(built, positions, layout))
        return sibling

    change_call(patch, runtime, "for_layout", siblings)


@_fault("larger-buffers-stretch-positions", check="G4-SELF-02", at=At.ORCHESTRATION)
def larger_buffers_stretch_positions(runtime: StaticGemma4Runtime, patch: Patch) -> None:
    """Larger buffers than the first are taken for a longer context, whose rotary tables are stretched."""
    own = runtime.layout.max_seq

    def stretched(built: MasksAndRope, positions: Tensor, layout: StaticLayout) -> MasksAndRope:
        return with_rope(built, lambda table: table * (own / layout.max_seq))

    change_siblings(runtime, patch, lambda layout: layout.max_seq > own, stretched)


@_fault("last-row-of-the-buffers-masked", check="G4-SELF-03", at=At.ORCHESTRATION)
def last_row_masked(runtime: StaticGemma4Runtime, patch: Patch) -> None:
    """In smaller buffers than the first, the mask ends one row before the buffers do."""

    def shortened(built: MasksAndRope, positions: Tensor, layout: StaticLayout) -> MasksAndRope:
        before_last = torch.arange(layout.max_seq, device=positions.device) < layout.max_seq - 1
        return with_masks(built, {layer_type: mask & before_last for layer_type, mask in built.masks.items()})

    change_siblings(runtime, patch, lambda layout: layout.max_seq < runtime.layout.max_seq, shortened)


# --- what must not matter ---------------------------------------------------------------------------------------------


class ArithmeticSlotCache(SlotCache):
    """Merges by multiplying with the slot and its opposite, which lets through what is not a number."""

    def update(self, key: Tensor, value: Tensor, layer_idx: int, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.new = key, value
        new, old = self.slot.to(key.dtype), (~self.slot).to(key.dtype)
        return key * new + self.past_key * old, value * new + self.past_value * old


@_fault("rows-merged-by-arithmetic", check="G4-SELF-04", at=At.GRAPH)
def rows_merged_by_arithmetic(runtime: StaticGemma4Runtime, patch: Patch) -> None:
    """New rows are multiplied by a mask and added, which keeps every padding row out but one that is not a number."""
    patch(graphs, "SlotCache", ArithmeticSlotCache)


@_fault("length-counted-by-pad-ids", check="G4-SELF-05", at=At.ORCHESTRATION)
def length_counted_by_pad_ids(runtime: StaticGemma4Runtime, patch: Patch) -> None:
    """Whatever is not the pad id is taken for a part of the prompt."""

    def prefilled(prefill: Any, inputs: StaticInputs, *args: Any) -> Tensor:
        counted = int((inputs.input_ids != runtime.facts.pad_token_id).sum())
        logits: Tensor = prefill(replace(inputs, valid_length=counted), *args)
        return logits

    change_call(patch, runtime, "prefill", prefilled)


def scale_layer(runtime: StaticGemma4Runtime, patch: Patch, layer: int, scale_of: Callable[[Tensor], Tensor]) -> None:
    """What enters a layer, [B, Q, H], is divided by a scale and multiplied by it again: off by rounding only."""
    graph = runtime.layers[layer]

    def scaled(hidden: Tensor, *args: Any) -> Any:
        scale = scale_of(hidden)
        return graph(hidden / scale * scale, *args)

    patch(runtime, "layers", [*runtime.layers[:layer], scaled, *runtime.layers[layer + 1 :]])


@_fault("scale-of-the-whole-buffer", check="G4-SELF-06", at=At.GRAPH)
def scale_of_the_whole_buffer(runtime: StaticGemma4Runtime, patch: Patch) -> None:
    """Activations are scaled dynamically by what all rows hold, padding included."""
    scale_layer(runtime, patch, 3, lambda hidden: hidden.abs().mean())


@_fault("scale-of-the-whole-prompt", check="G4-SELF-07", at=At.GRAPH)
def scale_of_the_whole_prompt(runtime: StaticGemma4Runtime, patch: Patch) -> None:
    """Activations are scaled dynamically by what all rows of the prompt hold, later ones included."""
    scale_layer(runtime, patch, 3, lambda hidden: hidden[:, : max(1, runtime.valid_length)].abs().mean())


@_fault("scale-of-all-rows-before", check="G4-SELF-08", at=At.GRAPH)
def scale_of_all_rows_before(runtime: StaticGemma4Runtime, patch: Patch) -> None:
    """Activations are scaled dynamically by what a row and all rows before it hold, whatever the window."""

    def running_mean(hidden: Tensor) -> Tensor:
        rows = torch.arange(1, hidden.shape[1] + 1, device=hidden.device)
        return hidden.abs().mean(-1, keepdim=True).cumsum(1) / rows[:, None]

    scale_layer(runtime, patch, 0, running_mean)


# --- what must not remain ---------------------------------------------------------------------------------------------


def change_now_and_then(patch: Patch, runtime: Runtime, method: str, period: int) -> None:
    """Every `period`-th result is off by the smallest step, as another order of summation would have it."""
    calls = 0

    def summed(call: Any, *args: Any) -> Tensor:
        nonlocal calls
        calls += 1
        logits: Tensor = call(*args)
        return logits if calls % period else torch.nextafter(logits, torch.full_like(logits, torch.inf))

    change_call(patch, runtime, method, summed)


@_fault("prefill-differs-from-run-to-run", check="G4-SELF-09", at=At.GRAPH, boundary=True)
def prefill_differs(runtime: Runtime, patch: Patch) -> None:
    """Partial sums of a prefill are added in the order in which they arrive."""
    change_now_and_then(patch, runtime, "prefill", period=2)


@_fault("decode-differs-from-run-to-run", check="G4-SELF-10", at=At.GRAPH, boundary=True)
def decode_differs(runtime: Runtime, patch: Patch) -> None:
    """Partial sums of a decode step are added in the order in which they arrive."""
    change_now_and_then(patch, runtime, "decode_one", period=3)


@_fault("repetitions-remembered", check="G4-SELF-11", boundary=True)
def repetitions_remembered(runtime: Runtime, patch: Patch) -> None:
    """What one generation said is forbidden in the next: the history of a repetition penalty is never emptied."""
    said: list[int] = []
    forbidden: list[int] = []

    def generated(generate: Any, inputs: StaticInputs, max_new_tokens: int) -> Generation:
        forbidden[:] = said
        done: Generation = generate(inputs, max_new_tokens)
        forbidden.clear()
        said.extend(done.token_ids[inputs.valid_length :])
        return done

    def selected(select: Any, logits: Tensor) -> Any:
        return select(logits.index_fill(1, logits.new_tensor(forbidden, dtype=torch.long), -torch.inf))

    change_call(patch, runtime, "generate", generated)
    change_call(patch, runtime, "select", selected)


@_fault("picture-of-the-request-before", check="G4-SELF-12", case="image-middle", boundary=True)
def picture_of_the_request_before(runtime: Runtime, patch: Patch) -> None:
    """Two buffers for soft tokens take turns, and fusion reads the one that was filled before."""
    filled: list[Tensor] = []

    def embedded(vision: Any, *args: Any) -> Tensor:
        filled.append(vision(*args))
        return filled[-2] if len(filled) > 1 else filled[-1]

    change_call(patch, runtime, "vision_prefill", embedded)


@_fault("decode-sees-the-longest-prompt-so-far", check="G4-SELF-13")
def decode_sees_the_longest_prompt(runtime: StaticGemma4Runtime, patch: Patch) -> None:
    """A decode step may attend every row that a prompt has ever reached."""
    lengths = [0]

    def prefilled(prefill: Any, inputs: StaticInputs, *args: Any) -> Tensor:
        lengths.append(inputs.valid_length)
        logits: Tensor = prefill(inputs, *args)
        return logits

    def stale(built: MasksAndRope, positions: Tensor) -> MasksAndRope:
        rows = torch.arange(runtime.layout.max_seq, device=positions.device)
        reached = (rows > positions) & (rows < max(lengths))
        return with_masks(built, {layer_type: mask | reached for layer_type, mask in built.masks.items()})

    change_call(patch, runtime, "prefill", prefilled)
    change_positional(runtime, patch, stale, prefill=False)


@_fault("only-the-first-rows-cleared", check="G4-SELF-14")
def only_the_first_rows_cleared(runtime: StaticGemma4Runtime, patch: Patch) -> None:
    """A block of rows is cleared between requests, not all of them."""

    def cleared(reset: Any) -> None:
        block = 3 * runtime.facts.sliding_window
        behind = {layer: [buffer[:, :, block:].clone() for buffer in pair] for layer, pair in buffers.items()}
        reset()
        for layer, pair in buffers.items():
            for buffer, rows in zip(pair, behind[layer], strict=True):
                buffer[:, :, block:] = rows

    buffers = runtime.cache.buffers
    change_call(patch, runtime.cache, "reset", cleared)


@_fault("state-of-one-length-loaded-once", check="G4-SELF-15", boundary=True)
def state_of_one_length_loaded_once(runtime: Runtime, patch: Patch) -> None:
    """A loaded state is known by its length, and one that is known is not loaded again."""
    known: set[int] = set()

    def loaded(load: Any, key_values: Any, past_len: int) -> None:
        if past_len not in known:
            load(key_values, past_len)
        known.add(past_len)

    change_call(patch, runtime, "load_state", loaded)


def change_reset(runtime: StaticGemma4Runtime, patch: Patch, change: Callable[[], None]) -> None:
    """`reset` is another, while prefill and `load_state` still begin a new request."""
    forget = runtime.reset

    def beginning(call: Any, *args: Any) -> Any:
        forget()
        return call(*args)

    change_call(patch, runtime, "prefill", beginning)
    change_call(patch, runtime, "load_state", beginning)
    patch(runtime, "reset", change)


@_fault("reset-does-nothing", check="G4-SELF-16")
def reset_does_nothing(runtime: StaticGemma4Runtime, patch: Patch) -> None:
    """A reset is left to the next prefill."""
    change_reset(runtime, patch, lambda: None)


@_fault("reset-forgets-the-length-only", check="G4-SELF-17")
def reset_forgets_the_length_only(runtime: StaticGemma4Runtime, patch: Patch) -> None:
    """A reset begins at row 0 again and leaves the cache as it is."""

    def reset() -> None:
        runtime.valid_length = runtime.past_len = 0

    change_reset(runtime, patch, reset)


# --- where generation stops -------------------------------------------------------------------------------------------


@_fault("stops-only-when-certain", check="G4-SELF-18", at=At.ORCHESTRATION, boundary=True)
def stops_only_when_certain(runtime: Runtime, patch: Patch) -> None:
    """A stop token counts as one only if it has a tenth of the probability."""

    def selected(select: Any, logits: Tensor) -> tuple[int, StopReason | None]:
        token, stop = select(logits)
        return token, stop if float(logits[0].softmax(-1)[token]) > 0.1 else None

    change_call(patch, runtime, "select", selected)


@_fault("at-least-two-tokens", check="G4-SELF-19", at=At.ORCHESTRATION, boundary=True)
def at_least_two_tokens(runtime: Runtime, patch: Patch) -> None:
    """`max_new_tokens` is looked at only after the first decode step."""

    def generated(generate: Any, inputs: StaticInputs, max_new_tokens: int) -> Generation:
        done: Generation = generate(inputs, max(2, max_new_tokens))
        return done

    change_call(patch, runtime, "generate", generated)


@_fault("last-draft-unverified", check="G4-SELF-20", at=At.ORCHESTRATION, boundary=True)
def last_draft_unverified(runtime: Runtime, patch: Patch) -> None:
    """A generation of two tokens is drafted in one go, and nobody verifies the second."""

    def generated(generate: Any, inputs: StaticInputs, max_new_tokens: int) -> Generation:
        done: Generation = generate(inputs, max_new_tokens)
        if max_new_tokens != 2:
            return done
        last_of_the_prompt = done.token_ids[inputs.valid_length - 1]
        return replace(done, token_ids=(*done.token_ids[:-1], last_of_the_prompt))

    change_call(patch, runtime, "generate", generated)
