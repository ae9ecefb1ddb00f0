"""Makes dataclasses of what a JSON file holds, and says what does not fit."""

from __future__ import annotations

from dataclasses import is_dataclass
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

T = TypeVar("T")


def decoded(kind: type[T], value: Any) -> T:
    """An instance of the dataclass `kind`, whose fields may be dataclasses, tuples, literals, and unions of scalars.

    Types are exact: neither is 1 taken for a float nor true for an integer.

    Raises:
        TypeError: a missing or unknown field, or a value of another type; the message names it.
    """
    return _decoded(kind, value, "")


def _decoded(kind: Any, value: Any, name: str) -> Any:
    if is_dataclass(kind):
        return _fields(kind, value, name)
    if get_origin(kind) is tuple:
        _require(isinstance(value, list), f"{name} is a list", value)
        return tuple(_decoded(get_args(kind)[0], item, f"{name}[{i}]") for i, item in enumerate(value))
    if get_origin(kind) is Literal:
        _require(value in get_args(kind), f"{name} is one of {', '.join(get_args(kind))}", value)
        return value
    kinds = get_args(kind) or (kind,)
    _require(type(value) in kinds, f"{name} is of type {' or '.join(k.__name__ for k in kinds)}", value)
    return value


def _fields(kind: Any, value: Any, name: str) -> Any:
    kinds = get_type_hints(kind)
    _require(isinstance(value, dict), f"{name or 'the top level'} is an object", value)
    _require(value.keys() == kinds.keys(), f"{name or 'the top level'} has the keys {', '.join(kinds)}", [*value])
    prefix = f"{name}." if name else ""
    return kind(**{field: _decoded(kinds[field], value[field], prefix + field) for field in kinds})


def _require(fits: bool, expected: str, found: Any) -> None:
    if not fits:
        raise TypeError(f"{found!r} where {expected}")
