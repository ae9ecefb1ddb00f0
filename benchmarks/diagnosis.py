"""Measures the diagnosis: `python benchmarks/diagnosis.py [--fault ID]`.

Each fault is planted and all bundled cases are judged as a user's run judges them, in a setting in which its
fingerprint was not recorded. How often is the true fault named first, how often among the first three? A fault whose
trace equals another's counts as wrong unless it happens to be named first.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch

from g4conformance.checkpoints.checkpoint import Checkpoint, LoadOptions, load_checkpoint
from g4conformance.checkpoints.seeded import SeededSpec, seeded_checkpoint
from g4conformance.faults import FAULTS, Fault
from g4conformance.faults.diagnosis import suspects
from g4conformance.faults.matrix import shipped_workbench
from g4conformance.faults.subjects import Subject
from g4conformance.faults.trial import Workbench
from g4conformance.fixtures import bundled_checkpoint
from g4conformance.judging.verdict import Verdict
from g4conformance.session import RunOptions

SETTINGS = ("as recorded, more steps", "sdpa", "another checkpoint")


def checkpoint_of(setting: str) -> Checkpoint:
    if setting == "another checkpoint":
        return seeded_checkpoint(SeededSpec(sliding_window=32, final_logit_softcapping=30.0), seed=11)
    attn = "sdpa" if setting == "sdpa" else "eager"
    return load_checkpoint(bundled_checkpoint(), LoadOptions(attn_implementation=attn))


def verdicts_with(fault: Fault, bench: Workbench) -> list[Verdict]:
    found: list[Verdict] = []
    for name in bench.session.cases:
        prepared = bench.prepared(name, probes=True)
        found += bench.judged(*bench.observed(fault, prepared))
    return found


def rank(fault: Fault, bench: Workbench) -> int | None:
    """The fault's place among the suspects, from 1; None if nothing was wrong."""
    ranked = suspects(verdicts_with(fault, bench))
    return next((place for place, s in enumerate(ranked, start=1) if s.fault is fault), None)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fault", action="append", default=[])
    parser.add_argument("--setting", choices=SETTINGS, action="append", default=[])
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    faults = [f for f in FAULTS.values() if f.needs is Subject.BUNDLED and (not args.fault or f.id in args.fault)]
    for setting in args.setting or SETTINGS:
        bench = shipped_workbench(checkpoint_of(setting), RunOptions())
        places = {fault.id: rank(fault, bench) for fault in faults}
        seen = [place for place in places.values() if place is not None]
        first, third = (sum(place <= n for place in seen) for n in (1, 3))
        print(f"{setting}: of {len(seen)} faults that show, {first} named first ({first / len(seen):.0%}), ", end="")
        print(f"{third} among the first three ({third / len(seen):.0%})")
        print("  not first:", ", ".join(f"{id} {place}" for id, place in places.items() if place not in (None, 1)))


if __name__ == "__main__":
    main()
