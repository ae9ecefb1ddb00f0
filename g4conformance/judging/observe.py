"""Drives a runtime through one case: once on its own, and each stage in isolation where its inputs differ.

Where a stage's inputs are bit-equal to the reference's, what it yielded on its own stands for both modes, and nothing
is run twice. Decode is always run twice: its input is the K/V state, which is never bit-equal.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from g4conformance.checkpoints.facts import ModelFacts
from g4conformance.expected import (
    key_values_of,
    masks_and_rope_of,
    padded_reference,
    scripted_logits,
    static_inputs_of,
)
from g4conformance.judging.alone import GraphsAlone
from g4conformance.judging.given import GivenInputs, is_of, positional_tensors, reuse
from g4conformance.judging.observation import (
    Observation,
    errors_of,
    is_quantized,
    listening,
    method_of,
    record_generation,
    record_selection,
)
from g4conformance.judging.probes import run_probes
from g4conformance.probe_requests import ProbeRequests
from g4conformance.prompts import Request, ResolvedCase
from g4conformance.runtime.contract import Runtime, StaticInputs
from g4conformance.runtime.layout import StaticLayout
from g4conformance.stages import Stage
from g4conformance.trace import Recorder


def observe(runtime: Runtime, case: ResolvedCase, reference: Mapping[str, Tensor], facts: ModelFacts) -> Observation:
    """Runs `case` on `runtime`; whatever the runtime raises is noted, and never ends the run."""
    observation = Observation()
    with torch.no_grad():
        for request in case.before:
            with errors_of(observation, None):
                _serve(_for_layout(runtime, request.layout), request)
        with errors_of(observation, Stage.BUILD_STATIC_INPUTS):
            runtime = _for_layout(runtime, case.request.layout)
        given = static_inputs_of(reference, case.request.layout, facts)
        _run_on_its_own(runtime, case, given, observation)
        _Isolation(runtime, case, reference, facts, observation).run()
        if case.case.self_consistency:
            dtype = reference["pad_embed"].dtype
            requests = ProbeRequests(case.request.inputs, case.request.layout, facts, dtype)
            run_probes(runtime, requests, case.gen_steps, observation)
    return observation


def _serve(runtime: Runtime, request: Request) -> None:
    inputs = method_of(runtime, "build_static_inputs")(request.prompt, request.images)
    method_of(runtime, "generate")(inputs, 2)


def _inputs(runtime: Runtime, case: ResolvedCase, given: StaticInputs) -> StaticInputs:
    """What the runtime makes of the prompt; a case of ids has none, and gives them to the runtime."""
    if case.request.prompt is None:
        return given
    inputs: StaticInputs = method_of(runtime, "build_static_inputs")(case.request.prompt, case.request.images)
    return inputs


def _run_on_its_own(runtime: Runtime, case: ResolvedCase, given: StaticInputs, observation: Observation) -> None:
    inputs = None
    with listening(runtime, Recorder()) as record:
        with errors_of(observation, Stage.BUILD_STATIC_INPUTS):
            inputs = _inputs(runtime, case, given)
            _record_inputs(record, inputs)
        if inputs is not None:
            with errors_of(observation, None):
                record_generation(record, "generation/", method_of(runtime, "generate")(inputs, case.gen_steps))
        elif Stage.BUILD_STATIC_INPUTS in observation.errors:
            observation.errors.setdefault(None, observation.errors[Stage.BUILD_STATIC_INPUTS])
    observation.accumulated = record.tensors


def _for_layout(runtime: Runtime, layout: StaticLayout) -> Runtime:
    return runtime.for_layout(layout) if hasattr(runtime, "for_layout") else runtime


class _Isolation:
    """The isolated run of each stage, in order."""

    def __init__(
        self,
        runtime: Runtime,
        case: ResolvedCase,
        reference: Mapping[str, Tensor],
        facts: ModelFacts,
        observation: Observation,
    ) -> None:
        self.runtime, self.case, self.reference, self.facts = runtime, case, reference, facts
        self.layout: StaticLayout = case.request.layout
        self.observation = observation
        self.inputs = static_inputs_of(reference, self.layout, facts)
        self.positional = masks_and_rope_of(reference, self.layout, facts)
        self.given = GivenInputs(reference, self.layout, facts)
        self.quantized = is_quantized(runtime)

    def run(self) -> None:
        reuse(self.observation, Stage.BUILD_STATIC_INPUTS)
        self._stage(Stage.TOKEN_EMBEDDING, self._token_embedding)
        if self.inputs.pixel_values is not None:
            self._stage(Stage.VISION_PREFILL, self._vision_prefill)
            self._alone(Stage.VISION_PREFILL, lambda graphs, record: graphs.vision(record))
            self._stage(Stage.MM_FUSION, self._mm_fusion)
        self._stage(Stage.MASKS_AND_ROPE, self._masks_and_rope)
        self._stage(Stage.PREFILL, self._prefill)
        self._alone(Stage.PREFILL, lambda graphs, record: graphs.prefill(record))
        self._call(Stage.DECODE, self._decode)
        self._alone(Stage.DECODE, self._decode_alone)
        self._call(Stage.GENERATION, self._generation)

    def _stage(self, stage: Stage, call: Callable[[Recorder], None]) -> None:
        """Reuses the run on its own where that had the reference's inputs and did not break off."""
        undisturbed = None not in self.observation.errors
        if undisturbed and self.given.equal(stage, self.observation.accumulated) and reuse(self.observation, stage):
            return
        self._call(stage, call)

    def _call(self, stage: Stage, call: Callable[[Recorder], None]) -> None:
        with listening(self.runtime, Recorder()) as record, errors_of(self.observation, stage):
            call(record)
        self.observation.isolated |= {name: t for name, t in record.tensors.items() if is_of(name, stage)}

    def _alone(self, stage: Stage, run: Callable[[GraphsAlone, Recorder], None]) -> None:
        """The graphs of a quantized runtime one by one."""
        if self.quantized:
            self._call(
                stage,
                lambda record: run(GraphsAlone(self.runtime, self.reference, self.layout, self.facts), record),
            )

    def _decode_alone(self, graphs: GraphsAlone, record: Recorder) -> None:
        for step in sorted({0, self.case.decode_steps - 1} if self.case.decode_steps else ()):
            graphs.decode(record, step)

    # --- one call a stage ---------------------------------------------------------------------------------------

    def _token_embedding(self, record: Recorder) -> None:
        record("text_embeds", method_of(self.runtime, "token_embedding")(self.inputs.llm_input_ids))

    def _vision_prefill(self, record: Recorder) -> None:
        pixel_values, positions = self.reference["pixel_values"], self.reference["image_position_ids"]
        record("visual_embeds", method_of(self.runtime, "vision_prefill")(pixel_values, positions))

    def _mm_fusion(self, record: Recorder) -> None:
        text_embeds = padded_reference(self.reference, self.layout, "text_embeds")
        record("fused_embeds", method_of(self.runtime, "mm_fusion")(text_embeds, self.reference["visual_embeds"]))

    def _masks_and_rope(self, record: Recorder) -> None:
        positional = method_of(self.runtime, "masks_and_rope")(self.inputs.valid_length)
        for name, tensor in positional_tensors(positional).items():
            record(name, tensor)

    def _prefill(self, record: Recorder) -> None:
        fused = padded_reference(self.reference, self.layout, "fused_embeds")
        record("prefill/logits", self.runtime.prefill(self.inputs, fused, self.positional))

    def _decode(self, record: Recorder) -> None:
        if self.case.decode_steps:
            key_values = key_values_of(self.reference, self.facts)
            method_of(self.runtime, "load_state")(key_values, self.inputs.valid_length)
        for step in range(self.case.decode_steps):
            token = int(self.reference[f"decode/{step}/token"])
            record(f"decode/{step}/logits", method_of(self.runtime, "decode_one")(token))

    def _generation(self, record: Recorder) -> None:
        scripted = scripted_logits(self.reference, self.facts)
        record("generation/select/logits", scripted)
        record_selection(record, "generation/select/", self.runtime, scripted)


def _record_inputs(record: Recorder, inputs: StaticInputs) -> None:
    record("input_ids", inputs.input_ids)
    record("llm_input_ids", inputs.llm_input_ids)
    record("attention_mask", inputs.attention_mask)
    record("valid_length", torch.tensor([inputs.valid_length]))
    if inputs.pixel_values is not None:
        record("pixel_values", inputs.pixel_values)
    if inputs.image_position_ids is not None:
        record("image_position_ids", inputs.image_position_ids)
