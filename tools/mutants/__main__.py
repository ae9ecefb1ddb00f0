"""Judges the machine-made mutants of the shipped runtime: `python -m tools.mutants [--file cache.py] [--mutant ID]`.

Prints how the mutants of each file ended, and the score. Ends with 1, and says which, if a mutant survives that
survivors.toml does not explain, or if one is explained that does not survive or does not exist.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from tools.mutants.fork import in_parallel
from tools.mutants.grounds import all_grounds
from tools.mutants.mutate import Mutant
from tools.mutants.outcome import End, Outcome
from tools.mutants.report import page, score, table
from tools.mutants.run import MODULES, all_mutants, outcome_of_mutant, require_innocent
from tools.mutants.survivors import gone, load_survivors, unexplained
from tools.mutants.unit_tests import load_plugins


def main() -> int:
    options = _options()
    mutants, listed = all_mutants(), load_survivors()
    complaints = gone(listed, mutants)
    outcomes = _judged(_selected(mutants, options), options.verbose, options.jobs)
    complaints += unexplained(listed, outcomes)
    new = sum(outcome.end is End.SURVIVED and mutant.id not in listed for mutant, outcome in outcomes.items())
    print(table(outcomes), *complaints, score(outcomes, new), sep="\n")
    if options.report:
        options.report.write_text(page(outcomes, listed))
    return 1 if complaints else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.mutants", description=__doc__)
    parser.add_argument(
        "--file",
        action="append",
        choices=[f"{m}.py" for m in MODULES],
        help="only this file's mutants; may be repeated",
    )
    parser.add_argument("--mutant", action="append", metavar="ID", help="only this mutant; may be repeated")
    parser.add_argument("--report", type=Path, metavar="FILE.md", help="also write the result as a Markdown page")
    parser.add_argument("--verbose", action="store_true", help="print how every mutant ends")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="judge N mutants at a time (default: 1)")
    options = parser.parse_args()
    if options.report and (options.file or options.mutant):
        parser.error("a page is about all mutants: leave --file and --mutant out")
    return options


def _selected(mutants: Sequence[Mutant], options: argparse.Namespace) -> list[Mutant]:
    known = {mutant.id for mutant in mutants}
    if unknown := [name for name in options.mutant or () if name not in known]:
        sys.exit(f"no such mutant: {', '.join(unknown)}")
    return [
        mutant
        for mutant in mutants
        if (not options.file or mutant.file in options.file) and (not options.mutant or mutant.id in options.mutant)
    ]


def _judged(mutants: Sequence[Mutant], verbose: bool, jobs: int) -> dict[Mutant, Outcome]:
    _use_one_thread()
    grounds = all_grounds()
    load_plugins()
    gc.freeze()  # whatever a fork collects, it need not look through all this
    require_innocent(grounds)
    outcomes = {}
    ended = in_parallel(lambda number: outcome_of_mutant(mutants[number], grounds), len(mutants), jobs)
    for mutant, outcome in zip(mutants, ended, strict=True):
        outcomes[mutant] = outcome
        if verbose or len(mutants) == 1:
            print(f"{mutant.id} (line {mutant.line})\n  {mutant.change}\n  {outcome}", flush=True)
    return outcomes


def _use_one_thread() -> None:
    """A fork has only the thread that made it: nothing may wait for another."""
    torch.set_num_threads(1)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


if __name__ == "__main__":
    sys.exit(main())
