"""Drives a runtime through one case: once on its own, and each stage in isolation where its inputs differ.

Where a stage's inputs are bit-equal to the reference's, what it yielded on its own stands for both modes, and nothing
is run twice. Decode is always run twice: its input is the K/V state, which is never bit-equal.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from g4conformance.adopting.boundary import at_boundary
from g4conformance.checkpoints.facts import ModelFacts
from g4conformance.expected import (
    key_values_of,
    masks_and_rope_of,
    padded_reference,
    scripted_logits,
    static_inputs_of,
)
from g4conformance.judging.alone import PiecesAlone
from g4conformance.judging.driving import accepted, given_inputs, inputs_of, run_on_its_own, runtime_for, serve
from g4conformance.judging.given import GivenInputs, is_of, positional_tensors, reuse
from g4conformance.judging.observation import (
    Observation,
    alone_key,
    errors_of,
    is_quantized,
    listening,
    method_of,
    record_selection,
)
from g4conformance.judging.padding import lacks_padding
from g4conformance.judging.probes import run_probes
from g4conformance.probe_requests import ProbeRequests
from g4conformance.prompts import ResolvedCase
from g4conformance.runtime.contract import Runtime
from g4conformance.runtime.layout import StaticLayout
from g4conformance.stages import Stage
from g4conformance.trace import Recorder


def observe(runtime: Any, case: ResolvedCase, reference: Mapping[str, Tensor], facts: ModelFacts) -> Observation:
    """Runs `case` on `runtime`; whatever the runtime raises is noted, and never ends the run."""
    observation, runtime = Observation(), at_boundary(runtime)
    dtype = reference["pad_embed"].dtype
    with torch.no_grad():
        for request in case.before:
            with errors_of(observation, None):
                of_layout = runtime_for(runtime, request.layout)
                inputs = inputs_of(of_layout, request, given_inputs(request, facts, dtype))
                serve(of_layout, inputs, 2, facts, Recorder())
        with errors_of(observation, Stage.BUILD_STATIC_INPUTS):
            runtime = runtime_for(runtime, case.request.layout)
        given = static_inputs_of(reference, case.request.layout, facts)
        run_on_its_own(runtime, case.request, given, case.gen_steps, facts, observation)
        _Isolation(runtime, case, reference, facts, observation).run()
        if case.case.self_consistency:
            requests = ProbeRequests(case.request.inputs, case.request.layout, facts, dtype)
            run_probes(runtime, requests, case.gen_steps, observation)
    length, max_seq = given.valid_length, case.request.layout.max_seq
    tensors = chain(observation.accumulated.items(), observation.isolated.items())
    observation.unpadded = frozenset(name for name, tensor in tensors if lacks_padding(name, tensor, length, max_seq))
    return observation


# The method of a stage, and the beginning of the trace name of what it returns.
_RESULTS = {
    Stage.TOKEN_EMBEDDING: ("token_embedding", "text_embeds"),
    Stage.VISION_PREFILL: ("vision_prefill", "visual_embeds"),
    Stage.MM_FUSION: ("mm_fusion", "fused_embeds"),
    Stage.MASKS_AND_ROPE: ("masks_and_rope", "mask/"),
    Stage.PREFILL: ("prefill", "prefill/logits"),
}
# What prefill goes through again, by how many of inputs, embeddings and masks it takes.
_WITHOUT_EMBEDS = frozenset((Stage.TOKEN_EMBEDDING, Stage.VISION_PREFILL, Stage.MM_FUSION, Stage.MASKS_AND_ROPE))
_REPEATED = {3: frozenset[Stage](), 2: frozenset((Stage.MASKS_AND_ROPE,)), 1: _WITHOUT_EMBEDS, 0: _WITHOUT_EMBEDS}


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
        self.prefill_takes = accepted(runtime.prefill, 3)
        self.given = GivenInputs(reference, self.layout, facts, self.prefill_takes)

    def run(self) -> None:
        reuse(self.observation, Stage.BUILD_STATIC_INPUTS)
        self._stage(Stage.TOKEN_EMBEDDING, self._token_embedding)
        if self.inputs.pixel_values is not None:
            self._stage(Stage.VISION_PREFILL, self._vision_prefill)
            if is_quantized(self.runtime):
                self._alone(Stage.VISION_PREFILL, lambda pieces, record: pieces.vision(record))
            self._stage(Stage.MM_FUSION, self._mm_fusion)
        self._stage(Stage.MASKS_AND_ROPE, self._masks_and_rope)
        self.observation.made_itself[Stage.PREFILL] = _REPEATED[self.prefill_takes]
        self._stage(Stage.PREFILL, self._prefill)
        self._alone(Stage.PREFILL, lambda pieces, record: pieces.prefill(record))
        self._call(Stage.DECODE, self._decode)
        self._alone(Stage.DECODE, self._decode_alone)
        self._call(Stage.GENERATION, self._generation)

    def _stage(self, stage: Stage, call: Callable[[Recorder], None]) -> None:
        """Reuses the run on its own where that had the reference's inputs, did not break off, and showed the result."""
        own, undisturbed = self.observation.accumulated, None not in self.observation.errors
        if undisturbed and self.given.equal(stage, own, self.observation.given) and self._shown(stage):
            reuse(self.observation, stage)
        else:
            self._call(stage, call)

    def _shown(self, stage: Stage) -> bool:
        """Whether the run on its own showed what the stage's method returns, or all that can be had of it."""
        method, result = _RESULTS[stage]
        own = self.observation.accumulated
        return any(name.startswith(result) for name in own) or (
            not hasattr(self.runtime, method) and any(is_of(name, stage) for name in own)
        )

    def _call(self, stage: Stage, call: Callable[[Recorder], None]) -> None:
        with listening(self.runtime, Recorder()) as record, errors_of(self.observation, stage):
            call(record)
        self.observation.isolated |= {name: t for name, t in record.tensors.items() if is_of(name, stage)}

    def _alone(self, stage: Stage, run: Callable[[PiecesAlone, Recorder], None]) -> None:
        """The pieces of the stage one by one; nobody listens meanwhile."""
        record = Recorder()
        with errors_of(self.observation, alone_key(stage)):
            run(PiecesAlone(self.runtime, self.reference, self.layout, self.facts), record)
        self.observation.isolated |= record.tensors

    def _decode_alone(self, pieces: PiecesAlone, record: Recorder) -> None:
        for step in sorted({0, self.case.decode_steps - 1} if self.case.decode_steps else ()):
            pieces.decode(record, step)

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
        taken: tuple[Any, ...] = self.inputs, fused, self.positional
        record("prefill/logits", self.runtime.prefill(*taken[: max(self.prefill_takes, 1)]))

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
