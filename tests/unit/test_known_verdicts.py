"""What is declared changes verdicts, and only those; the reports say so, and what is not true is a problem."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from g4conformance.cases import Case
from g4conformance.checks import CHECKS
from g4conformance.checks.run import Mode
from g4conformance.judging.judge import judge
from g4conformance.judging.observation import Observation
from g4conformance.judging.verdict import Known, Status, Verdict, Widened
from g4conformance.known.entries import ANY, Declared, KnownFailure, Scope, WiderBudget
from g4conformance.known.review import review
from g4conformance.reference.noise import Noise
from g4conformance.report.failure import failure_text
from g4conformance.report.files import as_html, as_json
from g4conformance.report.known import known_text
from g4conformance.report.summary import stage_verdict, summary_text

from .recording import NOISE, Recorded
from .test_report import SETTING

pytestmark = pytest.mark.unit

LINK = "https://example.org/1"
HIDDEN = "prefill/layer/3/hidden"
CHECK = "G4-PREFILL-03"
CASES = [Case(name, "x", prompt="Hi") for name in ("a", "b")]


def known(check: str, *cases: str) -> KnownFailure:
    return KnownFailure(f"[[known]] entry 1 ({check})", Scope(check, cases or (ANY,)), "too warm", "bug", LINK)


def wider(factor: float, check: str = CHECK, *cases: str) -> WiderBudget:
    return WiderBudget(f"[[budget]] entry 1 ({check})", Scope(check, cases or (ANY,)), "sums otherwise", factor=factor)


def with_factor(given: Recorded, factor: float) -> Observation:
    isolated = {**given.observation.isolated, HIDDEN: given.observation.isolated[HIDDEN] * factor}
    return replace(given.observation, isolated=isolated)


def judged(given: Recorded, declared: Declared, factor: float = 1 + 1e-4) -> list[Verdict]:
    bench = replace(given.bench, declared=declared)
    return judge(given.case, given.reference, with_factor(given, factor), bench)


def of(verdicts: list[Verdict], check: str = CHECK) -> Verdict:
    return next(v for v in verdicts if v.check == check and v.mode is Mode.ISOLATED)


def test_a_declared_failure_is_known_and_everything_else_is_as_it_was(text: Recorded) -> None:
    before, after = judged(text, Declared()), judged(text, Declared(failures=(known(CHECK),)))
    assert of(before).status is Status.FAIL
    assert of(after) == replace(of(before), status=Status.KNOWN, known=Known("too warm", "bug", LINK))
    assert not of(after).failed
    changed = [new for old, new in zip(before, after, strict=True) if old != new]
    assert {(v.check, v.status) for v in changed} == {(CHECK, Status.KNOWN)}


def test_another_case_is_not_meant(text: Recorded) -> None:
    assert of(judged(text, Declared(failures=(known(CHECK, "other"),)))).status is Status.FAIL
    assert of(judged(text, Declared(budgets=(wider(1e9, CHECK, "other"),)))).status is Status.FAIL


def test_a_wider_budget_is_told_where_it_was_needed(text: Recorded) -> None:
    failed = of(judged(text, Declared()))
    assert failed.would_pass is not None
    enough, too_little = failed.would_pass * 1.01, failed.would_pass * 0.99
    passed = of(judged(text, Declared(budgets=(wider(enough),))))
    assert passed.status is Status.PASS
    assert passed.widened == Widened(8.0, enough, "sums otherwise")
    still = of(judged(text, Declared(budgets=(wider(too_little),))))
    assert still == replace(failed, widened=Widened(8.0, too_little, "sums otherwise"))
    assert "not enough: budget widened from 8 to" in failure_text([still], [still], "repeat")


def test_a_wider_budget_is_not_told_where_it_was_not_needed(text: Recorded) -> None:
    verdicts = judged(text, Declared(budgets=(wider(1e9),)), factor=1.0)
    assert of(verdicts).status is Status.PASS
    assert all(verdict.widened is None for verdict in verdicts)


@pytest.mark.parametrize("declared", [Declared(failures=(known(CHECK),)), Declared(budgets=(wider(1e9),))])
def test_the_cases_own_noise_is_measured_before_anything_counts_as_known(text: Recorded, declared: Declared) -> None:
    """Else an entry would seem to be needed on a case whose noise is larger."""
    louder = Noise(NOISE.eps, {"layer/3/hidden": 1e-2}, {"layer/3/hidden": 1e-2}, {"layer/3/hidden": 1.0}, {})
    bench = replace(text.bench, declared=declared)
    verdict = of(judge(text.case, text.reference, with_factor(text, 1 + 1e-4), bench, lambda: louder))
    assert (verdict.status, verdict.known, verdict.widened) == (Status.PASS, None, None)


def test_a_verdict_with_both_survives_json() -> None:
    verdict = verdict_of(CHECK, "a", Status.KNOWN, known=Known("r", "bug", LINK, "G4-MASK-01"))
    verdict = replace(verdict, widened=Widened(8.0, 9.0, "why"))
    assert Verdict.from_dict(json.loads(json.dumps(verdict.as_dict()))) == verdict


# --- the review -----------------------------------------------------------------------------------------------------


def verdict_of(check: str, case: str, status: Status, known: Known | None = None) -> Verdict:
    return Verdict(check, CHECKS[check].stage, case, Mode.ISOLATED, status, "It holds.", where="there", known=known)


FAILED = Known("too warm", "bug", LINK)
KNOWN_A, PASS_A = verdict_of(CHECK, "a", Status.KNOWN, FAILED), verdict_of(CHECK, "a", Status.PASS)
UNSEEN_A, UNSEEN_B = (verdict_of(CHECK, case, Status.NOT_OBSERVED) for case in ("a", "b"))
PASS_B = verdict_of(CHECK, "b", Status.PASS)
WIDENED_A = replace(PASS_A, widened=Widened(8.0, 12.0, "why"))

PROBLEMS = {
    "as declared": (known(CHECK, "a"), [KNOWN_A], []),
    "it passes": (known(CHECK, "a"), [PASS_A], ["on a it passes; remove the entry"]),
    "one of two passes": (
        known(CHECK, "a", "b"),
        [KNOWN_A, PASS_B],
        ["on b it passes; remove the case from the entry"],
    ),
    "all cases, one passes": (
        known(CHECK),
        [KNOWN_A, PASS_B],
        ["on b it passes; name the cases that fail instead of *, or remove the entry"],
    ),
    "all cases, all pass": (
        known(CHECK),
        [PASS_A, PASS_B],
        ["on a, b it passes; name the cases that fail instead of *, or remove the entry"],
    ),
    "not observed": (known(CHECK, "a"), [UNSEEN_A], ["on a it is not observed (there); remove the entry"]),
    "all cases, one not observed": (known(CHECK), [KNOWN_A, UNSEEN_B], []),
    "all cases, none observed": (
        known(CHECK),
        [UNSEEN_A, UNSEEN_B],
        ["matches nothing that was judged; remove the entry"],
    ),
    "some cases, none observed": (known(CHECK), [UNSEEN_A], []),
    "a budget that is needed": (wider(12), [WIDENED_A, PASS_B], []),
    "a budget that no verdict needs": (wider(12), [PASS_A, PASS_B], ["no verdict needs it; remove the entry"]),
    "a budget that may be needed elsewhere": (wider(12), [PASS_A], []),
    "a budget of what is not observed": (
        wider(12),
        [UNSEEN_A, UNSEEN_B],
        ["matches nothing that was judged; remove the entry"],
    ),
}


@pytest.mark.parametrize("kind", PROBLEMS)
def test_what_is_declared_must_be_true(kind: str) -> None:
    entry, verdicts, problems = PROBLEMS[kind]
    declared = Declared(failures=(entry,)) if isinstance(entry, KnownFailure) else Declared(budgets=(entry,))
    found = review(declared, verdicts, "none", "float32", CASES)
    assert list(found.problems) == [f"{entry.place}: {problem}" for problem in problems]
    assert found.untouched == ()


@pytest.mark.parametrize(
    "scope",
    [
        Scope("G4-GEN-05", ("a",)),
        Scope(CHECK, ("b",)),
        Scope(CHECK, ("a",), scheme="w8a16"),
        Scope(CHECK, ("a",), dtype="bfloat16"),
    ],
)
def test_what_was_not_selected_is_no_problem_but_told(scope: Scope) -> None:
    entry = replace(known(CHECK), scope=scope)
    found = review(Declared(failures=(entry,)), [PASS_A], "none", "float32", CASES)
    assert (found.problems, found.untouched) == ((), (entry.place,))


# --- the reports ----------------------------------------------------------------------------------------------------

FOLLOWS = verdict_of("G4-DECODE-09", "a", Status.KNOWN, replace(FAILED, inherited_from=CHECK))
PATH = Path("conformance.toml")


def test_the_summary_lists_what_is_known_with_reason_and_link() -> None:
    found = review(Declared(PATH, failures=(known(CHECK, "a"),)), [KNOWN_A, FOLLOWS, PASS_B], "none", "float32", CASES)
    text = summary_text([KNOWN_A, FOLLOWS, PASS_B], SETTING, failed_tests=0, review=found)
    assert f"declared in conformance.toml:\n  {CHECK} on a: bug: too warm ({LINK})\n  1 more inherit from them" in text
    assert text.splitlines()[-1] == "conforms but for 1 known failure"


def test_the_summary_tells_a_wider_budget_that_was_needed() -> None:
    verdict = replace(WIDENED_A, unit="x the reference's noise")
    text = summary_text([verdict], SETTING, failed_tests=0)
    assert f"  {CHECK} on a, isolated: budget widened from 8 to 12 x the reference's noise: why" in text
    assert text.splitlines()[-1] == "conforms"


def test_what_is_not_true_is_told_last() -> None:
    found = review(Declared(PATH, failures=(known(CHECK, "a"),)), [PASS_A], "none", "float32", CASES)
    text = summary_text([PASS_A], SETTING, failed_tests=1, review=found)
    assert text.splitlines()[-2:] == [
        "not as declared in conformance.toml:",
        f"  [[known]] entry 1 ({CHECK}): on a it passes; remove the entry",
    ]
    assert "conforms" not in text
    assert "does not conform" in as_html([PASS_A], SETTING, found)
    assert json.loads(as_json([PASS_A], SETTING, found))["known"]["problems"] == list(found.problems)


def test_a_failure_of_its_own_is_told_beside_the_known_ones() -> None:
    wrong = verdict_of("G4-MASK-01", "a", Status.FAIL)
    text = summary_text([wrong, KNOWN_A], SETTING, failed_tests=1)
    assert "does not conform: wrong first at masks_and_rope (G4-MASK-01, case a)" in text
    assert f"{CHECK} on a: bug: too warm" in text


def test_machines_and_pages_get_known_failures_with_their_links() -> None:
    verdicts = [KNOWN_A, replace(KNOWN_A, case="b"), FOLLOWS, WIDENED_A]
    data = json.loads(as_json(verdicts, SETTING))
    assert data["known"]["failures"] == [
        {"check": CHECK, "cases": ["a", "b"], "reason": "too warm", "category": "bug", "link": LINK}
    ]
    assert data["stages"] == {"prefill": "known", "decode": "known"}
    page = as_html(verdicts, SETTING)
    assert f'<td>too warm</td><td><a href="{LINK}">{LINK}</a></td>' in page
    assert "conforms but for 1 known failure</h1>" in page
    assert "budget widened from 8 to 12" in page


def test_a_known_failure_is_worse_than_what_nobody_saw() -> None:
    assert stage_verdict([UNSEEN_A, KNOWN_A, PASS_B]) == "known"
    assert stage_verdict([KNOWN_A, verdict_of(CHECK, "b", Status.INHERITED)]) == "inherited"


def test_a_known_failure_in_one_line() -> None:
    assert known_text(KNOWN_A) == f"{CHECK}, case a: known: bug: too warm ({LINK})"
    assert known_text(FOLLOWS) == f"G4-DECODE-09, case a: known, inherits from {CHECK}: bug: too warm ({LINK})"
