"""The mutators on small snippets, what a mutant is, how one is put in place, and the list of survivors."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

from g4conformance.checks.run import Mode
from g4conformance.judging.verdict import Status, Verdict
from g4conformance.runtime import layout, masks
from g4conformance.stages import Stage
from tools.mutants.fork import in_fork
from tools.mutants.mutate import Mutant, mutants_of, mutated
from tools.mutants.mutators import MUTATORS
from tools.mutants.outcome import SURVIVED, End, Outcome, outcome_of
from tools.mutants.reload import PACKAGE, dependents, install, source_of
from tools.mutants.report import page, score, table
from tools.mutants.run import MODULES, all_mutants
from tools.mutants.survivors import Kind, Survivor, gone, load_survivors, unexplained

pytestmark = pytest.mark.unit


@pytest.fixture(scope="module")
def mutants() -> list[Mutant]:
    return all_mutants()


def made(kind: str, source: str) -> list[str]:
    """What the mutants of one kind look like, as source; for a snippet of one line."""
    return [ast.unparse(mutated(source, mutant)) for mutant in mutants_of(source, "x.py") if mutant.kind == kind]


SNIPPETS = [
    ("arithmetic", "a + b", ["a - b", "a * b"]),
    ("arithmetic", "a // b", ["a / b", "a * b"]),
    ("arithmetic", "a += b", ["a -= b", "a *= b"]),
    ("arithmetic", "~a", ["a"]),
    ("arithmetic", "-a", ["a"]),
    ("arithmetic", "name + 'key'", []),
    ("comparison", "a < b", ["a <= b", "a > b", "a != b"]),
    ("comparison", "a == b", ["a != b", "a <= b", "a >= b"]),
    ("comparison", "a == 'b'", ["a != 'b'"]),
    ("comparison", "a is None", ["a is not None"]),
    ("comparison", "a in b", ["a not in b"]),
    ("comparison", "0 < a in b", ["0 <= a in b", "0 > a in b", "0 != a in b", "0 < a not in b"]),
    ("logic", "a and b", ["a or b", "b", "a"]),
    ("logic", "a or b or c", ["a and b and c", "b or c", "a or c", "a or b"]),
    ("logic", "a & b", ["a", "b"]),
    ("logic", "not a", ["a"]),
    ("condition", "x if a else y", ["x if True else y", "x if False else y"]),
    ("condition", "[x for x in y if a]", ["[x for x in y if True]", "[x for x in y if False]"]),
    ("condition", "while True: f()", []),
    ("number", "f(2)", ["f(3)", "f(1)", "f(0)"]),
    ("number", "f(0)", ["f(1)", "f(-1)"]),
    ("number", "f(0.5)", ["f(1.5)", "f(-0.5)", "f(0.0)"]),
    ("number", "f(True)", []),
    ("flag", "f(True)", ["f(False)"]),
    ("text", "f('key')", ["f('key?')"]),
    ("text", "f(f'{a}/key')", ["f(f'{a}/key?')"]),
    ("slice", "x[a:]", ["x[:]", "x[a + 1:]", "x[a - 1:]"]),
    ("slice", "x[1:]", ["x[:]"]),
    ("index", "x[i]", ["x[i + 1]", "x[i - 1]"]),
    ("swap", "f(a, b, b)", ["f(b, a, b)"]),
    ("swap", "f(x=a, y=b)", ["f(x=b, y=a)"]),
    ("swap", "f('key', b)", []),
    ("order", "x[a, b, c]", ["x[b, a, c]", "x[a, c, b]"]),
    ("order", "a, b = x", ["b, a = x"]),
    ("call", "y = f(a)", ["y = a"]),
    ("call", "y = f(a, b, c)", ["y = a", "y = c"]),
    ("call", "y = f('key', b)", ["y = b"]),
    ("call", "y = a.float()", ["y = a"]),
    ("call", "y = a.to(b)", ["y = a"]),
    ("call", "y = self.f(a)", ["y = a"]),
    ("call", "y = self.a.float()", ["y = self.a"]),
    ("call", "y = Graph(a)", []),
    ("call", "f(a)", []),
    ("keyword", "f(a, x=b, y=c)", ["f(a, y=c)", "f(a, x=b)"]),
    ("statement", "self.reset()", ["pass"]),
    ("statement", "self.length = n", ["pass"]),
    ("statement", "length = n", []),
    ("function", "min(a)", ["max(a)"]),
    ("function", "a.any(b)", ["a.all(b)"]),
    ("function", "torch.zeros_like(a)", ["torch.ones_like(a)"]),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "source", "expected"), SNIPPETS)
def test_a_mutator_makes_what_it_says(kind: str, source: str, expected: list[str]) -> None:
    assert made(kind, source) == [ast.unparse(ast.parse(one)) for one in expected]


def test_every_mutator_is_tried_here() -> None:
    assert {kind for kind, *_ in SNIPPETS} == set(MUTATORS)


@pytest.mark.parametrize(
    "source",
    [
        '"""What it does, 1."""',
        "import torch as t",
        "from a import b",
        "x: tuple[int, 1]",
        "def f(x: list[1]) -> dict[1, 2]: ...",
        "raise ValueError(f'{a + 1} < {b}', not c)",
        "if TYPE_CHECKING:\n    x = 1",
        "class A(b[0]):\n    'Text.'",
    ],
)
def test_what_decides_nothing_is_not_mutated(source: str) -> None:
    assert mutants_of(source, "x.py") == []


def test_a_call_of_an_imported_function_is_dropped_for_its_argument_not_for_its_module() -> None:
    assert made("call", "from torch import nn\ny = nn.Buffer(a)") == ["from torch import nn\ny = a"]


SNIPPET = """
class Cache:
    def write(self, rows):
        self.rows = rows[1:]
        return len(rows) - 1
