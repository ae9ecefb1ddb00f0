"""What a snapshot holds, and its text: a table of JSON whose rows are statistics and whose columns are positions."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from g4conformance.statistics import RANKS, LogitStatistics

# Far below every tolerance; more digits would only be noise to a reviewer.
DECIMALS = 7


@dataclass(frozen=True)
class LogitRecord:
    """Statistics of one case in one setting.

    Attributes:
        fed: the tokens of all decode steps; they are an input, and kept so that every machine feeds the same.
        positions: statistics of the logits at `prefill` and `decode/<step>`.
    """

    scheme: str
    dtype: str
    case: str
    fed: tuple[int, ...]
    positions: Mapping[str, LogitStatistics]


def to_text(record: LogitRecord) -> str:
    """JSON with one line a statistic. Numbers that are not finite are refused with a ValueError."""
    head = {"scheme": record.scheme, "dtype": record.dtype, "case": record.case, "fed": list(record.fed)}
    columns = [_column(statistics) for statistics in record.positions.values()]
    rows = {name: [column[name] for column in columns] for name in columns[0]}
    lines = [f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in head.items()]
    lines += [_line(name, values) for name, values in {"position": list(record.positions), **rows}.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def from_text(text: str) -> LogitRecord:
    """The record of a text that `to_text` made; KeyError or ValueError for any other."""
    data = json.loads(text)
    head = {name: data.pop(name) for name in ("scheme", "dtype", "case", "fed", "position")}
    columns = [dict(zip(data, values, strict=True)) for values in zip(*data.values(), strict=True)]
    positions = dict(zip(head.pop("position"), map(_statistics, columns), strict=True))
    return LogitRecord(**{**head, "fed": tuple(head["fed"])}, positions=positions)


def _column(statistics: LogitStatistics) -> dict[str, float]:
    ids = {f"top {rank + 1}": id for rank, id in enumerate(statistics.top_ids)}
    margins = {f"margin {rank + 1}": round(margin, DECIMALS) for rank, margin in enumerate(statistics.margins)}
    return {name: round(value, DECIMALS) for name, value in statistics.numbers.items()} | ids | margins


def _statistics(column: Mapping[str, Any]) -> LogitStatistics:
    numbers = {name: value for name, value in column.items() if not name.startswith(("top ", "margin "))}
    return LogitStatistics(
        numbers=numbers,
        top_ids=tuple(column[f"top {rank + 1}"] for rank in range(RANKS)),
        margins=tuple(column[f"margin {rank + 1}"] for rank in range(RANKS)),
    )


def _line(name: str, values: list[Any]) -> str:
    cells = ", ".join(json.dumps(value, allow_nan=False).rjust(12) for value in values)
    return f"  {json.dumps(name) + ':':<12}[{cells}]"
