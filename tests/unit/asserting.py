"""How the unit tests look at errors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from g4conformance.errors import ConformanceError


@contextmanager
def told(kind: type[ConformanceError], *, expected: str, found: str, remedy: str) -> Iterator[None]:
    """The block raises exactly `kind`, whose three parts contain these words and whose message is the three parts."""
    with pytest.raises(kind) as caught:
        yield
    error = caught.value
    assert type(error) is kind
    for part, words in ((error.expected, expected), (error.found, found), (error.remedy, remedy)):
        assert words in part, f"{words!r} is not told by {part!r}"
    assert str(error) == f"expected {error.expected}, found {error.found}. {error.remedy}"
    assert error.remedy.endswith("."), "a remedy is a sentence"
    assert "\n" not in str(error), "one line, not a traceback"
