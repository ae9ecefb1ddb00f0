"""What a runtime says of itself holds: what it does not support it refuses, and computes nothing in its place."""

from __future__ import annotations

import torch

from g4conformance.adopting.capabilities import definition
from g4conformance.checks.compare import Comparison, compare, nothing
from g4conformance.checks.registry import Needs, check
from g4conformance.checks.run import CaseRun, Mode
from g4conformance.stages import Stage

_PREFIX = "self/refused/"


@check(
    "G4-SELF-21",
    stage=Stage.SELF_CONSISTENCY,
    budget="exact",
    needs=Needs.REFUSALS,
    modes=(Mode.ACCUMULATED,),
)
def unsupported_is_refused(run: CaseRun) -> list[Comparison]:
    """Asked for what it declares not to support, the runtime raises an error."""
    names = [name for name in run.runtime if name.startswith(_PREFIX)]
    if not names:
        return [nothing(_PREFIX, "the runtime declares nothing unsupported that could be asked for")]
    return [_refused(run, name) for name in names]


def _refused(run: CaseRun, name: str) -> Comparison:
    found = compare(name, torch.tensor([True]), run.observed(name))
    if found.difference is None or found.difference.equal:
        return found
    capability = name.removeprefix(_PREFIX)
    meaning = definition(capability).rstrip(".")
    return found.explained(f"it declares no {capability} ({meaning}), and computes something when asked")
