"""conformance.toml: what it may say, and how each thing that it may not say is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from g4conformance.budgets import budget_of
from g4conformance.cases import Case
from g4conformance.checks import CHECKS
from g4conformance.errors import CaseError, ConformanceError
from g4conformance.known.entries import ANY, KnownFailure, Scope, WiderBudget
from g4conformance.known.file import load_declared
from g4conformance.known.review import require_possible

from .asserting import told

pytestmark = pytest.mark.unit

KNOWN = """
[[known]]
check = "G4-GEN-05"
case = "fills-while-decoding"
reason = "its buffers grow"
category = "by design"
link = "https://example.org/1"
"""
BUDGET = """
[[budget]]
check = "G4-PREFILL-04"
factor = 12
reason = "sums in another order"
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "conformance.toml"


def test_entries_are_read(path: Path) -> None:
    path.write_text(KNOWN + BUDGET)
    declared = load_declared(path)
    scope = Scope("G4-GEN-05", ("fills-while-decoding",))
    place = "[[known]] entry 1 (G4-GEN-05)"
    assert declared.failures == (KnownFailure(place, scope, "its buffers grow", "by design", "https://example.org/1"),)
    assert declared.budgets == (
        WiderBudget("[[budget]] entry 1 (G4-PREFILL-04)", Scope("G4-PREFILL-04"), "sums in another order", factor=12.0),
    )


def test_an_entry_may_be_about_some_cases_one_scheme_and_one_dtype(path: Path) -> None:
    narrow = '\nscheme = "w8a16"\ndtype = "bfloat16"'
    path.write_text(KNOWN.replace('"fills-while-decoding"', f'["a", "b"]{narrow}'))
    (entry,) = load_declared(path).failures
    assert entry.scope == Scope("G4-GEN-05", ("a", "b"), "w8a16", "bfloat16")


def test_nothing_may_be_declared(path: Path) -> None:
    path.write_text("# nothing is known\n")
    declared = load_declared(path)
    assert (declared.failures, declared.budgets) == ((), ())


IN_KNOWN, IN_BUDGET = "[[known]] entry 1 (G4-GEN-05)", "[[budget]] entry 1 (G4-PREFILL-04)"
MALFORMED = {
    "no TOML": ("[[known]\n", "a TOML file at", "line 1"),
    "unknown table": ("[[knwon]]\n", "only tables [[known]] and [[budget]]", "'knwon'"),
    "one table": ('[known]\ncheck = "G4-GEN-05"\n', "tables [[known]]", "known = {"),
    "no check": ("[[known]]\n", "the id of a check", "no check"),
    "unknown check": (KNOWN.replace("GEN-05", "GEN-99"), "the id of a check", "'G4-GEN-99'"),
    "unknown key": (KNOWN + 'mode = "isolated"\n', IN_KNOWN, "'mode'"),
    "no case": (KNOWN.replace("case =", "# case ="), f"a case, in {{path}}, {IN_KNOWN}", "none"),
    "no reason": (KNOWN.replace("reason =", "# reason ="), f"a reason, in {{path}}, {IN_KNOWN}", "none"),
    "blank reason": (KNOWN.replace("its buffers grow", "  "), "a text as reason", "'  '"),
    "no category": (KNOWN.replace("category =", "# category ="), "a category", "none"),
    "bad category": (KNOWN.replace("by design", "wontfix"), "bug, unsupported, by design or reference", "'wontfix'"),
    "no link": (KNOWN.replace("link =", "# link ="), "a link", "none"),
    "bad link": (KNOWN.replace("https://", ""), "a link that begins with https://", "'example.org/1'"),
    "case of another type": (KNOWN.replace('"fills-while-decoding"', "3"), "a case's name", "3"),
    "no cases": (KNOWN.replace('"fills-while-decoding"', "[]"), "a case's name", "[]"),
    "all cases and one": (KNOWN.replace('"fills-while-decoding"', '["*", "a"]'), "* alone", "['*', 'a']"),
    "a case twice": (KNOWN.replace('"fills-while-decoding"', '["a", "a"]'), "names that differ", "['a', 'a']"),
    "bad scheme": (KNOWN + 'scheme = "int8"\n', "scheme none, ", "'int8'"),
    "bad dtype": (KNOWN + 'dtype = "fp32"\n', "dtype float32, ", "'fp32'"),
    "a quantized check in floating point": (
        KNOWN.replace("GEN-05", "QUANT-05") + 'scheme = "none"\n',
        "a quantized scheme for G4-QUANT-05",
        "'none'",
    ),
    "an exact budget": (BUDGET.replace("PREFILL-04", "GEN-05"), "a check that has a budget", "which is exact"),
    "no number": (BUDGET.replace("factor", "# factor"), f"in {{path}}, {IN_BUDGET}", "none"),
    "two numbers": (BUDGET + "limit = 1\n", "a factor (and nothing else)", "factor and limit"),
    "a limit of rounding": (BUDGET.replace("factor", "limit"), "a factor (and nothing else)", "limit"),
    "a factor of a loss": (BUDGET.replace("PREFILL-04", "QUANT-05"), "a limit (and nothing else)", "factor"),
    "no positive number": (BUDGET.replace("12", "-1"), "a positive number as factor", "-1"),
    "infinite": (BUDGET.replace("12", "inf"), "a positive number as factor", "inf"),
    "no number at all": (BUDGET.replace("12", "true"), "a positive number as factor", "True"),
    "a budget without a reason": (BUDGET.replace("reason =", "# reason ="), "a reason", "none"),
    "the same twice": (KNOWN + KNOWN, "at most one entry", "[[known]] entry 1 (G4-GEN-05) and [[known]] entry 2"),
    "one of all cases": (
        KNOWN + KNOWN.replace("fills-while-decoding", "*"),
        "at most one entry",
        "[[known]] entry 1 (G4-GEN-05) and [[known]] entry 2",
    ),
}


