"""Runtimes in an environment of their own: how it is made, and the command that starts a runtime there."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from g4conformance import runtimes


@dataclass(frozen=True)
class Environment:
    """Attributes:
    package: whose version is told.
    environment: how its environment is made, as lines of a shell.
    """

    package: str
    environment: tuple[str, ...]


ENVIRONMENTS = {
    "mlx": Environment(
        "mlx-vlm",
        ("python -m venv mlx", "mlx/bin/pip install mlx-vlm==0.7.10 mlx-lm==0.32.2 'mlx[cpu]'"),
    ),
}

# What the foreign side does instead, by the id of the finding that vanishes with it.
INSTEAD = {
    "mlx-placeholder": "pad-at-pictures",
    "mlx-resize": "given-pixels",
    "mlx-exif": "as-opened",
    "mlx-transparent": "over-white",
}


def command(name: str, python: str, checkpoint: Path, instead: str | None = None) -> str:
    """What `--runtime-command` is given: the foreign side's folder, started by the interpreter of its environment."""
    folder = Path(runtimes.__path__[0]) / name
    changed = ["--instead", instead] if instead else []
    return shlex.join([python, str(folder), str(checkpoint), *changed])


def version(name: str, python: str) -> str:
    """Of the runtime's package in its environment."""
    asked = f"import importlib.metadata; print(importlib.metadata.version({ENVIRONMENTS[name].package!r}))"
    return subprocess.run([python, "-c", asked], check=True, capture_output=True, text=True).stdout.strip()


def how_to_run(name: str) -> Sequence[str]:
    """Markdown: from nothing to verdicts."""
    return (
        "It is judged from an environment of its own:",
        "",
        *(f"    {line}" for line in ENVIRONMENTS[name].environment),
        "    g4conformance checkpoint --layout legacy --out published",
        f"    SIDE=$(python -c 'import g4conformance.runtimes as r; print(r.__path__[0])')/{name}",
        f'    g4conformance verify --runtime-command "{name}/bin/python $SIDE published"',
        "",
    )
