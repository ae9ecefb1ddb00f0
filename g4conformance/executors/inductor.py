"""Executor `inductor`: the exported program's graph compiled by torch's Inductor, saved and loaded back.

Weights are inputs of what is compiled: layers of one kind share the kernels in Inductor's own cache, and an artefact
holds code only. Compiling ahead of time into a package (AOTInductor) takes six times as long for each graph.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._inductor import standalone_compile
from torch._inductor.standalone_compile import CompiledArtifact
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from g4conformance.executors.programs import as_callable, as_tuple, export_program, tensors_of
from g4conformance.executors.registry import Lowered
from g4conformance.executors.storing import stored


def lower(module: nn.Module, example_inputs: tuple[Any, ...], artefact: Path) -> Lowered:
    """Exports, compiles and loads; the program is exported when an artefact is loaded too, for its weights."""
    program = export_program(module, example_inputs)
    weights = _lifted(program.exported)

    def make(path: Path) -> bool:
        compile_program(program.exported, (*weights, *tensors_of(example_inputs)), path)
        return program.returns_tensor

    path = artefact.with_name(artefact.name + ".inductor")
    seal = stored(path, make)
    compiled = CompiledArtifact.load(path=str(path), format="binary")
    return as_callable(lambda tensors: as_tuple(compiled(*weights, *tensors)), seal.returns_tensor)


def compile_program(program: ExportedProgram, inputs: tuple[Tensor, ...], path: Path) -> None:
    """Compiles the graph of a program, whose weights are its first inputs, and saves what was made."""
    with torch.no_grad():
        compiled = standalone_compile(program.graph_module, list(inputs), dynamic_shapes="from_example_inputs")
        compiled.save(path=str(path), format="binary")


def _lifted(program: ExportedProgram) -> tuple[Tensor, ...]:
    """Parameters, buffers and constants, in the order in which the program's graph takes them: before all inputs."""
    values = {**program.state_dict, **program.constants}
    return tuple(
        values[spec.target].detach()
        for spec in program.graph_signature.input_specs
        if spec.kind is not InputKind.USER_INPUT and spec.target is not None
    )
