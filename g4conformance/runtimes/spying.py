"""Spies: look at what a runtime's own functions take and return while it runs as its users run it."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from g4conformance.errors import ConformanceError
from g4conformance.faults.patching import Patch

Seen = Callable[..., object]


class Spies:
    """Calls of functions, methods and modules are looked at, before or after, until the context ends."""

    def __init__(self, patch: Patch) -> None:
        self._patch = patch

    def before(self, target: object, name: str, seen: Seen) -> None:
        """`seen` gets the arguments of each call of `target.name`, just before it."""
        original = getattr(target, name)

        @functools.wraps(original)
        def spied(*args: Any, **kwargs: Any) -> Any:
            seen(*args, **kwargs)
            return original(*args, **kwargs)

        self._patch(target, name, spied)

    def after(self, target: object, name: str, seen: Seen) -> None:
        """`seen` gets what each call of `target.name` returns, then its arguments."""
        original = getattr(target, name)

        @functools.wraps(original)
        def spied(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            seen(result, *args, **kwargs)
            return result

        self._patch(target, name, spied)


@contextmanager
def spies() -> Iterator[Spies]:
    with Patch() as patch:
        yield Spies(patch)


def imported(module: str, extra: str) -> ModuleType:
    """The runtime's package.

    Raises:
        ConformanceError: it is not installed, or something that it imports is not.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConformanceError(
            f"the package {module.partition('.')[0]}",
            f"none that can be imported ({error})",
            f"Install it with: pip install 'g4conformance[{extra}]'.",
        ) from None
