"""Reads conformance.toml; whatever is wrong with it is told in one line that names file and entry."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from g4conformance.checkpoints.files import DTYPES
from g4conformance.checks import CHECKS, Check
from g4conformance.checks.registry import QUANTIZED, BudgetKind
from g4conformance.errors import ConformanceError
from g4conformance.executors.registry import ALL_SCHEMES
from g4conformance.known.entries import ANY, CATEGORIES, Declared, KnownFailure, Scope, WiderBudget
from g4conformance.quantization.schemes import NONE

_SCOPE = ("check", "case", "scheme", "dtype")
_KEYS = {"known": (*_SCOPE, "reason", "category", "link"), "budget": (*_SCOPE, "factor", "limit", "reason", "link")}
_REQUIRED = {"known": ("check", "case", "reason", "category", "link"), "budget": ("check", "reason")}

Entry = TypeVar("Entry", KnownFailure, WiderBudget)


def load_declared(path: Path) -> Declared:
    """What the file declares.

    Raises:
        ConformanceError: it cannot be read, is no TOML, has keys or values that mean nothing, or says something twice.
    """
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConformanceError(f"a TOML file at {path}", " ".join(str(error).split()), "Mend it.") from None
    if unknown := [key for key in document if key not in _KEYS]:
        raise ConformanceError(f"only tables [[known]] and [[budget]] in {path}", repr(unknown[0]), "Mend the file.")
    return Declared(
        path,
        _distinct(path, _entries(document, path, "known", _known)),
        _distinct(path, _entries(document, path, "budget", _budget)),
    )


def _entries(
    document: Mapping[str, Any], path: Path, table: str, make: Callable[[_Reader], Entry]
) -> tuple[Entry, ...]:
    entries = document.get(table, [])
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ConformanceError(f"tables [[{table}]] in {path}", f"{table} = {entries!r}", "Write [[ and ]] around it.")
    return tuple(make(_Reader(path, table, number, entry)) for number, entry in enumerate(entries, start=1))


def _distinct(path: Path, entries: Sequence[Entry]) -> tuple[Entry, ...]:
    for one, other in combinations(entries, 2):
        if one.scope.overlaps(other.scope):
            wanted = f"at most one entry about any verdict in {path}"
            raise ConformanceError(wanted, f"{one.place} and {other.place}", "Merge them.")
    return tuple(entries)


def _known(entry: _Reader) -> KnownFailure:
    category = entry.text("category")
    if category not in CATEGORIES:
        entry.refuse(f"category {', '.join(CATEGORIES[:-1])} or {CATEGORIES[-1]}", repr(category))
    link = entry.text("link")
    if not link.startswith(("https://", "http://")):
        entry.refuse("a link that begins with https://", repr(link))
    return KnownFailure(entry.place, _scope(entry), entry.text("reason"), category, link)


def _budget(entry: _Reader) -> WiderBudget:
    scope = _scope(entry)
    kind = CHECKS[scope.check].budget
    if kind is BudgetKind.EXACT:
        entry.refuse("a check that has a budget", f"{scope.check}, which is exact", "Declare a [[known]] failure.")
    key = "limit" if kind is BudgetKind.QUALITY else "factor"
    if [name for name in ("factor", "limit") if name in entry.values] != [key]:
        found = " and ".join(name for name in ("factor", "limit") if name in entry.values) or "none"
        entry.refuse(f"a {key} (and nothing else) for the {kind} budget of {scope.check}", found)
    number = entry.values[key]
    if isinstance(number, bool) or not isinstance(number, int | float) or not 0 < number < math.inf:
        entry.refuse(f"a positive number as {key}", repr(number))
    return WiderBudget(entry.place, scope, entry.text("reason"), **{key: float(number)})


def _scope(entry: _Reader) -> Scope:
    check, scheme, dtype = entry.check.id, entry.text("scheme", ANY), entry.text("dtype", ANY)
    for key, value, allowed in (("scheme", scheme, ALL_SCHEMES), ("dtype", dtype, DTYPES)):
        if value not in (ANY, *allowed):
            entry.refuse(f"{key} {', '.join(allowed)} or {ANY}", repr(value))
    if scheme == NONE and entry.check.needs in QUANTIZED:
        entry.refuse(f"a quantized scheme for {check}, which is asked of quantized runtimes only", repr(scheme))
    return Scope(check, _cases(entry), scheme, dtype)


def _cases(entry: _Reader) -> tuple[str, ...]:
    value = entry.values.get("case", ANY)
    names = value if isinstance(value, list) else [value]
    if not names or not all(isinstance(name, str) and name.strip() for name in names):
        entry.refuse(f"a case's name, a list of names, or {ANY}", repr(value))
    if len(set(names)) < len(names) or (ANY in names and len(names) > 1):
        entry.refuse(f"names that differ, or {ANY} alone, as case", repr(value))
    return tuple(names)


class _Reader:
    """One table of the file: its values, and how to say that one of them is wrong."""

    def __init__(self, path: Path, table: str, number: int, values: Mapping[str, Any]) -> None:
        self.path, self.values = path, values
        self.place = f"[[{table}]] entry {number}"
        id = values.get("check")
        if not isinstance(id, str) or id not in CHECKS:
            self.refuse("the id of a check", "no check" if id is None else repr(id), "See `g4conformance checks`.")
        self.place += f" ({id})"
        self.check: Check = CHECKS[id]
        if unknown := [key for key in values if key not in _KEYS[table]]:
            self.refuse(f"only {', '.join(_KEYS[table])}", repr(unknown[0]))
        if missing := [key for key in _REQUIRED[table] if key not in values]:
            self.refuse(f"a {missing[0]}", "none")

    def text(self, key: str, default: str = "") -> str:
        value = self.values.get(key, default)
        if not isinstance(value, str) or not value.strip():
            self.refuse(f"a text as {key}", repr(value))
        return " ".join(value.split())

    def refuse(self, expected: str, found: str, remedy: str = "Mend the entry.") -> NoReturn:
        raise ConformanceError(f"{expected}, in {self.path}, {self.place}", found, remedy)
