"""Holds conformance.toml to its word: what it declares must be possible, and must have been found true by the run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from g4conformance.cases import OWN_CASE, Case
from g4conformance.checks import CHECKS
from g4conformance.checks.needs import may_apply
from g4conformance.checks.registry import Needs
from g4conformance.errors import CaseError
from g4conformance.judging.verdict import Status, Verdict
from g4conformance.known.entries import ANY, NOTHING, Declared, KnownFailure, Scope

_UNJUDGED = (Status.NOT_OBSERVED, Status.NOT_APPLICABLE)
_REMOVE = "remove the entry"


@dataclass(frozen=True)
class Review:
    """What a run says of conformance.toml.

    Attributes:
        problems: a line each, for entries that are not true; any of them fails the run.
        untouched: entries about checks, cases, schemes or dtypes that this run did not judge.
    """

    declared: Declared = NOTHING
    problems: tuple[str, ...] = ()
    untouched: tuple[str, ...] = ()


NO_REVIEW = Review()


def require_possible(declared: Declared, cases: Iterable[Case]) -> None:
    """Looks at the cases that entries name, before anything is run.

    Raises:
        CaseError: there is no such case, or the entry's check can never judge it.
    """
    by_name = {case.name: case for case in cases}
    for entry in declared.entries:
        check = CHECKS[entry.scope.check]
        for name in set(entry.scope.cases) - {ANY, OWN_CASE}:
            if name not in by_name:
                remedy = "See `g4conformance cases`, or give the cases with --cases."
                raise CaseError(f"a known case in {declared.path}, {entry.place}", repr(name), remedy)
            if not may_apply(check, by_name[name], first=True, quantized=True):
                wanted = f"a case with what {check.id} needs, {check.needs}, in {declared.path}, {entry.place}"
                raise CaseError(wanted, repr(name), "Mend the entry.")


def stale(entry: KnownFailure, verdicts: Sequence[Verdict]) -> str:
    """Why a known failure is none, by the verdicts of its check on one case; empty if it is one.

    Of a case that an entry names something must have been judged; `*` is about all cases where something can be.
    """
    found = {verdict.status for verdict in verdicts}
    if Status.KNOWN in found:
        return ""
    if Status.PASS in found:
        return f"passes; {_advice(entry.scope)}"
    if entry.scope.cases == (ANY,):
        return ""
    return f"is {verdicts[0].status.replace('_', ' ')} ({verdicts[0].where}); {_advice(entry.scope)}"


def review(declared: Declared, verdicts: Sequence[Verdict], scheme: str, dtype: str, cases: Sequence[Case]) -> Review:
    """Compares the file with the verdicts of a run.

    Args:
        cases: all that the run could have judged. Entries about others, and about checks and settings that were not
            judged, are no problems.
    """
    problems, untouched = [], []
    for entry in declared.entries:
        own = [v for v in verdicts if entry.scope.covers(v.check, v.case)] if entry.scope.within(scheme, dtype) else []
        if not own:
            untouched.append(entry.place)
            continue
        everything = _all_judged(entry.scope, own, cases)
        found = (
            _failure_problems(entry, _by_case(own), everything)
            if isinstance(entry, KnownFailure)
            else _budget_problems(own, everything)
        )
        problems += [f"{entry.place}: {problem}" for problem in found]
    return Review(declared, tuple(problems), tuple(untouched))


def _failure_problems(entry: KnownFailure, by_case: Mapping[str, list[Verdict]], everything: bool) -> list[str]:
    untrue: dict[str, list[str]] = {}
    for case, own in by_case.items():
        if told := stale(entry, own):
            untrue.setdefault(told, []).append(case)
    problems = [f"on {', '.join(cases)} it {told}" for told, cases in untrue.items()]
    statuses = {verdict.status for own in by_case.values() for verdict in own}
    if not problems and everything and Status.KNOWN not in statuses:
        return [f"matches nothing that was judged; {_REMOVE}"]
    return problems


def _budget_problems(verdicts: Sequence[Verdict], everything: bool) -> list[str]:
    if not everything or any(verdict.widened for verdict in verdicts):
        return []
    if all(verdict.status in _UNJUDGED for verdict in verdicts):
        return [f"matches nothing that was judged; {_REMOVE}"]
    return [f"no verdict needs it; {_REMOVE}"]


def _all_judged(scope: Scope, verdicts: Sequence[Verdict], cases: Sequence[Case]) -> bool:
    """Whether every case that the entry is about has been judged."""
    check, judged = CHECKS[scope.check], {verdict.case for verdict in verdicts}
    if check.needs is Needs.QUANTIZED_ONCE:
        return bool(judged)
    meant = [case for case in cases if scope.covers(check.id, case.name)]
    return judged >= {case.name for case in meant if may_apply(check, case, first=False, quantized=True)}


def _by_case(verdicts: Sequence[Verdict]) -> dict[str, list[Verdict]]:
    return {case: [v for v in verdicts if v.case == case] for case in dict.fromkeys(v.case for v in verdicts)}


def _advice(scope: Scope) -> str:
    if scope.cases == (ANY,):
        return f"name the cases that fail instead of {ANY}, or {_REMOVE}"
    return _REMOVE if len(scope.cases) == 1 else "remove the case from the entry"
