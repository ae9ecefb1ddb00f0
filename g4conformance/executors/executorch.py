"""Executor `executorch`: a .pte through the XNNPACK partitioner, run by ExecuTorch's Python runtime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import executorch.kernels.quantized  # noqa: F401  registers the kernels of quantized_decomposed
import torch
from executorch.backends.xnnpack.partition.config import ALL_PARTITIONER_CONFIGS
from executorch.backends.xnnpack.partition.config.generic_node_configs import GeluConfig
from executorch.backends.xnnpack.partition.config.xnnpack_config import ConfigPrecisionType
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.exir import to_edge_transform_and_lower
from executorch.runtime import Runtime, Verification
from torch import nn
from torch.export import ExportedProgram

from g4conformance.executors.programs import as_callable, export_program, tensors_of
from g4conformance.executors.registry import Lowered
from g4conformance.executors.storing import stored


def lower(module: nn.Module, example_inputs: tuple[Any, ...], artefact: Path) -> Lowered:
    """Exports, partitions and loads the stored .pte."""

    def make(path: Path) -> bool:
        program = export_program(module, example_inputs)
        partitioner = _partitioner(program.exported)
        with torch.no_grad():
            lowered = to_edge_transform_and_lower(program.exported, partitioner=[partitioner]).to_executorch()
        path.write_bytes(lowered.buffer)
        return program.returns_tensor

    path = artefact.with_name(artefact.name + ".pte")
    seal = stored(path, make)
    program = Runtime.get().load_program(path, verification=Verification.Minimal)
    method = program.load_method("forward")
    if method is None:
        raise RuntimeError("the stored program has no method `forward`")
    method.execute(tensors_of(example_inputs))  # a missing kernel shows here, and so does the chatter of a first run
    return as_callable(lambda tensors: method.execute(tensors), seal.returns_tensor)


def _partitioner(program: ExportedProgram) -> XnnpackPartitioner:
    """Everything that XNNPACK computes as the graph says.

    Its gelu is the exact one, whatever `approximate` is: Gemma 4's tanh form would be off by 5e-4. And it knows no
    int16: where a graph has any, quantizing stays with ExecuTorch's own kernels, and XNNPACK computes in float between.
    """
    wanted = [config for config in ALL_PARTITIONER_CONFIGS if config is not GeluConfig]
    if not _has_int16(program):
        return XnnpackPartitioner(configs=wanted)
    floating = [config for config in wanted if "Quantize" not in config.__name__]
    return XnnpackPartitioner(configs=floating, config_precisions=ConfigPrecisionType.FP32)


def _has_int16(program: ExportedProgram) -> bool:
    return any(torch.int16 in node.args for node in program.graph.nodes)
