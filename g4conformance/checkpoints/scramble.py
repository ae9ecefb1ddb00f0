"""Moves every parameter that Hugging Face initialises neutrally away from its neutral value.

A fresh Gemma 4 has unit norm weights and layer scalars, a position table of ones, infinite clip bounds and a zero pad
row. On such a model a runtime that forgets any of them is still right, so no checkpoint may be judged on it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers.models.gemma4.modeling_gemma4 import (
    Gemma4ClippableLinear,
    Gemma4ForConditionalGeneration,
    Gemma4RMSNorm,
    Gemma4TextDecoderLayer,
    Gemma4TextScaledWordEmbedding,
    Gemma4VisionModel,
    Gemma4VisionPatchEmbedder,
)

_ROWS_FOR_STD = 4096  # as good as all of them, and of a table of gigabytes at hand at once


def scramble_neutral_parameters(model: Gemma4ForConditionalGeneration, seed: int) -> None:
    """Draws norm weights, layer scalars, position table, clip bounds, standardisation and pad rows from `seed`.

    Works in place, in the model's own dtypes. Norm weights of queries and keys stay below one so that attention, whose
    scale is 1.0, does not saturate.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, module in model.named_modules():
            _scramble_module(name, module, generator)


def _scramble_module(name: str, module: nn.Module, generator: torch.Generator) -> None:
    if isinstance(module, Gemma4RMSNorm) and module.with_scale:
        low, high = (0.35, 0.65) if name.endswith(("q_norm", "k_norm")) else (0.6, 1.4)
        _fill(module.weight, low, high, generator)
    elif isinstance(module, Gemma4TextDecoderLayer):
        _fill(module.layer_scalar, 0.4, 0.95, generator)
    elif isinstance(module, Gemma4VisionPatchEmbedder):
        _fill(module.position_embedding_table, -1.0, 1.0, generator)
    elif isinstance(module, Gemma4ClippableLinear) and module.use_clipped_linears:
        _scramble_clip_bounds(module, generator)
    elif isinstance(module, Gemma4TextScaledWordEmbedding):
        std = float(module.weight[:_ROWS_FOR_STD].std())
        module.weight[module.padding_idx].copy_(torch.randn(module.weight.shape[1], generator=generator) * std)
    elif isinstance(module, Gemma4VisionModel) and module.config.standardize:
        _fill(module.std_bias, -2.0, 2.0, generator)
        _fill(module.std_scale, 0.5, 1.5, generator)


def _scramble_clip_bounds(module: Gemma4ClippableLinear, generator: torch.Generator) -> None:
    """Bounds near one standard deviation of a normalised input: each of the four clips some value of any picture."""
    _fill(module.input_min, -1.6, -1.0, generator)
    _fill(module.input_max, 1.0, 1.6, generator)
    _fill(module.output_min, -1.2, -0.6, generator)
    _fill(module.output_max, 0.6, 1.2, generator)


def _fill(tensor: Tensor, low: float, high: float, generator: torch.Generator) -> None:
    tensor.copy_(torch.rand(tensor.shape, generator=generator) * (high - low) + low)
