"""What a fuzz says at its end: how much was tried, and the example that does not conform."""

from __future__ import annotations

import textwrap
from collections import Counter
from pathlib import Path

from g4conformance.fuzz.conformance import Outcome
from g4conformance.fuzz.example import DTYPES, FuzzExample, described
from g4conformance.fuzz.search import Tally
from g4conformance.report.failure import failure_text


def tally_line(tally: Tally, seed: int, alarms: int) -> str:
    """Such as `9 configs (text and picture each, float32 4, float16 5), 0 false alarms, seed 7`."""
    judged, unsound = tally.judged.total(), tally.unsound.total()
    parts = [
        f"{_counted(judged, 'config')} ({', '.join(['text and picture each', *_by_dtype(tally.judged)])})",
        _counted(alarms, "false alarm"),
    ]
    if unsound:
        parts.append(f"{unsound:,} more not judged: reference unsound ({', '.join(_by_dtype(tally.unsound))})")
    return ", ".join([*parts, f"seed {seed}"])


def planted_line(tally: Tally, seed: int, fault: str, found: bool) -> str:
    """Whether a fault that was planted in every runtime was found, and after how many configs."""
    tried = _counted(tally.judged.total(), "config")
    ending = f"was found after {tried}" if found else f"was not found in {tried}"
    return f"{fault}, planted in every runtime, {ending}, seed {seed}"


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _by_dtype(counts: Counter[str]) -> list[str]:
    return [f"{dtype} {counts[dtype]:,}" for dtype in DTYPES if counts[dtype]]


def alarm_text(example: FuzzExample, outcome: Outcome, path: Path) -> str:
    """The first check that does not pass, or what was raised; the config; and how to repeat it from `path`."""
    repeat = f"g4conformance fuzz --replay {path}"
    return "\n".join([_what(outcome, repeat), *_config_lines(example)])


def _what(outcome: Outcome, repeat: str) -> str:
    if not outcome.wrong:
        return f"{outcome.raised.rstrip()}\n  repeat: {repeat}"
    first = outcome.wrong[0]
    of_case = [v for v in outcome.wrong if v.case == first.case]
    return failure_text([v for v in of_case if v.check == first.check], of_case, repeat)


def _config_lines(example: FuzzExample) -> list[str]:
    rooms = {"case": example, "picture": example.picture, "text config": example.spec, "vision": example.spec.vision}
    lines = [f"  {name}: {described(value)}" for name, value in rooms.items()]
    return [part for line in lines for part in textwrap.wrap(line, 120, subsequent_indent="    ")]
