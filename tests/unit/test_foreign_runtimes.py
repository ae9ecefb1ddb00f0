"""Runtimes of others: judged on what they yield, blamed at the stage that is wrong, and never guessed about."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from g4conformance.adopting.boundary import at_boundary
from g4conformance.checkpoints.checkpoint import Checkpoint
from g4conformance.checks import CHECKS
from g4conformance.checks.run import Mode
from g4conformance.faults.patching import Patch
from g4conformance.judging.judge import Bench, judge, verdict_of
from g4conformance.judging.observe import observe
from g4conformance.judging.support import refusals
from g4conformance.judging.verdict import Status, Verdict
from g4conformance.prompts import ResolvedCase
from g4conformance.reference.record import record_reference
from g4conformance.stages import Stage
from g4conformance.trace import Trace

from .foreign import Hooked, InNumpy, PackedHeads, PrefillOnly
from .recording import NOISE, Recorded, never_stopping

pytestmark = pytest.mark.unit

Judge = Callable[[Any], dict[tuple[str, Mode], Verdict]]


@pytest.fixture(scope="module")
def case(resolved: Callable[[str], ResolvedCase]) -> ResolvedCase:
    return replace(resolved("text-only"), first=True)


@pytest.fixture(scope="module")
def reference(tiny_checkpoint: Checkpoint, case: ResolvedCase) -> Trace:
    return record_reference(tiny_checkpoint, case.request.inputs, case.reference_steps)


@pytest.fixture(scope="module")
def judged(tiny_checkpoint: Checkpoint, case: ResolvedCase, reference: Trace) -> Judge:
    """The verdicts of the checks that apply to a runtime, on a short text."""
    facts = never_stopping(tiny_checkpoint.facts, reference)
    bench = Bench(facts, NOISE, "float32", foreign=True)

    def judged(runtime: Any) -> dict[tuple[str, Mode], Verdict]:
        observation = observe(runtime, case, reference, facts)
        observation.accumulated |= refusals(runtime, [case], reference, facts)
        found = judge(case, reference, observation, bench)
        return {(v.check, v.mode): v for v in found if v.status is not Status.NOT_APPLICABLE}

    return judged


def statuses(verdicts: dict[tuple[str, Mode], Verdict]) -> dict[tuple[str, Mode], Status]:
    return {key: verdict.status for key, verdict in verdicts.items()}


def passed(verdicts: dict[tuple[str, Mode], Verdict]) -> set[str]:
    return {check for (check, _), verdict in verdicts.items() if verdict.status is Status.PASS}


def wrong(verdicts: dict[tuple[str, Mode], Verdict]) -> set[Stage]:
    """The stages that are to blame."""
    return {verdict.stage for verdict in verdicts.values() if verdict.status in (Status.FAIL, Status.ERROR)}


# --- right ones -----------------------------------------------------------------------------------------------------

YIELDED = {
    PrefillOnly: {"G4-PREFILL-04"},
    Hooked: {"G4-EMBED-01", "G4-PREFILL-03", "G4-PREFILL-04", "G4-DECODE-02", "G4-DECODE-08", "G4-DECODE-09"},
    InNumpy: {"G4-EMBED-01", "G4-PREFILL-03", "G4-PREFILL-04", "G4-DECODE-02", "G4-DECODE-08", "G4-DECODE-09"},
    PackedHeads: {
        *("G4-EMBED-01", "G4-PREFILL-02", "G4-PREFILL-03", "G4-PREFILL-04", "G4-PREFILL-09"),
        *("G4-DECODE-02", "G4-DECODE-07", "G4-DECODE-08", "G4-DECODE-09", "G4-DECODE-13"),
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", YIELDED, ids=lambda kind: kind.__name__)
def test_a_runtime_is_judged_on_what_it_yields_and_nothing_else(
    tiny_checkpoint: Checkpoint, judged: Judge, kind: type[PrefillOnly]
) -> None:
    verdicts = judged(kind(tiny_checkpoint))
    assert passed(verdicts) == YIELDED[kind]
    rest = {key: status for key, status in statuses(verdicts).items() if key[0] not in YIELDED[kind]}
    assert set(rest.values()) == {Status.NOT_OBSERVED}
    assert len(rest) > 20


def test_what_the_suite_did_in_the_runtimes_place_is_said(tiny_checkpoint: Checkpoint, judged: Judge) -> None:
    told = {kind: judged(kind(tiny_checkpoint))["G4-GEN-04", Mode.ACCUMULATED].where for kind in (PrefillOnly, Hooked)}
    assert told[PrefillOnly] == "the runtime does not expose generation/token_ids; the suite called prefill alone"
    assert told[Hooked].endswith("called prefill and decode_one in turn and chose the most likely token")


def test_decode_is_judged_in_accumulation_without_load_state_and_in_both_modes_with_it(
    tiny_checkpoint: Checkpoint, judged: Judge
) -> None:
    without, with_it = (statuses(judged(kind(tiny_checkpoint))) for kind in (Hooked, PackedHeads))
    assert without["G4-DECODE-09", Mode.ACCUMULATED] is Status.PASS
    assert without["G4-DECODE-09", Mode.ISOLATED] is Status.NOT_OBSERVED
    assert with_it["G4-DECODE-09", Mode.ISOLATED] is with_it["G4-DECODE-09", Mode.ACCUMULATED] is Status.PASS


# --- mistakes -------------------------------------------------------------------------------------------------------


def embeddings_are_not_scaled(runtime: Any, patch: Patch) -> None:
    embedding = runtime.model.model.language_model.embed_tokens
    patch(embedding, "embed_scale", torch.ones_like(embedding.embed_scale))


def a_layer_scales_its_output(runtime: Any, patch: Patch) -> None:
    layer = runtime.model.model.language_model.layers[4]
    patch(layer, "layer_scalar", layer.layer_scalar * 1.001)


def a_token_is_fed_twice(runtime: Any, patch: Patch) -> None:
    decode = runtime.decode_one

    def twice(token: int) -> Any:
        runtime.step = -1 if runtime.step is None else runtime.step - 1
        decode(token)
        return decode(token)

    patch(runtime, "decode_one", twice)


def heads_are_unpacked_in_the_wrong_order(runtime: Any, patch: Patch) -> None:
    heads = runtime.model.config.text_config.num_key_value_heads
    patch(runtime, "views", {**runtime.views, "*/key": lambda key: key.unflatten(-1, (-1, heads)).permute(0, 3, 1, 2)})


MISTAKES = [
    (PrefillOnly, embeddings_are_not_scaled, Stage.PREFILL),  # it shows nothing before
    (Hooked, embeddings_are_not_scaled, Stage.TOKEN_EMBEDDING),
    (Hooked, a_layer_scales_its_output, Stage.PREFILL),
    (InNumpy, a_layer_scales_its_output, Stage.PREFILL),
    (InNumpy, a_token_is_fed_twice, Stage.DECODE),
    (PackedHeads, a_token_is_fed_twice, Stage.DECODE),
    (PackedHeads, heads_are_unpacked_in_the_wrong_order, Stage.PREFILL),
]


@pytest.mark.parametrize(
    ("kind", "plant", "stage"), MISTAKES, ids=[f"{kind.__name__}-{plant.__name__}" for kind, plant, _ in MISTAKES]
)
def test_a_mistake_is_blamed_on_its_stage(
    tiny_checkpoint: Checkpoint, judged: Judge, kind: type[PrefillOnly], plant: Any, stage: Stage
) -> None:
    runtime = kind(tiny_checkpoint)
    with Patch() as patch:
        plant(runtime, patch)
        found = wrong(judged(runtime))
    order = list(Stage)
    assert min(found, key=order.index) is stage
    if stage is Stage.TOKEN_EMBEDDING:
        assert Stage.PREFILL not in found, "prefill took ids, and made the embeddings itself: it inherits"


def test_a_wrong_layer_alone_is_named_and_only_that(tiny_checkpoint: Checkpoint, judged: Judge) -> None:
    runtime = PackedHeads(tiny_checkpoint)
    with Patch() as patch:
        a_layer_scales_its_output(runtime, patch)
        verdicts = judged(runtime)
    in_company, alone = (verdicts[check, Mode.ISOLATED].where for check in ("G4-PREFILL-03", "G4-PREFILL-09"))
    assert "later tensors too" in in_company
    assert alone.startswith("first in prefill/alone/layer/4/hidden")
    assert "later" not in alone


@pytest.mark.parametrize(
    ("off", "shipped", "foreign"),
    [(0.0, Status.PASS, Status.PASS), (2e-7, Status.FAIL, Status.PASS), (1e-4, Status.FAIL, Status.FAIL)],
)
@pytest.mark.parametrize(
    ("check", "name"),
    [("G4-ROPE-01", "rope/sliding_attention/sin"), ("G4-DECODE-05", "decode/1/rope/full_attention/cos")],
)
def test_only_a_foreign_rotary_table_may_be_off_by_rounding(
    text: Recorded, check: str, name: str, off: float, shipped: Status, foreign: Status
) -> None:
    isolated = text.observation.isolated
    observation = replace(text.observation, isolated={**isolated, name: isolated[name] + off})
    for bench, status in ((text.bench, shipped), (replace(text.bench, foreign=True), foreign)):
        found = verdict_of(CHECKS[check], text.case, text.reference, observation, bench, Mode.ISOLATED)
        assert found.status is status


# --- what it says of itself -----------------------------------------------------------------------------------------


class Declaring(Hooked):
    """Says that it cannot decode, and raises or computes all the same."""

    capabilities = {"decoding": False}
    refuses = True

    def decode_one(self, token: int) -> Tensor:
        if self.refuses:
            raise NotImplementedError("no decoding")
        return super().decode_one(token)


@pytest.mark.parametrize("refuses", [True, False])
def test_what_is_declared_unsupported_is_asked_once_and_not_judged(
    tiny_checkpoint: Checkpoint, judged: Judge, monkeypatch: pytest.MonkeyPatch, refuses: bool
) -> None:
    monkeypatch.setattr(Declaring, "refuses", refuses)
    verdicts = judged(Declaring(tiny_checkpoint))
    refusal = verdicts["G4-SELF-21", Mode.ACCUMULATED]
    assert refusal.status is (Status.PASS if refuses else Status.FAIL)
    assert ("it declares no decoding" in refusal.where) is not refuses
    assert verdicts["G4-DECODE-09", Mode.ACCUMULATED].status is Status.NOT_OBSERVED


class Slotted:
    """Takes no attribute, and so reports nothing."""

    __slots__ = ("inner",)

    def __init__(self, inner: PrefillOnly) -> None:
        self.inner = inner

    def prefill(self, inputs: Any) -> Tensor:
        return self.inner.prefill(inputs)


def test_a_runtime_that_takes_no_attribute_is_judged_on_what_it_returns(
    tiny_checkpoint: Checkpoint, judged: Judge
) -> None:
    assert passed(judged(Slotted(PrefillOnly(tiny_checkpoint)))) == {"G4-PREFILL-04"}


def test_a_runtime_at_the_boundary_is_wrapped_once(tiny_checkpoint: Checkpoint) -> None:
    seen = at_boundary(PrefillOnly(tiny_checkpoint))
    assert at_boundary(seen) is seen
