"""What static buffers must hold: pure functions of the reference's trace and the layout."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from g4conformance.checkpoints.checkpoint import Checkpoint
from g4conformance.checkpoints.facts import ModelFacts
from g4conformance.expected import (
    generation_of,
    greedy_tokens,
    key_values_of,
    logits_names,
    masks_and_rope_of,
    padded_mask,
    padded_reference,
    padded_rope,
    scripted_logits,
    static_inputs_of,
)
from g4conformance.metrics import top_two_gap
from g4conformance.runtime.contract import StopReason
from g4conformance.runtime.layout import StaticLayout

from .recording import Recorded

pytestmark = pytest.mark.unit

LAYOUT = StaticLayout(5)
F = "full_attention"


@pytest.fixture
def reference() -> dict[str, Tensor]:
    """Three valid rows, two decode steps; the greedy tokens are 1, 0, 1."""
    return {
        "input_ids": torch.tensor([[2, 9, 4]]),
        "llm_input_ids": torch.tensor([[2, 0, 4]]),
        "attention_mask": torch.ones(1, 3, dtype=torch.bool),
        "valid_length": torch.tensor([3]),
        "text_embeds": torch.ones(1, 3, 2),
        "pad_embed": torch.tensor([7.0, 8.0]),
        "visual_embeds": torch.ones(1, 2),
        f"mask/{F}": torch.ones(1, 3, 3, dtype=torch.bool).tril(),
        f"rope/{F}/cos": torch.full((1, 3, 2), 0.5),
        f"rope/{F}/sin": torch.full((1, 3, 2), 0.25),
        "prefill/layer/0/key": torch.ones(1, 1, 3, 2),
        "prefill/layer/0/value": torch.zeros(1, 1, 3, 2),
        "prefill/logits": torch.tensor([[0.0, 1.0]]),
        "decode/0/logits": torch.tensor([[1.0, 0.0]]),
        "decode/1/logits": torch.tensor([[0.0, 1.0]]),
    }


@pytest.fixture
def facts(tiny_checkpoint: Checkpoint) -> ModelFacts:
    return replace(
        tiny_checkpoint.facts, pad_token_id=0, stop_token_ids=frozenset(), layer_types=(F,), storing_layers=(0,)
    )


def test_embeddings_are_padded_with_the_pad_ids_embedding(reference: dict[str, Tensor]) -> None:
    padded = padded_reference(reference, LAYOUT, "text_embeds")
    assert padded[0].tolist() == [[1, 1], [1, 1], [1, 1], [7, 8], [7, 8]]
    assert padded_reference(reference, LAYOUT, "visual_embeds") is reference["visual_embeds"]


def test_no_row_of_a_padded_mask_sees_padding_and_none_is_empty(reference: dict[str, Tensor]) -> None:
    mask = padded_mask(reference, LAYOUT, F)[0]
    assert mask.shape == (5, 5)
    assert torch.equal(mask[:3, :3], reference[f"mask/{F}"][0])
    assert not bool(mask[:, 3:].any())
    assert bool(mask.any(dim=-1).all())


def test_padding_does_not_rotate(reference: dict[str, Tensor]) -> None:
    cos, sin = padded_rope(reference, LAYOUT, F)
    assert cos[0, :, 0].tolist() == [0.5, 0.5, 0.5, 1, 1]
    assert sin[0, :, 0].tolist() == [0.25, 0.25, 0.25, 0, 0]


def test_the_request_that_is_expected(reference: dict[str, Tensor], facts: ModelFacts) -> None:
    inputs = static_inputs_of(reference, LAYOUT, facts)
    assert inputs.input_ids.tolist() == [[2, 9, 4, 0, 0]]
    assert inputs.llm_input_ids.tolist() == [[2, 0, 4, 0, 0]]
    assert inputs.attention_mask.tolist() == [[True, True, True, False, False]]
    assert inputs.valid_length == 3
    assert inputs.pixel_values is None


def test_masks_and_rope_of_every_layer_type(text: Recorded, tiny_checkpoint: Checkpoint) -> None:
    layout = text.case.request.layout
    positional = masks_and_rope_of(text.reference, layout, tiny_checkpoint.facts)
    assert set(positional.masks) == set(positional.rope) == set(tiny_checkpoint.facts.layer_types)
    for layer_type, mask in positional.masks.items():
        assert mask.shape == (1, layout.max_seq, layout.max_seq)
        assert all(table.shape[:2] == (1, layout.max_seq) for table in positional.rope[layer_type])


def test_key_values_of_storing_layers(reference: dict[str, Tensor], facts: ModelFacts) -> None:
    (layer, (key, value)), *others = key_values_of(reference, facts).items()
    assert (layer, others) == (0, [])
    assert key is reference["prefill/layer/0/key"]
    assert value is reference["prefill/layer/0/value"]


def test_greedy_tokens(reference: dict[str, Tensor]) -> None:
    assert greedy_tokens(reference) == [1, 0, 1]
    del reference["decode/0/logits"]
    assert greedy_tokens(reference) == [1], "steps are followed as far as they have no gap"


def test_scripted_logits_have_one_right_answer_each(text: Recorded) -> None:
    """Every stop token and both ends of the vocabulary are chosen once, and no row has two largest values."""
    tie = text.reference["decode/0/logits"].clone()
    tie[0, tie.argmax() - 1] = tie.max()
    reference, facts = {**text.reference, "decode/0/logits": tie}, text.bench.facts
    scripted = scripted_logits(reference, facts)
    assert all(top_two_gap(row) > 0 for row in scripted)
    assert set(scripted.argmax(-1).tolist()) >= {*facts.stop_token_ids, 0, facts.vocab_size - 1}
    is_own = [bool((scripted == reference[name]).all(dim=-1).any()) for name in logits_names(reference)]
    assert is_own == [name != "decode/0/logits" for name in logits_names(reference)]


@pytest.mark.parametrize(
    ("gen_steps", "max_seq", "stops", "tokens", "reason"),
    [
        pytest.param(2, 9, {5}, [1, 0], StopReason.MAX_NEW_TOKENS, id="as many as asked for"),
        pytest.param(3, 9, {0}, [1, 0], StopReason.STOP_TOKEN, id="a stop token, which is returned"),
        pytest.param(3, 9, {1}, [1], StopReason.STOP_TOKEN, id="at once"),
        pytest.param(2, 9, {0}, [1, 0], StopReason.STOP_TOKEN, id="a stop token comes before the number asked for"),
        pytest.param(9, 5, {5}, [1, 0, 1], StopReason.MAX_SEQ, id="the last token needs no row"),
        pytest.param(9, 4, {5}, [1, 0], StopReason.MAX_SEQ, id="a full buffer"),
        pytest.param(9, 3, {5}, [1], StopReason.MAX_SEQ, id="a prompt that fills the buffer"),
        pytest.param(1, 3, {5}, [1], StopReason.MAX_NEW_TOKENS, id="asked for comes before a full buffer"),
    ],
)
def test_generation_ends_for_one_reason(
    reference: dict[str, Tensor],
    facts: ModelFacts,
    gen_steps: int,
    max_seq: int,
    stops: set[int],
    tokens: list[int],
    reason: StopReason,
) -> None:
    facts = replace(facts, stop_token_ids=frozenset(stops))
    assert generation_of(reference, StaticLayout(max_seq), facts, gen_steps) == (tokens, reason)


def test_a_reference_that_is_too_short_is_an_error(reference: dict[str, Tensor], facts: ModelFacts) -> None:
    with pytest.raises(ValueError, match="3 tokens, too few for 4"):
        generation_of(reference, StaticLayout(9), facts, 4)
