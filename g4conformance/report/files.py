"""The report as a file: JSON for gates, one self-contained HTML page for people."""

from __future__ import annotations

import html
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from g4conformance.errors import ConformanceError
from g4conformance.judging.verdict import Status, Verdict
from g4conformance.known.review import NO_REVIEW, Review
from g4conformance.report.failure import describe
from g4conformance.report.known import failures_declared, known_data, told, widened_text
from g4conformance.report.summary import conformity, stage_verdict
from g4conformance.report.suspects import likely, suspect_data
from g4conformance.stages import Stage

SUFFIXES = (".json", ".html")

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 82rem; padding: 0 1rem; color: #1c1c1c }
table { border-collapse: collapse; margin: 1rem 0 2rem }
th, td { border: 1px solid #d8d8d8; padding: .3rem .6rem; text-align: left; vertical-align: top }
th { background: #f4f4f4; font-weight: 600; white-space: nowrap }
.pass { background: #e2f3e2 } .fail, .error { background: #f8d4d0 } .inherited, .known { background: #fbeecb }
.not-observed, .not-applicable { color: #8a8a8a }
code { font-size: 13px; white-space: nowrap }
"""


def require_writable(path: Path, suffixes: Sequence[str] = SUFFIXES, option: str = "--report") -> None:
    """Raises ConformanceError unless a file can be written at `path`: a known suffix, in a folder that exists."""
    if path.suffix not in suffixes or not path.absolute().parent.is_dir():
        raise ConformanceError(
            f"a file ending in {' or '.join(suffixes)}, in a folder that exists", str(path), f"Check {option}."
        )


def write_report(
    path: Path, verdicts: Sequence[Verdict], setting: Mapping[str, Any], review: Review = NO_REVIEW
) -> None:
    """Writes `path`, whole or not at all, in the format of its suffix."""
    write = as_html if path.suffix == ".html" else as_json
    write_whole(path, write(verdicts, setting, review))


def write_whole(path: Path, text: str) -> None:
    """Writes `path`, whole or not at all."""
    partial = path.with_suffix(path.suffix + ".partial")
    partial.write_text(text)
    os.replace(partial, path)


def as_json(verdicts: Sequence[Verdict], setting: Mapping[str, Any], review: Review = NO_REVIEW) -> str:
    """`{"setting": ..., "stages": {stage: verdict}, "suspects": [...], "known": {...}, "verdicts": [...]}`.

    Infinities become null.
    """
    document = {
        "setting": dict(setting),
        "stages": {stage: stage_verdict(own) for stage, own in _by_stage(verdicts).items()},
        "suspects": suspect_data(likely(verdicts)),
        "known": known_data(verdicts, review),
        "verdicts": [v.as_dict() for v in verdicts],
    }
    return json.dumps(_finite(document), indent=1, allow_nan=False)


def as_html(verdicts: Sequence[Verdict], setting: Mapping[str, Any], review: Review = NO_REVIEW) -> str:
    """A page with the setting, a table case x stage, and every verdict that is not a pass."""
    title = f"{setting['runtime']} against the Hugging Face reference"
    facts = "".join(f"<tr><th>{_text(k)}</th><td>{_text(v)}</td></tr>" for k, v in setting.items())
    wrong = bool(review.problems) or any(v.failed for v in verdicts)
    ending = "does not conform" if wrong else conformity(verdicts)
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{_text(title)}</title><style>{_STYLE}</style>'
        f"<h1>{_text(title)}: {ending}</h1>"
        f"{_case_table(verdicts)}{_known(verdicts, review)}{_suspects(verdicts)}{_findings(verdicts)}"
        f"<h2>Setting</h2><table>{facts}</table></html>"
    )


def _case_table(verdicts: Sequence[Verdict]) -> str:
    head = "".join(f"<th>{stage}</th>" for stage in Stage)
    cases = dict.fromkeys(v.case for v in verdicts)
    rows = "".join(_case_row(case, [v for v in verdicts if v.case == case]) for case in cases)
    return f"<table><tr><th>case</th>{head}</tr>{rows}</table>"


def _case_row(case: str, verdicts: Sequence[Verdict]) -> str:
    by_stage = _by_stage(verdicts)
    words = [stage_verdict(by_stage.get(stage, [])) for stage in Stage]
    cells = "".join(
        f'<td class="{word.replace(" ", "-")}">{"" if word == "not applicable" else word}</td>' for word in words
    )
    return f"<tr><th>{_text(case)}</th>{cells}</tr>"


def _suspects(verdicts: Sequence[Verdict]) -> str:
    """A list of the known mistakes that this looks like, each with the places where it was reported."""
    items = "".join(
        f"<li><code>{_text(s.fault.id)}</code> ({s.resemblance:.0%}): {_text(s.fault.mechanism)} "
        + " ".join(f'<a href="{_text(link)}">{_text(link)}</a>' for link in s.fault.links)
        for s in likely(verdicts)
    )
    return f"<h2>Known mistakes that look like this</h2><ol>{items}</ol>" if items else ""


def _known(verdicts: Sequence[Verdict], review: Review) -> str:
    """What was declared and what became of it: failures with their links, and entries that are not true."""
    rows = "".join(
        f'<tr class="known"><td><code>{check}</code></td><td>{_text(", ".join(cases))}</td>'
        f"<td>{_text(known.category)}</td><td>{_text(known.reason)}</td>"
        f'<td><a href="{_text(known.link)}">{_text(known.link)}</a></td></tr>'
        for (check, known), cases in failures_declared(verdicts).items()
    )
    head = "<tr><th>check</th><th>cases</th><th>category</th><th>reason</th><th>link</th></tr>"
    problems = "".join(f"<li>{_text(problem)}</li>" for problem in review.problems)
    return (f"<h2>Known failures</h2><table>{head}{rows}</table>" if rows else "") + (
        f"<h2>Not as declared in {_text(review.declared.path)}</h2><ul>{problems}</ul>" if problems else ""
    )


def _findings(verdicts: Sequence[Verdict]) -> str:
    found = [v for v in verdicts if v.status not in (Status.PASS, Status.NOT_APPLICABLE) or v.widened is not None]
    if not found:
        return "<p>Every check passed.</p>"
    rows = "".join(_finding_row(v) for v in found)
    head = "<tr><th>check</th><th>case</th><th>mode</th><th>status</th><th>what must hold</th><th>found</th></tr>"
    return f"<h2>What is not a pass, or only by a wider budget</h2><table>{head}{rows}</table>"


def _finding_row(verdict: Verdict) -> str:
    cells = (verdict.case, verdict.mode, verdict.status.replace("_", " "), verdict.statement, _told(verdict))
    told = "".join(f"<td>{_text(cell)}</td>" for cell in cells)
    return f'<tr class="{verdict.status.replace("_", "-")}"><td><code>{verdict.check}</code></td>{told}</tr>'


def _told(verdict: Verdict) -> str:
    measured = describe(verdict.measurement) if verdict.measurement else ""
    known = told(verdict.known) if verdict.known else ""
    widened = widened_text(verdict.widened, verdict.unit) if verdict.widened else ""
    return "; ".join(filter(None, [verdict.where, measured, known, widened]))


def _by_stage(verdicts: Sequence[Verdict]) -> dict[Stage, list[Verdict]]:
    return {stage: own for stage in Stage if (own := [v for v in verdicts if v.stage is stage])}


def _text(value: object) -> str:
    return html.escape(str(value))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
