"""Trace: the named tensors that a reference or a runtime yields for one case, with where they came from."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from g4conformance.errors import CaseError

FORMAT_VERSION = 1


@dataclass(frozen=True)
class Provenance:
    """What a trace was made from; two traces may be compared only where case and checkpoint agree."""

    case: str
    case_digest: str
    checkpoint_digest: str
    dtype: str
    attn_implementation: str
    image_backend: str
    torch_version: str
    transformers_version: str
    format_version: int = FORMAT_VERSION


class Trace(Mapping[str, Tensor]):
    """Tensors under the contract's trace names, batch axis kept, plus their provenance. Immutable by convention."""

    def __init__(self, tensors: Mapping[str, Tensor], provenance: Provenance) -> None:
        self._tensors = dict(tensors)
        self.provenance = provenance

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def save(self, path: Path) -> None:
        """Writes one safetensors file, whole or not at all."""
        partial = path.with_suffix(path.suffix + ".partial")
        tensors = {name: tensor.contiguous() for name, tensor in self._tensors.items()}
        save_file(tensors, partial, metadata={"provenance": json.dumps(asdict(self.provenance))})
        os.replace(partial, path)

    @classmethod
    def load(cls, path: Path) -> Trace:
        """Reads what `save` wrote.

        Raises:
            CaseError: the file is no safetensors file, is truncated, or is of another format version.
        """
        try:
            with safe_open(path, framework="pt") as file:
                provenance = _provenance(file.metadata() or {}, path)
                return cls({name: file.get_tensor(name) for name in file.keys()}, provenance)  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise CaseError("a trace written by g4conformance", f"{path}: {error}", "Record the trace again.") from None


def _provenance(metadata: Mapping[str, str], path: Path) -> Provenance:
    try:
        known = json.loads(metadata["provenance"])
        version = known["format_version"]
    except (KeyError, ValueError, TypeError):
        raise CaseError("a trace with provenance", f"none in {path}", "Record the trace again.") from None
    if version != FORMAT_VERSION:
        raise CaseError(f"trace format {FORMAT_VERSION}", f"format {version} in {path}", "Record the trace again.")
    if missing := sorted({field.name for field in fields(Provenance)} - known.keys()):
        raise CaseError("a trace with whole provenance", f"no {missing[0]} in {path}", "Record the trace again.")
    return Provenance(**{field.name: known[field.name] for field in fields(Provenance)})


class Recorder:
    """Collects tensors as they come into being; copies each, because runtimes reuse their buffers."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}

    def __call__(self, name: str, tensor: Tensor) -> None:
        self.tensors[name] = torch.as_tensor(tensor).detach().clone()
