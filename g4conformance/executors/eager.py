"""Executor `eager`: the graph's own module. Stores nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from g4conformance.executors.registry import Lowered


def lower(module: nn.Module, example_inputs: tuple[Any, ...], artefact: Path) -> Lowered:
    """The module itself, without gradients."""
    return torch.no_grad()(module.forward)
