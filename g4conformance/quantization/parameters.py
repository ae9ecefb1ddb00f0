"""The scales and integers of quantized graphs, read from their programs."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from g4conformance.quantization.schemes import Scheme
from g4conformance.reference.ranges import Range
from g4conformance.runtime.contract import StaticInputs
from g4conformance.runtime.layout import StaticLayout

# By name: these ops do not exist before torchao is imported, and reading a graph does not need it.
QUANTIZE = "quantized_decomposed.quantize_per_tensor.default"
DEQUANTIZE = "quantized_decomposed.dequantize_per_tensor.default"
QUANTIZE_CHANNELS = "quantized_decomposed.quantize_per_channel.default"
DEQUANTIZE_CHANNELS = "quantized_decomposed.dequantize_per_channel.default"
CAST = "aten.to.dtype"
_CHANNELS = 8192


@dataclass(frozen=True)
class CalibrationRequest:
    """One calibration case as a runtime gets it: the request and the tokens to decode behind it."""

    layout: StaticLayout
    inputs: StaticInputs
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class Calibration:
    """What the float model says about the calibration cases.

    Attributes:
        ranges: of every activation that a scheme may quantize, by point: `<module>/input`, `<module>/output`, or the
            trace name, without prefill or decode step, of what a graph returns.
    """

    requests: tuple[CalibrationRequest, ...]
    ranges: Mapping[str, Range]


@dataclass(frozen=True)
class ActivationQuantization:
    """How one tensor is quantized: q = clamp(round(x / scale) + zero_point), x' = (q - zero_point) * scale.

    The formula is that of `torch.ops.quantized_decomposed.quantize_per_tensor`, which multiplies with 1 / scale.
    """

    scale: float
    zero_point: int
    quant_min: int
    quant_max: int

    def fake_quantized(self, values: Tensor) -> Tensor:
        """`values` on the grid, in their own dtype; computed in float32."""
        q = torch.round(values.float() * (1.0 / self.scale)) + self.zero_point
        return ((q.clamp(self.quant_min, self.quant_max) - self.zero_point) * self.scale).to(values.dtype)


@dataclass(frozen=True)
class WeightQuantization:
    """Integers [out, in] and a scale for each output channel, [out]."""

    integers: Tensor
    scale: Tensor

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """The weight that a linear op computes with: [out, in].

        Some channels at a time: in float32, a whole head of a large vocabulary is four times as large as its integers.
        """
        weight = torch.empty(self.integers.shape, dtype=dtype, device=self.integers.device)
        parts = (tensor.split(_CHANNELS) for tensor in (weight, self.integers, self.scale))
        for rows, integers, scale in zip(*parts, strict=True):
            rows.copy_(integers.float() * scale.float()[:, None])
        return weight


@dataclass(frozen=True)
class LinearQuantization:
    """What surrounds one linear op; None where a value stays in floating point."""

    weight: WeightQuantization | None
    input: ActivationQuantization | None
    output: ActivationQuantization | None


@dataclass(frozen=True)
class GraphQuantization:
    """What is quantized in one graph.

    Attributes:
        linears: by the path of the module in the Hugging Face model.
        outputs: of each tensor that the graph returns.
        quantize_ops, dequantize_ops: how many the program has.
        unequal_pairs: dequantize ops that do not undo their quantize op: other scale, zero point or bounds.
    """

    linears: Mapping[str, LinearQuantization]
    outputs: tuple[ActivationQuantization | None, ...]
    quantize_ops: int
    dequantize_ops: int
    unequal_pairs: int


@dataclass(frozen=True)
class Quantization:
    """All that a quantized runtime's graphs hold, by the graph's name.

    `calibration` is what the float model said of the cases on which it was calibrated, where that is known.
    """

    scheme: Scheme
    graphs: Mapping[str, GraphQuantization]
    calibration: Calibration | None = None

    @property
    def linears(self) -> dict[str, LinearQuantization]:
        """Every quantized linear op by the path of its module."""
        return {path: linear for graph in self.graphs.values() for path, linear in graph.linears.items()}

    @property
    def outputs(self) -> dict[str, ActivationQuantization]:
        """How each returned tensor is quantized, by its trace name without prefill or decode step."""
        found = {}
        for name, graph in self.graphs.items():
            for output, quantization in zip(output_names(name), graph.outputs, strict=False):
                if quantization is not None:
                    found[output] = quantization
        return found

    @property
    def digest(self) -> str:
        """Of every scale and zero point, and so of everything but the weights, which the checkpoint's digest covers."""
        lines = [f"{path} {linear.input} {linear.output}" for path, linear in sorted(self.linears.items())]
        lines += [f"{name} {output}" for name, output in sorted(self.outputs.items())]
        for path, linear in sorted(self.linears.items()):
            lines.append(f"{path} {linear.weight and linear.weight.scale.double().sum().item()}")
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def output_names(graph: str) -> tuple[str, ...]:
    """Trace names, without prefill or decode step, of what the graph of this name returns."""
    if graph.startswith("layer/"):
        return f"{graph}/hidden", f"{graph}/key", f"{graph}/value"
    if graph.startswith("vision/layer/"):
        return (f"{graph}/hidden",)
    return ("logits",) if graph == "head" else (graph,)


