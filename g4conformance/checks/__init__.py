"""The numbered checks, one module a stage, one for self-consistency and one for quantization.

A check is a statement about traces; it knows nothing of who made them.
"""

from g4conformance.checks.registry import CHECKS, Check, checks_of

# Importing a stage's module registers its checks, in the order of the stages.
from g4conformance.checks import (  # isort: skip
    build_static_inputs,
    token_embedding,
    vision_prefill,
    mm_fusion,
    masks_and_rope,
    prefill,
    decode,
    generation,
    self_consistency,
    refusals,
    quantization,
)

__all__ = ["CHECKS", "Check", "checks_of"]

del build_static_inputs, token_embedding, vision_prefill, mm_fusion, masks_and_rope, prefill, decode, generation
del self_consistency, refusals, quantization
