"""Probes of self-consistency: what is asked, what a runtime lacks, and that a probe that fails ends with itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from g4conformance.checks import checks_of
from g4conformance.checks.registry import Needs
from g4conformance.judging.judge import judge
from g4conformance.judging.observation import Observation
from g4conformance.judging.probes import run_probes
from g4conformance.judging.verdict import Status, Verdict
from g4conformance.probe_requests import (
    ProbeRequests,
    begins_with_text,
    decode_steps,
    ends_in_text,
    generated_lengths,
    layers_of_reach,
    other_layouts,
)
from g4conformance.runtime.contract import OnTensor, StaticInputs
from g4conformance.runtime.layout import StaticLayout
from g4conformance.runtime.static import StaticGemma4Runtime
from g4conformance.stages import Stage

from .recording import Recorded, with_facts

pytestmark = pytest.mark.unit

Runtime = StaticGemma4Runtime
ALL = {check.id for check in checks_of(Stage.SELF_CONSISTENCY) if check.needs is Needs.PROBES}
DECODING = {f"G4-SELF-{number:02}" for number in (1, 3, 10, 13, 15, 16, 17)}  # what a runtime that cannot decode lacks


def ids(*numbers: int) -> set[str]:
    return {f"G4-SELF-{number:02}" for number in numbers}


def requests_of(recorded: Recorded, layout: StaticLayout | None = None) -> ProbeRequests:
    request = recorded.case.request
    return ProbeRequests(request.inputs, layout or request.layout, recorded.bench.facts, torch.float32)


def probed(runtime: Any, recorded: Recorded) -> tuple[Observation, list[Verdict]]:
    """The probes alone, after a run on its own that was right."""
    own = {n: t for n, t in recorded.observation.accumulated.items() if not n.startswith("self/")}
    observation = replace(recorded.observation, accumulated=own, errors={}, missing={})
    with torch.no_grad():
        run_probes(runtime, requests_of(recorded), recorded.case.gen_steps, observation)
    verdicts = judge(recorded.case, recorded.reference, observation, recorded.bench)
    return observation, [verdict for verdict in verdicts if verdict.check in ALL]


def with_status(verdicts: list[Verdict], status: Status) -> set[str]:
    return {verdict.check for verdict in verdicts if verdict.status is status}


@pytest.fixture(params=["text", "image"])
def given(request: pytest.FixtureRequest, recorded: Callable[[str], Recorded]) -> Recorded:
    return recorded(request.param)


@pytest.fixture
def runtime(shared_runtime: Runtime, given: Recorded) -> Iterator[Runtime]:
    runtime = shared_runtime.for_layout(given.case.request.layout)
    with with_facts(runtime, given.bench.facts):
        yield runtime


# --- what is asked --------------------------------------------------------------------------------------------------


def test_requests_are_the_prompt_but_for_what_they_change(given: Recorded) -> None:
    requests, own = requests_of(given), given.reference["input_ids"][0].tolist()
    prompt = requests.prompt()
    length, images = prompt.valid_length, given.bench.facts.placeholder_ids
    assert prompt.input_ids[0, :length].tolist() == own
    assert requests.shortened().input_ids[0, : length - 1].tolist() == own[:-1]
    for inputs, row in ((requests.first_exchanged(), 0), (requests.last_exchanged(), length - 1)):
        assert (inputs.input_ids != prompt.input_ids).nonzero().tolist() == [[0, row]]
    longer = requests.longer().input_ids[0, :length]
    changed = longer != prompt.input_ids[0, :length]
    assert changed.tolist() == [token not in images for token in own], "an image stays in its slot"


def test_requests_say_of_every_row_what_the_processor_says(given: Recorded) -> None:
    """A runtime may read the processor's output instead of the static buffers."""
    output = given.case.request.inputs
    for name, tensor in requests_of(given).prompt().processor_output.items():
        assert torch.equal(torch.as_tensor(tensor), torch.as_tensor(output[name])), name


def test_the_longer_request_leaves_one_row_when_it_is_decoded(given: Recorded) -> None:
    requests = requests_of(given)
    assert requests.longer().valid_length + len(requests.tokens) == given.case.request.layout.max_seq - 1


