"""A trial: one fault planted, one case run, and what the suite made of it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor

from g4conformance.checkpoints.checkpoint import Checkpoint
from g4conformance.checks import CHECKS
from g4conformance.checks.run import Mode
from g4conformance.faults.registry import Fault
from g4conformance.faults.subjects import Subject
from g4conformance.judging.judge import judge
from g4conformance.judging.observation import Observation
from g4conformance.judging.verdict import Status, Verdict
from g4conformance.metrics import difference
from g4conformance.prompts import ResolvedCase
from g4conformance.reference.noise import Noise
from g4conformance.runtime.contract import Runtime
from g4conformance.runtime.layout import StaticLayout
from g4conformance.session import ConformanceSession, RunOptions
from g4conformance.stages import Stage, stage_of, upstream

_SHORT_PROMPT = "text-only"
QUICK = RunOptions(decode_steps=3, gen_steps=4)  # a frozen position and a lost row show at the second step


class Outcome(StrEnum):
    """How a trial ended; only `killed` speaks for the suite."""

    KILLED = "killed"
    SURVIVED = "survived"
    MISPLACED = "blamed on another stage"
    CRASHED = "crashed"
    NOT_APPLIED = "not applied"
    NOT_APPLICABLE = "not applicable"


class NotTriedError(Exception):
    """A fault cannot be tried on a runtime, for the reason that the message gives."""


@dataclass(frozen=True)
class Trial:
    """What became of one fault.

    Attributes:
        killers: every check of the fault's stage that turned red in isolation, with measured / allowed; infinite where
            nothing is allowed.
        shown_in: trace name of the first tensor, in the order of the stages, that the fault alters.
        missed_by: the naive observations that would not have noticed.
        detail: why it is no kill.
    """

    fault: Fault
    outcome: Outcome
    killers: Mapping[str, float] = field(default_factory=dict)
    shown_in: str = ""
    missed_by: tuple[str, ...] = ()
    detail: str = ""
    verdicts: tuple[Verdict, ...] = ()

    @property
    def killer(self) -> str:
        """The check that had to see the fault, or, if only others of its stage did, the one that saw most of it."""
        return (
            self.fault.check
            if self.fault.check in self.killers
            else max(self.killers, key=lambda check: self.killers[check], default=self.fault.check)
        )

    @property
    def margin(self) -> float:
        return self.killers.get(self.killer, 0.0)


@dataclass(frozen=True)
class Prepared:
    """A case with everything about it that no fault changes."""

    case: ResolvedCase
    reference: Mapping[str, Tensor]
    clean: Observation


class Workbench:
    """Tries faults on one runtime; the reference and the clean runtime run once a case.

    Raises:
        ConformanceError: as `ConformanceSession`.
    """

    def __init__(self, checkpoint: Checkpoint, runtime: Runtime, options: RunOptions = QUICK) -> None:
        self.checkpoint, self.runtime = checkpoint, runtime
        self.session = ConformanceSession(checkpoint, runtime, options)
        self._prepared: dict[tuple[str, bool], Prepared] = {}
        self._noise: dict[str, Noise] = {}
        self._already_red: dict[tuple[str, bool], set[str]] = {}

    def prepared(self, name: str, probes: bool = False) -> Prepared:
        """The case of this name, with its probes of self-consistency or, because those cost much, without."""
        if (name, probes) not in self._prepared:
            case = self.session.cases[name]
            if not probes:
                case = replace(case, case=replace(case.case, self_consistency=False))
            reference = self.session.reference(name)
            clean = self.session.observed(self.runtime, case, reference)
            self._prepared[name, probes] = Prepared(case, reference, clean)
        return self._prepared[name, probes]

    def prepared_for(self, fault: Fault) -> Prepared:
        """The case that shows `fault`, as it is to be run."""
        return self.prepared(fault.case, probes=fault.stage is Stage.SELF_CONSISTENCY)

    def judged(self, prepared: Prepared, observation: Observation) -> list[Verdict]:
        return judge(
            prepared.case, prepared.reference, observation, self.session.bench, lambda: self._own_noise(prepared.case)
        )

    def _own_noise(self, case: ResolvedCase) -> Noise:
        name = case.case.name
        if name not in self._noise:
            self._noise[name] = self.session.own_noise(case)
        return self._noise[name]

    def observed(self, fault: Fault, prepared: Prepared) -> tuple[Prepared, Observation]:
        """The case as a runtime with the fault runs it, and what it is to be compared with.

        That changes only where the fault is in a quantized runtime's scales and integers: the reference rounds with
        what the runtime has.

        Raises:
            AttributeError: the runtime has no such part.
            NotTriedError: with the fault there is nothing to observe.
        """
        with fault.applied(_of_layout(self.runtime, prepared.case.request.layout)):
            if fault.needs is Subject.QUANTIZED:
                session = self.session.requantized(self.runtime)
                prepared = replace(prepared, reference=session.reference(prepared.case.case.name))
            return prepared, self.session.observed(self.runtime, prepared.case, prepared.reference)

    def run(self, fault: Fault) -> Trial:
        """Plants `fault` and judges the case that shows it."""
        prepared = self.prepared_for(fault)
        already = self._red_without_a_fault(prepared)
        if fault.check in already:
            return Trial(fault, Outcome.NOT_APPLICABLE, detail=f"{fault.check} is red without it")
        try:
            prepared, observation = self.observed(fault, prepared)
        except (AttributeError, NotTriedError) as missing:
            return Trial(fault, Outcome.NOT_APPLICABLE, detail=str(missing))
        shown_in = first_difference(prepared.clean, observation)
        verdicts = [v for v in self.judged(prepared, observation) if v.check not in already]
        outcome, detail = self._outcome(fault, verdicts, shown_in)
        return Trial(
            fault,
            outcome,
            killers=self.killers(fault, verdicts),
            shown_in=shown_in,
            missed_by=tuple(self._missed_by(fault, prepared, observation)),
            detail=detail,
            verdicts=tuple(verdicts),
        )

    def _red_without_a_fault(self, prepared: Prepared) -> set[str]:
        """Checks that a runtime of the user's fails as it is: what is red anyway shows no fault."""
        key = prepared.case.case.name, prepared.case.case.self_consistency
        if key not in self._already_red:
            clean = self.judged(prepared, prepared.clean)
            self._already_red[key] = {verdict.check for verdict in clean if verdict.failed}
        return self._already_red[key]

    def killers(self, fault: Fault, verdicts: Sequence[Verdict]) -> Mapping[str, float]:
        """Checks of the fault's stage that are red in isolation, or that are made in accumulation only."""
        status = Status.ERROR if fault.raises else Status.FAIL
        return {
            v.check: v.measurement.ratio if v.measurement else math.inf
            for v in verdicts
            if (v.stage == fault.stage or v.check == fault.check)
            and v.status is status
            and (v.mode is Mode.ISOLATED or Mode.ISOLATED not in CHECKS[v.check].modes)
        }

    def is_killed(self, fault: Fault, verdicts: Sequence[Verdict]) -> bool:
        """Whether the check that must see the fault did."""
        return fault.check in self.killers(fault, verdicts)

    def _outcome(self, fault: Fault, verdicts: Sequence[Verdict], shown_in: str) -> tuple[Outcome, str]:
        if not shown_in:
            return Outcome.NOT_APPLIED, "no tensor of the trace differs from the clean runtime's"
        if fault.check not in CHECKS:
            return Outcome.SURVIVED, f"there is no check {fault.check}"
        wrong = [v for v in verdicts if v.status in (Status.FAIL, Status.ERROR)]
        misplaced = sorted({v.stage for v in wrong if v.stage != fault.stage and fault.stage not in upstream(v.stage)})
        if misplaced:
            return Outcome.MISPLACED, f"red at {', '.join(misplaced)}"
        if self.is_killed(fault, verdicts):
            return Outcome.KILLED, ""
        raised = [v for v in wrong if v.stage == fault.stage and v.status is Status.ERROR]
        if raised:
            return Outcome.CRASHED, raised[0].where
        red = sorted({v.check for v in wrong})
        return Outcome.SURVIVED, f"{fault.check} is not red in isolation; red are {', '.join(red) or 'none'}"

    def _missed_by(self, fault: Fault, prepared: Prepared, observation: Observation) -> Iterable[str]:
        """What people look at today: the last token's argmax on a short prompt, and two distances of its logits."""
        if self._short_prompt_argmax(fault):
            yield "argmax of a short prompt"
        logits = observation.accumulated.get("prefill/logits")
        expected = prepared.reference["prefill/logits"]
        if logits is None or logits.shape != expected.shape:
            return
        found = difference(expected, logits)
        if found.peir is not None and found.peir < 0.01:
            yield "PEIR 1 %"
        if float(torch.cosine_similarity(expected.double(), logits.double(), dim=-1)) >= 0.999:
            yield "cosine 0.999"

    def _short_prompt_argmax(self, fault: Fault) -> bool:
        """Whether the most likely token after a short text prompt is still the reference's."""
        prepared = self.prepared(_SHORT_PROMPT)
        request, expected = prepared.case.request, prepared.reference["prefill/logits"]
        # A quantized runtime has no programs for other buffers; making some would take longer than it saves.
        short = StaticLayout(max_seq=request.inputs["input_ids"].shape[1] + 1)
        runtime = _of_layout(self.runtime, request.layout if self.session.quantized else short)
        try:
            with torch.no_grad(), fault.applied(runtime):
                logits = runtime.prefill(runtime.build_static_inputs(request.prompt, request.images))
        except Exception:  # whoever looks at an argmax would have seen an exception
            return False
        return int(logits.argmax()) == int(expected.argmax())


def first_difference(clean: Observation, faulty: Observation) -> str:
    """The first tensor that differs, in the order of the stages; or the first stage that raises; "" if none does."""
    differing = [
        name
        for before, after in ((clean.isolated, faulty.isolated), (clean.accumulated, faulty.accumulated))
        for name in dict.fromkeys([*before, *after])
        if not _same(before.get(name), after.get(name))
    ]
    order = list(Stage)
    if differing:
        return min(differing, key=lambda name: order.index(stage_of(name)))
    raised = [str(stage or "generate") for stage in faulty.errors if stage not in clean.errors]
    return f"an exception in {raised[0]}" if raised else ""


def _same(before: Tensor | None, after: Tensor | None) -> bool:
    if before is None or after is None:
        return before is after
    if before.shape != after.shape or before.dtype != after.dtype:
        return False
    return bool(((before == after) | ((before != before) & (after != after))).all())  # NaN in padding stays NaN


def _of_layout(runtime: Any, layout: StaticLayout) -> Any:
    return runtime.for_layout(layout) if hasattr(runtime, "for_layout") else runtime
