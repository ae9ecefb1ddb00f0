"""Says which stage is to blame for a failure, and which failures are known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from g4conformance.checks import CHECKS
from g4conformance.checks.run import Mode
from g4conformance.judging.verdict import Known, Status, Verdict
from g4conformance.known.entries import NOTHING, Declared
from g4conformance.stages import Stage, upstream

_WRONG = (Status.FAIL, Status.ERROR)


# Of a stage, earlier ones that it went through again in isolation, because it does not take their results.
MadeItself = Mapping[Stage, frozenset[Stage]]
_NOTHING_AGAIN: MadeItself = MappingProxyType({})


def blame(
    verdicts: Sequence[Verdict], declared: Declared = NOTHING, made_itself: MadeItself = _NOTHING_AGAIN
) -> list[Verdict]:
    """Marks as inherited what follows from an earlier stage, and as known what is declared or follows from only that.

    A stage that is wrong in isolation is wrong by itself, unless it made there what an earlier stage is wrong about.
    One that is wrong only in accumulation has inherited it if any stage before it is wrong at all; else the fault is
    its own. Where the runtime's own run broke off, the stages that it never reached have inherited that from whichever
    stage is wrong in isolation.

    Args:
        verdicts: of one case, each a pass, a fail, an error, or nothing that could be judged.
    """
    wrong = [verdict for verdict in verdicts if verdict.status in _WRONG]
    follows = {id(verdict): causes(verdict, wrong, made_itself) for verdict in wrong}
    known: dict[int, Known] = {}
    explained = -1
    while explained < len(known):  # what follows from something known is known, and so on
        explained = len(known)
        for verdict in wrong:
            if explanation := _declared(verdict, declared) or _inherited(follows[id(verdict)], known):
                known.setdefault(id(verdict), explanation)

    def blamed(verdict: Verdict) -> Verdict:
        if explanation := known.get(id(verdict)):
            return replace(verdict, status=Status.KNOWN, known=explanation)
        return replace(verdict, status=Status.INHERITED) if follows.get(id(verdict)) else verdict

    return [blamed(verdict) for verdict in verdicts]


def causes(verdict: Verdict, wrong: Sequence[Verdict], made_itself: MadeItself = _NOTHING_AGAIN) -> list[Verdict]:
    """Those of the wrong verdicts of its case that one of them follows from; none if the fault is its own."""
    if verdict.mode is Mode.ISOLATED:
        again = frozenset() if _is_alone(verdict) else made_itself.get(verdict.stage, frozenset())
        return [other for other in wrong if other.stage in again]
    before = upstream(verdict.stage)

    def is_cause(other: Verdict) -> bool:
        if other.stage is verdict.stage:
            # What a quantized runtime loses does not follow from what its scales are: it is asked of both.
            return other.mode is Mode.ISOLATED and verdict.stage is not Stage.QUANTIZATION
        broke_off = verdict.status is Status.ERROR and other.mode is Mode.ISOLATED
        return broke_off or other.stage in before

    return [other for other in wrong if is_cause(other)]


def _is_alone(verdict: Verdict) -> bool:
    """Whether it is about pieces that were fed the reference's own, whatever the stage takes."""
    return verdict.check in CHECKS and CHECKS[verdict.check].alone


def _declared(verdict: Verdict, declared: Declared) -> Known | None:
    entry = declared.failure(verdict.check, verdict.case)
    return None if entry is None else Known(entry.reason, entry.category, entry.link)


def _inherited(causes: Sequence[Verdict], known: dict[int, Known]) -> Known | None:
    """What is known of the first cause, if all of them are."""
    if not causes or any(id(cause) not in known for cause in causes):
        return None
    first = known[id(causes[0])]
    return replace(first, inherited_from=first.inherited_from or causes[0].check)
