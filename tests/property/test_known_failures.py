"""Which verdicts an entry of conformance.toml is about, against a list of all verdicts that there can be."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from g4conformance.cases import Case
from g4conformance.checks import CHECKS
from g4conformance.checks.run import Mode
from g4conformance.judging.blame import blame
from g4conformance.judging.verdict import Status, Verdict
from g4conformance.known.entries import ANY, Declared, KnownFailure, Scope
from g4conformance.known.review import review
from g4conformance.stages import Stage, upstream

pytestmark = pytest.mark.property

CHECK_IDS = ("G4-EMBED-01", "G4-PREFILL-04", "G4-DECODE-09")
CASES = ("a", "b", "c")
SCHEMES = ("none", "w8a16")
DTYPES = ("float32", "bfloat16")
ALL_CASES = [Case(name, "x", prompt="Hi") for name in CASES]
EVERY = list(product(CHECK_IDS, CASES, SCHEMES, DTYPES))


def scopes() -> st.SearchStrategy[Scope]:
    some = st.lists(st.sampled_from(CASES), min_size=1, unique=True).map(tuple)
    return st.builds(
        Scope,
        st.sampled_from(CHECK_IDS),
        st.one_of(st.just((ANY,)), some),
        st.sampled_from((ANY, *SCHEMES)),
        st.sampled_from((ANY, *DTYPES)),
    )


def meant(scope: Scope) -> set[tuple[str, str, str, str]]:
    """Every verdict that the scope is about, one by one."""
    return {
        (check, case, scheme, dtype)
        for check, case, scheme, dtype in EVERY
        if check == scope.check
        and ("*" in scope.cases or case in scope.cases)
        and scope.scheme in ("*", scheme)
        and scope.dtype in ("*", dtype)
    }


@given(scopes())
def test_a_scope_covers_what_it_means(scope: Scope) -> None:
    covered = {
        (check, case, scheme, dtype)
        for check, case, scheme, dtype in EVERY
        if scope.within(scheme, dtype) and scope.covers(check, case)
    }
    assert covered == meant(scope)


@given(scopes(), scopes())
def test_scopes_overlap_where_they_mean_a_verdict_in_common(one: Scope, other: Scope) -> None:
    assert one.overlaps(other) == bool(meant(one) & meant(other)) == other.overlaps(one)


@given(st.lists(scopes(), max_size=4), st.sampled_from(SCHEMES), st.sampled_from(DTYPES))
def test_the_entry_that_is_found_is_the_one_that_means_it(scopes: list[Scope], scheme: str, dtype: str) -> None:
    entries = tuple(entry_of(scope, i) for i, scope in enumerate(scopes))
    declared = Declared(failures=entries).within(scheme, dtype)
    for check, case in product(CHECK_IDS, CASES):
        means = [entry for entry in entries if (check, case, scheme, dtype) in meant(entry.scope)]
        assert declared.failure(check, case) == next(iter(means), None)


def entry_of(scope: Scope, number: int = 1) -> KnownFailure:
    return KnownFailure(f"entry {number}", scope, "reason", "bug", "https://example.org")


# --- what is known of a case, and what follows ----------------------------------------------------------------------

STATUSES = (Status.PASS, Status.FAIL, Status.ERROR, Status.NOT_OBSERVED)


@st.composite
def case_verdicts(draw: st.DrawFn) -> list[Verdict]:
    ids = draw(st.lists(st.sampled_from(sorted(CHECKS)), min_size=1, max_size=8, unique=True))
    return [
        Verdict(id, CHECKS[id].stage, "a", mode, draw(st.sampled_from(STATUSES)), "statement")
        for id in ids
        for mode in CHECKS[id].modes
    ]


@given(case_verdicts(), st.sets(st.sampled_from(sorted(CHECKS)), max_size=40))
def test_only_what_is_declared_or_follows_from_nothing_else_is_known(verdicts: list[Verdict], ids: set[str]) -> None:
    declared = Declared(failures=tuple(entry_of(Scope(id)) for id in sorted(ids)))

    def is_known(verdict: Verdict) -> bool:
        if verdict.check in ids:
            return True
        causes = [other for other in verdicts if other.failed and causes_by_the_rule(other, verdict)]
        return bool(causes) and all(map(is_known, causes))

    for verdict, undeclared, found in zip(verdicts, blame(verdicts), blame(verdicts, declared), strict=True):
        if verdict.failed and is_known(verdict):
            assert found.status is Status.KNOWN
            assert found.known is not None
            assert (found.known.inherited_from == "") == (verdict.check in ids)
            assert found.known.inherited_from in {"", *ids}
        else:
            assert found == undeclared, "everything else is as it was"


def causes_by_the_rule(cause: Verdict, effect: Verdict) -> bool:
    """What can be wrong only in accumulation follows from: earlier stages, or its own one in isolation; where the run
    broke off, any stage in isolation."""
    if effect.mode is Mode.ISOLATED:
        return False
    if cause.stage is effect.stage:
        return cause.mode is Mode.ISOLATED and effect.stage is not Stage.QUANTIZATION
    broke_off = effect.status is Status.ERROR and cause.mode is Mode.ISOLATED
    return cause.stage in upstream(effect.stage) or broke_off


# --- the review -----------------------------------------------------------------------------------------------------


@given(
    st.dictionaries(st.sampled_from(CASES), st.sampled_from((Status.PASS, Status.KNOWN, Status.NOT_OBSERVED))),
    scopes(),
)
def test_an_entry_is_true_of_every_case_that_was_judged(judged: dict[str, Status], scope: Scope) -> None:
    check = CHECKS[scope.check]
    meant_here = {
        case: status for case, status in judged.items() if (check.id, case, "none", "float32") in meant(scope)
    }
    verdicts = [
        Verdict(
            check.id,
            check.stage,
            case,
            Mode.ISOLATED,
            Status.PASS if status is Status.KNOWN and case not in meant_here else status,
            "statement",
        )
        for case, status in judged.items()
    ]
    entry = entry_of(scope)
    found = review(Declared(failures=(entry,)), verdicts, "none", "float32", ALL_CASES)
    assert bool(found.untouched) == (not meant_here)
    untrue = sum(status is Status.PASS for status in meant_here.values())
    if scope.cases != (ANY,):
        untrue += sum(status is Status.NOT_OBSERVED for status in meant_here.values())
    elif not untrue and set(meant_here) == set(CASES) and Status.KNOWN not in meant_here.values():
        untrue = 1
    assert len(found.problems) == untrue
