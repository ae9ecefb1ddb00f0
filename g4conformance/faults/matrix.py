"""The kill matrix: every fault, the check that saw it, by how much, and who would have missed it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from rich.table import Table

from g4conformance.checkpoints.checkpoint import Checkpoint
from g4conformance.faults.fingerprints import Fingerprint, record
from g4conformance.faults.registry import FAULTS, Fault
from g4conformance.faults.requantizing import RequantizingWorkbench
from g4conformance.faults.subjects import Subject, subject_checkpoint, subject_scheme
from g4conformance.faults.trial import QUICK, Outcome, Trial, Workbench
from g4conformance.quantization.schemes import NONE
from g4conformance.runtime.contract import Runtime
from g4conformance.session import RunOptions
from g4conformance.shipped import shipped_runtime
from g4conformance.stages import Stage

NAIVE = ("argmax of a short prompt", "PEIR 1 %", "cosine 0.999")


def select_faults(ids: Sequence[str] = (), stages: Sequence[Stage] = ()) -> list[Fault]:
    """The faults of these ids and stages; all of them if neither is given.

    Raises:
        KeyError: an id is unknown.
    """
    chosen = [FAULTS[id] for id in ids] if ids else list(FAULTS.values())
    return [fault for fault in chosen if not stages or fault.stage in stages]


def try_on_shipped(faults: Iterable[Fault]) -> Iterator[Trial]:
    """Tries each fault on the shipped runtime, over the checkpoint that it needs."""
    for fault, bench in _with_benches(faults):
        yield bench.run(fault)


def record_on_shipped(faults: Iterable[Fault]) -> Iterator[tuple[Fault, Fingerprint]]:
    """The fingerprint of each fault over all cases, on the shipped runtime."""
    for fault, bench in _with_benches(faults):
        yield fault, record(bench, fault)


def _with_benches(faults: Iterable[Fault]) -> Iterator[tuple[Fault, Workbench]]:
    """Each fault with the workbench of the checkpoint that it needs; made once a checkpoint."""
    benches: dict[Subject, Workbench] = {}
    for fault in faults:
        if fault.needs not in benches:
            benches[fault.needs] = subject_workbench(fault.needs)
        yield fault, benches[fault.needs]


def try_on_quantized(faults: Iterable[Fault], quant: str) -> Iterator[Trial]:
    """Tries each fault on the shipped runtime in a scheme: those that need nothing special, and those of scales."""
    checkpoint = subject_checkpoint(Subject.BUNDLED)
    requantizing, converted = RequantizingWorkbench(checkpoint, quant), shipped_workbench(checkpoint, quant=quant)
    for fault in faults:
        yield (converted if fault.needs is Subject.QUANTIZED else requantizing).run(fault)


def try_on(checkpoint: Checkpoint, runtime: Runtime, faults: Iterable[Fault]) -> Iterator[Trial]:
    """Tries the faults of the contract's boundary on any runtime."""
    bench = Workbench(checkpoint, runtime)
    for fault in faults:
        if fault.boundary:
            yield bench.run(fault)


def subject_workbench(subject: Subject) -> Workbench:
    """The workbench of the faults that need this subject."""
    return shipped_workbench(subject_checkpoint(subject), quant=subject_scheme(subject))


def shipped_workbench(checkpoint: Checkpoint, options: RunOptions = QUICK, quant: str = NONE) -> Workbench:
    runtime = shipped_runtime(checkpoint, checkpoint.facts.default_max_seq, quant)
    return Workbench(checkpoint, runtime, options)


def survivors(trials: Iterable[Trial]) -> list[Trial]:
    """What should have been killed and was not; a fault that a runtime has no part for does not count."""
    return [trial for trial in trials if trial.outcome not in (Outcome.KILLED, Outcome.NOT_APPLICABLE)]


def missed_counts(trials: Iterable[Trial]) -> Counter[str]:
    """How many of the applied faults each naive observation would have missed."""
    return Counter(name for trial in trials for name in trial.missed_by)


def headline(trials: Sequence[Trial]) -> str:
    """One sentence: how many were tried, killed, and missed by naive observations."""
    tried = [trial for trial in trials if trial.outcome is not Outcome.NOT_APPLICABLE]
    killed = sum(trial.outcome is Outcome.KILLED for trial in tried)
    missed = missed_counts(tried)
    naive = ", ".join(f"{name} {missed[name]}" for name in NAIVE)
    left_out = len(trials) - len(tried)
    return (
        f"{killed} of {len(tried)} faults killed at their stage"
        + (f", {left_out} not applicable" if left_out else "")
        + (f"; missed by naive observations: {naive}" if missed else "")
    )


def as_table(trials: Sequence[Trial]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("fault", "stage", "outcome", "check"):
        table.add_column(name, no_wrap=True)
    table.add_column("margin", justify="right", no_wrap=True)
    table.add_column("shown in", no_wrap=True)
    table.add_column("missed by", no_wrap=True)
    for trial in trials:
        killed = trial.outcome is Outcome.KILLED
        style = "green" if killed else ("dim" if trial.outcome is Outcome.NOT_APPLICABLE else "bold red")
        last = _shortly(trial) if killed else trial.detail
        cells = (trial.fault.stage, f"[{style}]{trial.outcome}[/]", trial.killer, margin_text(trial))
        table.add_row(trial.fault.id, *cells, trial.shown_in, last)
    return table


def as_data(trials: Sequence[Trial]) -> list[dict[str, Any]]:
    """One dictionary a fault, for JSON; an exact check's margin is null."""
    return [
        {
            "fault": trial.fault.id,
            "stage": trial.fault.stage,
            "mechanism": trial.fault.mechanism,
            "at": trial.fault.at,
            "needs": trial.fault.needs,
            "case": trial.fault.case,
            "links": trial.fault.links,
            "outcome": trial.outcome,
            "check": trial.killer,
            "killers": {check: _finite(margin) for check, margin in trial.killers.items()},
            "shown_in": trial.shown_in,
            "missed_by": trial.missed_by,
            "detail": trial.detail,
        }
        for trial in trials
    ]


def margin_text(trial: Trial) -> str:
    """Measured / allowed of the check that had to see it."""
    if trial.outcome is not Outcome.KILLED:
        return ""
    return "exact" if math.isinf(trial.margin) else f"{trial.margin:,.3g} x"


def _shortly(trial: Trial) -> str:
    """The naive observations by their first words."""
    return ", ".join(name.split()[0] for name in trial.missed_by) or "none"


def _finite(margin: float) -> float | None:
    return margin if math.isfinite(margin) else None
