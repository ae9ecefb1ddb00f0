"""Judges mutants, each in a fork of its own, from the cheapest judge to the dearest, until one of them sees it."""

from __future__ import annotations

import ast
import sys
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from g4conformance.checkpoints.checkpoint import Checkpoint
from g4conformance.runtime.contract import Runtime
from g4conformance.runtime.layout import StaticLayout
from tools.mutants.fork import in_fork
from tools.mutants.grounds import Ground
from tools.mutants.mutate import Mutant, mutants_of, mutated
from tools.mutants.outcome import SURVIVED, End, Outcome, outcome_of
from tools.mutants.reload import PACKAGE, install, source_of
from tools.mutants.unit_tests import tested

MODULES = ("static", "cache", "graphs", "inputs", "masks", "vision", "layout")  # contract.py only declares
LOWEST = "layout"  # nearly all others depend on it


def all_mutants() -> list[Mutant]:
    return [mutant for module in MODULES for mutant in mutants_of(source_of(module), f"{module}.py")]


def outcome_of_mutant(mutant: Mutant, grounds: Sequence[Ground]) -> Outcome:
    module = mutant.file.removesuffix(".py")
    return _outcome(module, mutated(source_of(module), mutant), grounds)


def require_innocent(grounds: Sequence[Ground]) -> None:
    """The unchanged runtime must survive when it is executed anew as mutants are.

    Raises:
        RuntimeError: something is red without any change.
    """
    outcome = _outcome(LOWEST, ast.parse(source_of(LOWEST)), grounds)
    if outcome.end is not End.SURVIVED:
        raise RuntimeError(f"the unchanged runtime does not survive: {outcome}")


def _outcome(module: str, tree: ast.Module, grounds: Sequence[Ground]) -> Outcome:
    judged = in_fork(lambda: _judged(module, tree, grounds))
    return judged if judged.end is not End.SURVIVED else in_fork(lambda: _tested(module, tree, grounds))


def _judged(module: str, tree: ast.Module, grounds: Sequence[Ground]) -> Outcome:
    install(module, tree)
    for ground in grounds:
        for case, verdicts in ground.verdicts(_mutated_runtime):
            outcome = outcome_of(verdicts, case, ground.name)
            if outcome.end is not End.SURVIVED:
                return outcome
    return SURVIVED


def _tested(module: str, tree: ast.Module, grounds: Sequence[Ground]) -> Outcome:
    install(module, tree)
    return tested(module, bundled=grounds[0].session.checkpoint)


def _mutated_runtime(checkpoint: Checkpoint, layout: StaticLayout) -> Runtime:
    """The runtime of the modules that are installed now, whose layouts are of their class as well."""
    runtime_class: Any = sys.modules[f"{PACKAGE}.static"].StaticGemma4Runtime
    layout_class: Any = sys.modules[f"{PACKAGE}.layout"].StaticLayout

    def own(given: StaticLayout) -> Any:
        return layout_class(**{field.name: getattr(given, field.name) for field in fields(given)})

    class Mutated(runtime_class):  # type: ignore[misc]
        def for_layout(self, layout: StaticLayout) -> Any:
            return super().for_layout(own(layout))

    made: Runtime = Mutated(checkpoint, own(layout))
    return made
