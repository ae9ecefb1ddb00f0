"""What executors share: exporting a graph without its None inputs, and giving results back in its structure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from g4conformance.executors.registry import Lowered, Outputs


@dataclass(frozen=True)
class Program:
    """An exported graph of tensors only, and whether it returns a Tensor rather than a tuple."""

    exported: ExportedProgram
    returns_tensor: bool


class _TensorsOnly(nn.Module):
    """A graph without its None inputs, which not every executor can be given."""

    def __init__(self, module: nn.Module, given: tuple[bool, ...]) -> None:
        super().__init__()
        self.module, self.given = module, given

    def forward(self, *tensors: Tensor) -> Outputs:
        left = iter(tensors)
        return self.module(*(next(left) if given else None for given in self.given))


def export_program(module: nn.Module, example_inputs: tuple[Any, ...]) -> Program:
    """Exports a graph at the shapes of its example inputs; they are traced through, not run."""
    wrapped = _TensorsOnly(module, tuple(value is not None for value in example_inputs))
    with torch.no_grad():
        exported = torch.export.export(wrapped, tensors_of(example_inputs), strict=False)
    return Program(exported, exported.call_spec.out_spec.is_leaf())


def tensors_of(inputs: Sequence[Any]) -> tuple[Tensor, ...]:
    """The inputs that are not None, each dense: ExecuTorch takes no slice, and Inductor only one with equal strides."""
    return tuple(value.contiguous() for value in inputs if value is not None)


def as_tuple(outputs: Outputs) -> tuple[Tensor, ...]:
    return (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)


def as_callable(run: Callable[[tuple[Tensor, ...]], Sequence[Tensor]], returns_tensor: bool) -> Lowered:
    """Positional inputs, None among them, to a Tensor or a tuple, whichever the graph returns."""

    def lowered(*inputs: Any) -> Outputs:
        with torch.no_grad():
            outputs = tuple(run(tensors_of(inputs)))
        return outputs[0] if returns_tensor else outputs

    return lowered
