"""Checks that only a quantized runtime has: green on a right one, red where their statement does not hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from g4conformance.checkpoints.checkpoint import Checkpoint
from g4conformance.checkpoints.seeded import SeededSpec, VisionSpec, seeded_checkpoint
from g4conformance.checks import CHECKS
from g4conformance.checks.registry import QUANTIZED
from g4conformance.checks.run import Mode
from g4conformance.expected import logits_names
from g4conformance.judging.judge import Bench, judge, verdict_of
from g4conformance.judging.observe import Observation, observe
from g4conformance.judging.verdict import Status, Verdict
from g4conformance.prompts import ResolvedCase
from g4conformance.quantization.calibration import calibration_cases
from g4conformance.quantization.judging import QuantizedJudging
from g4conformance.shipped import shipped_runtime

from .recording import NOISE, never_stopping, with_facts

pytestmark = pytest.mark.unit

SLIDING, FULL = "sliding_attention", "full_attention"
SCHEME = "w8a8"
Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Record:
    """A picture's case on a quantized runtime, with what it is judged with."""

    case: ResolvedCase
    reference: Tensors
    observation: Observation
    bench: Bench

    def verdict(self, check: str) -> Verdict:
        declared = CHECKS[check]
        return verdict_of(declared, self.case, self.reference, self.observation, self.bench, declared.modes[0])

    def broken(self, apply: Callable[[Record], None]) -> Record:
        """A copy that `apply` may change in place."""
        seen = self.observation
        copied = replace(
            self,
            reference=cloned(self.reference),
            observation=replace(seen, isolated=cloned(seen.isolated), accumulated=cloned(seen.accumulated)),
        )
        apply(copied)
        return copied


def cloned(tensors: Tensors) -> Tensors:
    return {name: tensor.clone() for name, tensor in tensors.items()}


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    layers = (SLIDING, FULL, SLIDING, FULL)
    vision = VisionSpec(num_hidden_layers=2)
    spec = SeededSpec(layer_types=layers, num_kv_shared_layers=2, sliding_window=16, vision=vision)
    return seeded_checkpoint(spec, seed=5)


@pytest.fixture(scope="module")
def record(checkpoint: Checkpoint) -> Record:
    runtime = shipped_runtime(checkpoint, checkpoint.facts.default_max_seq, SCHEME)
    judging = QuantizedJudging.of_runtime(checkpoint, runtime)
    assert judging is not None
    case = replace(calibration_cases(checkpoint)[-1], decode_steps=2, gen_steps=3, first=True)
    trace = judging.record(case)
    facts = never_stopping(checkpoint.facts, trace)
    with with_facts(runtime.for_layout(case.request.layout), facts):
        observation = observe(runtime, case, trace, facts)
    observation.isolated |= judging.observed(runtime)
    bench = Bench(facts, NOISE, "float32", SCHEME, NOISE, judging.steps)
    return Record(case, dict(trace), observation, bench)


# --- damages --------------------------------------------------------------------------------------------------------

DAMAGES: dict[str, Callable[[Record], None]] = {}


def damage(check: str) -> Callable[[Callable[[Record], None]], Callable[[Record], None]]:
    def register(apply: Callable[[Record], None]) -> Callable[[Record], None]:
        DAMAGES[check] = apply
        return apply

    return register


def move(record: Record, alone: str, kind: str, steps: float, index: object = ...) -> None:
    """Moves elements of what a graph returned by itself by so many steps of its grid."""
    record.observation.isolated[alone][index] += steps * record.bench.steps[kind]


def one_element_far(check: str, alone: str, kind: str) -> None:
    """A little further than the check allows."""

    def apply(record: Record) -> None:
        move(record, alone, kind, 1.25 * record.bench.budget(CHECKS[check]).steps, (0, 0, 0))

    damage(check)(apply)


def all_elements_a_step(check: str, alone: str, kind: str) -> None:
    damage(check)(lambda record: move(record, alone, kind, 0.99))


one_element_far("G4-VISION-05", "vision/alone/layer/1/hidden", "vision/layer/1/hidden")
all_elements_a_step("G4-VISION-06", "vision/alone/layer/1/hidden", "vision/layer/1/hidden")
one_element_far("G4-PREFILL-07", "prefill/alone/layer/2/hidden", "layer/2/hidden")
all_elements_a_step("G4-PREFILL-08", "prefill/alone/layer/2/hidden", "layer/2/hidden")
one_element_far("G4-DECODE-11", "decode/1/alone/layer/1/key", "layer/1/key")
all_elements_a_step("G4-DECODE-12", "decode/0/alone/layer/3/hidden", "layer/3/hidden")


