"""Mistakes in a quantized runtime: in its scales, its integers, its rounding, or in what was lowered.

A program is never changed itself: a copy of it is, and stands in its place for a while.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from g4conformance.faults.patching import Patch
from g4conformance.faults.registry import At, fault
from g4conformance.faults.subjects import Subject
from g4conformance.quantization.graphs import QuantizedGraph
from g4conformance.quantization.parameters import (
    DEQUANTIZE,
    DEQUANTIZE_CHANNELS,
    QUANTIZE,
    before_cast,
    constant,
    is_op,
)
from g4conformance.stages import Stage

Edit = Callable[[GraphModule], None]
_fault = partial(fault, stage=Stage.QUANTIZATION, at=At.WEIGHTS, needs=Subject.QUANTIZED)
_TENTH = 1.1


# --- weights ----------------------------------------------------------------------------------------------------------


@_fault("weight-scale-10-percent", check="G4-QUANT-01")
def one_weight_scale_off(runtime: Any, patch: Patch) -> None:
    """The scales of one layer's q_proj are 10 % too large; the norm behind it hides that from every later tensor."""
    change_programs(patch, graph_of(runtime, "layer/1"), lambda program: scale_weight(program, "q_proj", _TENTH))


@_fault("weight-integers-off-by-one", check="G4-QUANT-01")
def integers_off_by_one(runtime: Any, patch: Patch) -> None:
    """One output channel of down_proj has integers that were rounded up where they should be rounded to nearest."""

    def round_up(program: GraphModule) -> None:
        integers, _ = weight_of(program, "down_proj")
        changed = constant(program, integers).clone()
        changed[3] = (changed[3] + 1).clamp(max=127)
        set_constant(program, integers, changed)

    change_programs(patch, graph_of(runtime, "layer/2"), round_up)


@_fault("weight-scale-per-tensor", check="G4-QUANT-01")
def one_scale_for_all_channels(runtime: Any, patch: Patch) -> None:
    """The weight of up_proj is quantized with the largest channel's scale for all of them."""

    def flatten(program: GraphModule) -> None:
        integers, scales = weight_of(program, "up_proj")
        weight = constant(program, integers).float() * constant(program, scales).float()[:, None]
        largest = constant(program, scales).amax()
        set_constant(program, integers, torch.round(weight / largest).to(torch.int8))
        set_constant(program, scales, largest.expand_as(constant(program, scales)).clone())

    change_programs(patch, graph_of(runtime, "layer/0"), flatten)


@_fault("weights-left-in-float", check="G4-QUANT-04")
def weight_not_quantized(runtime: Any, patch: Patch) -> None:
    """A wrapper in no-quantization mode: o_proj multiplies with its float weight, and nothing tells."""
    graph = graph_of(runtime, "layer/3")
    weight = graph.graph.get_parameter("layer.self_attn.o_proj.weight")

    def leave(program: GraphModule) -> None:
        node = linear_of(program, "o_proj")
        program.register_buffer("float_weight", weight)
        with program.graph.inserting_before(node):
            node.update_arg(1, program.graph.get_attr("float_weight"))

    change_programs(patch, graph, leave)


@_fault("weights-at-two-bits", check="G4-QUANT-08", at=At.WEIGHTS)
def head_at_two_bits(runtime: Any, patch: Patch) -> None:
    """The head's integers keep only their two highest bits."""

    def coarsen(program: GraphModule) -> None:
        integers, _ = weight_of(program, "lm_head")
        values = constant(program, integers).float()
        set_constant(program, integers, (torch.round(values / 64) * 64).clamp(-127, 127).to(torch.int8))

    change_programs(patch, graph_of(runtime, "head"), coarsen)


# --- activations ------------------------------------------------------------------------------------------------------


@_fault("activation-scale-10-percent", check="G4-QUANT-02")
def one_activation_scale_off(runtime: Any, patch: Patch) -> None:
    """What one layer returns has a scale that is 10 % too large, in quantize and dequantize alike."""
    change_programs(patch, graph_of(runtime, "layer/4"), lambda program: rescale(returned_pair(program), _TENTH))


@_fault("activation-scales-swapped", check="G4-QUANT-02")
def scales_of_two_layers_swapped(runtime: Any, patch: Patch) -> None:
    """Two layers return their hidden states with each other's scale, as when encodings are matched by position."""
    first, second = graph_of(runtime, "layer/0"), graph_of(runtime, "layer/4")
    scales = [returned_scale(graph) for graph in (first, second)]
    change_programs(patch, first, lambda program: rescale(returned_pair(program), scales[1] / scales[0]))
    change_programs(patch, second, lambda program: rescale(returned_pair(program), scales[0] / scales[1]))


@_fault("mask-in-the-observers", check="G4-QUANT-02", source="Samsung/TICO/pull/910")
def mask_fill_observed(runtime: Any, patch: Patch) -> None:
    """An observer has seen the mask's fill, and the values of attention share one step of its huge range."""
    change_programs(patch, graph_of(runtime, "layer/2"), lambda program: rescale(input_pair(program, "o_proj"), 1e6))


