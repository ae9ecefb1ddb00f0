"""Files of vectors: written whole or not at all, in dtypes that numpy has, and digested."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from g4conformance.errors import VectorsError
from g4conformance.foreign import FORMAT, METADATA, VERSION

_STORED = {torch.bfloat16: torch.float32}  # numpy has no bfloat16; float32 holds each of its values
_AGAIN = "Record or copy them again."


def folder_name(case: str) -> str:
    """The name of a case's folder: the case's, with what is no part of a file name escaped."""
    name = quote(case, safe="+ ")
    return "%2E" + name[1:] if name.startswith(".") else name


def stored_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which tensors of `dtype` are stored."""
    return _STORED.get(dtype, dtype)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def write_tensors(path: Path, tensors: Mapping[str, Tensor], identity: Mapping[str, Any]) -> None:
    """One safetensors file, the same bytes for the same tensors; `identity` says which case they are of."""
    partial = path.with_name(f"{path.name}.partial")
    stored = {name: tensors[name].cpu().to(stored_dtype(tensors[name].dtype)) for name in sorted(tensors)}
    plain = {name: tensor.contiguous() for name, tensor in stored.items()}
    save_file(plain, partial, metadata={METADATA: json.dumps(identity, sort_keys=True)})
    os.replace(partial, path)


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of a file, and the identity that it claims, empty if it claims none.

    Raises:
        VectorsError: it is missing, truncated, or no safetensors file.
    """
    try:
        with safe_open(path, framework="pt") as file:
            identity = json.loads((file.metadata() or {}).get(METADATA, "{}"))
            return {name: file.get_tensor(name) for name in file.keys()}, dict(identity)  # noqa: SIM118
    except (SafetensorError, OSError, ValueError, TypeError) as error:
        raise VectorsError("a whole safetensors file", f"{path}: {error}", _AGAIN) from None


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    os.replace(partial, path)


def read_json(path: Path) -> dict[str, Any]:
    """A document of this format.

    Raises:
        VectorsError: it is missing, no JSON, or of another format or version.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        found = document["format"], document["version"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise VectorsError(f"a file of {FORMAT} at {path}", f"{type(error).__name__}: {error}", _AGAIN) from None
    if found != (FORMAT, VERSION):
        wanted, met = f"format {FORMAT} {VERSION} in {path}", f"{found[0]} {found[1]}"
        raise VectorsError(wanted, met, "Record them again with this version of g4conformance.")
    return dict(document)


def write_sealed(path: Path, document: Mapping[str, Any]) -> None:
    """As `write_json`, with a digest of all that the document says."""
    write_json(path, {**document, "digest": _digest_of_data(document)})


def read_sealed(path: Path) -> dict[str, Any]:
    """What `write_sealed` wrote.

    Raises:
        VectorsError: as `read_json`, or the document was altered.
    """
    document = read_json(path)
    stated = document.pop("digest", None)
    if stated != (found := _digest_of_data(document)):
        wanted, met = f"{path} to have the digest that it states, {stated}", f"{found}: it was altered"
        raise VectorsError(wanted, met, _AGAIN)
    return document


def _digest_of_data(document: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


def digest_of(path: Path) -> str:
    """SHA-256 of a file's bytes.

    Raises:
        VectorsError: it cannot be read.
    """
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise VectorsError(f"a file at {path}", f"{error.strerror}", _AGAIN) from None


def require_digest(path: Path, expected: str) -> None:
    """Raises VectorsError unless the file's bytes have this SHA-256."""
    if (found := digest_of(path)) != expected:
        wanted, met = f"SHA-256 {expected[:12]}... of {path}", f"{found[:12]}...: it was altered or cut"
        raise VectorsError(wanted, met, _AGAIN)
