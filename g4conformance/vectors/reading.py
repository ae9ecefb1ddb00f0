"""Reads recorded vectors: everything is verified before anything is judged, and no model is loaded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from g4conformance.cases import Case
from g4conformance.errors import ConformanceError, VectorsError
from g4conformance.foreign import INDEX, INPUTS, MANIFEST, TRACE, identity
from g4conformance.judging.judge import Bench
from g4conformance.prompts import Request, ResolvedCase
from g4conformance.reference.noise import Noise
from g4conformance.vectors.files import read_json, read_sealed, read_tensors, require_digest
from g4conformance.vectors.request import facts_from_data, layout_from_data

_AGAIN = "Record the vectors again."


@dataclass(frozen=True)
class CaseVectors:
    """One recorded case: what was asked, and what it takes to judge an answer.

    Attributes:
        noise: the reference's calibrated noise; own_noise: that of this very case.
    """

    folder: Path
    manifest: Mapping[str, Any]
    case: ResolvedCase
    noise: Noise
    own_noise: Noise

    @property
    def identity(self) -> dict[str, Any]:
        return identity(self.manifest)

    @property
    def bench(self) -> Bench:
        facts, dtype = facts_from_data(self.manifest["facts"]), self.manifest["provenance"]["dtype"]
        return Bench(facts, self.noise, dtype, foreign=True)

    def reference(self) -> dict[str, Tensor]:
        """The recorded trace, in the dtypes that the reference yielded."""
        tensors, _ = read_tensors(self.folder / TRACE)
        described = self.manifest["tensors"][TRACE]
        with _whole(self.folder):
            return {name: tensor.to(getattr(torch, described[name]["dtype"])) for name, tensor in tensors.items()}


def open_vectors(folder: Path, names: Sequence[str] = (), checkpoint_digest: str | None = None) -> list[CaseVectors]:
    """The recorded cases of these names, all if there are none, after every byte of them was verified.

    Args:
        checkpoint_digest: of the checkpoint that they must be of, if one is asked for.

    Raises:
        VectorsError: no finished vectors, a file that is missing or was altered, an unknown case, another format
            version, or another checkpoint.
    """
    if not (folder / INDEX).exists():
        found = "none: they were not recorded to the end" if folder.is_dir() else "no such folder"
        raise VectorsError(f"vectors with an {INDEX} in {folder}", found, "Run `g4conformance record` (again).")
    index = read_sealed(folder / INDEX)
    with _whole(folder):
        _require_checkpoint(folder, str(index["checkpoint_digest"]), checkpoint_digest)
        entries = dict(index["cases"])
        if unknown := [name for name in names if name not in entries]:
            raise VectorsError("a recorded case", repr(unknown[0]), f"Recorded cases: {', '.join(entries)}.")
        chosen = [entry for name, entry in entries.items() if not names or name in names]
        cases = [_open_case(folder / str(entry["folder"]), str(entry["manifest"])) for entry in chosen]
        for case in cases:
            _require_checkpoint(case.folder, str(case.manifest["checkpoint_digest"]), str(index["checkpoint_digest"]))
    return cases


def is_whole(folder: Path) -> bool:
    """Whether a case's folder holds all files that its manifest names, unaltered."""
    try:
        manifest = read_json(folder / MANIFEST)
        with _whole(folder):
            _require_files(folder, manifest)
    except VectorsError:
        return False
    return True


def _open_case(folder: Path, digest: str) -> CaseVectors:
    require_digest(folder / MANIFEST, digest)
    manifest = read_json(folder / MANIFEST)
    with _whole(folder):
        _require_files(folder, manifest)
        noise = {name: Noise(**manifest["noise"][name]) for name in ("calibrated", "own")}
        return CaseVectors(folder, manifest, _case(folder, manifest), noise["calibrated"], noise["own"])


def _require_files(folder: Path, manifest: Mapping[str, Any]) -> None:
    files = dict(manifest["files"])
    if missing := sorted({INPUTS, TRACE} - files.keys()):
        raise VectorsError(f"a digest of {missing[0]} in {folder / MANIFEST}", "none", _AGAIN)
    for name, digest in files.items():
        require_digest(folder / name, digest)


def _case(folder: Path, manifest: Mapping[str, Any]) -> ResolvedCase:
    """The case as a run of the suite has it, but for its pictures, which judging does not look at."""
    told, request = manifest["case"], manifest["request"]
    inputs, _ = read_tensors(folder / INPUTS)
    prompt = request["prompt"]
    case = Case(
        told["name"],
        told["exercises"],
        prompt=prompt,
        vocabulary=(1, 1) if prompt is None else None,
        self_consistency=request["self_consistency"],
    )
    return ResolvedCase(
        case=case,
        request=Request(prompt, (), inputs, layout_from_data(request["layout"])),
        digest=told["digest"],
        decode_steps=request["decode_steps"],
        gen_steps=request["gen_steps"],
    )


def _require_checkpoint(where: Path, found: str, expected: str | None) -> None:
    if expected is not None and found != expected:
        wanted, met = f"vectors of the checkpoint {expected[:12]}...", f"{found[:12]}... in {where}"
        raise VectorsError(wanted, met, "Compare with vectors that were recorded of the same checkpoint.")


@contextmanager
def _whole(where: Path) -> Iterator[None]:
    """What a document lacks, or has in another kind than recorded ones, ends in one line."""
    try:
        yield
    except ConformanceError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        found = f"{type(error).__name__}: {error}"
        raise VectorsError(f"whole vectors in {where}", found, _AGAIN) from None