@damage("G4-QUANT-01")
def a_weight_more_than_half_a_step_off(record: Record) -> None:
    record.observation.isolated["quantization/weight_error/lm_head"][7] = 0.51


@damage("G4-QUANT-02")
def a_step_one_percent_too_large(record: Record) -> None:
    record.observation.isolated["quantization/grid/layer/1/hidden"][2] *= 1.01


@damage("G4-QUANT-03")
def a_pair_that_does_not_match(record: Record) -> None:
    record.observation.isolated["quantization/unequal_pairs"][0] = 1


@damage("G4-QUANT-04")
def a_weight_in_floating_point(record: Record) -> None:
    record.observation.isolated["quantization/bits/lm_head"][0] = 0


def disagree(record: Record) -> None:
    """The float model is sure of five tokens that the runtime thinks least of."""
    for name in logits_names(record.reference):
        own = record.observation.accumulated[name]
        least = own[0].topk(5, largest=False).indices
        floating = torch.zeros_like(own)
        floating[0, least] = torch.tensor([25.0, 20.0, 15.0, 10.0, 5.0])
        record.reference[f"float/{name}"] = floating


for number in range(5, 12):
    damage(f"G4-QUANT-{number:02}")(disagree)


# --- the tests ------------------------------------------------------------------------------------------------------


def test_every_check_of_quantized_runtimes_has_a_damage() -> None:
    assert set(DAMAGES) == {check.id for check in CHECKS.values() if check.needs in QUANTIZED}


def test_a_right_runtime_is_green_and_fully_observed(record: Record) -> None:
    for verdict in judge(record.case, record.reference, record.observation, record.bench):
        if CHECKS[verdict.check].needs in QUANTIZED and verdict.stage != "quantization":
            assert verdict.status is Status.PASS, (verdict.check, verdict.where)
            assert verdict.count > 0


@pytest.mark.parametrize("check", DAMAGES)
def test_a_damage_turns_its_check_red(record: Record, check: str) -> None:
    before, after = record.verdict(check), record.broken(DAMAGES[check]).verdict(check)
    quality = CHECKS[check].modes == (Mode.ACCUMULATED,)  # an untrained model may lose more than the limit says
    assert before.status is Status.PASS or quality
    assert after.status is Status.FAIL
    assert after.where
    assert after.would_pass is not None
    assert after.would_pass > (before.would_pass or 0.0)


@pytest.mark.parametrize("check", ["G4-QUANT-05", "G4-QUANT-06", "G4-QUANT-09", "G4-QUANT-10", "G4-QUANT-11"])
def test_no_loss_where_the_float_model_says_the_same(record: Record, check: str) -> None:
    def agree(record: Record) -> None:
        for name in logits_names(record.reference):
            record.reference[f"float/{name}"] = record.observation.accumulated[name].clone()

    verdict = record.broken(agree).verdict(check)
    assert verdict.status is Status.PASS
    assert verdict.measurement is not None
    assert verdict.measurement.max_abs == pytest.approx(0.0, abs=1e-12)


def test_a_runtime_that_generates_nothing_is_red_where_it_generates(record: Record) -> None:
    """Nothing new has parted from anything; that there is nothing is told by the stage itself."""

    def generate_nothing(record: Record) -> None:
        tensors = record.observation.accumulated
        tensors["generation/token_ids"] = tensors["generation/token_ids"][: int(record.reference["valid_length"])]

    silent = record.broken(generate_nothing)
    assert silent.verdict("G4-QUANT-11").status is Status.PASS
    assert any(
        v.failed and v.stage == "generation"
        for v in judge(silent.case, silent.reference, silent.observation, silent.bench)
    )


def test_a_float_runtime_is_not_asked(record: Record) -> None:
    bench = Bench(record.bench.facts, NOISE, "float32")
    verdicts = judge(record.case, record.reference, record.observation, bench)
    asked = {v.check for v in verdicts if v.status is not Status.NOT_APPLICABLE}
    assert not asked & set(DAMAGES)


def test_the_whole_runtime_is_asked_once(record: Record) -> None:
    later = replace(record, case=replace(record.case, first=False))
    assert [later.verdict(f"G4-QUANT-0{i}").status for i in range(1, 5)] == [Status.NOT_APPLICABLE] * 4


def test_a_failure_says_what_would_have_passed(record: Record) -> None:
    verdict = record.broken(disagree).verdict("G4-QUANT-05")
    assert verdict.measurement is not None
    assert verdict.unit == "as the limit"
    assert verdict.would_pass == pytest.approx(verdict.measurement.max_abs)