@_fault("dequantize-scale-10-percent", stage=Stage.PREFILL, check="G4-QUANT-03")
def dequantized_with_another_scale(runtime: Any, patch: Patch) -> None:
    """What enters down_proj is dequantized with a scale that is 10 % larger than it was quantized with."""
    change_programs(
        patch, graph_of(runtime, "layer/1"), lambda program: rescale(input_pair(program, "down_proj")[1:], _TENTH)
    )


@_fault("outliers-clipped", check="G4-QUANT-05")
def outliers_clipped(runtime: Any, patch: Patch) -> None:
    """The range of one layer's hidden state was chosen by a percentile, and its outliers are clipped to an eighth."""
    change_programs(patch, graph_of(runtime, "layer/4"), lambda program: rescale(returned_pair(program), 1 / 8))


@_fault("calibrated-on-one-token", check="G4-QUANT-06")
def calibrated_on_too_little(runtime: Any, patch: Patch) -> None:
    """Every layer's range is half of what it should be, as when calibration has seen a single token."""
    for graph in layers_of(runtime):
        change_programs(patch, graph, lambda program: rescale(returned_pair(program), 1 / 2))


@_fault("cache-clipped", check="G4-QUANT-07")
def cache_clipped(runtime: Any, patch: Patch) -> None:
    """K and V of the cache are clipped to a sixteenth of their ranges."""
    for graph in layers_of(runtime, storing=True):
        change_programs(
            patch, graph, lambda program: rescale([*returned_pair(program, 1), *returned_pair(program, 2)], 1 / 16)
        )


@_fault("hidden-at-two-bits", check="G4-QUANT-09")
def hidden_at_two_bits(runtime: Any, patch: Patch) -> None:
    """Every layer returns its hidden state with a step that is 16,384 times as large: two bits of sixteen."""
    for graph in layers_of(runtime):
        change_programs(patch, graph, lambda program: rescale(returned_pair(program), 16384.0))


@_fault("logits-at-four-bits", check="G4-QUANT-10")
def logits_at_four_bits(runtime: Any, patch: Patch) -> None:
    """The logits have four bits of their sixteen, so that candidates are tied."""
    change_programs(patch, graph_of(runtime, "head"), lambda program: rescale(returned_pair(program), 4096.0))


@_fault("hidden-clipped", check="G4-QUANT-11")
def hidden_clipped(runtime: Any, patch: Patch) -> None:
    """Every layer's hidden state is clipped to a sixteenth of its range."""
    for graph in layers_of(runtime):
        change_programs(patch, graph, lambda program: rescale(returned_pair(program), 1 / 16))


# --- rounding and lowering --------------------------------------------------------------------------------------------


@_fault(
    "vision-residual-lowered-twice",
    stage=Stage.VISION_PREFILL,
    at=At.GRAPH,
    check="G4-VISION-05",
    case="image-first",
)
def vision_residual_added_twice(runtime: Any, patch: Patch) -> None:
    """One encoder layer was lowered with its last residual addition done twice."""
    change_programs(patch, graph_of(runtime, "vision/layer/1"), add_twice)


@_fault("vision-truncated", stage=Stage.VISION_PREFILL, at=At.GRAPH, check="G4-VISION-06", case="image-first")
def vision_rounds_down(runtime: Any, patch: Patch) -> None:
    """One encoder layer rounds what it returns down, not to nearest."""
    change_programs(patch, graph_of(runtime, "vision/layer/1"), truncate)


@_fault("residual-lowered-twice", stage=Stage.PREFILL, at=At.GRAPH, check="G4-PREFILL-07")
def residual_added_twice(runtime: Any, patch: Patch) -> None:
    """One decoder layer was lowered with its last residual addition done twice."""
    change_programs(patch, graph_of(runtime, "layer/1"), add_twice)


@_fault("gelu-lowered-exact", stage=Stage.PREFILL, at=At.GRAPH, check="G4-PREFILL-08")
def gelu_exact(runtime: Any, patch: Patch) -> None:
    """One decoder layer was lowered with GELU itself in place of its tanh approximation."""
    change_programs(patch, graph_of(runtime, "layer/1"), exact_gelu)


@_fault("hidden-truncated", stage=Stage.PREFILL, at=At.GRAPH, check="G4-PREFILL-08")
def layer_rounds_down(runtime: Any, patch: Patch) -> None:
    """One decoder layer rounds what it returns down, not to nearest."""
    change_programs(patch, graph_of(runtime, "layer/1"), truncate)


@_fault("decode-program-scale-10-percent", stage=Stage.DECODE, check="G4-DECODE-11")
def decode_program_has_other_weights(runtime: Any, patch: Patch) -> None:
    """Only the decode program of one layer has weight scales that are 10 % too large, those of gate_proj."""
    change_programs(
        patch, graph_of(runtime, "layer/1"), lambda program: scale_weight(program, "gate_proj", _TENTH), rows=1
    )


