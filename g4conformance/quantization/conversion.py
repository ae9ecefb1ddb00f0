"""From a program that observes to one with quantize and dequantize ops and integer weights."""

from __future__ import annotations

import copy
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e

from g4conformance.quantization.parameters import (
    DEQUANTIZE,
    DEQUANTIZE_CHANNELS,
    QUANTIZE_CHANNELS,
    WeightQuantization,
    constant,
    is_op,
)
from g4conformance.runtime.lowering import Graph

_ELEMENTS = 1 << 24  # of a weight that are quantized at a time


def converted(prepared: GraphModule, integers: dict[str, Tensor]) -> GraphModule:
    """The quantized program of a prepared one, which is used up.

    Args:
        integers: weights that another program of the same graph has quantized, by the name of the float weight; those
            that are missing are quantized and put there, so that the programs of one graph share them.
    """
    program = convert_pt2e(prepared, fold_quantize=False)
    for node in list(program.graph.nodes):
        if is_op(node, QUANTIZE_CHANNELS):
            _fold(program, node, integers)
        elif is_op(node, DEQUANTIZE):
            _dequantize_in_float32(program, node)
    program.graph.eliminate_dead_code()
    program.recompile()
    return program


def _fold(program: GraphModule, node: Node, integers: dict[str, Tensor]) -> None:
    """Puts the integers of a weight in the place of the op that makes them.

    PT2E's own folding computes all that follows from constants, dequantized weights too, in float32 and as a whole:
    for the head of a large vocabulary, many times its bytes.
    """
    arguments: Any = node.args
    weight, scales, zero_points = arguments[:3]
    name = str(weight.target)
    if name not in integers:
        scale, zero_point = constant(program, scales.target), constant(program, zero_points.target)
        integers[name] = _quantized(node, constant(program, name), scale, zero_point)
    kept = name.replace(".", "_") + "_integers"
    program.register_buffer(kept, integers[name])
    with program.graph.inserting_before(node):
        folded = program.graph.get_attr(kept)
    folded.meta = dict(node.meta)
    node.replace_all_uses_with(folded)
    program.graph.erase_node(node)
    if not weight.users:
        program.graph.erase_node(weight)
        holder, _, attribute = name.rpartition(".")
        delattr(program.get_submodule(holder), attribute)


@torch.no_grad()
def _quantized(node: Node, weight: Tensor, scale: Tensor, zero_point: Tensor) -> Tensor:
    """What the op computes of a weight [out, in]: some output channels at a time, because it computes in float32."""
    axis, quant_min, quant_max, dtype = node.args[3:]
    if axis != 0:
        raise RuntimeError(f"weights are quantized along output channels, not along axis {axis}")
    op: Any = node.target
    parts = (tensor.split(max(1, _ELEMENTS // weight.shape[1])) for tensor in (weight, scale, zero_point))
    return torch.cat([op(*part, 0, quant_min, quant_max, dtype) for part in zip(*parts, strict=True)])


def _dequantize_in_float32(program: GraphModule, node: Node) -> None:
    """Lets an op dequantize in float32 and round once.

    PT2E dequantizes in the dtype of the model, `(q.to(dtype) - zero_point) * scale`: bfloat16 has 8 bits for an integer
    of 16.
    """
    dtype = node.kwargs.get("out_dtype", torch.float32)
    if dtype is torch.float32:
        return
    node.kwargs = {}
    with program.graph.inserting_after(node):
        cast = program.graph.call_function(torch.ops.aten.to.dtype, (node, dtype))
    node.replace_all_uses_with(cast, delete_user_cb=lambda user: user is not cast)


def run_by_torch(name: str, program: nn.Module, inputs: tuple[Any, ...]) -> Graph:
    """A float module as it is, and a copy of a quantized program that dequantizes weights some channels at a time.

    PT2E's op makes an int64 and a float32 of every integer on the way, 5 GB for the head of E2B. The values are equal.
    """
    if not isinstance(program, GraphModule):
        return program
    thrifty = copy.deepcopy(program, {id(tensor): tensor for tensor in chain(program.parameters(), program.buffers())})
    for node in thrifty.graph.nodes:
        if is_op(node, DEQUANTIZE_CHANNELS) and not constant(thrifty, node.args[2].target).any():
            node.target = _dequantized
    thrifty.recompile()
    return thrifty


def _dequantized(integers: Tensor, scales: Tensor, *_: Any, out_dtype: torch.dtype = torch.float32) -> Tensor:
    """As `quantized_decomposed.dequantize_per_channel` of a symmetric weight, whose zero points are zero."""
    return WeightQuantization(integers, scales).dequantized(out_dtype)
