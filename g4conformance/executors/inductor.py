"""Executor `inductor`: the exported program compiled ahead of time by torch's Inductor into a .pt2 package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from g4conformance.executors.programs import as_callable, as_tuple, export_program
from g4conformance.executors.registry import Lowered
from g4conformance.executors.storing import stored

# The wrapper only calls kernels; optimising it takes g++ longer than all kernels together.
CONFIG = {"aot_inductor.compile_wrapper_opt_level": "O0"}


def lower(module: nn.Module, example_inputs: tuple[Any, ...], artefact: Path) -> Lowered:
    """Exports, compiles and loads the package."""

    def make(path: Path) -> bool:
        program = export_program(module, example_inputs)
        with torch.no_grad():
            torch._inductor.aoti_compile_and_package(program.exported, package_path=str(path), inductor_configs=CONFIG)
        return program.returns_tensor

    path = artefact.with_name(artefact.name + ".aoti.pt2")
    seal = stored(path, make)
    compiled = torch._inductor.aoti_load_package(str(path))
    return as_callable(lambda tensors: as_tuple(compiled(*tensors)), seal.returns_tensor)
