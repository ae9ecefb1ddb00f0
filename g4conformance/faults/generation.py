"""Faults of stage 8: the logits are right, and what is made of them is not."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from g4conformance.faults.parts import change_call
from g4conformance.faults.patching import Patch
from g4conformance.faults.registry import At, fault
from g4conformance.runtime.contract import Generation, Runtime, StaticInputs, StopReason
from g4conformance.runtime.static import StaticGemma4Runtime
from g4conformance.stages import Stage

_fault = partial(fault, stage=Stage.GENERATION, at=At.ORCHESTRATION)


@_fault(
    "eos-list-truncated",
    check="G4-GEN-02",
    source="Blaizzy/mlx-vlm/pull/309 waybarrios/vllm-mlx/pull/256 AI-Hypercomputer/maxtext/pull/4053",
)
def first_stop_token_only(runtime: StaticGemma4Runtime, patch: Patch) -> None:
    """Only the text config's end-of-sequence token stops a generation."""
    eos = runtime.checkpoint.text_config.eos_token_id
    patch(runtime, "facts", replace(runtime.facts, stop_token_ids=frozenset({eos})))


@_fault("eos-sources-replaced-not-unioned", check="G4-GEN-02", source="Blaizzy/mlx-vlm/pull/2112")
def stop_set_of_one_source(runtime: StaticGemma4Runtime, patch: Patch) -> None:
    """The model config's stop tokens replace those of the generation config in place of joining them."""
    stops = runtime.checkpoint.model.config.eos_token_id
    patch(runtime, "facts", replace(runtime.facts, stop_token_ids=frozenset(stops)))


@_fault("pad-stops", check="G4-GEN-02")
def pad_token_stops(runtime: StaticGemma4Runtime, patch: Patch) -> None:
    """The pad token is in the stop set too."""
    stops = runtime.facts.stop_token_ids | {runtime.facts.pad_token_id}
    patch(runtime, "facts", replace(runtime.facts, stop_token_ids=stops))


@_fault("runner-up-selected", check="G4-GEN-01", boundary=True)
def runner_up_selected(runtime: Runtime, patch: Patch) -> None:
    """The second most likely token is selected where it comes close."""

    def hasty(select: Any, logits: Tensor) -> tuple[int, StopReason | None]:
        best, second = logits[0].topk(2).values
        if best - second > 0.5:
            return select(logits)
        return select(logits.masked_fill(logits == best, -torch.inf))

    change_call(patch, runtime, "select", hasty)


@_fault("vocabulary-cut-short", check="G4-GEN-01", boundary=True)
def last_id_out_of_reach(runtime: Runtime, patch: Patch) -> None:
    """The last id of the vocabulary cannot be selected."""
    change_call(patch, runtime, "select", lambda select, logits: select(logits[:, :-1]))


@_fault(
    "returned-ids-lose-image-tokens",
    check="G4-GEN-03",
    case="image-first",
    source="Samsung/TICO/pull/849",
    boundary=True,
)
def placeholders_lost(runtime: Runtime, patch: Patch) -> None:
    """The returned sequence begins with the language model's ids, in which placeholders are padding."""

    def returned(inputs: StaticInputs, done: Generation) -> tuple[int, ...]:
        prompt = inputs.llm_input_ids[0, : inputs.valid_length].tolist()
        return (*prompt, *done.token_ids[inputs.valid_length :])

    _change_returned(runtime, patch, returned)


@_fault("prompt-not-returned", check="G4-GEN-03", boundary=True)
def new_tokens_only(runtime: Runtime, patch: Patch) -> None:
    """Only the new tokens are returned."""
    _change_returned(runtime, patch, lambda inputs, done: done.token_ids[inputs.valid_length :])


@_fault("one-token-too-many", check="G4-GEN-04", boundary=True)
def one_token_too_many(runtime: Runtime, patch: Patch) -> None:
    """The loop's condition is checked one step late."""
    change_call(patch, runtime, "generate", lambda generate, inputs, limit: generate(inputs, limit + 1))


@_fault("stop-token-not-returned", check="G4-GEN-04", case="system-turn", boundary=True)
def stop_token_cut_off(runtime: Runtime, patch: Patch) -> None:
    """The stop token that ended the generation is not part of what is returned."""

    def cut(inputs: StaticInputs, done: Generation) -> tuple[int, ...]:
        return done.token_ids[:-1] if done.stop_reason is StopReason.STOP_TOKEN else done.token_ids

    _change_returned(runtime, patch, cut)


@_fault("stop-reason-length", check="G4-GEN-05", case="system-turn", boundary=True)
def always_stopped_by_length(runtime: Runtime, patch: Patch) -> None:
    """Every generation is said to have ended by its length."""

    def relabelled(generate: Any, inputs: StaticInputs, limit: int) -> Generation:
        return replace(generate(inputs, limit), stop_reason=StopReason.MAX_NEW_TOKENS)

    change_call(patch, runtime, "generate", relabelled)


@_fault("full-buffer-not-told", check="G4-GEN-05", case="fills-while-decoding", boundary=True)
def full_buffer_not_told(runtime: Runtime, patch: Patch) -> None:
    """A generation that ended because the buffers were full is said to have reached the number asked for."""

    def relabelled(generate: Any, inputs: StaticInputs, limit: int) -> Generation:
        done: Generation = generate(inputs, limit)
        full = done.stop_reason is StopReason.MAX_SEQ
        return replace(done, stop_reason=StopReason.MAX_NEW_TOKENS) if full else done

    change_call(patch, runtime, "generate", relabelled)


def _change_returned(runtime: Runtime, patch: Patch, returned: Any) -> None:
    """`generate` returns the ids `returned(inputs, generation)`."""

    def changed(generate: Any, inputs: StaticInputs, limit: int) -> Generation:
        done: Generation = generate(inputs, limit)
        return replace(done, token_ids=tuple(returned(inputs, done)))

    change_call(patch, runtime, "generate", changed)
