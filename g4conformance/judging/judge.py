"""Applies checks and budgets to one observed case, and says which stage is to blame."""

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
from g4conformance.judging.observation import Observation
from g4conformance.judging.traits import traits_of
from g4conformance.judging.verdict import Measurement, Status, Verdict
from g4conformance.metrics import Difference
from g4conformance.prompts import ResolvedCase
from g4conformance.reference.noise import Noise, kind_of
from g4conformance.stages import Stage, stage_of, upstream

_WRONG = (Status.FAIL, Status.ERROR)
# No case was seen whose own noise is more than five times the calibrated one.
_INEXCUSABLE = 100.0


@dataclass(frozen=True)
class Bench:
    """What judging needs besides the traces: facts, noise, and the setting that budgets depend on.

    Attributes:
        noise: of the reference that the runtime is compared with.
        float_noise: of the float reference, where the other one is fake-quantized.
        steps: distance of two neighbouring values of each tensor on a quantized grid, by kind of trace name.
        foreign: whether the runtime computes with code of its own, so that what it rounds is not bit-equal.
    """

    facts: ModelFacts
    noise: Noise
    dtype: str
    scheme: str = "none"
    float_noise: Noise | None = None
    steps: Mapping[str, float] = field(default_factory=dict)
    foreign: bool = False

    def budget(self, check: Check) -> Budget:
        return budget_of(check, self.dtype, self.scheme, self.foreign)

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
    if own_noise is None or not any(map(_excusable, verdicts)):
        return verdicts
    return _judge(case, reference, observation, replace(bench, noise=bench.noise.joined(own_noise())))


def _excusable(verdict: Verdict) -> bool:
    """Whether it is wrong, but might not be by a larger noise."""
    found = verdict.measurement
    return verdict.failed and found is not None and found.allowed_max > 0.0 and found.ratio < _INEXCUSABLE


def _judge(
    case: ResolvedCase, reference: Mapping[str, Tensor], observation: Observation, bench: Bench
) -> list[Verdict]:
    runs = {mode: _run(case, reference, observation, bench, mode) for mode in Mode}
    verdicts = [
        _verdict(check, runs[mode], observation, bench)
        for check in CHECKS.values()
        for mode in check.modes
        if not (mode is Mode.ACCUMULATED and check.stage in observation.same and Mode.ISOLATED in check.modes)
    ]
    return blame(verdicts)


def verdict_of(
    check: Check,
    case: ResolvedCase,
    reference: Mapping[str, Tensor],
    observation: Observation,
    bench: Bench,
    mode: Mode,
) -> Verdict:
    """What one check finds in one mode, whoever is to blame."""
    return _verdict(check, _run(case, reference, observation, bench, mode), observation, bench)


def blame(verdicts: Sequence[Verdict]) -> list[Verdict]:
    """Marks as inherited what follows from an earlier stage.

    A stage that is wrong in isolation is wrong by itself. One that is wrong only in accumulation has inherited it if
    any stage before it is wrong at all; else the fault is its own. Where the runtime's own run broke off, the stages
    that it never reached have inherited that from whichever stage is wrong in isolation.
    """
    wrong_anyhow = {v.stage for v in verdicts if v.status in _WRONG}
    wrong_isolated = {v.stage for v in verdicts if v.status in _WRONG and v.mode is Mode.ISOLATED}

    def inherits(verdict: Verdict) -> bool:
        if verdict.mode is Mode.ISOLATED or verdict.status not in _WRONG:
            return False
        broke_off = verdict.status is Status.ERROR and bool(wrong_isolated - {verdict.stage})
        # What a quantized runtime loses does not follow from what its scales are: it is asked of both.
        own = verdict.stage in wrong_isolated and verdict.stage is not Stage.QUANTIZATION
        return broke_off or bool(upstream(verdict.stage) & wrong_anyhow) or own

    return [replace(v, status=Status.INHERITED) if inherits(v) else v for v in verdicts]


def applies(check: Check, run: CaseRun) -> bool:
    """Whether case and checkpoint have what `check` needs."""
    met = {
        Needs.NOTHING: True,
        Needs.PROMPT: run.has_prompt,
        Needs.IMAGE: run.layout.num_visual_tokens > 0,
        Needs.PER_LAYER_INPUTS: run.facts.has_per_layer_inputs,
        Needs.PROBES: run.probed,
        Needs.QUANTIZED: run.quantized,
        Needs.QUANTIZED_IMAGE: run.quantized and run.layout.num_visual_tokens > 0,
        Needs.QUANTIZED_ONCE: run.quantized and run.first,
    }
    return met[check.needs]


def _run(
    case: ResolvedCase, reference: Mapping[str, Tensor], observation: Observation, bench: Bench, mode: Mode
) -> CaseRun:
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
    )


def _verdict(check: Check, run: CaseRun, observation: Observation, bench: Bench) -> Verdict:
    blank = Verdict(check.id, check.stage, run.case, run.mode, Status.PASS, check.statement)
    if not applies(check, run):
        return replace(blank, status=Status.NOT_APPLICABLE, where=f"needs {check.needs}")
    if error := _error(check, run, observation):
        return replace(blank, status=Status.ERROR, where=f"the runtime raised {error}")
    try:
        comparisons = check(run)
    except NotObserved as missing:
        return _unobserved(blank, str(missing), observation)
    except (RuntimeError, IndexError, ValueError, TypeError) as error:
        where = f"the runtime's tensors do not have the contract's shapes ({type(error).__name__}: {error})"
        return replace(blank, status=Status.ERROR, where=where)
    return _measured(blank, comparisons, bench.budget(check), bench)


def _error(check: Check, run: CaseRun, observation: Observation) -> str | None:
    """What the runtime raised in the check's stage; of its run on its own, where the stage's tensors end with that."""
    if check.stage is Stage.SELF_CONSISTENCY:
        return None  # each probe has its own; see _unobserved
    if run.mode is Mode.ISOLATED:
        return observation.errors.get(check.stage)
    broke_off = check.stage is Stage.GENERATION or not any(
        name in run.runtime for name in run.reference if stage_of(name) is check.stage
    )
    return observation.errors.get(None) if broke_off else None


def _unobserved(blank: Verdict, name: str, observation: Observation) -> Verdict:
    """A tensor is missing: because the probe that yields it raised, or because the runtime does not have something."""
    if blank.stage is not Stage.SELF_CONSISTENCY:
        return replace(blank, status=Status.NOT_OBSERVED, where=f"the runtime does not expose {name}")
    source = "/".join(name.split("/")[:2]) if name.startswith("self/") else None  # a probe, or the run on its own
    if source in observation.errors:
        return replace(blank, status=Status.ERROR, where=f"the runtime raised {observation.errors[source]}")
    missing = observation.missing.get(source, name)
    return replace(blank, status=Status.NOT_OBSERVED, where=f"the runtime does not expose {missing}")


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
