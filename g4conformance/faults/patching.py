"""Patch: attributes replaced for a while, then put back exactly as they were."""

from __future__ import annotations

from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self

from torch import nn


class Patch:
    """A context in which attributes of any object may be replaced, module parameters and buffers included.

    `pytest.MonkeyPatch` would leave a bound method behind as an instance attribute, and `unittest.mock.patch` would
    turn a buffer into a plain attribute; a fault must leave nothing behind.
    """

    def __init__(self) -> None:
        self._undo = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._undo.close()

    def __call__(self, target: object, name: str, value: Any) -> None:
        """Replaces `target.name` until the context ends.

        Raises:
            AttributeError: the target has no such attribute, or takes none: a fault would not be applied.
        """
        if not hasattr(target, name):
            raise AttributeError(f"{type(target).__name__} has no {name} to replace")
        if isinstance(target, type):
            self._undo.callback(setattr, target, name, vars(target)[name])
            setattr(target, name, value)
            return
        home = _home(target, name)
        if name in home:
            self._undo.callback(home.__setitem__, name, home[name])
        else:
            self._undo.callback(home.__delitem__, name)
        home[name] = value


def _home(target: object, name: str) -> dict[str, Any]:
    """The dictionary that holds the attribute; a class's methods are shadowed in the instance's own."""
    if isinstance(target, nn.Module):
        for home in (target._parameters, target._buffers, target._modules):
            if name in home:
                return home
    if not hasattr(target, "__dict__"):
        raise AttributeError(f"{type(target).__name__} takes no attributes of its own")
    return vars(target)
