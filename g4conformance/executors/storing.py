"""Artefacts on disk, whole or not there at all."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory


@dataclass(frozen=True)
class Seal:
    """What is written beside an artefact when it is whole: its digest, and what its own format does not tell."""

    sha256: str
    returns_tensor: bool


def stored(path: Path, make: Callable[[Path], bool]) -> Seal:
    """The seal of the artefact at `path`, which is made first unless it is there whole.

    Args:
        path: where the artefact is or will be.
        make: writes the artefact to the path that it is given, and says whether the graph returns a Tensor. What it
            raises leaves nothing behind.
    """
    if (seal := _seal_of_whole(path)) is not None:
        return seal
    path.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=path.parent, prefix=".making-") as folder:
        made = Path(folder) / path.name
        returns_tensor = make(made)
        seal = Seal(_sha256(made), returns_tensor)
        sealed = Path(folder) / "seal"
        sealed.write_text(json.dumps(asdict(seal)))
        os.replace(made, path)
        os.replace(sealed, seal_path(path))
    return seal


def seal_path(path: Path) -> Path:
    return path.with_name(path.name + ".seal")


def _seal_of_whole(path: Path) -> Seal | None:
    """None where the artefact or its seal is missing, truncated or of another making."""
    try:
        seal = Seal(**json.loads(seal_path(path).read_text()))
        return seal if seal.sha256 == _sha256(path) else None
    except (OSError, ValueError, TypeError):
        return None


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
