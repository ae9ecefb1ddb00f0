"""The mutants of a module's source: each changes one place, and has a name that edits elsewhere leave as it is."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import takewhile

from tools.mutants.mutators import MUTATORS
from tools.mutants.sites import Site, Step, replaced, sites

_PART_OF_AN_EXPRESSION = (ast.Tuple, ast.Slice, ast.UnaryOp, ast.keyword, ast.Starred, ast.FormattedValue)
_CONTEXT = 40  # characters that are shown on either side of a change


@dataclass(frozen=True)
class Mutant:
    """One changed place of one file.

    Attributes:
        file: the file's name.
        function: names of the classes and functions around the place, joined by dots.
        kind: the mutator that made it.
        ordinal: which of its kind in that function, counted from 1 in the order of the source.
        line: of the place, counted from 1. Not part of the id.
        before, after: the place and a little around it, on one line each.
    """

    file: str
    function: str
    kind: str
    ordinal: int
    line: int
    before: str
    after: str
    steps: tuple[Step, ...] = field(repr=False)
    replacement: ast.AST = field(repr=False, compare=False)

    @property
    def id(self) -> str:
        return f"{self.file}::{self.function}::{self.kind}::{self.ordinal}"

    @property
    def change(self) -> str:
        return f"{self.before}  ->  {self.after}"


def mutants_of(source: str, file: str) -> list[Mutant]:
    """Every mutant of the module `source`, in the order of the source."""
    counts: Counter[tuple[str, str]] = Counter()
    return [_mutant(site, kind, replacement, file, counts) for site, kind, replacement in _changes(ast.parse(source))]


def mutated(source: str, mutant: Mutant) -> ast.Module:
    """The module `source` with `mutant`'s change, ready to be compiled."""
    return ast.fix_missing_locations(replaced(ast.parse(source), mutant.steps, mutant.replacement))


def _changes(tree: ast.Module) -> Iterator[tuple[Site, str, ast.AST]]:
    """Site, kind and replacement; two mutators that would put the same into a place count once."""
    for site in sites(tree):
        seen = {ast.dump(site.node)}
        for kind, mutator in MUTATORS.items():
            for replacement in mutator(site):
                if (dumped := ast.dump(replacement)) not in seen:
                    seen.add(dumped)
                    yield site, kind, replacement


def _mutant(site: Site, kind: str, replacement: ast.AST, file: str, counts: Counter[tuple[str, str]]) -> Mutant:
    counts[site.function, kind] += 1
    before, after = _shown(site, replacement)
    return Mutant(
        file=file,
        function=site.function,
        kind=kind,
        ordinal=counts[site.function, kind],
        line=getattr(site.node, "lineno", getattr(site.parent, "lineno", 1)),
        before=before,
        after=after,
        steps=site.steps,
        replacement=replacement,
    )


def _shown(site: Site, replacement: ast.AST) -> tuple[str, str]:
    """The place before and after, with the expression or simple statement that it stands in."""
    outer, depth = site.node, len(site.parents)
    while depth and _is_one_line(site.parents[depth - 1]):
        depth -= 1
        outer = site.parents[depth]
        if not isinstance(outer, _PART_OF_AN_EXPRESSION):
            break
    after = replaced(outer, site.steps[depth:], replacement) if site.steps[depth:] else replacement
    return _without_what_is_far(_line(outer), _line(after))


def _is_one_line(node: ast.AST) -> bool:
    return not isinstance(node, (ast.mod, ast.comprehension)) and not hasattr(node, "body")


def _line(node: ast.AST) -> str:
    return " ".join(ast.unparse(node).split())


def _without_what_is_far(before: str, after: str) -> tuple[str, str]:
    """Both lines without what they have in common far from where they differ."""
    start = max(0, _in_common(before, after) - _CONTEXT)
    end = max(0, _in_common(before[::-1], after[::-1]) - _CONTEXT)
    return _cut(before, start, end), _cut(after, start, end)


def _in_common(one: str, other: str) -> int:
    """With how many same characters both begin."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def _cut(line: str, start: int, end: int) -> str:
    head = "..." if start > 3 else line[:start]
    tail = "..." if end > 3 else line[len(line) - end :]
    return head + line[start : len(line) - end] + tail
