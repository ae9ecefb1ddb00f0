"""Judges the shipped runtime on one fuzz example, as a run would, clean or with a fault planted in it."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from g4conformance.checkpoints.checkpoint import Checkpoint
from g4conformance.errors import UnsoundReferenceError
from g4conformance.fuzz.cases import calibration_cases, judged_cases
from g4conformance.fuzz.example import FuzzExample
from g4conformance.judging.judge import Bench, judge
from g4conformance.judging.observe import observe
from g4conformance.judging.verdict import Status, Verdict
from g4conformance.prompts import ResolvedCase
from g4conformance.reference.record import record_reference
from g4conformance.reference.selfcheck import measure_noise, require_sound
from g4conformance.runtime.static import StaticGemma4Runtime

Plant = Callable[[StaticGemma4Runtime], AbstractContextManager[None]]
"""Puts a fault into a runtime while the context lasts; leaves alone a runtime whose config it does not apply to."""


@dataclass(frozen=True)
class Outcome:
    """What came of an example; it conforms if all three are empty.

    Attributes:
        wrong: verdicts of both cases that do not pass although the case has what they need.
        unsound: why the reference was not fit to judge anyone; nothing was judged then.
        raised: the traceback of what ended the judging, where that was neither of the two.
    """

    wrong: tuple[Verdict, ...] = ()
    unsound: str = ""
    raised: str = ""

    @property
    def alarm(self) -> str:
        """What is wrong first, a check's id or the name of an exception; empty if nothing is."""
        if self.wrong:
            return self.wrong[0].check
        return self.raised.strip().rpartition("\n")[2].partition(":")[0]


def examine(example: FuzzExample, plant: Plant | None = None) -> Outcome:
    """As `judge_example`, but whatever it raises is an outcome too: a search must keep the example that did it."""
    try:
        return judge_example(example, plant)
    except Exception:
        return Outcome(raised=traceback.format_exc())


def judge_example(example: FuzzExample, plant: Plant | None = None) -> Outcome:
    """Judges both cases, one after the other on one runtime, by the noise of the example's own checkpoint.

    Args:
        plant: puts a fault into the runtime of each case; the reference has been recorded by then.

    Raises:
        UnsoundReferenceError: the reference disagrees with itself in float32. In low precision an untrained checkpoint
            can amplify rounding beyond the limit, and that is an outcome.
    """
    checkpoint = example.checkpoint()
    try:
        noise = measure_noise(checkpoint, calibration_cases(checkpoint))
        require_sound(noise)
        bench = Bench(checkpoint.facts, noise, example.dtype)
        cases = judged_cases(example, checkpoint)
        runtime = StaticGemma4Runtime(checkpoint, cases[0].request.layout)
        return Outcome(wrong=tuple(v for case in cases for v in _wrong(checkpoint, runtime, case, bench, plant)))
    except UnsoundReferenceError as error:
        if example.dtype == "float32":
            raise
        return Outcome(unsound=str(error))


def _wrong(
    checkpoint: Checkpoint, runtime: StaticGemma4Runtime, case: ResolvedCase, bench: Bench, plant: Plant | None
) -> list[Verdict]:
    """The verdicts on `case` that do not pass; one that nothing was observed for is among them."""
    reference = record_reference(checkpoint, case.request.inputs, case.reference_steps, case.case.name)
    serving = runtime.for_layout(case.request.layout)
    with plant(serving) if plant is not None else nullcontext():
        observation = observe(serving, case, reference, checkpoint.facts)
    verdicts = judge(case, reference, observation, bench, lambda: measure_noise(checkpoint, [case]))
    return [v for v in verdicts if v.status not in (Status.PASS, Status.NOT_APPLICABLE)]
