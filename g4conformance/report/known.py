"""What was declared in conformance.toml and what became of it, in words and as data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from g4conformance.judging.verdict import Known, Verdict, Widened
from g4conformance.known.entries import FILE_NAME
from g4conformance.known.review import Review


def known_text(verdict: Verdict) -> str:
    """One line: the check, why it is known to fail, and what it inherits that from."""
    assert verdict.known is not None
    source = verdict.known.inherited_from
    inherits = f", inherits from {source}" if source else ""
    return f"{verdict.check}, case {verdict.case}: known{inherits}: {told(verdict.known)}"


def told(known: Known) -> str:
    return f"{known.category}: {known.reason} ({known.link})"


def widened_text(widened: Widened, unit: str) -> str:
    """Such as `budget widened from 8 to 12 x the reference's noise: reason`."""
    return f"budget widened from {widened.usual:g} to {widened.allowed:g} {unit}: {widened.reason}"


def failures_declared(verdicts: Sequence[Verdict]) -> dict[tuple[str, Known], list[str]]:
    """The cases of each check that is declared to fail, and did; those that inherit it are left out."""
    found: dict[tuple[str, Known], list[str]] = {}
    for verdict in verdicts:
        if verdict.known is not None and not verdict.known.inherited_from:
            cases = found.setdefault((verdict.check, verdict.known), [])
            if verdict.case not in cases:
                cases.append(verdict.case)
    return found


def known_lines(verdicts: Sequence[Verdict], review: Review) -> list[str]:
    """The part of the summary about the file: known failures, budgets that were needed, what is not true."""
    lines = [
        f"  {check} on {', '.join(cases)}: {told(known)}"
        for (check, known), cases in failures_declared(verdicts).items()
    ]
    inheriting = {(v.check, v.case) for v in verdicts if v.known is not None and v.known.inherited_from}
    if inheriting:
        lines.append(f"  {len(inheriting)} more inherit from them")
    for verdict in verdicts:
        if verdict.widened is not None and not verdict.failed:
            text = widened_text(verdict.widened, verdict.unit)
            lines.append(f"  {verdict.check} on {verdict.case}, {verdict.mode}: {text}")
    if review.untouched:
        lines.append(f"  about checks, cases or settings that were not judged here: {', '.join(review.untouched)}")
    return [f"declared in {review.declared.path or FILE_NAME}:", *lines] if lines else []


def known_data(verdicts: Sequence[Verdict], review: Review) -> dict[str, Any]:
    """The same for machines."""
    return {
        "file": None if review.declared.path is None else str(review.declared.path),
        "failures": [
            {"check": check, "cases": cases, "reason": known.reason, "category": known.category, "link": known.link}
            for (check, known), cases in failures_declared(verdicts).items()
        ],
        "problems": list(review.problems),
        "untouched": list(review.untouched),
    }
