"""QuantizedGraphs: float graphs become graphs with quantize and dequantize ops, by PT2E.

A float graph is exported and prepared once for each kind and each set of input shapes, and copied for every layer of
that kind with the layer's own weights. Programs of one graph at several shapes (prefill, decode, other buffers) share
their observers, so that a value has the same scale in all of them.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torchao.quantization.pt2e.quantize_pt2e import prepare_pt2e

from g4conformance.errors import ConformanceError
from g4conformance.quantization.conversion import converted, run_by_torch
from g4conformance.quantization.parameters import Calibration, GraphQuantization, Quantization, read_graph
from g4conformance.quantization.quantizer import LinearQuantizer
from g4conformance.quantization.schemes import Scheme, coverage_of
from g4conformance.runtime.lowering import ByShape, Execute, Graph, Signature, signature_of

_OBSERVER = "activation_post_process_"


@dataclass
class QuantizedGraph:
    """One graph of the runtime. Calling it runs the program for the shapes of the inputs, made when first needed.

    Attributes:
        prepared: programs that observe, by signature; none once converted.
        converted: programs with quantize and dequantize ops, by signature.
        observers: what every program of this graph observes with, by the name of the submodule.
        integers: the quantized weights that its converted programs share, by the name of the float weight.
    """

    name: str
    graph: nn.Module
    owner: QuantizedGraphs
    prepared: dict[Signature, GraphModule] = field(default_factory=dict)
    converted: dict[Signature, GraphModule] = field(default_factory=dict)
    executed: dict[Signature, Graph] = field(default_factory=dict)
    observers: dict[str, nn.Module] = field(default_factory=dict)
    integers: dict[str, Tensor] = field(default_factory=dict)

    def __call__(self, *inputs: Any) -> Any:
        signature = signature_of(inputs)
        if self.owner.calibrating:
            if signature not in self.prepared:
                self.prepared[signature] = self._prepare(signature, inputs)
            return self.prepared[signature](*inputs)
        if signature not in self.executed:
            self._make(signature, inputs)
        return self.executed[signature](*inputs)

    def convert(self) -> None:
        """Every prepared program becomes a quantized one.

        Raises:
            ConformanceError: nothing was observed.
        """
        if not self.prepared:
            raise ConformanceError(
                f"a calibration case that reaches the graph {self.name!r}", "none", "Add one to the calibration cases."
            )
        for signature in list(self.prepared):  # one at a time: a program that was converted is let go of
            self.converted[signature] = converted(self.prepared.pop(signature), self.integers)

    def _make(self, signature: Signature, inputs: tuple[Any, ...]) -> None:
        """A program to run; at shapes that calibration did not meet, its observers are those of the other programs."""
        if signature not in self.converted:
            self.converted[signature] = converted(self._prepare(signature, inputs), self.integers)
        self.executed[signature] = self.owner.execute(self.name, self.converted[signature], inputs)

    def _prepare(self, signature: Signature, inputs: tuple[Any, ...]) -> GraphModule:
        program = self.owner.copy_for(self, signature, inputs)
        own = {name: module for name, module in program.named_children() if name.startswith(_OBSERVER)}
        if not self.observers:
            self.observers = own
        if own.keys() != self.observers.keys():
            raise RuntimeError(
                f"{self.name}: programs of two shapes observe {len(own)} and {len(self.observers)} values"
            )
        for name, observer in self.observers.items():
            setattr(program, name, observer)
        return program


class QuantizedGraphs:
    """Lowers graphs to a quantization scheme: observes until `convert`, runs quantized programs from then on.

    Implements `g4conformance.runtime.lowering.Lower`.
    """

    def __init__(self, scheme: Scheme, execute: Execute = run_by_torch) -> None:
        self.scheme, self.execute = scheme, execute
        self.calibrating = True
        self.calibration: Calibration | None = None
        self.graphs: dict[str, QuantizedGraph] = {}
        self._templates: dict[Any, GraphModule] = {}

    def __call__(self, name: str, graph: nn.Module) -> Graph:
        if not coverage_of(name).linears:
            return ByShape(name, graph, self.execute)
        return self.graphs.setdefault(name, QuantizedGraph(name, graph, self))

    def convert(self, calibration: Calibration | None = None) -> None:
        """Ends calibration: one graph at a time becomes quantized.

        Args:
            calibration: what the observers have seen, to be told with the scales.

        Raises:
            ConformanceError: calibration did not reach a graph.
        """
        self.calibration = calibration
        for graph in self.graphs.values():
            graph.convert()
        self.calibrating = False

    def copy_for(self, graph: QuantizedGraph, signature: Signature, inputs: tuple[Any, ...]) -> GraphModule:
        """A prepared program of the graph's kind with its own weights."""
        kind = _kind(graph.graph), signature
        if kind not in self._templates:
            self._templates[kind] = self._export(graph, inputs)
        return _with_tensors_of(self._templates[kind], graph.graph)

    def _export(self, graph: QuantizedGraph, inputs: tuple[Any, ...]) -> GraphModule:
        with torch.no_grad():
            exported = torch.export.export(graph.graph, inputs, strict=False).module()
            return prepare_pt2e(exported, LinearQuantizer(self.scheme, graph.name))

    def quantization(self, model: nn.Module) -> Quantization:
        """The scales and integers of the converted graphs, read anew; names are paths of `model`'s modules."""
        paths = {id(module): path for path, module in model.named_modules()}

        def read(graph: QuantizedGraph) -> GraphQuantization:
            program = next(iter(graph.converted.values()))
            return read_graph(program, lambda path: paths[id(graph.graph.get_submodule(path))])

        return Quantization(self.scheme, {name: read(graph) for name, graph in self.graphs.items()}, self.calibration)


def _kind(graph: nn.Module) -> Any:
    """Equal for graphs that differ in nothing but the values of their tensors."""
    return type(graph), tuple((name, tuple(t.shape), t.dtype) for name, t in _tensors(graph))


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return chain(module.named_parameters(), module.named_buffers())


def _with_tensors_of(template: GraphModule, graph: nn.Module) -> GraphModule:
    """A copy of the program that holds the graph's very tensors, not the template's, and observers of its own."""
    shared = {id(tensor): tensor for name, tensor in _tensors(template) if not name.startswith(_OBSERVER)}
    program = copy.deepcopy(template, shared)
    for name, tensor in _tensors(graph):
        holder, _, attribute = name.rpartition(".")
        try:
            module: Any = program.get_submodule(holder)
        except AttributeError:  # a tensor that the graph does not use is not in its program
            continue
        for kept in (module._parameters, module._buffers):
            if attribute in kept:
                kept[attribute] = tensor
    return program
