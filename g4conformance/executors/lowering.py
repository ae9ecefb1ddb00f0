"""Lowers one named graph, and tells in one line why one cannot be lowered."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from torch import nn

from g4conformance.errors import LoweringError
from g4conformance.executors.quiet import quiet
from g4conformance.executors.registry import Lowered, require_installed

# as exporters print ops: OpOverload(op='aten.foo', ...), torch.ops.aten.foo, aten.foo, or any foo::bar but C++'s own
_OP = re.compile(
    r"OpOverload\(op='([^']+)'"
    r"|for (\w+)\(\d+\) node"  # ONNX Runtime
    r"|torch\.ops\.(\w+\.\w+)"
    r"|\b((?:aten|quantized_decomposed)\.\w+)"
    r"|(?<![\w:])((?!(?:std|c10|at|torch|executorch|onnxruntime)::)\w+::\w+)(?![\w:])"
)


def lower_graph(
    executor: str, name: str, module: nn.Module, example_inputs: tuple[Any, ...], artefact: Path
) -> Lowered:
    """The callable of graph `name` on an executor: same positional inputs, same structure and dtypes of results.

    Raises:
        ConformanceError: there is no such executor, or what it needs is not installed.
        LoweringError: the executor cannot lower this graph.
    """
    with quiet():
        lower = require_installed(executor)
        try:
            return lower(module, example_inputs, artefact)
        except Exception as error:
            raise lowering_error(executor, name, error) from None


def lowering_error(executor: str, name: str, error: Exception) -> LoweringError:
    """Names graph, executor, the op if any message in the chain of causes tells it, and the first line of the cause."""
    chain = _causes(error)
    ops = [op for cause in reversed(chain) if (op := _op_in(str(cause))) is not None]
    cause = f"{type(chain[-1]).__name__}: {_line(chain[-1])}"
    return LoweringError(graph=name, executor=executor, op=ops[0] if ops else None, cause=cause)


def _causes(error: BaseException) -> list[BaseException]:
    """The error and what it was raised from, the outermost first."""
    chain = [error]
    while (cause := chain[-1].__cause__) is not None and cause not in chain:
        chain.append(cause)
    return chain


def _op_in(message: str) -> str | None:
    found = _OP.search(message)
    return None if found is None else next(group for group in found.groups() if group is not None)


def _line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")
