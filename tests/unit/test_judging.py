"""From comparisons to verdicts, and from verdicts to the stage that is to blame."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from g4conformance.checks import CHECKS, checks_of
from g4conformance.checks.compare import compare, holds
from g4conformance.checks.registry import QUANTIZED, Needs, check
from g4conformance.checks.run import CaseRun, Mode
from g4conformance.expected import greedy_tokens
from g4conformance.judging.blame import blame
from g4conformance.judging.judge import judge
from g4conformance.judging.observe import Observation
from g4conformance.judging.verdict import Status, Verdict
from g4conformance.reference.noise import Noise
from g4conformance.stages import Stage

from .recording import NOISE, Recorded

pytestmark = pytest.mark.unit

ISO, ACC = Mode.ISOLATED, Mode.ACCUMULATED
EMBED, FUSION, PREFILL, DECODE = Stage.TOKEN_EMBEDDING, Stage.MM_FUSION, Stage.PREFILL, Stage.DECODE
MASKS, GENERATION = Stage.MASKS_AND_ROPE, Stage.GENERATION


# --- compare --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expected", "actual", "detail"),
    [
        (torch.zeros(1, 3), torch.zeros(1, 4), "x.shape=(1, 4), but should be (1, 3)"),
        (torch.zeros(1, 3), torch.zeros(3), "x.shape=(3,), but should be (1, 3)"),
        (torch.zeros(3), torch.zeros(3).long(), "x.dtype=torch.int64, but should be torch.float32"),
        (torch.zeros(3).bool(), torch.zeros(3).long(), "x.dtype=torch.int64, but should be torch.bool"),
        (torch.zeros(3).long(), torch.zeros(3), "x.dtype=torch.float32, but should be torch.int64"),
    ],
)
def test_another_shape_or_kind_is_a_mismatch_of_its_own(expected: Tensor, actual: Tensor, detail: str) -> None:
    found = compare("x", expected, actual)
    assert found.difference is None
    assert found.detail == detail


@pytest.mark.parametrize(
    ("expected", "actual"),
    [(torch.ones(3), torch.ones(3, dtype=torch.bfloat16)), (torch.ones(3).long(), torch.ones(3).int())],
)
def test_the_width_of_a_number_is_no_kind(expected: Tensor, actual: Tensor) -> None:
    found = compare("x", expected, actual)
    assert found.difference is not None
    assert found.difference.equal


def test_holds_tells_its_detail_only_where_it_does_not_hold() -> None:
    assert holds("x", torch.tensor([True, True]), "told").detail == ""
    broken = holds("x", torch.tensor([True, False]), "told")
    assert broken.detail == "told"
    assert broken.difference is not None
    assert broken.difference.where == (1,)


# --- the registry ---------------------------------------------------------------------------------------------------


def test_an_id_is_given_once() -> None:
    with pytest.raises(ValueError, match="two checks are called G4-MASK-01"):
        check("G4-MASK-01", stage=MASKS, budget="exact")(lambda run: [])


def test_every_stage_has_checks_and_every_check_a_statement() -> None:
    assert all(checks_of(stage) for stage in Stage)
    assert [declared for stage in Stage for declared in checks_of(stage)] == list(CHECKS.values()), "in stage order"
    for declared in CHECKS.values():
        assert declared.statement.endswith((".", "]."))
        assert "\n" not in declared.statement


# --- blame ----------------------------------------------------------------------------------------------------------

PASS, FAIL, ERROR, INHERITED, UNSEEN = Status.PASS, Status.FAIL, Status.ERROR, Status.INHERITED, Status.NOT_OBSERVED

# Stage, mode, how its check ended, and what becomes of that.
BLAME: dict[str, list[tuple[Stage, Mode, Status, Status]]] = {
    "nothing wrong": [(EMBED, ISO, PASS, PASS), (PREFILL, ACC, PASS, PASS)],
    "the later stage is right in isolation": [
        (EMBED, ISO, FAIL, FAIL),
        (PREFILL, ISO, PASS, PASS),
        (PREFILL, ACC, FAIL, INHERITED),
    ],
    "both are wrong by themselves": [
        (EMBED, ISO, FAIL, FAIL),
        (PREFILL, ISO, FAIL, FAIL),
        (PREFILL, ACC, FAIL, INHERITED),
    ],
    "the isolated verdict says it": [(PREFILL, ISO, FAIL, FAIL), (PREFILL, ACC, FAIL, INHERITED)],
    "wrong only on its own, nothing before": [(PREFILL, ISO, PASS, PASS), (PREFILL, ACC, FAIL, FAIL)],
    "accumulation begins at the first": [
        (PREFILL, ACC, FAIL, FAIL),
        (DECODE, ACC, FAIL, INHERITED),
        (GENERATION, ACC, FAIL, INHERITED),
    ],
    "no stage inherits from its sibling": [(MASKS, ISO, FAIL, FAIL), (FUSION, ACC, FAIL, FAIL)],
    "no stage inherits from a later one": [(DECODE, ISO, FAIL, FAIL), (PREFILL, ACC, FAIL, FAIL)],
    "the own run broke off elsewhere": [(MASKS, ISO, ERROR, ERROR), (EMBED, ACC, ERROR, INHERITED)],
    "a raise is passed on": [(EMBED, ACC, ERROR, ERROR), (PREFILL, ACC, ERROR, INHERITED)],
    "what was not observed stays so": [(EMBED, ISO, FAIL, FAIL), (PREFILL, ACC, UNSEEN, UNSEEN)],
    "what was not observed is to blame for nothing": [(EMBED, ISO, UNSEEN, UNSEEN), (PREFILL, ACC, FAIL, FAIL)],
}


@pytest.mark.parametrize("findings", BLAME.values(), ids=BLAME.keys())
def test_blame(findings: list[tuple[Stage, Mode, Status, Status]]) -> None:
    verdicts = [Verdict("G4-X-01", stage, "a", mode, status, "") for stage, mode, status, _ in findings]
    assert [verdict.status for verdict in blame(verdicts)] == [blamed for *_, blamed in findings]


@pytest.mark.parametrize("status", Status)
def test_a_verdict_survives_json(status: Status, text: Recorded) -> None:
    first, *_ = judge(text.case, text.reference, text.observation, text.bench)
    for measurement in (None, first.measurement):
        verdict = Verdict("G4-X-01", EMBED, "a", ISO, status, "It holds.", measurement, math.inf, 3, 1, "there")
        assert Verdict.from_dict(json.loads(json.dumps(verdict.as_dict()))) == verdict
        assert verdict.failed is (status in (FAIL, INHERITED, ERROR))


# --- judge ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["text", "image"])
def test_the_shipped_runtime_is_right_and_fully_observed(recorded: Callable[[str], Recorded], kind: str) -> None:
    given: Recorded = recorded(kind)
    verdicts = judge(given.case, given.reference, given.observation, given.bench)
    for verdict in verdicts:
        needs = CHECKS[verdict.check].needs
        applies = needs not in QUANTIZED and (kind == "image" or needs is not Needs.IMAGE)
        assert verdict.status is (PASS if applies else Status.NOT_APPLICABLE), (verdict.check, verdict.where)
        assert not applies or verdict.count > 0, f"{verdict.check} compared nothing"
    assert {verdict.check for verdict in verdicts} == set(CHECKS)
    assert given.observation.errors == {}


def test_one_verdict_where_isolated_and_accumulated_are_one(image: Recorded) -> None:
    verdicts = in_float(judge(image.case, image.reference, image.observation, image.bench))
    for stage in set(Stage) - {Stage.QUANTIZATION}:
        modes = {verdict.mode for verdict in verdicts if verdict.stage is stage}
        both = {ACC} if stage is Stage.SELF_CONSISTENCY else {ISO, ACC}
        assert modes == ({ISO} if stage in image.observation.same else both)
    assert image.observation.same >= {Stage.BUILD_STATIC_INPUTS, Stage.VISION_PREFILL, Stage.TOKEN_EMBEDDING}
    assert DECODE not in image.observation.same


def in_float(verdicts: list[Verdict]) -> list[Verdict]:
    """Without those of checks that only a quantized runtime has."""
    return [verdict for verdict in verdicts if CHECKS[verdict.check].needs not in QUANTIZED]


def observed_with(given: Recorded, name: str, factor: float) -> Observation:
    """What was observed, one tensor of prefill multiplied by `factor`."""
    altered = {name: given.observation.isolated[name] * factor}
    return replace(given.observation, isolated={**given.observation.isolated, **altered})


def test_the_cases_own_noise_counts_where_it_is_larger(text: Recorded) -> None:
    name = "prefill/layer/3/hidden"
    observation = observed_with(text, name, 1 + 1e-4)
    louder = Noise(NOISE.eps, {"layer/3/hidden": 1e-2}, {"layer/3/hidden": 1e-2}, {"layer/3/hidden": 1.0}, {})
    statuses = [
        next(v.status for v in verdicts if v.check == "G4-PREFILL-03" and v.mode is ISO)
        for verdicts in (
            judge(text.case, text.reference, observation, text.bench),
            judge(text.case, text.reference, observation, text.bench, lambda: NOISE),
            judge(text.case, text.reference, observation, text.bench, lambda: louder),
        )
    ]
    assert statuses == [Status.FAIL, Status.FAIL, Status.PASS]


@pytest.mark.parametrize("name", [None, "rope/full_attention/cos"])
def test_the_cases_own_noise_is_not_measured_where_it_cannot_matter(text: Recorded, name: str | None) -> None:
    """Neither where all is well nor where something exact is wrong."""

    def never() -> Noise:
        raise AssertionError("measured for nothing")

    observation = text.observation if name is None else observed_with(text, name, 2.0)
    verdicts = judge(text.case, text.reference, observation, text.bench, never)
    assert any(verdict.status is Status.FAIL for verdict in verdicts) == (name is not None)


@pytest.mark.parametrize("mode", Mode)
def test_nothing_observed_means_nothing_passes(image: Recorded, mode: Mode) -> None:
    verdicts = in_float(judge(image.case, image.reference, Observation(), image.bench))
    passed = [
        verdict.check for verdict in verdicts if verdict.mode is mode and verdict.status is not Status.NOT_OBSERVED
    ]
    assert passed == ([] if mode is ISO else ["G4-SELF-21"]), "who declares nothing has nothing to refuse"


@pytest.mark.parametrize("stage", Stage)
def test_a_stage_that_raised_is_an_error_with_its_message(image: Recorded, stage: Stage) -> None:
    observation = Observation(errors={stage: "LayoutError: full"})
    verdicts = in_float(judge(image.case, image.reference, observation, image.bench))
    for verdict in verdicts:
        if verdict.mode is ISO:
            raised = verdict.stage is stage and not CHECKS[verdict.check].alone
            assert verdict.status is (ERROR if raised else Status.NOT_OBSERVED)
            assert ("raised LayoutError: full" in verdict.where) is raised


def test_a_piece_alone_that_raised_is_an_error_of_its_own(image: Recorded) -> None:
    observation = Observation(errors={"prefill/alone": "RuntimeError: no such layer"})
    verdicts = in_float(judge(image.case, image.reference, observation, image.bench))
    raised = {verdict.check: verdict.where for verdict in verdicts if verdict.status is ERROR}
    assert raised == {"G4-PREFILL-09": "the runtime raised RuntimeError: no such layer"}


def test_a_run_of_its_own_that_broke_off_is_an_error_in_accumulation(image: Recorded) -> None:
    observation = Observation(
        accumulated={}, isolated=image.observation.isolated, errors={None: "RuntimeError: out of memory"}
    )
    verdicts = [v for v in judge(image.case, image.reference, observation, image.bench) if v.mode is ACC]
    by_check = {verdict.check: verdict for verdict in verdicts}
    assert by_check["G4-PREFILL-04"].where == "the runtime raised RuntimeError: out of memory"
    assert by_check["G4-PREFILL-04"].status is INHERITED
    assert by_check["G4-GEN-04"].status is INHERITED


# --- what a check sees ----------------------------------------------------------------------------------------------


def case_run(recorded: Recorded, mode: Mode, runtime: dict[str, Tensor]) -> CaseRun:
    return CaseRun(
        case="a",
        layout=recorded.case.request.layout,
        facts=recorded.bench.facts,
        mode=mode,
        reference=recorded.reference,
        runtime=runtime,
        decode_steps=2,
        gen_steps=3,
        near_tie=lambda name: 0.0,
    )


def test_accumulated_decode_is_judged_as_long_as_the_tokens_are_the_references(text: Recorded) -> None:
    prompt, chosen = text.reference["input_ids"][0].tolist(), greedy_tokens(text.reference)

    def generated(*new: int) -> dict[str, torch.Tensor]:
        return {"generation/token_ids": torch.tensor([*prompt, *new])}

    assert case_run(text, ACC, generated(*chosen[:3])).decode_prefixes == ["decode/0/", "decode/1/"]
    strayed = generated(chosen[0], chosen[1] + 1, 9)
    assert case_run(text, ACC, strayed).decode_prefixes == ["decode/0/"]
    assert case_run(text, ACC, generated(*chosen[:2])).decode_prefixes == ["decode/0/"], "the last token is not fed"
    assert case_run(text, ISO, strayed).decode_prefixes == ["decode/0/", "decode/1/"]


def test_what_enters_a_stage_depends_on_the_mode(image: Recorded) -> None:
    own = {"visual_embeds": torch.zeros(1)}
    assert torch.equal(case_run(image, ISO, own).entering("visual_embeds"), image.reference["visual_embeds"])
    assert case_run(image, ACC, own).entering("visual_embeds") is own["visual_embeds"]
