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
    """

    package: str
    variable: str

    def interpreter(self) -> str:
        """Raises ConformanceError if nobody has said which it is."""
        found = os.environ.get(self.variable)
        if not found:
            raise ConformanceError(f"{self.variable}, an interpreter with {self.package}", "none", "Set it.")
        return found

    def version(self) -> str:
        asked = f"import importlib.metadata; print(importlib.metadata.version({self.package!r}))"
        ran = subprocess.run([self.interpreter(), "-c", asked], capture_output=True, text=True, check=True)
        return ran.stdout.strip()


BEHIND = {"deepmind": Behind("gemma", "G4_DEEPMIND_PYTHON")}


def command(name: str, checkpoint: Checkpoint, instead: Sequence[str] = ()) -> CommandRuntime:
    """The command that judges runtime `name`, with interventions.

    Raises:
        ConformanceError: its interpreter is not known, or the checkpoint is not in a folder.
    """
    side = Path(g4conformance.__file__).parent / "runtimes" / name
    folder = published_folder(checkpoint.name, cache_folder())
    options = [word for intervention in instead for word in ("--instead", intervention)]
    words = [BEHIND[name].interpreter(), str(side), *options, str(folder)]
    return CommandRuntime(shlex.join(words), _TIMEOUT)
