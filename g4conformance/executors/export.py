"""Executor `export`: the graph as a torch.export program, saved as .pt2 and loaded back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from g4conformance.executors.programs import as_callable, as_tuple, export_program
from g4conformance.executors.registry import Lowered
from g4conformance.executors.storing import stored


def lower(module: nn.Module, example_inputs: tuple[Any, ...], artefact: Path) -> Lowered:
    """Exports, saves and loads; what runs is what was loaded, so that saving is under test too."""

    def make(path: Path) -> bool:
        program = export_program(module, example_inputs)
        torch.export.save(program.exported, path)
        return program.returns_tensor

    path = artefact.with_name(artefact.name + ".pt2")
    seal = stored(path, make)
    loaded = torch.export.load(path).module()
    return as_callable(lambda tensors: as_tuple(loaded(*tensors)), seal.returns_tensor)
