"""Compares two records of logit statistics within a tolerance; what is beyond it reads as a table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from g4conformance.statistics import LogitStatistics

from .record import LogitRecord
from .tolerance import kind_of

_SHOWN = 25


@dataclass(frozen=True)
class Beyond:
    """One value that is not what the snapshot says; `position` is empty where it is about the whole case."""

    position: str
    statistic: str
    was: str
    now: str
    allowed: str


def compare(was: LogitRecord, now: LogitRecord, allowed: Mapping[str, float]) -> list[Beyond]:
    """All that moved further than `allowed` says for its kind, in the order of the snapshot."""
    return [
        *_of_heads(was, now),
        *_of_names("", was.positions, now.positions, "position"),
        *(
            beyond
            for position, before in was.positions.items()
            if position in now.positions
            for beyond in _of_position(position, before, now.positions[position], allowed)
        ),
    ]


def table(found: Sequence[Beyond]) -> list[str]:
    """`found` as lines with a heading, the columns aligned; no more than can be read."""
    rows = [("position", "statistic", "was", "is", "allowed")]
    rows += [(b.position, b.statistic, b.was, b.now, b.allowed) for b in found[:_SHOWN]]
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return lines + ([f"and {len(found) - _SHOWN} more"] if len(found) > _SHOWN else [])


def numbers_of(statistics: LogitStatistics) -> dict[str, float]:
    """Everything that is compared as a number: the numbers, and the margins under the names of their rows."""
    margins = {f"margin {rank + 1}": margin for rank, margin in enumerate(statistics.margins)}
    return {**statistics.numbers, **margins}


def _of_heads(was: LogitRecord, now: LogitRecord) -> Iterator[Beyond]:
    for name in ("scheme", "dtype", "case", "fed"):
        before, after = getattr(was, name), getattr(now, name)
        if before != after:
            yield Beyond("", name, str(before), str(after), "the same")


def _of_names(position: str, was: Mapping[str, object], now: Mapping[str, object], what: str) -> Iterator[Beyond]:
    """Entries that only one side has."""
    for name in was.keys() - now.keys():
        yield Beyond(position, f"{what} {name}".strip(), "in the snapshot", "not made by any run", "both")
    for name in now.keys() - was.keys():
        yield Beyond(position, f"{what} {name}".strip(), "not in the snapshot", "made by this run", "both")


def _of_position(
    position: str, was: LogitStatistics, now: LogitStatistics, allowed: Mapping[str, float]
) -> Iterator[Beyond]:
    before, after = numbers_of(was), numbers_of(now)
    yield from _of_names(position, before, after, "")
    for name in (name for name in before if name in after):
        limit = allowed[kind_of(name)]
        if not abs(after[name] - before[name]) <= limit:  # written so that NaN is beyond
            yield Beyond(position, name, f"{before[name]:.7g}", f"{after[name]:.7g}", f"± {limit:.2g}")
    for rank, id in enumerate(now.top_ids):
        gap = _gap(was, id, rank)
        if not gap <= allowed["margin"]:
            because = f"an id at most {allowed['margin']:.2g} from it, not {gap:.2g}"
            yield Beyond(position, f"top {rank + 1}", str(was.top_ids[rank]), str(id), because)


def _gap(was: LogitStatistics, id: int, rank: int) -> float:
    """How far apart, in the snapshot, lie the logit of `rank` and that of `id`.

    An id that is not among the snapshot's lies no higher than the one that comes next after them.
    """
    before = was.top_ids.index(id) if id in was.top_ids else len(was.top_ids)
    return sum(was.margins[min(before, rank) : max(before, rank)])