@pytest.mark.parametrize("kind", MALFORMED)
def test_a_malformed_file_is_one_line_that_names_file_and_entry(path: Path, kind: str) -> None:
    text, expected, found = MALFORMED[kind]
    path.write_text(text)
    with told(ConformanceError, expected=expected.replace("{path}", str(path)), found=found, remedy="."):
        load_declared(path)
    with told(ConformanceError, expected=str(path), found=found, remedy="."):
        load_declared(path)


def test_a_file_that_is_not_there_is_told(path: Path) -> None:
    with told(ConformanceError, expected=f"a TOML file at {path}", found="No such file", remedy="Mend it."):
        load_declared(path)


CASES = (
    Case("short", "x", prompt="Hi"),
    Case("picture", "x", prompt="{image}Hi", images=("p.png",)),
    Case("ids", "x", vocabulary=(1, 4)),
)


@pytest.mark.parametrize(
    ("check", "case", "found"),
    [
        ("G4-GEN-05", "shrot", "'shrot'"),
        ("G4-VISION-01", "short", "'short'"),
        ("G4-INPUTS-01", "ids", "'ids'"),
        ("G4-SELF-01", "picture", "'picture'"),
    ],
)
def test_a_case_that_the_check_can_never_judge_is_told_before_anything_runs(
    path: Path, check: str, case: str, found: str
) -> None:
    path.write_text(KNOWN.replace("G4-GEN-05", check).replace("fills-while-decoding", case))
    with told(CaseError, expected=f"in {path}, [[known]] entry 1 ({check})", found=found, remedy="."):
        require_possible(load_declared(path), CASES)


@pytest.mark.parametrize(("check", "case"), [("G4-GEN-05", "ids"), ("G4-VISION-01", "picture"), ("G4-GEN-05", ANY)])
def test_other_cases_are_possible(path: Path, check: str, case: str) -> None:
    path.write_text(KNOWN.replace("G4-GEN-05", check).replace("fills-while-decoding", case))
    require_possible(load_declared(path), CASES)


def test_the_own_prompt_is_a_case_whether_or_not_one_is_given(path: Path) -> None:
    path.write_text(KNOWN.replace("fills-while-decoding", "own"))
    require_possible(load_declared(path), CASES)


# --- wider budgets --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("check", "scheme", "number"),
    [("G4-PREFILL-04", "none", 80.0), ("G4-PREFILL-07", "w8a16", 3.0), ("G4-QUANT-05", "w8a16", 0.9)],
)
def test_a_budget_is_widened_to_the_number_that_a_failure_says_would_have_passed(
    check: str, scheme: str, number: float
) -> None:
    usual = budget_of(CHECKS[check], "float32", scheme)
    key = "limit" if check.startswith("G4-QUANT") else "factor"
    wider = WiderBudget("entry", Scope(check), "why", **{key: number}).applied(usual)
    ratio = number / usual.number
    assert usual.would_pass(ratio) == pytest.approx(number)
    for part in ("factor", "gain_factor", "steps", "quality"):
        assert getattr(wider, part) == pytest.approx(getattr(usual, part) * ratio)
    assert (wider.kind, wider.evidence) == (usual.kind, usual.evidence)


def test_a_budget_cannot_be_narrowed() -> None:
    usual = budget_of(CHECKS["G4-PREFILL-04"], "float32")
    entry = WiderBudget("[[budget]] entry 1", Scope("G4-PREFILL-04"), "why", factor=usual.number)
    with told(
        ConformanceError, expected=f"above {usual.number:g}", found=f"{usual.number:g}", remedy="only be widened"
    ):
        entry.applied(usual)
