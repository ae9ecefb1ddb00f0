"""Runtimes that their owners bring: made by a function of theirs, which `--runtime package.module:factory` names."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

from g4conformance.checkpoints.checkpoint import Checkpoint
from g4conformance.errors import ConformanceError
from g4conformance.runtime.contract import Runtime

_WANTED = "--runtime package.module:factory, where factory(checkpoint) makes a runtime"


def load_factory(spec: str) -> Callable[[Checkpoint], Any]:
    """Imports what `package.module:factory` names; nothing is made yet.

    Raises:
        ConformanceError: it is not written so, cannot be imported, or is nothing that can be called.
    """
    module, _, name = spec.partition(":")
    if not module or not name:
        raise ConformanceError(_WANTED, repr(spec), "Check it.")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # an adopter's module lies where the command is called
    try:
        factory = getattr(importlib.import_module(module), name)
    except Exception as error:  # whatever an adopter's module raises, there is no factory to call
        raise _refused(spec, error) from None
    if not callable(factory):
        raise ConformanceError(_WANTED, f"{spec}, which is a {type(factory).__name__}", "Check it.")
    return factory


def made_by(spec: str, checkpoint: Checkpoint) -> Runtime:
    """The runtime that `package.module:factory` makes of the checkpoint.

    Raises:
        ConformanceError: as `load_factory`; the factory raised something, or made something that has no `prefill`.
    """
    factory = load_factory(spec)
    try:
        runtime = factory(checkpoint)
    except Exception as error:  # whatever an adopter's factory raises, there is no runtime to judge
        raise _refused(spec, error) from None
    if not callable(getattr(runtime, "prefill", None)):
        found = f"a {type(runtime).__name__} of {spec}, which has none"
        raise ConformanceError("a runtime with a method `prefill`", found, "See g4conformance/runtime/contract.py.")
    return runtime


def _refused(spec: str, error: Exception) -> ConformanceError:
    told = " ".join(str(error).split())
    return ConformanceError(_WANTED, f"{spec} ({type(error).__name__}: {told})", "Check it.")
