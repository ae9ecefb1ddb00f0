"""Faults: what porters got wrong, put into a runtime to show that the suite notices."""

from g4conformance.faults.registry import FAULTS, At, Fault

# Importing a stage's module registers its faults, in the order of the stages.
from g4conformance.faults import (  # isort: skip
    build_static_inputs,
    token_embedding,
    vision_prefill,
    mm_fusion,
    masks_and_rope,
    per_layer_inputs,
    prefill,
    prefill_cache,
    decode,
    generation,
    self_consistency,
    small,
    quantization,
)

__all__ = ["FAULTS", "At", "Fault"]

del build_static_inputs, token_embedding, vision_prefill, mm_fusion, masks_and_rope, per_layer_inputs, prefill
del prefill_cache, decode, generation, self_consistency, small, quantization
