"""Lengths as expressions: `W-1`, `2*W`, `max_seq`, resolved per checkpoint; and texts of exactly that many tokens."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping

from g4conformance.errors import CaseError

_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
}


def evaluate_length(expression: str | int, names: Mapping[str, int]) -> int:
    """The value of a sum, difference, product or floor quotient of integers and `names`.

    Raises:
        CaseError: anything else, or a result below 1.
    """
    try:
        value = _evaluate(ast.parse(str(expression), mode="eval").body, names)
    except (SyntaxError, ValueError, ZeroDivisionError):
        known = ", ".join(names)
        raise CaseError(
            f"a length made of integers, {known} and + - * //", repr(expression), "Mend the case's length."
        ) from None
    if value < 1:
        raise CaseError("a length of at least 1", f"{expression!r} = {value}", "Mend the case's length.")
    return value


def _evaluate(node: ast.expr, names: Mapping[str, int]) -> int:
    match node:
        case ast.Constant(value=int(value)) if not isinstance(value, bool):
            return value
        case ast.Name(id=name) if name in names:
            return names[name]
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_evaluate(left, names), _evaluate(right, names))
        case _:
            raise ValueError(ast.dump(node))


def fit_text(text: str, length: int, count_tokens: Callable[[str], int]) -> str:
    """A beginning of `text`, repeated as often as needed, for which `count_tokens` gives exactly `length`.

    Raises:
        CaseError: no beginning does: what surrounds it is longer already, or the tokenizer jumps over the length.
    """
    whole = text
    while (count := count_tokens(whole)) < length:
        if not text or count_tokens(whole + text) <= count:
            break
        whole += text
    low, high = 0, len(whole)
    while low < high:  # the shortest beginning with at least `length` tokens
        middle = (low + high) // 2
        if count_tokens(whole[:middle]) < length:
            low = middle + 1
        else:
            high = middle
    # The number of tokens is not quite monotonic in the number of characters: look around.
    for end in sorted(range(max(0, low - 40), min(len(whole), low + 40) + 1), key=lambda end: abs(end - low)):
        if count_tokens(whole[:end]) == length:
            return whole[:end]
    raise CaseError(f"a beginning of {text[:30]!r}... with {length} tokens", "none", "Change the case's prompt.")