"""


def test_ids_survive_edits_elsewhere() -> None:
    edited = "import os\n\n\ndef other(a):\n    return a + 1\n" + SNIPPET
    ids = [mutant.id for mutant in mutants_of(SNIPPET, "x.py")]
    assert ids == [mutant.id for mutant in mutants_of(edited, "x.py") if mutant.function.startswith("Cache")]
    assert "x.py::Cache.write::number::4" in ids


def test_a_change_is_shown_with_the_expression_around_it_and_with_its_line() -> None:
    shown = {mutant.id: (mutant.line, mutant.change) for mutant in mutants_of(SNIPPET, "x.py")}
    assert shown["x.py::Cache.write::slice::1"] == (4, "rows[1:]  ->  rows[:]")
    assert shown["x.py::Cache.write::statement::1"] == (4, "self.rows = rows[1:]  ->  pass")
    assert shown["x.py::Cache.write::call::1"] == (5, "len(rows) - 1  ->  rows - 1")


def test_of_a_long_line_only_what_is_near_the_change_is_shown() -> None:
    source = f"f({', '.join(f'argument_{i}' for i in range(30))}, x=1)"
    (last,) = [mutant for mutant in mutants_of(source, "x.py") if mutant.kind == "keyword"]
    assert len(last.change) < 120
    assert last.change.startswith("...")
    assert "x=1" in last.before
    assert "x=1" not in last.after


def test_the_runtimes_mutants_are_unique(mutants: list[Mutant]) -> None:
    assert len({mutant.id for mutant in mutants}) == len(mutants)
    assert len({(m.file, m.steps, ast.dump(m.replacement)) for m in mutants}) == len(mutants)


def test_no_mutant_is_the_original(mutants: list[Mutant]) -> None:
    for mutant in mutants[::20]:  # all of them take seconds
        source = source_of(mutant.file.removesuffix(".py"))
        assert ast.dump(mutated(source, mutant)) != ast.dump(ast.parse(source)), mutant
        assert mutant.before != mutant.after, mutant


def test_every_module_and_every_mutator_has_mutants(mutants: list[Mutant]) -> None:
    assert {mutant.file for mutant in mutants} == {f"{module}.py" for module in MODULES}
    assert {mutant.kind for mutant in mutants} == set(MUTATORS)


# --- putting one in place -------------------------------------------------------------------------------------------


def test_dependents_come_after_what_they_import() -> None:
    assert dependents("static") == ["static"]
    order = dependents("layout")
    assert order[0] == "layout"
    assert order[-1] == "static"
    assert order.index("graphs") < order.index("vision")
    assert set(dependents("masks")) == {"masks", "vision", "static"}


def test_a_mutant_is_applied_to_the_runtime_and_not_to_its_judges(mutants: list[Mutant]) -> None:
    (one,) = [m for m in mutants if m.id == "masks.py::<module>::text::1"]

    def work() -> Outcome:
        install("masks", mutated(source_of("masks"), one))
        new, static = sys.modules[f"{PACKAGE}.masks"], sys.modules[f"{PACKAGE}.static"]
        expected = sys.modules["g4conformance.expected"]
        applied = new.SLIDING == "sliding_attention?" and static.attention_mask is new.attention_mask
        return Outcome(End.CHECK) if applied and expected.mask_bias is masks.mask_bias else SURVIVED

    assert in_fork(work).end is End.CHECK
    assert masks.SLIDING == "sliding_attention"


def test_a_fork_tells_what_became_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def raises() -> Outcome:
        raise SystemExit(3)

    def never_ends() -> Outcome:
        while True:
            pass

    monkeypatch.setattr("tools.mutants.fork.CPU_SECONDS", 0.1)
    assert in_fork(lambda: Outcome(End.CHECK, "G4-MASK-01")) == Outcome(End.CHECK, "G4-MASK-01")
    assert in_fork(raises) == Outcome(End.CRASH, "SystemExit")
    assert in_fork(never_ends).end is End.TIMEOUT


def test_a_layout_of_the_shipped_class_is_no_layout_of_a_mutated_one(mutants: list[Mutant]) -> None:
    def work() -> Outcome:
        install("layout", ast.parse(source_of("layout")))
        return (
            Outcome(End.CHECK) if sys.modules[f"{PACKAGE}.layout"].StaticLayout is not layout.StaticLayout else SURVIVED
        )

    assert in_fork(work).end is End.CHECK


# --- outcomes and the list ------------------------------------------------------------------------------------------


def verdict(status: Status, check: str = "G4-MASK-01") -> Verdict:
    return Verdict(check, Stage.MASKS_AND_ROPE, "window", Mode.ISOLATED, status, "A statement.")


@pytest.mark.parametrize(
    ("statuses", "end"),
    [
        ([Status.PASS, Status.NOT_APPLICABLE], End.SURVIVED),
        ([Status.PASS, Status.FAIL], End.CHECK),
        ([Status.ERROR, Status.FAIL, Status.INHERITED], End.CHECK),
        ([Status.NOT_OBSERVED, Status.ERROR], End.CRASH),
        ([Status.PASS, Status.NOT_OBSERVED], End.CHECK),
    ],
)
def test_a_wrong_value_says_more_than_an_exception(statuses: list[Status], end: End) -> None:
    assert outcome_of([verdict(status) for status in statuses], "window", "bundled").end is end


def test_survivors_name_only_mutants_that_are_still_what_they_were(mutants: list[Mutant]) -> None:
    assert gone(load_survivors(), mutants) == []


def test_every_survivor_is_argued_for() -> None:
    assert all(len(survivor.why.split()) > 5 for survivor in load_survivors().values())


LIST = """
[[survivors]]
kind = "equivalent"
why = '''
It is the
same.'''
[survivors.mutants]
"x.py::f::number::1" = "1  ->  2"
"""


def test_the_list_is_read_and_refuses_what_is_listed_twice(tmp_path: Path) -> None:
    path = tmp_path / "survivors.toml"
    path.write_text(LIST)
    only = Survivor("x.py::f::number::1", "1  ->  2", Kind.EQUIVALENT, "It is the same.")
    assert load_survivors(path) == {only.id: only}
    path.write_text(LIST + LIST)
    with pytest.raises(ValueError, match="listed twice"):
        load_survivors(path)


def test_complaints_about_the_list() -> None:
    one, other, *_ = mutants_of("f(1)", "x.py")
    same = Survivor(one.id, one.change, Kind.EQUIVALENT, "")
    listed = {one.id: same}
    assert gone(listed, [one, other]) == []
    assert gone(listed, [other]) == [f"listed, but there is no such mutant: {one.id}"]
    moved = Survivor(one.id, "a  ->  b", Kind.EQUIVALENT, "")
    assert gone({one.id: moved}, [one]) == [f"listed as another change: {one.id} is {one.change}"]
    assert unexplained(listed, {one: SURVIVED}) == []
    assert unexplained({}, {one: SURVIVED}) == [f"survived, but is not listed: {one.id}: {one.change}"]
    dead = Outcome(End.CHECK, "G4-MASK-01")
    assert unexplained(listed, {one: dead}) == [f"listed, but {dead}: {one.id}"]


def test_the_report_counts_and_explains() -> None:
    one, other, third = mutants_of("f(2)", "x.py")[:3]
    outcomes = {one: SURVIVED, other: Outcome(End.CHECK, "G4-MASK-01", ground="bundled"), third: Outcome(End.CRASH)}
    line = "3 mutants: 1 killed by a check (33%), 0 by unit tests, 1 crashed, 0 timed out, 1 survived"
    assert score(outcomes, 0) == f"{line}, all explained"
    assert score(outcomes, 1) == f"{line}, 1 of them unexplained"
    assert "| x.py | 3 | 1 | 0 | 1 | 0 | 1 |" in table(outcomes)
    text = page(outcomes, {one.id: Survivor(one.id, one.change, Kind.UNOBSERVED, "Nobody cares.")})
    assert f"Nobody cares.\n\n- `{one.id}`: `{one.change}`" in text
