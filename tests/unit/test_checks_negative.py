"""Every check turns red where its statement does not hold, and only there."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from g4conformance.checks import CHECKS, Check, checks_of
from g4conformance.checks.registry import QUANTIZED, BudgetKind
from g4conformance.checks.run import Mode
from g4conformance.expected import STOP_REASONS, generation_of, greedy_tokens
from g4conformance.judging import judge as judging
from g4conformance.judging.judge import judge
from g4conformance.judging.observe import Observation
from g4conformance.judging.verdict import Status, Verdict
from g4conformance.runtime.contract import StopReason
from g4conformance.stages import stage_of

from .damages import DAMAGES, Damage
from .damages.registry import Apply, Tensors, limit_of, miss, set_mask, stray
from .recording import DECODE_STEPS, GEN_STEPS, Recorded

pytestmark = pytest.mark.unit

Record = Callable[[str], Recorded]


def broken(recorded: Recorded, apply: Apply) -> Observation:
    """A copy of the observation, damaged in both modes, each of which is to be judged."""

    def damaged(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        copies = {name: tensor.clone() for name, tensor in tensors.items()}
        apply(copies, recorded)
        return copies

    seen = recorded.observation
    return Observation(accumulated=damaged(seen.accumulated), isolated=damaged(seen.isolated))


def judged(recorded: Recorded, observation: Observation) -> list[Verdict]:
    return judge(recorded.case, recorded.reference, observation, recorded.bench)


def judged_by(
    recorded: Recorded, observation: Observation, checks: Iterable[Check], modes: Iterable[Mode] = Mode
) -> list[Verdict]:
    """The verdicts of these checks only, to save time; none is blamed on another."""
    runs = {
        mode: judging.case_run(recorded.case, recorded.reference, observation, recorded.bench, mode) for mode in modes
    }
    return [
        judging._verdict(check, runs[mode], observation, recorded.bench)
        for check in checks
        for mode in check.modes
        if mode in runs
    ]


def red(verdicts: list[Verdict]) -> set[str]:
    return {verdict.check for verdict in verdicts if verdict.status not in (Status.PASS, Status.NOT_APPLICABLE)}


# --- the table ------------------------------------------------------------------------------------------------------


def test_every_check_has_a_damage() -> None:
    in_float = {check.id for check in CHECKS.values() if check.needs not in QUANTIZED}
    assert {damage.check for damage in DAMAGES} == in_float  # test_quantized_checks.py has the others
    assert set().union(*(damage.also for damage in DAMAGES)) <= set(CHECKS)
    assert len({damage.name for damage in DAMAGES}) == len(DAMAGES)


@pytest.mark.parametrize("case", ["text", "image"])
def test_an_undamaged_copy_is_green(recorded: Record, case: str) -> None:
    assert red(judged(recorded(case), broken(recorded(case), lambda tensors, recorded: None))) == set()


@pytest.mark.parametrize("damage", DAMAGES, ids=[f"{damage.check}-{damage.name}" for damage in DAMAGES])
def test_a_damage_turns_its_check_red(recorded: Record, damage: Damage) -> None:
    given = recorded(damage.case)
    verdicts = judged(given, broken(given, damage.apply))
    assert red(verdicts) == {damage.check, *damage.also}
    own = [verdict for verdict in verdicts if verdict.check == damage.check]
    assert [verdict.mode for verdict in own] == list(CHECKS[damage.check].modes)
    assert [verdict.status for verdict in own] == [Status.FAIL, Status.INHERITED][: len(own)], "wrong by itself"
    for verdict in own:
        assert damage.where in verdict.where
        if verdict.measurement is not None:
            assert verdict.mismatched > 0
            assert verdict.measurement.ratio > 1


# --- what is no mistake ---------------------------------------------------------------------------------------------


def rows_of_padding_are_anything(tensors: Tensors, recorded: Recorded) -> None:
    beyond = int(recorded.reference["valid_length"])
    for name in tensors:
        if name.startswith(("prefill/layer/", "rope/", "per_layer_inputs")):
            axis = 2 if name.endswith(("key", "value")) else 1
            tensors[name].movedim(axis, 0)[beyond:] = torch.nan


def a_fill_is_minus_infinity(tensors: Tensors, recorded: Recorded) -> None:
    """But for rows of padding, which see no key through the sliding window: their softmax would not be a number."""
    for name in tensors:
        if "mask_bias/" in name:
            sees_a_key = tensors[name.replace("mask_bias/", "mask/")].any(dim=-1)
            tensors[name][(tensors[name] < 0) & sees_a_key[:, None, :, None]] = -torch.inf


def a_padding_row_sees_itself(tensors: Tensors, recorded: Recorded) -> None:
    set_mask(tensors, "", "full_attention", lambda mask: mask[0, -1, -1:].fill_(True))


def prompt_rows_come_without_padding(tensors: Tensors, recorded: Recorded) -> None:
    for layer in range(len(recorded.bench.facts.layer_types)):
        name = f"prefill/layer/{layer}/hidden"
        tensors[name] = tensors[name][:, : int(recorded.reference["valid_length"])]


@pytest.mark.parametrize(
    "apply",
    [
        rows_of_padding_are_anything,
        a_fill_is_minus_infinity,
        a_padding_row_sees_itself,
        prompt_rows_come_without_padding,
    ],
)
def test_a_runtimes_own_affair_is_not_judged(recorded: Record, apply: Apply) -> None:
    assert red(judged(recorded("text"), broken(recorded("text"), apply))) == set()


# --- two sides of a budget ------------------------------------------------------------------------------------------

WITHIN = {
    "G4-VISION-01": "vision/patch_embeds",
    "G4-VISION-02": "vision/layer/1/hidden",
    "G4-VISION-03": "vision/soft_tokens",
    "G4-VISION-04": "visual_embeds",
    "G4-FUSION-03": "fused_embeds",
    "G4-PREFILL-01": "per_layer_inputs",
    "G4-PREFILL-02": "prefill/layer/2/value",
    "G4-PREFILL-03": "prefill/layer/7/hidden",
    "G4-PREFILL-04": "prefill/logits",
    "G4-PREFILL-09": "prefill/alone/layer/2/value",
    "G4-DECODE-13": "decode/1/alone/layer/7/hidden",
    "G4-DECODE-06": "decode/1/per_layer_inputs",
    "G4-DECODE-07": "decode/1/layer/2/value",
    "G4-DECODE-08": "decode/0/layer/7/hidden",
    "G4-DECODE-09": "decode/1/logits",
}
# Checks that compare two of the runtime's own tensors: which, and which of them is moved.
WITHIN_ITSELF = {
    "G4-SELF-01": ("self/base/prefill/logits", "self/shortened/decode/0/logits"),
    "G4-SELF-02": ("self/base/prefill/logits", "self/larger/prefill/logits"),
    "G4-SELF-03": ("self/base/decode/1/logits", "self/smaller/decode/1/logits"),
}


def test_every_rounding_check_has_its_two_sides() -> None:
    assert {*WITHIN, *WITHIN_ITSELF} == {check.id for check in CHECKS.values() if check.budget is BudgetKind.ROUNDING}


@pytest.mark.parametrize(("limits", "status"), [(0.9, Status.PASS), (1.1, Status.FAIL)])
@pytest.mark.parametrize("check", [*WITHIN, *WITHIN_ITSELF])
def test_rounding_is_forgiven_and_a_tenth_more_is_not(
    image: Recorded, check: str, limits: float, status: Status
) -> None:

    def apply(tensors: dict[str, Tensor], recorded: Recorded) -> None:
        if check in WITHIN:
            if (name := WITHIN[check]) in tensors:
                miss(check, tensors, recorded, name, (0,) * tensors[name].ndim, limits)
        elif "self/base/prefill/logits" in tensors:
            stray(check, tensors, recorded, *WITHIN_ITSELF[check], (0, 0), limits)

    (verdict,) = judged_by(image, broken(image, apply), [CHECKS[check]], CHECKS[check].modes[:1])
    assert verdict.status is status
    assert verdict.measurement is not None
    assert verdict.measurement.ratio == pytest.approx(limits, rel=0.02)
    assert verdict.would_pass == pytest.approx(image.bench.budget(CHECKS[check]).factor * limits, rel=0.02)


def test_a_small_shift_of_everything_exceeds_the_mean(image: Recorded) -> None:
    """A bias that stays below the limit of single values is no rounding."""

    def apply(tensors: dict[str, Tensor], recorded: Recorded) -> None:
        tensors["prefill/logits"] += 0.9 * limit_of("G4-PREFILL-04", recorded, "prefill/logits")

    (verdict,) = judged_by(image, broken(image, apply), [CHECKS["G4-PREFILL-04"]], [Mode.ISOLATED])
    assert verdict.status is Status.FAIL
    assert verdict.measurement is not None
    assert verdict.measurement.max_abs < verdict.measurement.allowed_max
    assert verdict.measurement.mean_abs > verdict.measurement.allowed_mean


def test_a_common_factor_within_all_differences_exceeds_the_gain(image: Recorded) -> None:
    """What scales everything by next to nothing is no rounding either."""

    def apply(tensors: dict[str, Tensor], recorded: Recorded) -> None:
        tensors["prefill/layer/0/hidden"] *= 1 + 5e-6

    (verdict,) = judged_by(image, broken(image, apply), [CHECKS["G4-PREFILL-03"]], [Mode.ISOLATED])
    assert verdict.status is Status.FAIL
    assert verdict.measurement is not None
    assert verdict.measurement.max_abs < verdict.measurement.allowed_max
    assert verdict.measurement.mean_abs < verdict.measurement.allowed_mean
    assert verdict.measurement.gain == pytest.approx(1 + 5e-6, rel=1e-6)
    assert verdict.measurement.gain - 1 > verdict.measurement.allowed_gain


def test_a_failed_exact_check_says_what_would_have_passed(text: Recorded) -> None:
    damage = next(damage for damage in DAMAGES if damage.check == "G4-EMBED-01")
    (verdict,) = judged_by(text, broken(text, damage.apply), [CHECKS[damage.check]], [Mode.ISOLATED])
    assert verdict.would_pass is not None
    assert not math.isnan(verdict.would_pass)


# --- no tensor escapes ----------------------------------------------------------------------------------------------


def poison(tensor: Tensor) -> Tensor:
    if tensor.is_floating_point():
        return torch.full_like(tensor, torch.nan)
    return ~tensor if tensor.dtype == torch.bool else tensor + 1


def change_kind(tensor: Tensor) -> Tensor:
    return tensor.long() if tensor.is_floating_point() or tensor.dtype == torch.bool else tensor.float()


def lose_a_row(tensor: Tensor) -> Tensor:
    """Prompt rows lie on the last axis but one, if there are two."""
    return tensor.narrow(axis := max(0, tensor.ndim - 2), 0, tensor.shape[axis] - 1) if tensor.ndim else tensor[None]


def gain_an_axis(tensor: Tensor) -> Tensor:
    return tensor[None]


# Rows of padding are the runtime's own affair, and single numbers may come in any shape.
FREE = {
    lose_a_row: re.compile(r"(self/\w+/)?prefill/(alone/)?layer/|rope/|.*stop_reason"),
    gain_an_axis: re.compile("valid_length|decode/1/(token|position)$|.*stop_reason"),
    change_kind: re.compile(".*stop_reason"),
    poison: re.compile("nothing"),
}


def kinds(recorded: Recorded) -> list[str]:
    """One tensor name of each kind that the runtime yields: of layer 0 and decode step 1 only."""
    names = {*recorded.observation.accumulated, *recorded.observation.isolated}
    return sorted({re.sub(r"^decode/\d+/", "decode/1/", re.sub(r"/(layer|cache)/\d+/", r"/\1/0/", n)) for n in names})


@pytest.mark.parametrize(
    "change",
    [
        poison,
        change_kind,
        lose_a_row,
        gain_an_axis,
    ],
)
def test_no_tensor_escapes(image: Recorded, change: Callable[[Tensor], Tensor]) -> None:
    """Whatever is done to a whole tensor, judging goes on and a check of its stage is red."""
    seen, missed = image.observation, []
    for name in kinds(image):
        tensors = [
            {**mode, name: change(mode[name])} if name in mode else mode for mode in (seen.accumulated, seen.isolated)
        ]
        if FREE[change].match(name):
            continue
        mode = Mode.ISOLATED if name in seen.isolated else Mode.ACCUMULATED
        try:
            if not red(judged_by(image, Observation(*tensors), checks_of(stage_of(name)), [mode])):
                missed.append(name)
        except Exception as error:
            missed.append(f"{name}: {type(error).__name__}: {error}")
    assert missed == []


# --- decode follows its tokens --------------------------------------------------------------------------------------


def test_a_token_of_its_own_ends_accumulation_but_not_isolation(text: Recorded) -> None:
    def apply(tensors: dict[str, Tensor], recorded: Recorded) -> None:
        tensors["decode/1/token"] += 1
        if "generation/token_ids" in tensors:
            tensors["generation/token_ids"][int(recorded.reference["valid_length"]) + 1] += 1
        tensors["decode/1/logits"].fill_(torch.nan)

    verdicts = judged_by(text, broken(text, apply), [CHECKS["G4-DECODE-01"], CHECKS["G4-DECODE-09"]])
    status = {(verdict.check, verdict.mode): verdict.status for verdict in verdicts}
    assert status == {
        ("G4-DECODE-01", Mode.ISOLATED): Status.FAIL,
        ("G4-DECODE-01", Mode.ACCUMULATED): Status.PASS,
        ("G4-DECODE-09", Mode.ISOLATED): Status.FAIL,
        ("G4-DECODE-09", Mode.ACCUMULATED): Status.PASS,
    }
    count = {(verdict.check, verdict.mode): verdict.count for verdict in verdicts}
    assert count["G4-DECODE-01", Mode.ISOLATED] == DECODE_STEPS * count["G4-DECODE-01", Mode.ACCUMULATED]


def test_a_step_that_was_made_and_not_shown_is_not_observed(text: Recorded) -> None:
    observation = broken(text, lambda tensors, recorded: tensors.pop("decode/1/logits"))
    verdicts = judged_by(text, observation, [CHECKS["G4-DECODE-09"]])
    assert {verdict.mode: verdict.status for verdict in verdicts} == dict.fromkeys(Mode, Status.NOT_OBSERVED)


# --- generation and its stop ----------------------------------------------------------------------------------------


def generated(recorded: Recorded, new: list[int], reason: StopReason) -> Observation:
    prompt = recorded.reference["input_ids"][0].tolist()
    tensors = {
        "generation/token_ids": torch.tensor(prompt + new),
        "generation/stop_reason": torch.tensor(STOP_REASONS.index(reason)),
    }
    return Observation(accumulated=tensors)


def generation_statuses(recorded: Recorded, observation: Observation) -> dict[str, Status]:
    checks = [CHECKS["G4-GEN-04"], CHECKS["G4-GEN-05"]]
    return {verdict.check: verdict.status for verdict in judged_by(recorded, observation, checks)}


def stopping(recorded: Recorded, row: int) -> Recorded:
    """As if the token that the reference chooses at `row` were a stop token."""
    facts = replace(recorded.bench.facts, stop_token_ids=frozenset((greedy_tokens(recorded.reference)[row],)))
    return replace(recorded, bench=replace(recorded.bench, facts=facts))


@pytest.mark.parametrize("row", range(GEN_STEPS))
@pytest.mark.parametrize(
    ("change", "tokens", "reason"),
    [
        pytest.param(lambda new, stop: (new, stop), Status.PASS, Status.PASS, id="right"),
        pytest.param(lambda new, stop: ([*new, new[-1]], stop), Status.FAIL, Status.PASS, id="doubled stop token"),
        pytest.param(lambda new, stop: (new[:-1], stop), Status.FAIL, Status.PASS, id="stop token swallowed"),
        pytest.param(lambda new, stop: ([*new, 9], stop), Status.FAIL, Status.PASS, id="ran on"),
        pytest.param(lambda new, stop: (new, StopReason.MAX_NEW_TOKENS), Status.PASS, Status.FAIL, id="other reason"),
        pytest.param(lambda new, stop: ([], stop), Status.FAIL, Status.PASS, id="nothing new"),
    ],
)  # fmt: skip
def test_a_generation_ends_at_its_stop_token(
    text: Recorded, row: int, change: Callable[..., tuple[list[int], StopReason]], tokens: Status, reason: Status
) -> None:
    given = stopping(text, row)
    expected, stop = generation_of(given.reference, given.case.request.layout, given.bench.facts, GEN_STEPS)
    assert stop is StopReason.STOP_TOKEN
    statuses = generation_statuses(given, generated(given, *change(expected, stop)))
    assert statuses == {"G4-GEN-04": tokens, "G4-GEN-05": reason}


@pytest.mark.parametrize("row", range(GEN_STEPS))
def test_a_near_tie_excuses_what_follows_but_not_what_came_before(text: Recorded, row: int) -> None:
    """The two largest logits of one row are made equal: that row's token and later ones may be any."""
    name = f"decode/{row - 1}/logits" if row else "prefill/logits"
    logits = text.reference[name].clone()
    best, second = logits[0].topk(2).indices
    logits[0, second] = logits[0, best]
    facts = replace(text.bench.facts, stop_token_ids=frozenset())
    given = replace(text, reference={**text.reference, name: logits}, bench=replace(text.bench, facts=facts))
    tokens = greedy_tokens(text.reference)[:GEN_STEPS]
    strayed = [*tokens[:row], int(second), 9, 9, 9]
    statuses = generation_statuses(given, generated(given, strayed, StopReason.STOP_TOKEN))
    before = Status.PASS if row else Status.NOT_APPLICABLE
    assert statuses == {"G4-GEN-04": before, "G4-GEN-05": Status.NOT_APPLICABLE}
    if row:
        early = [tokens[0] + 1, *strayed[1:]]
        found = generation_statuses(given, generated(given, early, StopReason.STOP_TOKEN))
        assert found["G4-GEN-04"] is Status.FAIL
