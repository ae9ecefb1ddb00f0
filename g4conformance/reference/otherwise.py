"""What other code than the reference's own may compute otherwise: linear ops, and in a foreign runtime rotary angles.

Linear ops are summed in a wider dtype, and off by as much as executors are from each other. Angles are exact.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextRotaryEmbedding, Gemma4VisionRotaryEmbedding

from g4conformance.checkpoints.checkpoint import Checkpoint
from g4conformance.runtime.static import own_modules

WAY = "linear ops summed and rounded otherwise"
# Of a result's largest |value|. ONNX Runtime and Inductor were measured to differ from eager float graphs by up to 6e-6
# at values of up to 6, one layer at a time.
_JITTER = 2.0**-20


class OtherwiseLinear:
    """What a linear op computes with sums in a wider dtype and results off by a little; the same at every run."""

    def __init__(self) -> None:
        self.generator = torch.Generator()

    def __call__(self, values: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """As `functional.linear`, in the dtype of `values`."""
        wide = torch.float64 if values.dtype is torch.float32 else torch.float32
        result = functional.linear(values.to(wide), weight.to(wide), None if bias is None else bias.to(wide))
        self.generator.manual_seed(result.shape[-1])
        jitter = torch.rand(result.shape[-1], generator=self.generator, dtype=wide).to(result.device) * 2 - 1
        return (result + jitter * (_JITTER * result.abs().amax())).to(values.dtype)


def with_other_way(checkpoint: Checkpoint, foreign: bool = False) -> Checkpoint:
    """`checkpoint` whose noise counts how far another executor of its linear ops may be away.

    The shipped runtime's eager graphs call the very modules of the reference and need no such room.

    Args:
        foreign: whether the runtime has code of its own for everything, rotary tables too.
    """
    model: Any = own_modules(checkpoint.model)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            _compute_otherwise(module)
        elif foreign and isinstance(module, Gemma4TextRotaryEmbedding):
            _turn_exactly(module)
        elif foreign and isinstance(module, Gemma4VisionRotaryEmbedding):
            _turn_patches_exactly(module)
    name = "foreign" if foreign else "otherwise"
    return replace(checkpoint, other_ways={WAY: model}, digest=f"{checkpoint.digest}-{name}")


def _compute_otherwise(module: Any) -> None:
    linear = OtherwiseLinear()
    module.forward = lambda values: linear(values, module.weight, module.bias)


def _turn_exactly(module: Any) -> None:
    def forward(x: Tensor, position_ids: Tensor, layer_type: str) -> tuple[Tensor, Tensor]:
        base = module.config.rope_parameters[layer_type]["rope_theta"]
        frequencies = exact_frequencies(getattr(module, f"{layer_type}_inv_freq"), base)
        angles = position_ids[..., None].double() * frequencies
        angles, scaling = torch.cat([angles, angles], dim=-1), getattr(module, f"{layer_type}_attention_scaling")
        return (angles.cos() * scaling).to(x.dtype), (angles.sin() * scaling).to(x.dtype)

    module.forward = forward


def _turn_patches_exactly(module: Any) -> None:
    def forward(x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        angles = position_ids[..., None].double() * exact_frequencies(
            module.inv_freq, module.config.rope_parameters["rope_theta"]
        )
        cos, sin = (module.recomposition_frequencies(part) for part in (angles.cos(), angles.sin()))
        return (cos * module.attention_scaling).to(x.dtype), (sin * module.attention_scaling).to(x.dtype)

    module.forward = forward


def exact_frequencies(inv_freq: Tensor, base: float) -> Tensor:
    """`base ** -(k / n)` for each k of n in float64, and 0 where nothing rotates.

    float32 rounds the exponent, the power and the angle, which at position 75 adds up to 30 times its eps. Frequencies
    of another kind are taken as they are.
    """
    exponents = torch.arange(len(inv_freq), dtype=torch.float64, device=inv_freq.device) / len(inv_freq)
    exact = torch.where(inv_freq == 0, 0.0, base**-exponents)
    return exact if torch.allclose(exact, inv_freq.double(), rtol=1e-5) else inv_freq.double()