def quantizable(model: nn.Module) -> list[tuple[str, nn.Linear]]:
    """Every linear op of the decoder, the head and the vision tower, with its path; audio is no part of the runtime."""
    return [
        (path, module)
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear) and "audio" not in path
    ]


def read_graph(program: GraphModule, path_of: Callable[[str], str]) -> GraphQuantization:
    """What is quantized in a converted program.

    Args:
        path_of: from the path of a submodule in the exported graph to its path in the Hugging Face model.
    """
    nodes = list(program.graph.nodes)
    linear_nodes = [node for node in nodes if node.target is torch.ops.aten.linear.default]
    returned = next(node for node in nodes if node.op == "output").args[0]
    return GraphQuantization(
        linears={path_of(_module_path(node)): _linear(program, node) for node in linear_nodes},
        outputs=tuple(_quantization_of(node) for node in returned),
        quantize_ops=sum(is_op(node, QUANTIZE) for node in nodes),
        dequantize_ops=sum(is_op(node, DEQUANTIZE, DEQUANTIZE_CHANNELS) for node in nodes),
        unequal_pairs=sum(_is_unequal(node) for node in nodes),
    )


def is_op(value: Any, *ops: str) -> bool:
    """Whether a node's argument is the result of one of these ops."""
    return isinstance(value, Node) and str(value.target) in ops


def _linear(program: GraphModule, node: Node) -> LinearQuantization:
    arguments: Any = node.args
    activation, weight = arguments[:2]
    quantizers = [user for user in node.users if is_op(user, QUANTIZE)]
    return LinearQuantization(
        weight=_weight(program, weight),
        input=_quantization_of(activation),
        output=_activation(quantizers[0]) if quantizers else None,
    )


def _weight(program: GraphModule, value: Any) -> WeightQuantization | None:
    if not is_op(value, DEQUANTIZE_CHANNELS):
        return None
    integers, scale = (constant(program, argument.target) for argument in value.args[:2])
    return None if integers.dtype.is_floating_point else WeightQuantization(integers, scale)


def _quantization_of(value: Any) -> ActivationQuantization | None:
    """How a node's value was quantized before it was dequantized by the node."""
    dequantize = before_cast(value)
    return _activation(dequantize) if is_op(dequantize, DEQUANTIZE) else None


def before_cast(value: Any) -> Any:
    """What a node casts to another dtype; the node itself if it casts nothing."""
    return value.args[0] if is_op(value, CAST) else value


def _activation(node: Node) -> ActivationQuantization:
    arguments: Any = node.args[1:5]
    scale, zero_point, quant_min, quant_max = arguments
    return ActivationQuantization(float(scale), int(zero_point), int(quant_min), int(quant_max))


def _is_unequal(node: Node) -> bool:
    if not is_op(node, DEQUANTIZE):
        return False
    source: Any = node.args[0]
    return not (is_op(source, QUANTIZE) and source.args[1:] == node.args[1:])


def constant(program: GraphModule, name: Any) -> Tensor:
    """The tensor that a program holds under the name, which may lie in a submodule."""
    tensor: Tensor = operator.attrgetter(name)(program)
    return tensor


def _module_path(node: Node) -> str:
    """The path of the module that called the op, in the exported graph."""
    path, _ = list(node.meta["nn_module_stack"].values())[-1]
    return str(path)
