"""Lowered artefacts cached by digest of all that they depend on.

They live in one folder, `lowered` in the cache folder, which may be deleted at any time. Those that no run has used for
`UNUSED_DAYS` are removed when another one is made.
"""

from __future__ import annotations

import hashlib
import os
import platform
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from torch import Tensor, fx, nn

from g4conformance.executors.lowering import lower_graph, lowering_error
from g4conformance.executors.quiet import quiet
from g4conformance.executors.registry import Lowered, require_executor

UNUSED_DAYS = 30
FORMAT = "1"  # to be raised when an executor's module lowers differently


def cached_lowering(
    executor: str,
    name: str,
    module: nn.Module,
    example_inputs: tuple[Any, ...],
    folder: Path,
    key: str | None = None,
) -> Lowered:
    """`lower_graph` with its artefact in `folder`, made by one process only, however many ask for it at once.

    Args:
        key: stands for the graph and its weights, where the caller has something cheaper than their digest; it must
            differ where any of them does.

    Raises:
        ConformanceError: there is no such executor, or what it needs is not installed.
        LoweringError: the executor cannot lower this graph.
    """
    require_executor(executor)
    if executor == "eager":
        return lower_graph(executor, name, module, example_inputs, folder / "unused")
    if key is None:
        key = _graph_digest(executor, name, module, example_inputs)
    path = artefact_path(folder, executor, key, example_inputs)
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_name(path.name + ".lock")):
        lowered = lower_graph(executor, name, module, example_inputs, path)
        _touch(path)
    _remove_unused(folder)
    return lowered


def artefact_path(folder: Path, executor: str, key: str, example_inputs: tuple[Any, ...]) -> Path:
    """Where the artefact of a program goes: a name that differs where anything that the program depends on differs."""
    parts = [FORMAT, executor, key, *(_describe(value) for value in example_inputs), *_versions(executor)]
    return folder / f"{executor}-{hashlib.sha256(repr(parts).encode()).hexdigest()[:32]}"


def _describe(value: Any) -> str:
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)


def _versions(executor: str) -> list[str]:
    """Of torch, of the executor's packages, and of the processor: Inductor compiles for the one that it finds."""
    packages = ("torch", "g4conformance", *require_executor(executor).packages)
    return [*(f"{p} {version(p)}" for p in packages), platform.machine(), torch.backends.cpu.get_cpu_capability()]


def _graph_digest(executor: str, name: str, module: nn.Module, example_inputs: tuple[Any, ...]) -> str:
    try:
        with quiet():
            return graph_digest(module, example_inputs)
    except Exception as error:
        raise lowering_error(executor, name, error) from None


def graph_digest(module: nn.Module, example_inputs: tuple[Any, ...]) -> str:
    """Of the graph's text with its scalars, and of every parameter, buffer and constant."""
    if isinstance(module, fx.GraphModule):
        traced: fx.GraphModule = module
    else:
        with torch.no_grad():
            traced = torch.export.export(module, example_inputs, strict=False).module()
    digest = hashlib.sha256(str(traced.graph).encode())
    for node in traced.graph.find_nodes(op="get_attr"):
        digest.update(_bytes(_attribute(traced, str(node.target))))
    return digest.hexdigest()


def _attribute(module: nn.Module, dotted: str) -> Any:
    found: Any = module
    for part in dotted.split("."):
        found = getattr(found, part)
    return found


def _bytes(value: Any) -> bytes:
    if not isinstance(value, Tensor):
        return repr(value).encode()
    raw = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return f"{value.dtype} {tuple(value.shape)} ".encode() + raw.tobytes()


def _touch(path: Path) -> None:
    for file in path.parent.glob(path.name + ".*"):
        os.utime(file)


def _remove_unused(folder: Path) -> None:
    """Removes files that no run has touched for `UNUSED_DAYS`; another process may be quicker."""
    oldest = time.time() - UNUSED_DAYS * 86_400
    for file in folder.iterdir():
        if file.is_file() and file.stat().st_mtime < oldest:
            file.unlink(missing_ok=True)
