"""What a run of the mutants found, as text and as a Markdown page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from tools.mutants.mutate import Mutant
from tools.mutants.outcome import End, Outcome
from tools.mutants.survivors import Kind, Survivor

Outcomes = Mapping[Mutant, Outcome]

_TITLES = {
    Kind.EQUIVALENT: "Survivors that compute the same",
    Kind.UNOBSERVED: "Survivors that differ in what no check should see",
}


def score(outcomes: Outcomes, unexplained: int) -> str:
    """The result in one line."""
    ends = Counter(outcome.end for outcome in outcomes.values())
    checked = ends[End.CHECK]
    explained = f"{unexplained} of them unexplained" if unexplained else "all explained"
    return (
        f"{len(outcomes)} mutants: {checked} killed by a check ({checked / max(1, len(outcomes)):.0%}), "
        f"{ends[End.UNIT_TEST]} by unit tests, {ends[End.CRASH]} crashed, {ends[End.TIMEOUT]} timed out, "
        f"{ends[End.SURVIVED]} survived, {explained}"
    )


def table(outcomes: Outcomes) -> str:
    """How the mutants of each file ended, as a Markdown table."""
    ends = Counter((mutant.file, outcome.end) for mutant, outcome in outcomes.items())
    files = dict.fromkeys(mutant.file for mutant in outcomes)
    rows = [[file, sum(ends[file, end] for end in End), *(ends[file, end] for end in End)] for file in files]
    return _markdown_table(["file", "mutants", *End], rows)


def page(outcomes: Outcomes, listed: Mapping[str, Survivor]) -> str:
    """docs/mutants.md."""
    unexplained = sum(o.end is End.SURVIVED and m.id not in listed for m, o in outcomes.items())
    killers = Counter(outcome.by for outcome in outcomes.values() if outcome.end is End.CHECK)
    grounds = Counter(outcome.ground for outcome in outcomes.values() if outcome.end is End.CHECK)
    parts = [
        "# Machine-made mutants",
        _INTRODUCTION,
        f"**{score(outcomes, unexplained)}.**",
        table(outcomes),
        "Where the mutants that a check killed were killed, from the first place to the last:",
        _markdown_table(["checkpoint", "mutants"], [[name, count] for name, count in grounds.items()]),
        "The checks that were the first to see a mutant (a mutant is not judged further):",
        _markdown_table(["check", "mutants"], [[name, killers[name]] for name in sorted(killers)]),
        *(part for kind in Kind for part in _survivors(kind, listed.values())),
    ]
    return "\n\n".join(parts) + "\n"


_INTRODUCTION = """\
Written by `python -m tools.mutants --report docs/mutants.md`. Each mutant is the shipped runtime with one place of its
source changed by a program: an operator, a comparison, a number, a bound, two arguments in each other's place, a call
left out. It is judged on the bundled cases, then on other checkpoints with other features, then by the unit tests of
the runtime's parts, and dies where it is first seen. A mutant that raises instead of yielding wrong values is counted
as crashed. Checks, references and expected values are never mutated."""


def _survivors(kind: Kind, listed: Iterable[Survivor]) -> list[str]:
    """A section with every survivor of `kind`, those of one argument together."""
    by_argument: dict[str, list[Survivor]] = {}
    for survivor in listed:
        if survivor.kind is kind:
            by_argument.setdefault(survivor.why, []).append(survivor)
    return [f"## {_TITLES[kind]}", *(_argument(why, survivors) for why, survivors in by_argument.items())]


def _argument(why: str, survivors: Iterable[Survivor]) -> str:
    return "\n".join([why, "", *(f"- `{survivor.id}`: `{survivor.change}`" for survivor in survivors)])


def _markdown_table(titles: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    titles = list(titles)
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)