@_fault("decode-truncated", stage=Stage.DECODE, at=At.GRAPH, check="G4-DECODE-12")
def decode_rounds_down(runtime: Any, patch: Patch) -> None:
    """Only the decode programs round what a layer returns down, not to nearest."""
    for graph in layers_of(runtime):
        change_programs(patch, graph, truncate, rows=1)


# --- how to change a program ------------------------------------------------------------------------------------------


def graph_of(runtime: Any, name: str) -> QuantizedGraph:
    """AttributeError for a runtime whose graphs are not quantized."""
    graph: QuantizedGraph = runtime.lower.graphs[name]
    return graph


def layers_of(runtime: Any, storing: bool = False) -> Iterator[QuantizedGraph]:
    """Every decoder layer's graph, or only those that store K/V."""
    for spec in runtime.specs:
        if spec.stores_kv or not storing:
            yield graph_of(runtime, f"layer/{spec.index}")


def change_programs(patch: Patch, graph: QuantizedGraph, edit: Edit, rows: int | None = None) -> None:
    """Edited copies stand in the place of the graph's programs: of all, or of those whose input has so many rows."""

    def edited(signature: Any, program: GraphModule) -> GraphModule:
        if rows is not None and signature[0][0][1] != rows:
            return program
        shared = {id(tensor): tensor for tensor in chain(program.parameters(), program.buffers())}
        changed = copy.deepcopy(program, shared)
        edit(changed)
        changed.recompile()
        return changed

    patch(graph, "converted", {signature: edited(signature, p) for signature, p in graph.converted.items()})
    patch(graph, "executed", {})


def linear_of(program: GraphModule, name: str) -> Node:
    """The linear op of the module whose path ends with `name`."""
    for node in program.graph.nodes:
        if node.target is torch.ops.aten.linear.default and _path(node).endswith(name):
            return node
    raise AttributeError(f"the graph has no linear op {name}")


def weight_of(program: GraphModule, name: str) -> tuple[str, str]:
    """The attributes that hold the integers and the scales of a linear op's weight."""
    dequantize: Any = linear_of(program, name).args[1]
    assert is_op(dequantize, DEQUANTIZE_CHANNELS)
    integers, scales = dequantize.args[:2]
    return str(integers.target), str(scales.target)


def set_constant(program: GraphModule, name: str, tensor: Tensor) -> None:
    home: Any = program._buffers if name in program._buffers else program._parameters
    home[name] = tensor if home is program._buffers else torch.nn.Parameter(tensor, requires_grad=False)


def scale_weight(program: GraphModule, name: str, factor: float) -> None:
    _, scales = weight_of(program, name)
    set_constant(program, scales, constant(program, scales) * factor)


def returned_pair(program: GraphModule, index: int = 0) -> list[Node]:
    """The quantize and the dequantize op of one tensor that the graph returns."""
    output = next(node for node in program.graph.nodes if node.op == "output")
    return _pair(output.args[0][index])


def input_pair(program: GraphModule, name: str) -> list[Node]:
    """The quantize and the dequantize op of what enters a linear op."""
    return _pair(linear_of(program, name).args[0])


def _pair(value: Any) -> list[Node]:
    dequantize = before_cast(value)
    assert is_op(dequantize, DEQUANTIZE)
    assert is_op(dequantize.args[0], QUANTIZE)
    return [dequantize.args[0], dequantize]


def returned_scale(graph: QuantizedGraph) -> float:
    scale: Any = returned_pair(next(iter(graph.converted.values())))[0].args[1]
    return float(scale)


def rescale(nodes: Sequence[Node], factor: float) -> None:
    """Multiplies the scale of these quantize and dequantize ops; the zero point stays."""
    for node in nodes:
        scale: Any = node.args[1]
        node.update_arg(1, scale * factor)


def exact_gelu(program: GraphModule) -> None:
    for node in program.graph.nodes:
        if node.target is torch.ops.aten.gelu.default:
            node.kwargs = {"approximate": "none"}


def add_twice(program: GraphModule) -> None:
    """Adds the branch that the last residual addition adds once more."""
    last = [node for node in program.graph.nodes if node.target is torch.ops.aten.add.Tensor][-1]
    with program.graph.inserting_after(last):
        again = program.graph.call_function(torch.ops.aten.add.Tensor, (last, last.args[1]))
    last.replace_all_uses_with(again, delete_user_cb=lambda user: user is not again)


def truncate(program: GraphModule) -> None:
    """Takes half a step off what is returned first, before it is rounded to nearest."""
    quantize, _ = returned_pair(program)
    value, scale = quantize.args[:2]
    with program.graph.inserting_before(quantize):
        lower = program.graph.call_function(torch.ops.aten.sub.Tensor, (value, scale / 2))  # type: ignore[operator]
    quantize.update_arg(0, lower)


def _path(node: Node) -> str:
    path, _ = list(node.meta["nn_module_stack"].values())[-1]
    return str(path)
