"""One failed check in words: what was measured, what was allowed, where, who inherits it, how to repeat it."""

from __future__ import annotations

import math
from collections.abc import Sequence

from g4conformance.judging.verdict import Measurement, Status, Verdict
from g4conformance.report.known import widened_text
from g4conformance.report.suspects import likely
from g4conformance.stages import upstream


def failure_text(verdicts: Sequence[Verdict], of_case: Sequence[Verdict], repeat: str) -> str:
    """The message of a failed test.

    Args:
        verdicts: those of one check on one case, one a mode.
        of_case: all verdicts of the case, to say which stages inherit the fault.
        repeat: the command that runs just this check again.
    """
    told = next((v for v in verdicts if v.status is not Status.PASS), verdicts[0])
    lines = [f"{told.check} {told.stage}, case {told.case}: {told.statement}"]
    for verdict in verdicts:
        lines += _mode_lines(verdict)
    lines += [_blame_line(told, of_case), _seen_before(of_case)]
    lines.append(f"  repeat: {repeat}")
    return "\n".join(line for line in lines if line)


def _mode_lines(verdict: Verdict) -> list[str]:
    widened = "" if verdict.widened is None else f"; {widened_text(verdict.widened, verdict.unit)}"
    if verdict.status is Status.PASS:
        return [f"  {verdict.mode}: within budget{widened}"]
    lines = [f"  {verdict.mode}: {verdict.status.replace('_', ' ')}; {verdict.where}"]
    if verdict.measurement is not None:
        lines.append(f"    {_differing(verdict)}; {describe(verdict.measurement)}")
        lines.append(f"    {_allowance(verdict)}{'; not enough: ' + widened.removeprefix('; ') if widened else ''}")
    return lines


def _differing(verdict: Verdict) -> str:
    return f"{verdict.mismatched:,} of {verdict.count:,} values differ"


def describe(measurement: Measurement) -> str:
    """The statistics that every numeric verdict carries."""
    peir = "none (constant reference)" if measurement.peir is None else f"{measurement.peir:.3%}"
    argmax = "same" if measurement.argmax_equal else "another"
    return (
        f"worst in {measurement.tensor}: max |diff| {measurement.max_abs:.3g}, mean |diff| {measurement.mean_abs:.3g}, "
        f"gain {measurement.gain:.6g}, PEIR {peir}, argmax {argmax}"
    )


def _allowance(verdict: Verdict) -> str:
    measurement = verdict.measurement
    assert measurement is not None
    if measurement.allowed_max == 0.0:
        return "allowed: nothing, this is exact"
    gain = "" if math.isinf(measurement.allowed_gain) else f", gain off by {measurement.allowed_gain:.3g}"
    would = "no budget" if verdict.would_pass in (None, math.inf) else f"{verdict.would_pass:.3g} {verdict.unit}"
    return (
        f"allowed: max |diff| {measurement.allowed_max:.3g}, mean |diff| {measurement.allowed_mean:.3g}{gain}; "
        f"would have passed with {would}"
    )


def _blame_line(told: Verdict, of_case: Sequence[Verdict]) -> str:
    if told.status is Status.INHERITED:
        blamed = [v for v in of_case if v.status in (Status.FAIL, Status.ERROR) and v.stage in upstream(told.stage)]
        return f"  inherited from: {_by_stage(blamed)}" if blamed else ""
    inheriting = [v for v in of_case if v.status is Status.INHERITED and told.stage in upstream(v.stage)]
    return f"  inherited by: {_by_stage(inheriting)}" if inheriting else ""


def _seen_before(of_case: Sequence[Verdict]) -> str:
    """The known mistakes that the whole case looks like."""
    names = ", ".join(suspect.fault.id for suspect in likely(of_case))
    return f"  seen before: {names}" if names else ""


def _by_stage(verdicts: Sequence[Verdict]) -> str:
    """Such as `prefill (G4-PREFILL-02, G4-PREFILL-03), generation (G4-GEN-04)`."""
    stages = dict.fromkeys(v.stage for v in verdicts)
    checks = {stage: dict.fromkeys(v.check for v in verdicts if v.stage is stage) for stage in stages}
    return ", ".join(f"{stage} ({', '.join(names)})" for stage, names in checks.items())
