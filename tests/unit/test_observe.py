"""Driving a runtime: what is run, what is reused, and that nothing a runtime does ends the run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from g4conformance.checks.run import Mode
from g4conformance.judging.judge import judge
from g4conformance.judging.observe import Observation, observe
from g4conformance.judging.verdict import Status, Verdict
from g4conformance.prompts import ResolvedCase
from g4conformance.reference.record import record_reference
from g4conformance.runtime.contract import OnTensor, StaticInputs
from g4conformance.runtime.static import StaticGemma4Runtime
from g4conformance.stages import Stage

from .recording import Recorded

pytestmark = pytest.mark.unit

Runtime = StaticGemma4Runtime
METHODS = {
    "build_static_inputs": Stage.BUILD_STATIC_INPUTS,
    "token_embedding": Stage.TOKEN_EMBEDDING,
    "vision_prefill": Stage.VISION_PREFILL,
    "mm_fusion": Stage.MM_FUSION,
    "masks_and_rope": Stage.MASKS_AND_ROPE,
    "prefill": Stage.PREFILL,
    "load_state": Stage.DECODE,
    "decode_one": Stage.DECODE,
    "select": Stage.GENERATION,
}


@pytest.fixture
def runtime(shared_runtime: Runtime, image: Recorded) -> Iterator[Runtime]:
    """The image case's runtime; what a test sets on it goes with the test."""
    runtime = shared_runtime.for_layout(image.case.request.layout)
    before = dict(vars(runtime))
    runtime.facts = image.bench.facts
    yield runtime
    for name in vars(runtime).keys() - before.keys():
        delattr(runtime, name)
    vars(runtime).update(before)


def seen(runtime: Any, recorded: Recorded) -> tuple[Observation, list[Verdict]]:
    """Without the probes of self-consistency, and the verdicts of the checks that apply."""
    case = replace(recorded.case, case=replace(recorded.case.case, self_consistency=False))
    observation = observe(runtime, case, recorded.reference, recorded.bench.facts)
    verdicts = judge(case, recorded.reference, observation, recorded.bench)
    return observation, [verdict for verdict in verdicts if verdict.status is not Status.NOT_APPLICABLE]


def wrong(verdicts: list[Verdict]) -> set[Stage]:
    return {verdict.stage for verdict in verdicts if verdict.status in (Status.FAIL, Status.ERROR)}


def raising(*args: object) -> None:
    raise RuntimeError("out of memory")


# --- a runtime that raises ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_a_method_that_raises_is_an_error_of_its_stage(runtime: Runtime, image: Recorded, method: str) -> None:
    setattr(runtime, method, raising)
    observation, verdicts = seen(runtime, image)
    assert observation.errors[METHODS[method]] == "RuntimeError: out of memory"
    assert wrong(verdicts) == {METHODS[method]}, "the other stages are judged, and not blamed"
    assert runtime.on_tensor is None


@pytest.mark.parametrize("layer", [0, 5])
def test_an_error_in_the_middle_of_a_stage_is_told(runtime: Runtime, image: Recorded, layer: int) -> None:
    runtime.layers = [*runtime.layers[:layer], raising, *runtime.layers[layer + 1 :]]  # type: ignore[list-item]
    _, verdicts = seen(runtime, image)
    logits = [v for v in verdicts if v.check == "G4-PREFILL-04" and v.mode is Mode.ISOLATED]
    assert [(verdict.status, verdict.where) for verdict in logits] == [
        (Status.ERROR, "the runtime raised RuntimeError: out of memory")
    ]


def test_an_error_before_everything_is_inherited(runtime: Runtime, image: Recorded) -> None:
    runtime.build_static_inputs = raising  # type: ignore[method-assign, assignment]
    _, verdicts = seen(runtime, image)
    accumulated = [v for v in verdicts if v.mode is Mode.ACCUMULATED and v.stage is not Stage.BUILD_STATIC_INPUTS]
    assert {verdict.status for verdict in accumulated} == {Status.INHERITED}


