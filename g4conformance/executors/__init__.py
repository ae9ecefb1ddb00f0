"""Executors: ways of running the static runtime's graphs.

`registry` says which there are and what each can express, `lowering` turns one graph into a callable, `artefacts` keeps
what was made. Every other module is one executor with one function, `lower`, or helps those. Nothing heavy is imported
before it is asked for.
"""

from g4conformance.executors.artefacts import cached_lowering
from g4conformance.executors.lowering import lower_graph
from g4conformance.executors.registry import EXECUTORS, Executor, require_expressible, require_installed

__all__ = [
    "EXECUTORS",
    "Executor",
    "cached_lowering",
    "lower_graph",
    "require_expressible",
    "require_installed",
]
