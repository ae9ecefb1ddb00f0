"""The vocabulary of stages."""

from __future__ import annotations

import pytest

from g4conformance.stages import DEPENDS_ON, Stage, stage_of, upstream

from .recording import Recorded

pytestmark = pytest.mark.unit

BEHIND = {Stage.SELF_CONSISTENCY, Stage.QUANTIZATION}  # groups of checks behind all stages, beside each other


def test_every_stage_depends_on_earlier_ones_only() -> None:
    order = list(Stage)
    assert set(DEPENDS_ON) == set(order)
    for stage, before in DEPENDS_ON.items():
        assert all(order.index(other) < order.index(stage) for other in before)


@pytest.mark.parametrize(
    ("stage", "expected"),
    [
        (Stage.BUILD_STATIC_INPUTS, set()),
        (Stage.VISION_PREFILL, {Stage.BUILD_STATIC_INPUTS}),
        (Stage.MM_FUSION, {Stage.BUILD_STATIC_INPUTS, Stage.TOKEN_EMBEDDING, Stage.VISION_PREFILL}),
        (Stage.MASKS_AND_ROPE, {Stage.BUILD_STATIC_INPUTS}),
        (Stage.GENERATION, set(Stage) - {Stage.GENERATION, *BEHIND}),
        (Stage.SELF_CONSISTENCY, set(Stage) - BEHIND),
        (Stage.QUANTIZATION, set(Stage) - BEHIND),
    ],
)
def test_upstream(stage: Stage, expected: set[Stage]) -> None:
    assert upstream(stage) == expected


@pytest.mark.parametrize(
    ("name", "stage"),
    [
        ("input_ids", Stage.BUILD_STATIC_INPUTS),
        ("llm_input_ids", Stage.BUILD_STATIC_INPUTS),
        ("pad_embed", Stage.TOKEN_EMBEDDING),
        ("text_embeds", Stage.TOKEN_EMBEDDING),
        ("vision/layer/0/hidden", Stage.VISION_PREFILL),
        ("visual_embeds", Stage.VISION_PREFILL),
        ("fused_embeds", Stage.MM_FUSION),
        ("mask/sliding_attention", Stage.MASKS_AND_ROPE),
        ("mask_bias/full_attention", Stage.MASKS_AND_ROPE),
        ("rope/full_attention/cos", Stage.MASKS_AND_ROPE),
        ("per_layer_inputs", Stage.PREFILL),
        ("prefill/cache/0/key", Stage.PREFILL),
        ("decode/3/text_embeds", Stage.DECODE),
        ("decode/3/mask/full_attention", Stage.DECODE),
        ("generation/token_ids", Stage.GENERATION),
        ("self/base/prefill/logits", Stage.SELF_CONSISTENCY),
    ],
)
def test_a_trace_name_belongs_to_one_stage(name: str, stage: Stage) -> None:
    assert stage_of(name) is stage


@pytest.mark.parametrize("name", ["", "logits", "input_ids/0", "text_embeds_", "masks/full_attention", "vision"])
def test_names_outside_the_contract_are_refused(name: str) -> None:
    with pytest.raises(KeyError, match="not a trace name"):
        stage_of(name)


def test_every_recorded_tensor_belongs_to_a_stage(text: Recorded, image: Recorded) -> None:
    for recorded in (text, image):
        for tensors in (recorded.reference, recorded.observation.accumulated, recorded.observation.isolated):
            assert {stage_of(name) for name in tensors} <= set(Stage)
