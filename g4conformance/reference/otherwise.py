"""The reference computed otherwise: linear ops summed in a wider dtype, and off by as much as executors are from each
other; rotary tables in float64 of other frequencies.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from g4conformance.checkpoints.checkpoint import Checkpoint
from g4conformance.runtime.static import own_modules

WAY = "linear ops and rotary tables summed and rounded otherwise"
# Of a result's largest |value|. ONNX Runtime and Inductor were measured to differ from eager float graphs by up to 6e-6
# at values of up to 6, one layer at a time.
_JITTER = 2.0**-20
_ELEMENTS = 1 << 24  # of a weight that are widened at a time


class OtherwiseLinear:
    """What a linear op computes with sums in a wider dtype and results off by a little; the same at every run."""

    def __init__(self) -> None:
        self.generator = torch.Generator()

    def __call__(self, values: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """As `functional.linear`, in the dtype of `values`."""
        wide = torch.float64 if values.dtype is torch.float32 else torch.float32
        result = _product(values.to(wide), weight)
        if bias is not None:
            result += bias.to(wide)
        self.generator.manual_seed(result.shape[-1])
        jitter = torch.rand(result.shape[-1], generator=self.generator, dtype=wide).to(result.device) * 2 - 1
        return (result + jitter * (_JITTER * result.abs().amax())).to(values.dtype)


def _product(values: Tensor, weight: Tensor) -> Tensor:
    """values @ weight.T in the dtype of `values`; a large weight is widened some rows at a time, never as a whole."""
    pieces = weight.split(max(1, _ELEMENTS // weight.shape[1]))
    return torch.cat([functional.linear(values, piece.to(values.dtype)) for piece in pieces], dim=-1)


def with_other_way(checkpoint: Checkpoint) -> Checkpoint:
    """`checkpoint` whose noise counts how far another executor of its linear ops and rotary tables may be away.

    The shipped runtime's eager graphs call the very modules of the reference and need no such room.
    """
    model: Any = own_modules(checkpoint.model)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            _compute_otherwise(module)
    rotary, turned = model.model.language_model.rotary_emb, model.model.vision_tower.encoder.rotary_emb
    rotary.forward = lambda like, positions, layer_type: wide_rotary_tables(rotary, like, positions, layer_type)
    turned.forward = lambda like, positions: _wide_patch_tables(turned, like, positions)
    return replace(checkpoint, other_ways={WAY: model}, digest=f"{checkpoint.digest}-otherwise")


def _compute_otherwise(module: Any) -> None:
    linear = OtherwiseLinear()
    module.forward = lambda values: linear(values, module.weight, module.bias)


def wide_rotary_tables(rotary: Any, like: Tensor, positions: Tensor, layer_type: str) -> tuple[Tensor, Tensor]:
    """cos and sin [B, S, D] of positions [B, S], in float64 of frequencies that are off by an eps of float32.

    They are rounded to the dtype of `like`. Powers of another library may be off by so much, and so may angles that are
    rounded elsewhere. The tables differ by that times the position: the more, the longer the prompt.
    """
    angles = _wide_angles(positions, getattr(rotary, f"{layer_type}_inv_freq"))
    scale = getattr(rotary, f"{layer_type}_attention_scaling")
    doubled = torch.cat((angles, angles), dim=-1)
    return (doubled.cos() * scale).to(like.dtype), (doubled.sin() * scale).to(like.dtype)


def _wide_patch_tables(rotary: Any, like: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """The same of the vision tower's positions [B, N, 2]."""
    angles = _wide_angles(positions, rotary.inv_freq)
    cos, sin = (rotary.recomposition_frequencies(part) for part in (angles.cos(), angles.sin()))
    return (cos * rotary.attention_scaling).to(like.dtype), (sin * rotary.attention_scaling).to(like.dtype)


def _wide_angles(positions: Tensor, frequencies: Tensor) -> Tensor:
    return positions[..., None].double() * (frequencies.double() * (1 + torch.finfo(torch.float32).eps))
