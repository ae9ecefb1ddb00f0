"""What `g4conformance faults` does: try faults, print the matrix, write it, and say whether all were killed."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from g4conformance.checkpoints.checkpoint import LoadOptions, load_checkpoint
from g4conformance.errors import ConformanceError
from g4conformance.factory import made_by
from g4conformance.faults import FAULTS, Fault
from g4conformance.faults.fingerprints import load, save
from g4conformance.faults.markdown import as_markdown
from g4conformance.faults.matrix import (
    as_data,
    as_table,
    headline,
    record_on_shipped,
    select_faults,
    shipped_workbench,
    survivors,
    try_on,
    try_on_quantized,
    try_on_shipped,
)
from g4conformance.faults.sensitivity import Probe, findings
from g4conformance.faults.subjects import Subject, subject_checkpoint
from g4conformance.faults.trial import Outcome, Trial
from g4conformance.fixtures import bundled_checkpoint
from g4conformance.report.files import require_writable, write_whole
from g4conformance.report.progress import progress_bar
from g4conformance.stages import Stage

SUFFIXES = (".json", ".md")
_WIDTH = 180


@dataclass(frozen=True)
class FaultOptions:
    """What the command was asked to do."""

    ids: tuple[str, ...] = ()
    stages: tuple[str, ...] = ()
    runtime: str | None = None
    quant: str | None = None
    model: str | None = None
    report: str | None = None
    record: str | None = None


def run_faults(options: FaultOptions) -> int:
    """Tries the chosen faults; 0 if every one that the runtime has a part for was killed at its stage, 1 if not.

    Raises:
        ConformanceError: an unknown fault or stage, a runtime that cannot be made, or a file that cannot be written.
    """
    _require_together(options)
    faults = _chosen(options)
    if options.record is not None:
        return _record(faults, Path(options.record))
    if options.report is not None:
        require_writable(Path(options.report), SUFFIXES)
    trials = _trials(options, faults)
    console = Console(width=_WIDTH, highlight=False)
    console.print(as_table(trials))
    everything = options.runtime is None and options.quant is None and not (options.ids or options.stages)
    blind, seen = _sensitivity() if everything else ([], [])
    for line in [*blind, *seen, headline(trials)]:
        console.print(line)
    if options.report is not None:
        _write(Path(options.report), trials)
    killed = sum(trial.outcome is Outcome.KILLED for trial in trials)
    # The shipped runtime has every part; one of an adopter's may lack some, and some faults keep one from calibration,
    # but something must have been tried.
    enough = len(trials) if options.runtime is None and options.quant is None else max(1, killed)
    return 1 if survivors(trials) or blind or killed < enough else 0


def _require_together(options: FaultOptions) -> None:
    """Raises ConformanceError for options that contradict each other."""
    if options.model is not None and options.runtime is None:
        raise ConformanceError("--runtime together with --model", "--model alone", "Name a runtime, or leave it out.")
    if options.quant is not None and options.runtime is not None:
        raise ConformanceError("either --quant or --runtime", "both", "A scheme is the shipped runtime's.")


def _trials(options: FaultOptions, faults: Sequence[Fault]) -> list[Trial]:
    """Tries those of the faults that this kind of runtime can have.

    Raises:
        ConformanceError: it can have none of them, or the runtime cannot be made.
    """
    if options.quant is not None:
        possible = [fault for fault in faults if fault.needs in (Subject.BUNDLED, Subject.QUANTIZED)]
        found = try_on_quantized(possible, options.quant)
    elif options.runtime is not None:
        possible = [fault for fault in faults if fault.boundary]
        checkpoint = load_checkpoint(options.model or bundled_checkpoint(), LoadOptions())
        found = try_on(checkpoint, made_by(options.runtime, checkpoint), possible)
    else:
        possible, found = list(faults), try_on_shipped(faults)
    if not possible:
        wanted = "a fault of the contract's boundary" if options.runtime else "a fault that needs no special checkpoint"
        raise ConformanceError(wanted, "none among those chosen", "See `g4conformance faults` for what each needs.")
    return _with_progress(found, len(possible))


def _write(path: Path, trials: Sequence[Trial]) -> None:
    write_whole(path, as_markdown(trials) if path.suffix == ".md" else json.dumps(as_data(trials), indent=1))


def _record(faults: Sequence[Fault], path: Path) -> int:
    """Writes the fingerprints of these faults, and keeps those of others that the file holds."""
    require_writable(path, (".json",), "--record")
    recorded = dict(load(path)) if path.exists() else {}
    with progress_bar() as progress:
        for fault, fingerprint in progress.track(record_on_shipped(faults), total=len(faults), description="recording"):
            recorded[fault.id] = fingerprint
    save({id: recorded[id] for id in FAULTS if id in recorded}, path)
    return 0


def _chosen(options: FaultOptions) -> list[Fault]:
    if unknown := [id for id in options.ids if id not in FAULTS]:
        raise ConformanceError("the id of a fault", repr(unknown[0]), "See `g4conformance faults` for all of them.")
    known = [stage.value for stage in Stage]
    if unknown := [stage for stage in options.stages if stage not in known]:
        raise ConformanceError(f"one of {', '.join(known)}", repr(unknown[0]), "Check --stage.")
    return select_faults(options.ids, [Stage(stage) for stage in options.stages])


def _with_progress(trials: Iterable[Trial], total: int) -> list[Trial]:
    with progress_bar() as progress:
        return list(progress.track(trials, total=total, description="planting faults"))


def _sensitivity() -> tuple[list[str], list[str]]:
    """A line a check that does not see each of the smallest wrong values that it must see; else one that says so."""
    found = list(findings(shipped_workbench(subject_checkpoint(Subject.BUNDLED))))
    missed: dict[str, list[Probe]] = {}
    for finding in found:
        if not finding.red:
            missed.setdefault(finding.probe.check, []).append(finding.probe)
    all_seen = f"{len(found):,} smallest wrong values in single tensors: each is seen by the check that must see it"
    return [_blind_line(check, probes) for check, probes in missed.items()], [] if missed else [all_seen]


def _blind_line(check: str, probes: Sequence[Probe]) -> str:
    first = probes[0]
    return (
        f"[bold red]{check} is blind[/] to {len(probes)} of the smallest wrong values that it must see, the first in "
        f"{first.tensor}: {first.place}, {first.mode}"
    )
