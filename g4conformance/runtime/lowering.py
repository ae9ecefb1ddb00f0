"""What becomes of a runtime's graphs before they are run: the seam for quantization schemes and executors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

Graph = Callable[..., Any]
# Takes a graph's name and its float module, and returns what is called in its place. The name says all that tells two
# graphs of one checkpoint apart: "layer/3", "head", "vision/layer/0", "fusion/4-13".
Lower = Callable[[str, nn.Module], Graph]


def as_it_is(name: str, graph: nn.Module) -> Graph:
    """The float module itself, run eagerly."""
    return graph


Signature = tuple[Any, ...]
# Makes the callable that an executor runs for a graph's program: its name, module and example inputs.
Execute = Callable[[str, nn.Module, tuple[Any, ...]], Graph]


def run_eagerly(name: str, program: nn.Module, inputs: tuple[Any, ...]) -> Graph:
    """The program itself."""
    return program


def signature_of(inputs: tuple[Any, ...]) -> Signature:
    """What a fixed-shape program is made for: shape and dtype of each input."""
    return tuple(None if tensor is None else (tuple(tensor.shape), tensor.dtype) for tensor in inputs)


class ByShape:
    """A graph that an executor runs: one program for each set of input shapes, made when first called."""

    def __init__(self, name: str, graph: nn.Module, execute: Execute) -> None:
        self.name, self.graph, self.execute = name, graph, execute
        self.programs: dict[Signature, Graph] = {}

    def __call__(self, *inputs: Any) -> Any:
        signature = signature_of(inputs)
        if signature not in self.programs:
            self.programs[signature] = self.execute(self.name, self.graph, inputs)
        return self.programs[signature](*inputs)


def executed_by(execute: Execute) -> Lower:
    """Lowers float graphs to what an executor runs."""
    return lambda name, graph: ByShape(name, graph, execute)
