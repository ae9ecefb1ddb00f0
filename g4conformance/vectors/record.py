"""Records conformance vectors: the reference's trace and inputs of every case, one case after the other.

A case's folder is whole once its manifest is there, which is written last. The index, which names all cases and the
digests of their manifests, is written when all of them are whole. So an interrupted recording shows, and goes on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from g4conformance.checkpoints.checkpoint import Checkpoint
from g4conformance.errors import VectorsError
from g4conformance.expected import generation_of
from g4conformance.foreign import FORMAT, INDEX, MANIFEST, TRACE, VERSION, identity
from g4conformance.prompts import ResolvedCase
from g4conformance.session import ConformanceSession, RunOptions
from g4conformance.trace import Trace
from g4conformance.vectors.buffers import in_static_buffers
from g4conformance.vectors.elsewhere import Elsewhere
from g4conformance.vectors.files import digest_of, folder_name, read_json, read_sealed, write_sealed, write_tensors
from g4conformance.vectors.limits import limits_of
from g4conformance.vectors.reading import is_whole
from g4conformance.vectors.request import described, request_of, seal, setting_of, write_entering

JUDGED_LATER = Elsewhere("whoever answers the vectors")


def record_vectors(checkpoint: Checkpoint, options: RunOptions, out: Path) -> Iterator[tuple[str, bool]]:
    """Records the cases of `options` into `out`; yields each one's name, and whether it was whole already.

    Raises:
        VectorsError: `out` holds finished vectors of another checkpoint or setting.
        ConformanceError: as `ConformanceSession`.
    """
    session = ConformanceSession(checkpoint, JUDGED_LATER, options)
    common = _common(session)
    finished = _finished(out, common)
    for name, case in session.cases.items():
        folder = out / folder_name(name)
        kept = _is_recorded(folder, case, session)
        if not kept:
            _record_case(folder, case, session)
        finished[name] = {"folder": folder.name, "manifest": digest_of(folder / MANIFEST)}
        yield name, kept
    order = [case.name for case in options.all_cases()]
    in_order = sorted(finished, key=lambda name: order.index(name) if name in order else len(order))
    write_sealed(out / INDEX, {**common, "cases": {name: finished[name] for name in in_order}})


def _record_case(folder: Path, case: ResolvedCase, session: ConformanceSession) -> None:
    checkpoint, bench = session.checkpoint, session.bench
    reference = session.reference(case.case.name)
    manifest = write_entering(folder, case, reference, checkpoint)
    trace = dict(reference)
    write_tensors(folder / TRACE, trace, identity(manifest))
    manifest["files"][TRACE] = digest_of(folder / TRACE)
    manifest["tensors"][TRACE] = {name: described(name, tensor) for name, tensor in trace.items()}
    own_noise = session.own_noise(case)
    noise = {"calibrated": vars(bench.noise), "own": vars(own_noise)}
    manifest |= {"noise": noise, "generation": _generation(case, reference, session)}
    buffers = in_static_buffers(reference, case.request.layout, bench.facts)
    limits = limits_of(case, reference, replace(bench, noise=bench.noise.joined(own_noise)))
    for name, statement in manifest["tensors"][TRACE].items():
        statement |= {"in_static_buffers": list(buffers[name].shape), "limits": limits.get(name, [])}
    seal(folder, manifest)


def _generation(case: ResolvedCase, reference: Trace, session: ConformanceSession) -> dict[str, Any]:
    """What greedy generation must yield, up to a near-tie of the reference's logits."""
    new, reason = generation_of(reference, case.request.layout, session.checkpoint.facts, case.gen_steps)
    return {"new_token_ids": new, "stop_reason": str(reason)}


def _is_recorded(folder: Path, case: ResolvedCase, session: ConformanceSession) -> bool:
    """Whether this very case was recorded before, in this setting, to the end, and nobody has altered it since."""
    if not is_whole(folder):
        return False
    asked = setting_of(case, session.checkpoint) | {"request": request_of(case)}
    manifest = read_json(folder / MANIFEST)
    same_noise = manifest.get("noise", {}).get("calibrated") == vars(session.bench.noise)
    return same_noise and all(manifest.get(key) == value for key, value in asked.items())


def _common(session: ConformanceSession) -> dict[str, Any]:
    """What all cases of the vectors have alike."""
    setting = setting_of(next(iter(session.cases.values())), session.checkpoint)
    alike = {key: setting[key] for key in ("checkpoint_digest", "provenance")}
    return {"format": FORMAT, "version": VERSION, **alike, "max_seq": session.max_seq}


def _finished(out: Path, common: Mapping[str, Any]) -> dict[str, Any]:
    """The cases of vectors that `out` holds already, if they are of the same setting."""
    if not (out / INDEX).exists():
        return {}
    index = read_sealed(out / INDEX)
    for key, value in common.items():
        if index.get(key) != value:
            wanted, found = f"an empty folder, or vectors of the same {key.replace('_', ' ')}", f"others in {out}"
            raise VectorsError(wanted, found, "Choose another --out.")
    return dict(index["cases"])
