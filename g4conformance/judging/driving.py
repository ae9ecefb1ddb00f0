"""A runtime's run on its own: `build_static_inputs` and `generate`, or what there is in their place.

What a runtime does not have is never made up for it: inputs that it was given, and tokens that the suite chose for it,
are not recorded as its own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from g4conformance.checkpoints.facts import ModelFacts
from g4conformance.judging.observation import (
    Observation,
    errors_of,
    listening,
    method_of,
    record_generation,
)
from g4conformance.prompts import Request
from g4conformance.runtime.contract import Runtime, StaticInputs
from g4conformance.runtime.inputs import static_inputs
from g4conformance.runtime.layout import StaticLayout
from g4conformance.stages import Stage
from g4conformance.trace import Recorder

# Tokens that were fed to a runtime which has no `generate`.
DRIVEN = "generation/driven/token_ids"
_INPUTS = ("input_ids", "llm_input_ids", "attention_mask", "valid_length", "pixel_values", "image_position_ids")


def runtime_for(runtime: Runtime, layout: StaticLayout) -> Runtime:
    """The runtime of `layout`; one that knows no layouts serves all of them."""
    return runtime.for_layout(layout) if hasattr(runtime, "for_layout") else runtime


def given_inputs(request: Request, facts: ModelFacts, dtype: torch.dtype) -> StaticInputs:
    """The request as `build_static_inputs` should make it, for a runtime that has none."""
    return static_inputs(
        request.inputs,
        request.layout,
        pad_token_id=facts.pad_token_id,
        image_token_id=facts.image_token_id,
        placeholder_ids=facts.placeholder_ids,
        dtype=dtype,
    )


def inputs_of(runtime: Runtime, request: Request, given: StaticInputs) -> StaticInputs:
    """What the runtime makes of the prompt; what it is given, where it cannot or where there are only ids."""
    if request.prompt is None or not hasattr(runtime, "build_static_inputs"):
        return given
    return runtime.build_static_inputs(request.prompt, request.images)


def run_on_its_own(
    runtime: Runtime, request: Request, given: StaticInputs, gen_steps: int, facts: ModelFacts, observation: Observation
) -> None:
    """Records as `accumulated` all that the runtime yields from the prompt to the end of its generation."""
    with listening(runtime, Recorder()) as record:
        inputs = None
        with errors_of(observation, Stage.BUILD_STATIC_INPUTS):
            inputs = inputs_of(runtime, request, given)
            if inputs is given:
                observation.given |= set(_INPUTS)
                method_of(runtime, "build_static_inputs")
            else:
                _record_inputs(record, inputs)
        if inputs is not None:
            with errors_of(observation, None):
                serve(runtime, inputs, gen_steps, facts, record)
        elif Stage.BUILD_STATIC_INPUTS in observation.errors:
            observation.errors.setdefault(None, observation.errors[Stage.BUILD_STATIC_INPUTS])
    observation.driven = how_driven(runtime)
    observation.accumulated = record.tensors


def how_driven(runtime: Runtime) -> str:
    """How the suite drives a runtime that does not generate by itself; "" for one that does."""
    if hasattr(runtime, "generate"):
        return ""
    if not hasattr(runtime, "decode_one"):
        return "the suite called prefill alone"
    if hasattr(runtime, "select"):
        return "the suite called prefill, decode_one and select in turn"
    return "the suite called prefill and decode_one in turn and chose the most likely token"


def serve(runtime: Runtime, inputs: StaticInputs, max_new_tokens: int, facts: ModelFacts, record: Recorder) -> None:
    """One whole request."""
    if hasattr(runtime, "generate"):
        record_generation(record, "generation/", runtime.generate(inputs, max_new_tokens))
        return
    logits = runtime.prefill(inputs)
    record("prefill/logits", logits)
    if not hasattr(runtime, "decode_one"):
        return
    room = inputs.input_ids.shape[1] - inputs.valid_length
    chosen: list[int] = []
    try:
        for token in _continuation(runtime, logits, min(max_new_tokens, room + 1), facts, record):
            chosen.append(token)
    finally:  # what was fed before an error can be judged
        prompt = inputs.input_ids[0, : inputs.valid_length].tolist()
        record(DRIVEN, torch.tensor(prompt + chosen))


def _continuation(runtime: Runtime, logits: Tensor, count: int, facts: ModelFacts, record: Recorder) -> Iterator[int]:
    """At most `count` tokens; each but the last is fed after it was chosen."""
    choose = _chooser(runtime, facts)
    for step in range(count):
        token, ends = choose(logits)
        yield token
        if ends or step == count - 1:
            return
        logits = runtime.decode_one(token)
        record(f"decode/{step}/logits", logits)


def _chooser(runtime: Runtime, facts: ModelFacts) -> Callable[[Tensor], tuple[int, bool]]:
    """The next token and whether it ends the generation: as the runtime selects, else the most likely."""
    if not hasattr(runtime, "select"):
        return lambda logits: ((token := int(logits[0].argmax())), token in facts.stop_token_ids)

    def select(logits: Tensor) -> tuple[int, bool]:
        token, reason = runtime.select(logits)
        return int(token), reason is not None

    return select


def accepted(method: Callable[..., Any], arguments: int) -> int:
    """How many positional arguments, of at most `arguments`, the method takes; all if it has no Python signature."""
    try:
        signature = inspect.signature(method)
    except (ValueError, TypeError):
        return arguments
    return next((count for count in range(arguments, 0, -1) if _binds(signature, count)), 0)


def _binds(signature: inspect.Signature, count: int) -> bool:
    try:
        signature.bind(*range(count))
    except TypeError:
        return False
    return True


def _record_inputs(record: Recorder, inputs: StaticInputs) -> None:
    record("input_ids", inputs.input_ids)
    record("llm_input_ids", inputs.llm_input_ids)
    record("attention_mask", inputs.attention_mask)
    record("valid_length", torch.tensor([inputs.valid_length]))
    if inputs.pixel_values is not None:
        record("pixel_values", inputs.pixel_values)
    if inputs.image_position_ids is not None:
        record("image_position_ids", inputs.image_position_ids)
