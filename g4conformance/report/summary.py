"""The terminal summary: a line a stage with its worst measured value against its budget, and the verdict."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from g4conformance.judging.verdict import Status, Verdict
from g4conformance.known.review import NO_REVIEW, Review
from g4conformance.report.known import failures_declared, known_lines
from g4conformance.report.suspects import likely, suspect_lines
from g4conformance.stages import Stage

_WIDTH = 140
_RED = {Status.FAIL, Status.ERROR, Status.INHERITED}
_STYLES = {
    "pass": "green",
    "pass in part": "green",
    "fail": "bold red",
    "error": "bold red",
    "inherited": "yellow",
    "known": "yellow",
}


def summary_text(
    verdicts: Sequence[Verdict],
    setting: Mapping[str, Any],
    failed_tests: int,
    colour: bool = False,
    review: Review = NO_REVIEW,
) -> str:
    """The whole summary as text of at most 140 columns.

    `failed_tests` counts all that went wrong in the run: a test can fail without a verdict that says why.
    """
    console = Console(file=io.StringIO(), width=_WIDTH, force_terminal=colour, no_color=not colour, highlight=False)
    console.print(_header(setting))
    console.print(_table(verdicts))
    for line in _closing_lines(verdicts, failed_tests, review):
        console.print(line)
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


def stage_verdict(verdicts: Sequence[Verdict]) -> str:
    """The word for a stage: the worst status of its verdicts; in part, where some of it was not observed."""
    present = {v.status for v in verdicts}
    if present >= {Status.PASS, Status.NOT_OBSERVED} and not present & (_RED | {Status.KNOWN}):
        return "pass in part"
    for status in (Status.FAIL, Status.ERROR, Status.INHERITED, Status.KNOWN, Status.NOT_OBSERVED, Status.PASS):
        if status in present:
            return status.replace("_", " ")
    return "not applicable"


def conformity(verdicts: Sequence[Verdict]) -> str:
    """How a run ends in which nothing is wrong that was not known."""
    known = len(failures_declared(verdicts))
    return "conforms" if not known else f"conforms but for {known} known failure{'s' if known > 1 else ''}"


def _header(setting: Mapping[str, Any]) -> str:
    worst = max(setting.get("reference_peir", {}).values(), default=0.0)
    return (
        f"{setting['runtime']} against the Hugging Face reference\n{_of_the_runtime(setting)}"
        f"model {setting['model']}, {setting['dtype']}, attention {setting['attn']}, images by "
        f"{setting['image_backend']}, max_seq {setting['max_seq']}\n"
        f"quantization {setting['quant']}, graphs run by {setting['executor']}\n"
        f"torch {setting['torch']}, transformers {setting['transformers']}; the reference agrees with itself to a PEIR "
        f"of {worst:.2g} on logits"
    )


def _of_the_runtime(setting: Mapping[str, Any]) -> str:
    """What the suite did in the runtime's place, and what it says it cannot do; nothing for most."""
    told = []
    if driven := setting.get("driven"):
        told.append(f"{driven}: the runtime has no generate\n")
    if unsupported := setting.get("unsupported"):
        told.append(f"declared unsupported: {', '.join(unsupported)}\n")
    return "".join(told)


def _table(verdicts: Sequence[Verdict]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("stage", "verdict"):
        table.add_column(name, no_wrap=True)
    for name in ("checks", "values", "of budget", "max |diff|", "mean |diff|", "PEIR", "argmax"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("worst in", no_wrap=True)
    for stage in Stage:
        if own := [v for v in verdicts if v.stage is stage]:
            table.add_row(stage, *_cells(own))
    return table


def _cells(verdicts: Sequence[Verdict]) -> list[str]:
    judged = [v for v in verdicts if v.status is not Status.NOT_APPLICABLE]
    cells = [_styled(stage_verdict(verdicts)), str(len(judged)), _count(sum(v.count for v in judged))]
    measured = [v for v in judged if v.measurement is not None]
    if not measured:
        return [*cells, "", "", "", "", "", ""]
    worst = max(measured, key=lambda v: v.measurement.ratio if v.measurement else 0.0)
    found = worst.measurement
    assert found is not None
    return [
        *cells,
        _of_budget(found.ratio),
        f"{found.max_abs:.2g}",
        f"{found.mean_abs:.2g}",
        "" if found.peir is None else f"{found.peir:.1g}",
        "same" if found.argmax_equal else "another",
        f"{worst.check} {worst.case}" if found.ratio > 0.0 else "",
    ]


def _of_budget(ratio: float) -> str:
    """Measured / allowed: a percentage within the budget, a multiple beyond it."""
    if ratio == 0.0:
        return "exact"
    if math.isinf(ratio):
        return "not exact"
    return f"{ratio:.0%}" if ratio <= 1.0 else f"{ratio:.3g} x"


def _styled(word: str) -> str:
    style = _STYLES.get(word)
    return f"[{style}]{word}[/]" if style else word


def _closing_lines(verdicts: Sequence[Verdict], failed_tests: int, review: Review) -> list[str]:
    judged = [v for v in verdicts if v.status not in (Status.NOT_APPLICABLE, Status.NOT_OBSERVED)]
    checks, cases = {v.check for v in judged}, {v.case for v in judged}
    lines = [
        f"{len(checks)} checks on {len(cases)} cases compared {_count(sum(v.count for v in judged))} values; "
        f"{_not_observed(verdicts)}",
        *map(escape, known_lines(verdicts, review)),
    ]
    wrong = [v for v in verdicts if v.status in (Status.FAIL, Status.ERROR)]
    if wrong:
        order = list(Stage)
        first = min(wrong, key=lambda v: order.index(v.stage))
        lines.append(f"[bold red]does not conform[/]: wrong first at {first.stage} ({first.check}, case {first.case})")
        if resembling := suspect_lines(likely(verdicts)):
            lines += ["known mistakes that look like this:", *map(escape, resembling)]
    if review.problems:
        lines.append(f"[bold red]not as declared[/] in {escape(str(review.declared.path))}:")
        lines += [escape(f"  {problem}") for problem in review.problems]
    elif failed_tests and not wrong:
        lines.append(f"[bold red]incomplete[/]: {failed_tests} tests failed for another reason than a wrong value")
    elif judged and not wrong:
        lines.append(f"[green]{conformity(verdicts)}[/]")
    return lines


def _not_observed(verdicts: Sequence[Verdict]) -> str:
    missing = [v for v in verdicts if v.status is Status.NOT_OBSERVED]
    if not missing:
        return "nothing is unobserved"
    return f"{len({v.check for v in missing})} checks not observed: {missing[0].where}"


def _count(number: int) -> str:
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.1f} {letter}"
    return str(number)
