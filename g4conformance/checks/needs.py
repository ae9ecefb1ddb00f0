"""Whether a check can judge a case at all, as far as that is known without a checkpoint."""

from __future__ import annotations

from g4conformance.cases import Case
from g4conformance.checks.registry import Check, Needs


def may_apply(check: Check, case: Case, *, first: bool, quantized: bool) -> bool:
    """Whether case and run have what the check needs of them; what it needs of the checkpoint is not known yet.

    Args:
        first: whether it is the run's first case.
        quantized: whether the runtime is, or may be.
    """
    met = {
        Needs.PROMPT: case.vocabulary is None,
        Needs.IMAGE: bool(case.images),
        Needs.PROBES: case.self_consistency,
        Needs.REFUSALS: first,
        Needs.QUANTIZED: quantized,
        Needs.QUANTIZED_IMAGE: quantized and bool(case.images),
        Needs.QUANTIZED_ONCE: quantized and first,
    }
    return met.get(check.needs, True)
