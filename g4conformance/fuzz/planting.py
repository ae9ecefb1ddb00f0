"""Puts a fault of the catalogue into fuzzed runtimes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from g4conformance.errors import ConformanceError
from g4conformance.faults import FAULTS
from g4conformance.fuzz.conformance import Plant

# What planting raises where a config lacks the part that the fault is in, such as per-layer inputs or a sixth layer.
_NO_SUCH_PART = (AttributeError, IndexError, KeyError, RuntimeError, TypeError)


def planting(id: str) -> Plant:
    """Plants the fault wherever the config has the part that it is in.

    Raises:
        ConformanceError: there is no such fault.
    """
    if id not in FAULTS:
        raise ConformanceError("the id of a fault", repr(id), "See docs/kill-matrix.md.")

    @contextmanager
    def plant(runtime: Any) -> Iterator[None]:
        with ExitStack() as planted:
            with suppress(*_NO_SUCH_PART):
                planted.enter_context(FAULTS[id].applied(runtime))
            yield

    return plant
