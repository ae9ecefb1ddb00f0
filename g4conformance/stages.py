"""The vocabulary: the eight stages in the order in which a runtime passes through them, and two groups behind them."""

from __future__ import annotations

from enum import StrEnum


class Stage(StrEnum):
    """One observation point of a Gemma 4 runtime; the last two are no stages, but groups of checks behind all of them.

    Self-consistency compares a runtime with itself and needs no reference. Quantization compares a quantized runtime
    with the floating-point reference. What a wrong stage breaks there is inherited.
    """

    BUILD_STATIC_INPUTS = "build_static_inputs"
    TOKEN_EMBEDDING = "token_embedding"
    VISION_PREFILL = "vision_prefill"
    MM_FUSION = "mm_fusion"
    MASKS_AND_ROPE = "masks_and_rope"
    PREFILL = "prefill"
    DECODE = "decode"
    GENERATION = "generation"
    SELF_CONSISTENCY = "self_consistency"
    QUANTIZATION = "quantization"


DEPENDS_ON: dict[Stage, tuple[Stage, ...]] = {
    Stage.BUILD_STATIC_INPUTS: (),
    Stage.TOKEN_EMBEDDING: (Stage.BUILD_STATIC_INPUTS,),
    Stage.VISION_PREFILL: (Stage.BUILD_STATIC_INPUTS,),
    Stage.MM_FUSION: (Stage.TOKEN_EMBEDDING, Stage.VISION_PREFILL),
    Stage.MASKS_AND_ROPE: (Stage.BUILD_STATIC_INPUTS,),
    Stage.PREFILL: (Stage.MM_FUSION, Stage.MASKS_AND_ROPE),
    Stage.DECODE: (Stage.PREFILL,),
    Stage.GENERATION: (Stage.DECODE,),
    Stage.SELF_CONSISTENCY: (Stage.GENERATION,),
    Stage.QUANTIZATION: (Stage.GENERATION,),
}

# A trace name belongs to the stage whose name it is, or whose prefix (ending in a slash) it starts with.
_TRACE_PREFIXES: dict[str, Stage] = {
    "input_ids": Stage.BUILD_STATIC_INPUTS,
    "llm_input_ids": Stage.BUILD_STATIC_INPUTS,
    "attention_mask": Stage.BUILD_STATIC_INPUTS,
    "valid_length": Stage.BUILD_STATIC_INPUTS,
    "pixel_values": Stage.BUILD_STATIC_INPUTS,
    "image_position_ids": Stage.BUILD_STATIC_INPUTS,
    "text_embeds": Stage.TOKEN_EMBEDDING,
    "pad_embed": Stage.TOKEN_EMBEDDING,
    "vision/": Stage.VISION_PREFILL,
    "visual_embeds": Stage.VISION_PREFILL,
    "fused_embeds": Stage.MM_FUSION,
    "mask/": Stage.MASKS_AND_ROPE,
    "mask_bias/": Stage.MASKS_AND_ROPE,
    "rope/": Stage.MASKS_AND_ROPE,
    "per_layer_inputs": Stage.PREFILL,
    "prefill/": Stage.PREFILL,
    "decode/": Stage.DECODE,
    "generation/": Stage.GENERATION,
    "self/": Stage.SELF_CONSISTENCY,
    "quantization/": Stage.QUANTIZATION,
    "float/": Stage.QUANTIZATION,
}


def upstream(stage: Stage) -> frozenset[Stage]:
    """Every stage whose fault `stage` could inherit."""
    direct = DEPENDS_ON[stage]
    return frozenset(direct).union(*(upstream(s) for s in direct))


def stage_of(trace_name: str) -> Stage:
    """The stage that yields the tensor of this trace name; KeyError for a name outside the contract."""
    for prefix, stage in _TRACE_PREFIXES.items():
        if trace_name == prefix or (prefix.endswith("/") and trace_name.startswith(prefix)):
            return stage
    raise KeyError(f"{trace_name!r} is not a trace name of the contract")
