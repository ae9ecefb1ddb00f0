"""Applies checks and budgets to one observed case."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from g4conformance.budgets import Budget, Limit, budget_of, quality_tie, rounding_factor
from g4conformance.checkpoints.facts import ModelFacts
from g4conformance.checks import CHECKS, Check
from g4conformance.checks.compare import Comparison
from g4conformance.checks.registry import BudgetKind, Needs
from g4conformance.checks.run import CaseRun, Mode, NotObserved
from g4conformance.judging.blame import blame
from g4conformance.judging.observation import Observation, alone_key
from g4conformance.judging.traits import traits_of
from g4conformance.judging.verdict import Measurement, Status, Verdict, Widened
from g4conformance.known.entries import NOTHING, Declared
from g4conformance.metrics import Difference
from g4conformance.prompts import ResolvedCase
from g4conformance.reference.noise import Noise, kind_of
from g4conformance.stages import Stage, stage_of

# No case was seen whose own noise is more than five times the calibrated one.
_INEXCUSABLE = 100.0


@dataclass(frozen=True)
class Bench:
    """What judging needs besides the traces: facts, noise, and the setting that budgets depend on.

    Attributes:
        noise: of the reference that the runtime is compared with.
        float_noise: of the float reference, where the other one is fake-quantized.
        steps: distance of two neighbouring values of each tensor on a quantized grid, by kind of trace name.
        declared: known failures and wider budgets of the runtime in this setting.
        foreign: whether the runtime is not the shipped one: tables that it makes its own way differ by rounding.
    """

    facts: ModelFacts
    noise: Noise
    dtype: str
    scheme: str = "none"
    float_noise: Noise | None = None
    steps: Mapping[str, float] = field(default_factory=dict)
    declared: Declared = NOTHING
    foreign: bool = False

    def budget(self, check: Check) -> Budget:
        return budget_of(check.of_foreign() if self.foreign else check, self.dtype, self.scheme)

    def limit(self, budget: Budget, comparison: Comparison) -> Limit:
        assert comparison.difference is not None
        exact_grid = budget.kind is BudgetKind.STEP and self.float_noise is not None
        noise = self.float_noise if exact_grid and self.float_noise is not None else self.noise
        step = self.steps.get(kind_of(comparison.tensor), 0.0)
        return budget.limit(noise, comparison.tensor, comparison.difference, step)


def judge(
    case: ResolvedCase,
    reference: Mapping[str, Tensor],
    observation: Observation,
    bench: Bench,
    own_noise: Callable[[], Noise] | None = None,
) -> list[Verdict]:
    """The verdicts of every check on `case`, in the order of the stages, isolated before accumulated.

    Args:
        own_noise: measures the reference's noise on this very case. It costs several runs of the reference, so it is
            asked for only where something is wrong by the calibrated noise, and then the larger of both counts.
    """
    verdicts = _judge(case, reference, observation, bench)
    if own_noise is None or not any(_excusable(verdict, bench) for verdict in verdicts):
        return verdicts
    return _judge(case, reference, observation, replace(bench, noise=bench.noise.joined(own_noise())))


def _excusable(verdict: Verdict, bench: Bench) -> bool:
    """Whether it is wrong, or would be if nothing were declared, but might not be by a larger noise.

    Only rounding budgets are made of noise.
    """
    found = verdict.measurement
    if found is None or not (verdict.failed or verdict.known is not None or verdict.widened is not None):
        return False
    return bench.budget(CHECKS[verdict.check]).kind is BudgetKind.ROUNDING and found.ratio < _INEXCUSABLE


def _judge(
    case: ResolvedCase, reference: Mapping[str, Tensor], observation: Observation, bench: Bench
) -> list[Verdict]:
    runs = {mode: case_run(case, reference, observation, bench, mode) for mode in Mode}
    verdicts = [
        _verdict(check, runs[mode], observation, bench)
        for check in CHECKS.values()
        for mode in check.modes
        if not _said_by_the_other_mode(check, mode, observation)
    ]
    return blame(verdicts, bench.declared, observation.made_itself)


def _said_by_the_other_mode(check: Check, mode: Mode, observation: Observation) -> bool:
    """Whether both runs are one, so that isolation says it all; or there was only the run on its own."""
    if len(check.modes) < len(Mode):
        return False
    return check.stage in (observation.same if mode is Mode.ACCUMULATED else observation.own_only)


def verdict_of(
    check: Check,
    case: ResolvedCase,
    reference: Mapping[str, Tensor],
    observation: Observation,
    bench: Bench,
    mode: Mode,
) -> Verdict:
    """What one check finds in one mode, whoever is to blame."""
    return _verdict(check, case_run(case, reference, observation, bench, mode), observation, bench)


def applies(check: Check, run: CaseRun) -> bool:
    """Whether case and checkpoint have what `check` needs."""
    met = {
        Needs.NOTHING: True,
        Needs.PROMPT: run.has_prompt,
        Needs.IMAGE: run.layout.num_visual_tokens > 0,
        Needs.PER_LAYER_INPUTS: run.facts.has_per_layer_inputs,
        Needs.PROBES: run.probed,
        Needs.REFUSALS: run.first,
        Needs.FLOATING: not run.quantized,
        Needs.QUANTIZED: run.quantized,
        Needs.QUANTIZED_IMAGE: run.quantized and run.layout.num_visual_tokens > 0,
        Needs.QUANTIZED_ONCE: run.quantized and run.first,
    }
    return met[check.needs]


def case_run(
    case: ResolvedCase, reference: Mapping[str, Tensor], observation: Observation, bench: Bench, mode: Mode
) -> CaseRun:
    """What a check gets to see of `case` in `mode`."""
    logits_factor = rounding_factor("G4-DECODE-09", bench.dtype, bench.scheme)

    def near_tie(name: str) -> float:
        largest = float(reference[name].abs().max())
        return 2 * logits_factor * bench.noise.allowed_largest(name, largest)

    return CaseRun(
        case=case.case.name,
        layout=case.request.layout,
        facts=bench.facts,
        mode=mode,
        reference=reference,
        runtime=observation.isolated if mode is Mode.ISOLATED else observation.accumulated,
        decode_steps=case.decode_steps,
        gen_steps=case.gen_steps,
        near_tie=near_tie,
        has_prompt=case.request.prompt is not None,
        probed=case.case.self_consistency,
        quantized=bench.scheme != "none",
        first=case.first,
        steps=bench.steps,
        quality_tie=quality_tie(bench.scheme) if bench.scheme != "none" else 0.0,
        teacher_forced=observation.teacher_forced,
        unpadded=observation.unpadded,
    )


def _verdict(check: Check, run: CaseRun, observation: Observation, bench: Bench) -> Verdict:
    blank = Verdict(check.id, check.stage, run.case, run.mode, Status.PASS, check.statement)
    if not applies(check, run):
        return replace(blank, status=Status.NOT_APPLICABLE, where=f"needs {check.needs}")
    if observation.unsupported and check.needs is not Needs.REFUSALS:
        return replace(blank, status=Status.NOT_OBSERVED, where=f"the runtime supports no {observation.unsupported}")
    if error := _error(check, run, observation):
        return replace(blank, status=Status.ERROR, where=f"the runtime raised {error}")
    try:
        comparisons = check(run)
    except NotObserved as missing:
        return _unobserved(blank, str(missing), observation)
    except (RuntimeError, IndexError, ValueError, TypeError) as error:
        where = f"the runtime's tensors do not have the contract's shapes ({type(error).__name__}: {error})"
        return replace(blank, status=Status.ERROR, where=where)
    return _budgeted(check, blank, comparisons, bench)


def _budgeted(check: Check, blank: Verdict, comparisons: Sequence[Comparison], bench: Bench) -> Verdict:
    """By the budget as it is; by a wider one only where that is declared and needed."""
    usual = bench.budget(check)
    judged = _measured(blank, comparisons, usual, bench)
    entry = bench.declared.budget(check.id, blank.case)
    if entry is None or judged.status is not Status.FAIL:
        return judged
    wider = _measured(blank, comparisons, entry.applied(usual), bench)
    needed = Widened(usual.number, entry.number, entry.reason)
    # What fails all the same is told by the budget as it is: the number that would have passed is the one to write.
    return replace(judged if wider.status is Status.FAIL else wider, widened=needed)


def _error(check: Check, run: CaseRun, observation: Observation) -> str | None:
    """What the runtime raised in the check's stage; of its run on its own, where the stage's tensors end with that."""
    if check.stage is Stage.SELF_CONSISTENCY or check.alone:
        return None  # each probe has its own, and so have pieces alone; see _unobserved
    if run.mode is Mode.ISOLATED:
        return observation.errors.get(check.stage)
    broke_off = check.stage is Stage.GENERATION or not any(
        name in run.runtime for name in run.reference if stage_of(name) is check.stage
    )
    return observation.errors.get(None) if broke_off else None


def _unobserved(blank: Verdict, name: str, observation: Observation) -> Verdict:
    """A tensor is missing: because what yields it raised, or because the runtime does not have something."""
    source = _source(blank, name)
    if source in observation.errors:
        return replace(blank, status=Status.ERROR, where=f"the runtime raised {observation.errors[source]}")
    missing = observation.missing.get(source, name)
    how = f"; {observation.driven}" if observation.driven and name.startswith("generation/") else ""
    return replace(blank, status=Status.NOT_OBSERVED, where=f"the runtime does not expose {missing}{how}")


def _source(blank: Verdict, name: str) -> str | None:
    """Under which key of `errors` and `missing` it is said what became of the tensor; "" if under none."""
    if name.startswith("self/"):
        return "/".join(name.split("/")[:2])  # a probe
    if "/alone/" in name:
        return alone_key(blank.stage)
    return None if blank.stage is Stage.SELF_CONSISTENCY else ""


def _measured(blank: Verdict, found: Sequence[Comparison], budget: Budget, bench: Bench) -> Verdict:
    if mismatch := next((c for c in found if c.difference is None), None):
        traits = traits_of(mismatch, sum(c.difference is None for c in found) / len(found))
        return replace(blank, status=Status.FAIL, where=mismatch.detail, would_pass=math.inf, traits=traits)
    if not any(c.difference.count for c in found if c.difference):
        detail = next((c.detail for c in found if c.detail), "this case has nothing to compare here")
        return replace(blank, status=Status.NOT_APPLICABLE, where=detail)
    measurements = [_measurement(c, bench.limit(budget, c)) for c in found]
    counted = replace(
        blank,
        count=sum(c.difference.count for c in found if c.difference),
        mismatched=sum(c.difference.mismatched for c in found if c.difference),
    )
    worst = max(measurements, key=lambda m: m.ratio)
    judged = replace(
        counted,
        measurement=worst,
        would_pass=budget.would_pass(worst.ratio) if math.isfinite(worst.ratio) else math.inf,
        unit=budget.unit,
    )
    beyond = [c for c, m in zip(found, measurements, strict=True) if m.ratio > 1.0]
    if not beyond:
        return judged
    return replace(
        judged, status=Status.FAIL, where=_where(beyond), traits=traits_of(beyond[0], len(beyond) / len(found))
    )


def _measurement(comparison: Comparison, limit: Limit) -> Measurement:
    found = comparison.difference
    assert found is not None
    return Measurement(
        tensor=comparison.tensor,
        max_abs=found.max_abs,
        mean_abs=found.mean_abs,
        peir=found.peir,
        argmax_equal=found.argmax_equal,
        allowed_max=limit.largest,
        allowed_mean=limit.mean,
        gain=found.gain,
        allowed_gain=limit.gain,
        ratio=_ratio(found, limit),
    )


def _ratio(found: Difference, limit: Limit) -> float:
    def over(measured: float, allowed: float) -> float:
        if measured == 0.0:
            return 0.0
        return measured / allowed if allowed > 0 else math.inf

    pairs = (found.max_abs, limit.largest), (found.mean_abs, limit.mean), (abs(found.gain - 1.0), limit.gain)
    ratios = [over(measured, allowed) for measured, allowed in pairs]
    return math.inf if any(map(math.isnan, ratios)) else max(ratios)


def _where(beyond: Sequence[Comparison]) -> str:
    """The first tensor, in the order in which the runtime makes them, that is beyond its limit."""
    first = beyond[0]
    difference = first.difference
    assert difference is not None
    others = f"; {len(beyond) - 1} later tensors too" if len(beyond) > 1 else ""
    detail = f"; {first.detail}" if first.detail else ""
    return f"first in {first.tensor}, most at {difference.where}{detail}{others}"
