"""Executor `onnxruntime`: ONNX from the exported program, run by ONNX Runtime on the CPU."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import onnxruntime
import torch
from torch import Tensor, nn

from g4conformance.executors.programs import as_callable, export_program
from g4conformance.executors.registry import Lowered
from g4conformance.executors.storing import stored

OPSET = 21  # the first whose QuantizeLinear takes int16

# By default ONNX Runtime does not compute what a quantized graph says, on two counts:
AS_THE_GRAPH_SAYS = {
    # a MatMul with int8 weights has its float activations quantized to int8 (accuracy level 4); 1 keeps float32
    "session.qdq_matmulnbits_accuracy_level": "1",
    # x86 without VNNI adds products of uint8 and int8 in 16 bits, which saturate
    "session.x64quantprecision": "1",
}


def lower(module: nn.Module, example_inputs: tuple[Any, ...], artefact: Path) -> Lowered:
    """Exports, converts to ONNX and opens a session on the stored file."""

    def make(path: Path) -> bool:
        program = export_program(module, example_inputs)
        converted = torch.onnx.export(
            program.exported, (), dynamo=True, optimize=False, opset_version=OPSET, verbose=False
        )
        if converted is None:
            raise RuntimeError("torch.onnx.export made no program")
        converted.save(path)
        return program.returns_tensor

    path = artefact.with_name(artefact.name + ".onnx")
    seal = stored(path, make)
    session = onnxruntime.InferenceSession(path, _options(), providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_inputs()]

    def run(tensors: tuple[Tensor, ...]) -> list[Tensor]:
        feed = {name: tensor.contiguous().numpy() for name, tensor in zip(names, tensors, strict=True)}
        return [torch.from_numpy(array) for array in session.run(None, feed)]

    return as_callable(run, seal.returns_tensor)


def _options() -> Any:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors
    for key, value in AS_THE_GRAPH_SAYS.items():
        options.add_session_config_entry(key, value)
    if (threads := os.environ.get("OMP_NUM_THREADS", "")).isdigit():
        options.intra_op_num_threads = int(threads)  # ONNX Runtime has threads of its own and does not read it
    return options
