"""Runtimes behind a command: which interpreter has them, and how it is started."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import g4conformance
from g4conformance.checkpoints.checkpoint import Checkpoint
from g4conformance.checkpoints.published import published_folder
from g4conformance.errors import ConformanceError
from g4conformance.session import cache_folder
from g4conformance.vectors.elsewhere import CommandRuntime

_TIMEOUT = 3600.0  # seconds a case: nothing is measured by it


@dataclass(frozen=True)
class Behind:
    """A runtime in an environment of its own.

    Attributes:
        package: what is installed there.
        variable: the environment variable that names the environment's interpreter.
        told: that of what the side is told, as a shell would split it; if empty, it is told the checkpoint's folder.
    """

    package: str
    variable: str
    told: str = ""

    def interpreter(self) -> str:
        """Raises ConformanceError if nobody has said which it is."""
        return _said(self.variable, f"an interpreter with {self.package}")

    def arguments(self, checkpoint: Checkpoint) -> list[str]:
        """What the side is told of the checkpoint.

        Raises:
            ConformanceError: the checkpoint is not in a folder, or must be converted first and nobody has said to what.
        """
        if self.told:
            return shlex.split(_said(self.told, f"what {self.package} is told of the bundled checkpoint"))
        return [str(published_folder(checkpoint.name, cache_folder()))]

    def version(self) -> str:
        asked = f"import importlib.metadata; print(importlib.metadata.version({self.package!r}))"
        ran = subprocess.run([self.interpreter(), "-c", asked], capture_output=True, text=True, check=True)
        return ran.stdout.strip()


BEHIND = {
    "deepmind": Behind("gemma", "G4_DEEPMIND_PYTHON"),
    "llama": Behind("llama-cpp-python", "G4_LLAMA_PYTHON", told="G4_LLAMA_MODEL"),
    "mlx": Behind("mlx-vlm", "G4_MLX_PYTHON"),
}


def command(name: str, checkpoint: Checkpoint, instead: Sequence[str] = ()) -> CommandRuntime:
    """The command that judges runtime `name`, with interventions.

    Raises:
        ConformanceError: its interpreter, or what it is told, is not known.
    """
    side = Path(g4conformance.__file__).parent / "runtimes" / name
    options = [word for intervention in instead for word in ("--instead", intervention)]
    words = [BEHIND[name].interpreter(), str(side), *options, *BEHIND[name].arguments(checkpoint)]
    return CommandRuntime(shlex.join(words), _TIMEOUT)


def _said(variable: str, what: str) -> str:
    found = os.environ.get(variable)
    if not found:
        raise ConformanceError(f"{variable}, {what}", "none", "Set it.")
    return found