def test_a_layout_that_cannot_be_built_is_an_error(runtime: Runtime, image: Recorded) -> None:
    runtime.for_layout = raising  # type: ignore[method-assign, assignment]
    observation, _ = seen(runtime, image)
    assert "RuntimeError: out of memory" in observation.errors.values()


@dataclass
class PrefillOnly:
    """The least that the contract asks for."""

    inner: Runtime
    on_tensor: OnTensor | None = None

    def prefill(self, inputs: StaticInputs, fused_embeds: Any = None, masks_and_rope: Any = None) -> Tensor:
        return self.inner.prefill(inputs, fused_embeds, masks_and_rope)


def test_only_prefill_is_required(runtime: Runtime, image: Recorded) -> None:
    _, verdicts = seen(PrefillOnly(runtime), image)
    status = {v.check: v.status for v in verdicts if v.mode is Mode.ISOLATED}
    assert status["G4-PREFILL-04"] is Status.PASS
    assert set(status.values()) == {Status.PASS, Status.NOT_OBSERVED}, "what is missing is not observed, and no error"


# --- what is run, and what is reused --------------------------------------------------------------------------------


def test_a_right_runtime_prefills_once_and_its_stages_are_reused(runtime: Runtime, image: Recorded) -> None:
    prefills: list[StaticInputs] = []
    prefill = runtime.prefill
    runtime.prefill = lambda *args: prefills.append(args[0]) or prefill(*args)  # type: ignore[method-assign]
    observation, _ = seen(runtime, image)
    assert len(prefills) == 1
    assert observation.same >= {Stage.VISION_PREFILL, Stage.TOKEN_EMBEDDING, Stage.MASKS_AND_ROPE}


def test_a_wrong_stage_is_run_again_behind_it_with_the_references_inputs(runtime: Runtime, image: Recorded) -> None:
    """The embedding is off by one step, so fusion and prefill are fed anew; they are right in isolation."""
    embedding, up = runtime.embedding, torch.tensor(torch.inf)
    runtime.embedding = lambda ids: torch.nextafter(embedding(ids), up) if ids.shape[1] > 1 else embedding(ids)  # type: ignore[assignment]
    observation, verdicts = seen(runtime, image)
    assert wrong(verdicts) == {Stage.TOKEN_EMBEDDING}
    assert not {Stage.MM_FUSION, Stage.PREFILL} & observation.same
    fused = image.reference["fused_embeds"]
    assert torch.equal(observation.isolated["fused_embeds"][:, : fused.shape[1]], fused)
    assert not torch.equal(observation.accumulated["fused_embeds"][:, : fused.shape[1]], fused)


def test_a_runtime_that_leaks_into_the_next_request_is_caught(
    shared_runtime: Runtime, resolved: Callable[[str], ResolvedCase], text: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A-B-A: the second A is judged after the others were served on the same buffers."""
    case = resolved("a-b-a")
    reference = record_reference(shared_runtime.checkpoint, case.request.inputs, case.reference_steps)
    bench = replace(text.bench, facts=shared_runtime.facts)
    recorded = Recorded(case, reference, Observation(), bench)
    assert wrong(seen(shared_runtime, recorded)[1]) == set()
    cache = shared_runtime.for_layout(case.request.layout).cache
    monkeypatch.setattr(cache, "reset", lambda: None)
    _, verdicts = seen(shared_runtime, recorded)
    assert {verdict.check for verdict in verdicts if verdict.status is Status.FAIL} >= {"G4-PREFILL-06"}


def test_generation_is_judged_on_its_own_and_selection_in_isolation(image: Recorded) -> None:
    own, isolated = image.observation.accumulated, image.observation.isolated
    assert {"generation/token_ids", "generation/stop_reason"} <= own.keys()
    scripted = isolated["generation/select/logits"]
    assert len(scripted) > 1 + image.case.reference_steps, "the reference's own rows, and scripted ones"
    assert set(scripted.argmax(-1).tolist()) >= image.bench.facts.stop_token_ids
