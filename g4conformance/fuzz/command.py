"""The command `g4conformance fuzz`: searches under a progress bar, or replays what a search has saved."""

from __future__ import annotations

import math
from argparse import Namespace
from pathlib import Path
from random import SystemRandom
from tempfile import TemporaryFile

from g4conformance.errors import ConformanceError
from g4conformance.fuzz.conformance import Plant, examine
from g4conformance.fuzz.example import FuzzExample
from g4conformance.fuzz.planting import planting
from g4conformance.fuzz.report import alarm_text, planted_line, tally_line
from g4conformance.fuzz.search import Budget, Found, Tally, search
from g4conformance.report.progress import progress_bar


def run_fuzz(args: Namespace) -> tuple[int, str]:
    """The exit status and what to print: 0 if everything conforms, or if the fault that was planted was found; else 1.

    Args:
        args: the options of `g4conformance.cli.add_fuzz_options`.

    Raises:
        ConformanceError: the reproducer cannot be read or not be judged, `--out` is no place for one, or there is no
            such fault.
    """
    plant = None if args.fault is None else planting(args.fault)
    if args.replay:
        return _replay(Path(args.replay), plant)
    out = _writable(Path(args.out))
    seed = SystemRandom().randrange(2**32) if args.seed is None else args.seed
    budget = Budget(args.minutes or math.inf, args.examples or math.inf, args.shrink_seconds)
    tally, found = _search(budget, seed, plant)
    if plant is not None:
        lines = _kept(found, out) if found is not None else []
        return int(found is None), "\n".join([planted_line(tally, seed, args.fault, found is not None), *lines])
    if found is None:
        return 0, tally_line(tally, seed, alarms=0)
    return 1, "\n".join([tally_line(tally, seed, alarms=1), *_kept(found, out)])


def _replay(path: Path, plant: Plant | None) -> tuple[int, str]:
    example = FuzzExample.load(path)
    outcome = examine(example, plant)
    if outcome.unsound:
        raise ConformanceError(f"an example that can be judged at {path}", "an unsound reference", outcome.unsound)
    return (1, alarm_text(example, outcome, path)) if outcome.alarm else (0, f"{path} conforms")


def _kept(found: Found, out: Path) -> list[str]:
    path = found.example.save(out)
    return [alarm_text(found.example, found.outcome, path), f"saved as {path}"]


def _search(budget: Budget, seed: int, plant: Plant | None) -> tuple[Tally, Found | None]:
    with progress_bar() as progress:
        task = progress.add_task("configs", total=budget.examples if math.isfinite(budget.examples) else None)

        def show(tally: Tally) -> None:
            description = f"shrinking, {tally.candidates} candidates" if tally.candidates else "configs"
            progress.update(task, completed=tally.tried, description=description)

        return search(budget, seed, plant=plant, on_step=show)


def _writable(folder: Path) -> Path:
    """The folder, made if need be: a night is too long to learn at its end that nothing can be saved.

    Raises:
        ConformanceError: it cannot be made, or nothing can be written into it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ConformanceError(f"a folder for reproducers at {folder}", str(error), "Check --out.") from None
    return folder
