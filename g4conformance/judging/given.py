"""What a stage is given in isolation, and whether a runtime's own run happened to give it the very same."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from g4conformance.checkpoints.facts import ModelFacts
from g4conformance.expected import masks_and_rope_of, padded_reference, static_inputs_of
from g4conformance.judging.observation import Observation
from g4conformance.runtime.contract import MasksAndRope
from g4conformance.runtime.layout import StaticLayout
from g4conformance.stages import Stage, stage_of


class GivenInputs:
    """The reference's inputs of the stages from token embedding to prefill, in the shape of the static buffers.

    Args:
        prefill_takes: how many of inputs, embeddings and masks the runtime's prefill takes.
    """

    def __init__(
        self, reference: Mapping[str, Tensor], layout: StaticLayout, facts: ModelFacts, prefill_takes: int = 3
    ) -> None:
        self.reference, self.layout, self.prefill_takes = reference, layout, prefill_takes
        self.inputs = static_inputs_of(reference, layout, facts)
        self.positional = positional_tensors(masks_and_rope_of(reference, layout, facts))

    def names(self, stage: Stage) -> list[str]:
        """Trace names of what `stage` is given."""
        return {
            Stage.TOKEN_EMBEDDING: ["llm_input_ids"],
            Stage.VISION_PREFILL: ["pixel_values", "image_position_ids"],
            Stage.MM_FUSION: ["text_embeds", "visual_embeds"],
            Stage.MASKS_AND_ROPE: ["valid_length"],
            Stage.PREFILL: ["valid_length", "llm_input_ids", *self._entering_prefill()],
        }[stage]

    def _entering_prefill(self) -> list[str]:
        """Beside ids: embeddings and masks as far as prefill takes them, and else what it makes them of."""
        seen = self.inputs.pixel_values is not None
        if self.prefill_takes < 2:
            return ["pixel_values", "image_position_ids"] if seen else []
        embeds = "fused_embeds" if seen else "text_embeds"
        return [embeds, *(self.positional if self.prefill_takes == 3 else ())]

    def equal(self, stage: Stage, own: Mapping[str, Tensor], given: Collection[str] = ()) -> bool:
        """Whether all that the runtime made for `stage` is bit-equal to the reference's; it made nothing of `given`."""
        return all(name in given or self._bit_equal(name, own.get(name)) for name in self.names(stage))

    def _bit_equal(self, name: str, own: Tensor | None) -> bool:
        expected = self._expected(name)
        if own is None or own.shape != expected.shape or own.dtype != expected.dtype:
            return False
        own = own.to(expected.device)
        if name in self.positional:  # rows of padding are the runtime's own affair
            own, expected = (t.narrow(-2, 0, self.inputs.valid_length) for t in (own, expected))
        return torch.equal(own, expected)

    def _expected(self, name: str) -> Tensor:
        if name == "llm_input_ids":
            return self.inputs.llm_input_ids
        if name in self.positional:
            return self.positional[name]
        return padded_reference(self.reference, self.layout, name)


def positional_tensors(positional: MasksAndRope) -> dict[str, Tensor]:
    """Masks, biases and rotary tables under their trace names."""
    tensors = {f"mask/{layer_type}": mask for layer_type, mask in positional.masks.items()}
    tensors |= {f"mask_bias/{layer_type}": bias for layer_type, bias in positional.biases.items()}
    for layer_type, (cos, sin) in positional.rope.items():
        tensors |= {f"rope/{layer_type}/cos": cos, f"rope/{layer_type}/sin": sin}
    return tensors


def reuse(observation: Observation, stage: Stage) -> bool:
    """Takes what the run on its own yielded for `stage` as the isolated run's too; false if that was nothing."""
    own = {name: tensor for name, tensor in observation.accumulated.items() if is_of(name, stage)}
    observation.isolated |= own
    if own:
        observation.same.add(stage)
    return bool(own)


def is_of(name: str, stage: Stage) -> bool:
    """Whether the trace name is one of the stage's; names outside the contract are no stage's and are ignored."""
    try:
        return stage_of(name) is stage
    except KeyError:
        return False
