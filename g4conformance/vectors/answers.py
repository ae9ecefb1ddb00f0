"""Answers: traces that others have written, for a request or for a case of recorded vectors."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from g4conformance.errors import VectorsError
from g4conformance.foreign import MANIFEST, TRACE
from g4conformance.vectors.files import read_json, read_tensors, require_digest
from g4conformance.vectors.statements import STATEMENTS, statement_of


def read_answer(folder: Path, asked: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors of the trace in `folder`.

    Args:
        asked: the identity of the request that it answers.

    Raises:
        VectorsError: the trace cannot be read; it says that it is of another case, checkpoint or format version; its
            manifest, if there is one, has another digest; or it holds names that are no trace names.
    """
    path = folder / TRACE
    _require_intact(folder)
    tensors, claimed = read_tensors(path)
    for key, value in asked.items():
        if claimed.get(key, value) != value:
            what = key.replace("_", " ")
            found = f"{claimed[key]!r} in {path}"
            raise VectorsError(f"a trace of the {what} {value!r}", found, "Answer the request that is judged.")
    _require_known(tensors, path)
    return tensors


def _require_intact(folder: Path) -> None:
    """Of a trace with a manifest beside it, such as a recorded one."""
    if (folder / MANIFEST).exists():
        digest = read_json(folder / MANIFEST).get("files", {}).get(TRACE)
        if digest is not None:
            require_digest(folder / TRACE, digest)


def _require_known(names: Iterable[str], path: Path) -> None:
    for name in names:
        if statement_of(name) is None:
            near = difflib.get_close_matches(name, [statement.kind for statement in STATEMENTS], n=1, cutoff=0.0)
            found = f"{name!r} in {path}"
            raise VectorsError("trace names of the contract", found, f"The nearest one is {near[0]}.")
