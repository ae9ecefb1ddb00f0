"""Which executors there are, what installs them, and what each cannot express: data, and the refusals that follow."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn

from g4conformance.errors import ConformanceError
from g4conformance.quantization.schemes import NONE, SCHEMES

ALL_SCHEMES = (NONE, *SCHEMES)

Outputs = Tensor | tuple[Tensor, ...]
Lowered = Callable[..., Outputs]


class Lower(Protocol):
    """What an executor's module calls `lower`."""

    def __call__(self, module: nn.Module, example_inputs: tuple[Any, ...], artefact: Path) -> Lowered: ...


@dataclass(frozen=True)
class Executor:
    """One way of running graphs.

    Args:
        name: what `--executor` takes.
        how: one line for people.
        module: the module of this package whose `lower` it is.
        extra: the extra of pyproject that installs it; None needs nothing beyond g4conformance.
        packages: what must be importable, and whose versions an artefact depends on.
        refused_schemes: the schemes that it cannot express, each with the reason.
        refused_dtypes: the checkpoint dtypes that it cannot run, each with the reason.
    """

    name: str
    how: str
    module: str
    extra: str | None = None
    packages: tuple[str, ...] = ()
    refused_schemes: Mapping[str, str] = field(default_factory=dict)
    refused_dtypes: Mapping[str, str] = field(default_factory=dict)


_HERE = "g4conformance.executors"

EXECUTORS: dict[str, Executor] = {
    executor.name: executor
    for executor in (
        Executor("eager", "the module itself", f"{_HERE}.eager"),
        Executor("export", "torch.export program, saved as .pt2 and loaded back", f"{_HERE}.export"),
        Executor(
            "onnxruntime",
            "ONNX of the exported program, run by ONNX Runtime on the CPU",
            f"{_HERE}.onnxruntime",
            extra="onnxruntime",
            packages=("onnxruntime", "onnx", "onnxscript"),
            refused_dtypes={"bfloat16": "ONNX Runtime's CPU provider has no bfloat16 kernels"},
        ),
        Executor(
            "executorch",
            ".pte through the XNNPACK partitioner, run by ExecuTorch's Python runtime",
            f"{_HERE}.executorch",
            extra="executorch",
            packages=("executorch",),
        ),
        # Needs no Python package beyond torch, but a C++ compiler; its absence is a LoweringError of the first graph.
        Executor("inductor", "compiled ahead of time by torch's Inductor (needs a C++ compiler)", f"{_HERE}.inductor"),
    )
}


def require_executor(name: str) -> Executor:
    """The executor of a name.

    Raises:
        ConformanceError: there is none.
    """
    if name not in EXECUTORS:
        raise ConformanceError(f"an executor among {', '.join(EXECUTORS)}", repr(name), "Choose one of them.")
    return EXECUTORS[name]


def require_expressible(name: str, scheme: str, dtype: str = "float32") -> Executor:
    """The executor of a name, if it can run graphs of this quantization scheme and dtype.

    Raises:
        ConformanceError: there is no such executor or scheme, or the executor cannot express it.
    """
    executor = require_executor(name)
    if scheme not in ALL_SCHEMES:
        raise ConformanceError(f"a scheme among {', '.join(ALL_SCHEMES)}", repr(scheme), "Choose one of them.")
    for found, refused in ((scheme, executor.refused_schemes), (dtype, executor.refused_dtypes)):
        if reason := refused.get(found):
            raise ConformanceError(
                f"something that executor {name} can express",
                f"{found} ({reason})",
                f"Choose another executor; these can: {', '.join(_able(scheme, dtype))}.",
            )
    return executor


def _able(scheme: str, dtype: str) -> list[str]:
    return [e.name for e in EXECUTORS.values() if scheme not in e.refused_schemes and dtype not in e.refused_dtypes]


def require_installed(name: str) -> Lower:
    """The `lower` of an executor, whose packages are imported only now.

    Raises:
        ConformanceError: there is no such executor, or what it needs is not installed.
    """
    executor = require_executor(name)
    if missing := [package for package in executor.packages if importlib.util.find_spec(package) is None]:
        raise ConformanceError(
            f"the packages that executor {name} needs",
            f"no {', '.join(missing)}",
            f"Run: pip install 'g4conformance[{executor.extra}]'.",
        )
    return importlib.import_module(executor.module).lower
