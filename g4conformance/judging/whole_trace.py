"""Observation of a whole trace: what a runtime that cannot be driven stage by stage has yielded of one case.

Such a runtime is given the reference's inputs of the first stages and the tokens to decode, and runs once. Its trace is
the run on its own. It stands for isolation too at each stage whose inputs were the reference's: given, or made by the
runtime itself and bit-equal. At all other stages the trace is judged in accumulation only.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from g4conformance.checkpoints.facts import ModelFacts
from g4conformance.expected import scripted_logits
from g4conformance.judging.given import GivenInputs, reuse
from g4conformance.judging.observation import Observation
from g4conformance.judging.padding import lacks_padding
from g4conformance.prompts import ResolvedCase
from g4conformance.stages import Stage

_GIVEN = ("llm_input_ids", "pixel_values", "image_position_ids")
_MAY_BE_ALONE = (
    Stage.TOKEN_EMBEDDING,
    Stage.VISION_PREFILL,
    Stage.MM_FUSION,
    Stage.MASKS_AND_ROPE,
    Stage.PREFILL,
)


def observation_of(
    trace: Mapping[str, Tensor], case: ResolvedCase, reference: Mapping[str, Tensor], facts: ModelFacts
) -> Observation:
    """What `trace` tells about the runtime that yielded it.

    Args:
        trace: tensors under trace names; of the reference's dtype or wider, in the shape of the static buffers or with
            the prompt's rows only.
    """
    own = {name: _narrowed(tensor, reference.get(name)) for name, tensor in trace.items()}
    length, max_seq = int(reference["valid_length"]), case.request.layout.max_seq
    unpadded = frozenset(name for name, tensor in own.items() if lacks_padding(name, tensor, length, max_seq))
    observation = Observation(accumulated=own, teacher_forced=True, unpadded=unpadded)
    reuse(observation, Stage.BUILD_STATIC_INPUTS)
    given = GivenInputs(reference, case.request.layout, facts)
    entered = _given(given) | own
    for stage in _MAY_BE_ALONE:
        if _concerns(stage, case) and given.equal(stage, entered):
            reuse(observation, stage)
    observation.own_only = set(Stage) - observation.same
    if selected := {name: tensor for name, tensor in own.items() if name.startswith("generation/select/")}:
        observation.isolated |= {"generation/select/logits": scripted_logits(reference, facts), **selected}
    return observation


def failed(reason: str) -> Observation:
    """Of a runtime that has yielded nothing, and why."""
    return Observation(errors={None: reason}, own_only=set(Stage))


def _concerns(stage: Stage, case: ResolvedCase) -> bool:
    return stage not in (Stage.VISION_PREFILL, Stage.MM_FUSION) or case.request.layout.num_visual_tokens > 0


def _given(given: GivenInputs) -> dict[str, Tensor]:
    """What the runtime was given, and uses unless it yields its own."""
    inputs = {name: getattr(given.inputs, name) for name in _GIVEN}
    return {name: tensor for name, tensor in inputs.items() if tensor is not None} | {
        "valid_length": given.reference["valid_length"]
    }


def _narrowed(tensor: Tensor, like: Tensor | None) -> Tensor:
    """In the reference's dtype, if nothing is lost: bfloat16 comes as float32 from who has no bfloat16."""
    if like is None or bool in (_kind(tensor), _kind(like)) or _kind(tensor) is not _kind(like):
        return tensor
    narrow = tensor.to(like.dtype)
    return narrow if torch.equal(narrow.to(tensor.dtype), tensor) else tensor


def _kind(tensor: Tensor) -> type:
    return bool if tensor.dtype == torch.bool else float if tensor.is_floating_point() else int