def test_another_picture_keeps_its_padding_patches_empty(image: Recorded) -> None:
    prompt, longer = requests_of(image).prompt(), requests_of(image).longer()
    assert prompt.pixel_values is not None
    assert longer.pixel_values is not None
    assert ((prompt.pixel_values == 0) == (longer.pixel_values == 0)).all()
    assert (prompt.pixel_values != longer.pixel_values).any()


def test_padding_holds_words_and_the_prompt_is_untouched(given: Recorded) -> None:
    prompt, other = requests_of(given).prompt(), requests_of(given).other_padding()
    for name in ("input_ids", "llm_input_ids"):
        before, after = getattr(prompt, name)[0], getattr(other, name)[0]
        assert torch.equal(before[: prompt.valid_length], after[: prompt.valid_length])
        assert (before[prompt.valid_length :] != after[prompt.valid_length :]).all()
    assert torch.equal(prompt.attention_mask, other.attention_mask)


def test_exchanged_tokens_are_ordinary_ones(text: Recorded) -> None:
    facts = text.bench.facts
    special = {facts.pad_token_id, facts.bos_token_id} | facts.placeholder_ids | facts.stop_token_ids
    requests = requests_of(text)
    exchanged = {int(requests.first_exchanged().input_ids[0, 0]), int(requests.last_exchanged().input_ids[0, 32])}
    assert not (exchanged | set(requests.tokens)) & special
    assert set(requests.favoured) & facts.stop_token_ids == facts.stop_token_ids


@pytest.mark.parametrize(("max_seq", "steps"), [(33, 0), (34, 1), (35, 2), (134, 2)])
def test_no_more_is_decoded_than_there_is_room_for(text: Recorded, max_seq: int, steps: int) -> None:
    layout = StaticLayout(max_seq)
    requests = requests_of(text, layout)
    assert decode_steps(layout, 33) == len(requests.tokens) == steps
    assert requests.longer().valid_length == max(33, max_seq - 1 - steps)
    sizes = {probe: other.max_seq for probe, other in other_layouts(layout, 33, text.bench.facts).items()}
    assert sizes == {"larger": max_seq + 32} | ({"smaller": 35} if max_seq > 35 else {})


@pytest.mark.parametrize(
    ("layout", "length", "begins", "ends"),
    [
        (StaticLayout(20), 5, True, True),
        (StaticLayout(20), 1, True, False),
        (StaticLayout(20, 0, 4), 5, False, True),
        (StaticLayout(20, 1, 4), 5, True, False),
        (StaticLayout(20, 1, 4), 6, True, True),
    ],
)
def test_only_text_is_exchanged_or_cut(layout: StaticLayout, length: int, begins: bool, ends: bool) -> None:
    assert begins_with_text(layout) is begins
    assert ends_in_text(layout, length) is ends


def test_the_runs_own_generation_is_asked_last() -> None:
    assert [generated_lengths(steps) for steps in (1, 2, 3, 8)] == [(1,), (1, 2), (1, 2, 3), (1, 2, 8)]


@pytest.mark.parametrize(("kinds", "count"), [("ssf", 3), ("fs", 1), ("sfsf", 2)])
def test_reach_is_followed_up_to_the_first_full_layer(text: Recorded, kinds: str, count: int) -> None:
    names = {"s": "sliding_attention", "f": "full_attention"}
    facts = replace(text.bench.facts, layer_types=tuple(names[kind] for kind in kinds))
    assert layers_of_reach(facts) == range(count)


# --- what a runtime lacks -------------------------------------------------------------------------------------------


class Outside:
    """A runtime as the driver sees it, with one method missing or replaced; what calls it inside is undisturbed."""

    def __init__(self, inner: Runtime, method: str, replacement: Callable[..., Any] | None = None) -> None:
        self.inner, self.method, self.replacement = inner, method, replacement

    def __getattr__(self, name: str) -> Any:
        return self.replacement if name == self.method else getattr(self.inner, name)

    @property
    def on_tensor(self) -> OnTensor | None:
        return self.inner.on_tensor

    @on_tensor.setter
    def on_tensor(self, listener: OnTensor | None) -> None:
        self.inner.on_tensor = listener


