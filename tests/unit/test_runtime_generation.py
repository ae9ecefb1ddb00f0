"""Selection and generation: greedy, until something says stop."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace

import pytest
import torch

from g4conformance.checkpoints.checkpoint import Checkpoint
from g4conformance.checkpoints.facts import model_facts
from g4conformance.expected import greedy_tokens
from g4conformance.prompts import ResolvedCase
from g4conformance.runtime.contract import Generation, StopReason
from g4conformance.runtime.static import StaticGemma4Runtime

from .recording import Recorded, with_facts

pytestmark = pytest.mark.unit

Runtime = StaticGemma4Runtime


def stopping_at(runtime: Runtime, *tokens: int) -> AbstractContextManager[None]:
    """`runtime` with another stop set; what the checkpoint's weights say cannot be relied on."""
    return with_facts(runtime, replace(runtime.facts, stop_token_ids=frozenset(tokens)))


def generate(runtime: Runtime, case: ResolvedCase, max_new_tokens: int) -> Generation:
    with torch.no_grad():
        runtime = runtime.for_layout(case.request.layout)
        return runtime.generate(runtime.build_static_inputs(case.request.prompt, case.request.images), max_new_tokens)


# --- the stop set ---------------------------------------------------------------------------------------------------


class Source:
    """Stands in for a generation config or a tokenizer."""

    def __init__(self, eos_token_id: int | list[int] | None) -> None:
        self.eos_token_id = eos_token_id
        self.bos_token_id = 2


class Processor:
    def __init__(self, eos_token_id: int | None) -> None:
        self.tokenizer = Source(eos_token_id)
        self.image_processor = type("ImageProcessor", (), {"max_soft_tokens": 70})


@pytest.mark.parametrize(
    ("generation", "top", "text", "tokenizer", "stops"),
    [
        ([1, 50], 106, 1, 7, {1, 7, 50, 106}),
        (None, [1, 106], None, 1, {1, 106}),
        (3, 4, 5, 6, {3, 4, 5, 6}),
        (None, None, 5, None, {5}),
    ],
)
def test_the_stop_set_is_the_union_of_all_sources(
    tiny_checkpoint: Checkpoint,
    generation: int | list[int] | None,
    top: int | list[int] | None,
    text: int | None,
    tokenizer: int | None,
    stops: set[int],
) -> None:
    config = type(tiny_checkpoint.model.config).from_dict(tiny_checkpoint.model.config.to_dict())
    config.eos_token_id, config.text_config.eos_token_id = top, text
    assert model_facts(config, Source(generation), Processor(tokenizer)).stop_token_ids == stops


def test_a_model_without_generation_config(tiny_checkpoint: Checkpoint) -> None:
    facts = model_facts(tiny_checkpoint.model.config, None, tiny_checkpoint.processor)
    assert tiny_checkpoint.processor.tokenizer.eos_token_id in facts.stop_token_ids


def test_the_bundled_checkpoint_names_stops_in_more_than_one_place(tiny_checkpoint: Checkpoint) -> None:
    stops, config = tiny_checkpoint.facts.stop_token_ids, tiny_checkpoint.model.config
    assert stops >= set(tiny_checkpoint.model.generation_config.eos_token_id)
    assert stops > {config.text_config.eos_token_id, tiny_checkpoint.processor.tokenizer.eos_token_id}


# --- select ---------------------------------------------------------------------------------------------------------


def test_select_is_greedy_and_knows_every_stop(shared_runtime: Runtime) -> None:
    vocab = shared_runtime.facts.vocab_size
    for token in range(0, vocab, 7):
        logits = torch.linspace(-1, 0, vocab)[None].clone()
        logits[0, token] = 0.5
        expected = StopReason.STOP_TOKEN if token in shared_runtime.facts.stop_token_ids else None
        assert shared_runtime.select(logits) == (token, expected)
    for token in shared_runtime.facts.stop_token_ids:
        assert shared_runtime.select(torch.eye(vocab)[token][None]) == (token, StopReason.STOP_TOKEN)


# --- generate -------------------------------------------------------------------------------------------------------


@pytest.fixture
def greedy(text: Recorded) -> list[int]:
    return greedy_tokens(text.reference)


@pytest.mark.parametrize("kind", ["text", "image"])
def test_generation_returns_the_prompt_and_the_references_tokens(
    shared_runtime: Runtime, recorded: Callable[[str], Recorded], kind: str
) -> None:
    case, reference = recorded(kind).case, recorded(kind).reference
    runtime = shared_runtime.for_layout(case.request.layout)
    with stopping_at(runtime):
        found = generate(shared_runtime, case, 3)
    assert found.token_ids == (*reference["input_ids"][0].tolist(), *greedy_tokens(reference)[:3])
    assert found.stop_reason is StopReason.MAX_NEW_TOKENS


@pytest.mark.parametrize("count", [1, 2])
def test_it_stops_after_the_number_asked_for(
    shared_runtime: Runtime, text: Recorded, greedy: list[int], count: int
) -> None:
    with stopping_at(shared_runtime):
        found = generate(shared_runtime, text.case, count)
    assert list(found.token_ids[-count:]) == greedy[:count]
    assert len(found.token_ids) == int(text.reference["valid_length"]) + count
    assert found.stop_reason is StopReason.MAX_NEW_TOKENS


@pytest.mark.parametrize("row", [0, 1, 2])
def test_it_stops_at_a_stop_token_which_it_returns(
    shared_runtime: Runtime, text: Recorded, greedy: list[int], row: int
) -> None:
    expected = greedy[: greedy.index(greedy[row]) + 1]
    with stopping_at(shared_runtime, greedy[row]):
        found = generate(shared_runtime, text.case, len(expected))
    assert list(found.token_ids[int(text.reference["valid_length"]) :]) == expected
    assert found.stop_reason is StopReason.STOP_TOKEN, "a stop token outranks the number asked for"


@pytest.mark.parametrize("count", [0, -1])
def test_no_tokens_cannot_be_asked_for(shared_runtime: Runtime, text: Recorded, count: int) -> None:
    with pytest.raises(ValueError, match=f"at least 1, got {count}"):
        generate(shared_runtime, text.case, count)


@pytest.mark.parametrize(("name", "new"), [("fills-max-seq", 1), ("fills-while-decoding", 3)])
def test_it_stops_where_the_buffer_is_full(
    shared_runtime: Runtime, resolved: Callable[[str], ResolvedCase], name: str, new: int
) -> None:
    """The last token is chosen from logits; only feeding it would need a row."""
    case = resolved(name)
    with stopping_at(shared_runtime.for_layout(case.request.layout)):
        found = generate(shared_runtime, case, 50)
        assert found.stop_reason is StopReason.MAX_SEQ
        assert len(found.token_ids) == case.request.inputs["input_ids"].shape[1] + new
        assert generate(shared_runtime, case, new).stop_reason is StopReason.MAX_NEW_TOKENS
