"""What a quantized runtime's scales and integers are, and what they should be, as tensors of a trace.

quantization/weight_error/<module> [out]    the channel's largest |dequantized - float|, in the float weight's steps
quantization/bits/<module> [3]              largest |integer| of the weight, levels - 1 of its input and of its output
quantization/grid/<module>/input|output [3], quantization/grid/<trace name> [3]    both ends of the grid, and its step
quantization/unequal_pairs [graphs]         dequantize ops that do not undo their quantize op
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from g4conformance.quantization.parameters import (
    ActivationQuantization,
    Quantization,
    WeightQuantization,
    quantizable,
)
from g4conformance.quantization.schemes import Scheme
from g4conformance.reference.ranges import Range

_PREFIX = "quantization/"
_CHANNELS = 1024  # of a weight that are looked at at a time


def observed_quantization(quantization: Quantization, model: nn.Module) -> dict[str, Tensor]:
    """What the runtime has; `model` is the float model, whose weights its integers stand for."""
    found = {}
    for path, linear in quantization.linears.items():
        weight = model.get_parameter(f"{path}.weight")
        found[f"{_PREFIX}weight_error/{path}"] = _weight_error(weight, linear.weight, quantization.scheme)
        largest = 0 if linear.weight is None else int(linear.weight.integers.abs().amax())
        found[f"{_PREFIX}bits/{path}"] = torch.tensor([largest, _levels(linear.input), _levels(linear.output)])
    for point, activation in _activations(quantization).items():
        found[f"{_PREFIX}grid/{point}"] = _grid(activation)
    found[f"{_PREFIX}unequal_pairs"] = torch.tensor([g.unequal_pairs for g in quantization.graphs.values()])
    return found


def expected_quantization(scheme: Scheme, model: nn.Module, ranges: Mapping[str, Range]) -> dict[str, Tensor]:
    """What a runtime of this scheme should have.

    Args:
        ranges: of the float model's activations on the calibration cases, by point: `<module>/input`, `<trace name>`.
    """
    bits = scheme.activation_bits
    levels = 0 if bits is None else 2**bits - 1
    found = {}
    for path, module in quantizable(model):
        found[f"{_PREFIX}weight_error/{path}"] = torch.zeros(module.out_features)
        output = 0 if path == "lm_head" else levels  # the head's own output is what its graph returns
        found[f"{_PREFIX}bits/{path}"] = torch.tensor([scheme.weight_max, levels, output])
    if bits is not None:
        for point, range_ in ranges.items():
            own = 2 ** (scheme.logits_bits if point == "logits" else bits) - 1
            found[f"{_PREFIX}grid/{point}"] = _grid_of(range_, own)
    return found


def _weight_error(weight: Tensor, quantized: WeightQuantization | None, scheme: Scheme) -> Tensor:
    """In float64, some channels at a time: a whole embedding table would be eight times as large."""
    if quantized is None:
        return weight.new_zeros(weight.shape[0])
    parts = (tensor.split(_CHANNELS) for tensor in (weight, quantized.integers, quantized.scale))
    found = []
    for rows, integers, scale in zip(*parts, strict=True):
        steps = rows.abs().amax(dim=1).double() / scheme.weight_max
        errors = (rows.double() - integers.double() * scale.double()[:, None]).abs().amax(dim=1)
        found.append(errors / steps.clamp(min=torch.finfo(torch.float32).tiny))
    return torch.cat(found)


def _levels(activation: ActivationQuantization | None) -> int:
    return 0 if activation is None else activation.quant_max - activation.quant_min


def _activations(quantization: Quantization) -> dict[str, ActivationQuantization]:
    points = dict(quantization.outputs)
    for path, linear in quantization.linears.items():
        for part, activation in (("input", linear.input), ("output", linear.output)):
            if activation is not None:
                points[f"{path}/{part}"] = activation
    return points


def _grid(activation: ActivationQuantization) -> Tensor:
    """The smallest and the largest value of the grid, and its step, float64 [3]."""
    low, high = (activation.scale * (q - activation.zero_point) for q in (activation.quant_min, activation.quant_max))
    return torch.tensor([low, high, activation.scale], dtype=torch.float64)


def _grid_of(range_: Range, levels: int) -> Tensor:
    """The grid for values of this range with so many steps from end to end: zero is always on it."""
    low, high = min(range_.low, 0.0), max(range_.high, 0.0)
    return torch.tensor([low, high, (high - low) / levels], dtype=torch.float64)