def test_the_shipped_runtime_lacks_nothing(runtime: Runtime, given: Recorded) -> None:
    observation, verdicts = probed(runtime, given)
    assert with_status(verdicts, Status.PASS) == ALL
    assert observation.missing == {}
    assert observation.errors == {}
    assert runtime.on_tensor is None


LACKING = {
    "for_layout": ids(2, 3),
    "decode_one": DECODING,
    "load_state": ids(15),
    "reset": ids(16, 17),
    "generate": ids(11, 19, 20),
    "select": ids(18),
    "token_embedding": ids(4, 6),
}


@pytest.mark.parametrize("method", LACKING)
def test_a_missing_method_is_not_observed_and_named(runtime: Runtime, given: Recorded, method: str) -> None:
    observation, verdicts = probed(Outside(runtime, method), given)
    assert with_status(verdicts, Status.NOT_OBSERVED) == LACKING[method]
    assert with_status(verdicts, Status.PASS) == ALL - LACKING[method]
    told = {verdict.where for verdict in verdicts if verdict.status is Status.NOT_OBSERVED}
    assert told == {f"the runtime does not expose {method}"}
    assert observation.errors == {}


def test_a_prefill_that_takes_no_embeddings_is_told(runtime: Runtime, given: Recorded) -> None:
    _, verdicts = probed(Outside(runtime, "prefill", lambda inputs: runtime.prefill(inputs)), given)
    assert with_status(verdicts, Status.NOT_OBSERVED) == ids(4, 6)
    assert next(v.where for v in verdicts if v.check == "G4-SELF-04").endswith("expose prefill's fused_embeds")


@dataclass
class PrefillOnly:
    """The least that the contract asks for; intermediate tensors stay inside."""

    inner: Runtime
    on_tensor: OnTensor | None = None

    def prefill(self, inputs: StaticInputs) -> Tensor:
        return self.inner.prefill(inputs)


def test_prefill_alone_is_compared_with_itself(runtime: Runtime, given: Recorded) -> None:
    _, verdicts = probed(PrefillOnly(runtime), given)
    assert with_status(verdicts, Status.PASS) == ids(5, 9, 12)
    assert with_status(verdicts, Status.NOT_OBSERVED) == ALL - ids(5, 9, 12)


# --- a runtime that raises ------------------------------------------------------------------------------------------


def raising(*args: object) -> None:
    raise RuntimeError("out of memory")


@pytest.mark.parametrize("method", LACKING)
def test_a_probe_that_raises_is_an_error_of_its_checks_only(runtime: Runtime, given: Recorded, method: str) -> None:
    _, verdicts = probed(Outside(runtime, method, raising), given)
    assert with_status(verdicts, Status.ERROR) == LACKING[method]
    assert with_status(verdicts, Status.PASS) == ALL - LACKING[method]
    assert {v.where for v in verdicts if v.status is Status.ERROR} == {"the runtime raised RuntimeError: out of memory"}
    assert runtime.on_tensor is None


def test_a_prefill_that_raises_once_ends_one_probe(runtime: Runtime, given: Recorded) -> None:
    """The second prefill is the second run in a row."""
    calls = []

    def second_raises(*args: Any) -> Tensor:
        calls.append(args)
        return runtime.prefill(*args) if len(calls) != 2 else raising()  # type: ignore[return-value]

    _, verdicts = probed(Outside(runtime, "prefill", second_raises), given)
    assert with_status(verdicts, Status.ERROR) == ids(9, 10)
    assert with_status(verdicts, Status.PASS) == ALL - ids(9, 10)


def test_an_own_run_that_broke_off_is_an_error_where_it_is_compared(runtime: Runtime, given: Recorded) -> None:
    observation, _ = probed(runtime, given)
    own = {name: tensor for name, tensor in observation.accumulated.items() if name.startswith("self/")}
    broken = replace(observation, accumulated=own, errors={None: "RuntimeError: out of memory"})
    verdicts = judge(given.case, given.reference, broken, given.bench)
    red = [v for v in verdicts if v.check in ALL and v.status is not Status.PASS]
    assert [(v.check, v.status) for v in red] == [("G4-SELF-11", Status.INHERITED)]
