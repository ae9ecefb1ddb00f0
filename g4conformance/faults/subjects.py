"""Subjects: the checkpoints on which faults are planted, because no single one has every feature."""

from __future__ import annotations

from enum import StrEnum
from functools import cache

import torch

from g4conformance.checkpoints.checkpoint import Checkpoint, LoadOptions, load_checkpoint
from g4conformance.checkpoints.large_scores import large_scores_checkpoint
from g4conformance.checkpoints.seeded import SeededSpec, VisionSpec, seeded_checkpoint
from g4conformance.fixtures import bundled_checkpoint
from g4conformance.quantization.schemes import DEFAULT, NONE

_SEED = 7
_WINDOW = 32  # as the bundled checkpoint's, so that the bundled cases have their meaning


class Subject(StrEnum):
    """What a fault needs to be able to show; its value says so in a report."""

    BUNDLED = "nothing special"
    BFLOAT16 = "bfloat16"
    BIDIRECTIONAL = "bidirectional attention among image rows"
    K_EQ_V = "full layers with KV heads of their own number and without v_proj"
    STANDARDIZED = "standardised soft tokens"
    LARGE_SCORES = "attention scores of a hundred"
    QUANTIZED = "a quantized runtime (w8a16)"
    LARGE_VISION = "float16, and soft tokens beyond its range before they are standardised"


@cache
def subject_checkpoint(subject: Subject) -> Checkpoint:
    """The checkpoint of `subject`, made once a process."""
    if subject in (Subject.BUNDLED, Subject.BFLOAT16, Subject.QUANTIZED):
        return load_checkpoint(bundled_checkpoint(), LoadOptions(dtype=_dtype(subject)))
    if subject is Subject.LARGE_SCORES:
        return large_scores_checkpoint()
    spec = {
        Subject.BIDIRECTIONAL: SeededSpec(sliding_window=_WINDOW, use_bidirectional_attention="vision"),
        Subject.K_EQ_V: SeededSpec(
            sliding_window=_WINDOW, attention_k_eq_v=True, num_global_key_value_heads=3, num_attention_heads=6
        ),
        Subject.STANDARDIZED: SeededSpec(sliding_window=_WINDOW, vision=VisionSpec(standardize=True)),
        Subject.LARGE_VISION: SeededSpec(
            sliding_window=_WINDOW, vision=VisionSpec(standardize=True, use_clipped_linears=False)
        ),
    }[subject]
    checkpoint = seeded_checkpoint(spec, _SEED, LoadOptions(dtype=_dtype(subject)))
    if subject is Subject.LARGE_VISION:
        _enlarge_soft_tokens(checkpoint)
    return checkpoint


def subject_scheme(subject: Subject) -> str:
    """The quantization scheme of the runtime that the subject's faults are planted in."""
    return DEFAULT if subject is Subject.QUANTIZED else NONE


def _dtype(subject: Subject) -> str:
    return {Subject.BFLOAT16: "bfloat16", Subject.LARGE_VISION: "float16"}.get(subject, "float32")


def _enlarge_soft_tokens(checkpoint: Checkpoint) -> None:
    """Makes pooled features exceed 65,504, float16's largest number, and standardisation bring them back.

    The published 26B checkpoint has a `std_bias` of up to 5e4 (vllm-project/vllm#40290).
    """
    tower = checkpoint.model.model.vision_tower
    with torch.no_grad():
        tower.encoder.layers[-1].post_feedforward_layernorm.weight.mul_(5e3)
        tower.std_scale.mul_(1e-5)
