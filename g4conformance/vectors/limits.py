"""How far each tensor may be off, as numbers: for those who judge a trace without g4conformance."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from g4conformance.checks import CHECKS, Check
from g4conformance.checks.compare import Comparison
from g4conformance.checks.run import CaseRun, Mode, NotObserved
from g4conformance.judging.judge import Bench, applies, case_run
from g4conformance.judging.observation import Observation
from g4conformance.prompts import ResolvedCase
from g4conformance.vectors.buffers import in_static_buffers

Limits = dict[str, list[dict[str, Any]]]


def limits_of(case: ResolvedCase, reference: Mapping[str, Tensor], bench: Bench) -> Limits:
    """By trace name, what each check that compares this tensor allows: `{check, budget, max_abs, mean_abs, gain}`.

    They are found by asking the checks about a runtime that makes no mistake. A limit counts for the whole comparison,
    which may be of the prompt's rows or of an image's patches only; the check's statement says of which.
    """
    perfect = Observation(isolated=in_static_buffers(reference, case.request.layout, bench.facts))
    run = case_run(case, reference, perfect, bench, Mode.ISOLATED)
    limits: Limits = {}
    for check in CHECKS.values():
        for comparison in _comparisons(check, run):
            limits.setdefault(comparison.tensor, []).append(_limit(check, comparison, bench))
    return limits


def _comparisons(check: Check, run: CaseRun) -> list[Comparison]:
    """What the check compares; nothing where it needs what no reference has, such as buffers of a cache."""
    if not applies(check, run):
        return []
    try:
        return [comparison for comparison in check(run) if comparison.difference is not None]
    except NotObserved:
        return []


def _limit(check: Check, comparison: Comparison, bench: Bench) -> dict[str, Any]:
    budget = bench.budget(check)
    limit = bench.limit(budget, comparison)
    allowed = {"max_abs": limit.largest, "mean_abs": limit.mean, "gain": limit.gain}
    return {"check": check.id, "budget": str(budget.kind), **allowed}
