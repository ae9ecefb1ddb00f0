"""What enters a layer by itself: the reference's own, with padding and without."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from g4conformance.checkpoints.checkpoint import Checkpoint
from g4conformance.judging.padding import lacks_padding
from g4conformance.layer_inputs import Pass, decode_pass, layer_inputs, prefill_pass
from g4conformance.runtime.graphs import SharedDecoderLayerGraph, layer_arguments

from .recording import Recorded

pytestmark = pytest.mark.unit

Passes = Callable[[Recorded], Pass]
PASSES: dict[str, Passes] = {
    "prefill": lambda r: prefill_pass(r.reference, r.case.request.layout, r.bench.facts),
    "step 1": lambda r: decode_pass(r.reference, r.case.request.layout, r.bench.facts, 1),
}


@pytest.mark.parametrize("kind", PASSES)
def test_a_layer_that_shares_computes_the_same_without_padding(
    tiny_checkpoint: Checkpoint, image: Recorded, kind: str
) -> None:
    of, layers = PASSES[kind](image), tiny_checkpoint.model.model.language_model.layers
    entering = layer_inputs(image.reference, image.case.request.layout, image.bench.facts, of)
    for i, inputs in enumerate(entering):
        if inputs.stores:
            continue
        graph = SharedDecoderLayerGraph(layers[i])
        with torch.no_grad():
            padded, bare = (graph(*layer_arguments(given)) for given in (inputs, inputs.unpadded()))
        expected = image.reference[f"{of.leaving}layer/{i}/hidden"]
        torch.testing.assert_close(bare, expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(padded[:, : of.new_rows], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", PASSES)
def test_a_layer_that_stores_sees_the_rows_before_it_and_a_slot_for_its_own(image: Recorded, kind: str) -> None:
    of, max_seq = PASSES[kind](image), image.case.request.layout.max_seq
    for i, inputs in enumerate(layer_inputs(image.reference, image.case.request.layout, image.bench.facts, of)):
        assert inputs.stores is (i in image.bench.facts.storing_layers)
        slot = inputs.slot.nonzero().flatten().tolist()
        assert slot == list(range(of.past_len, of.past_len + of.new_rows))
        known = of.past_len + (0 if inputs.stores else of.new_rows)
        key, value = inputs.key_value
        assert key.shape[2] == value.shape[2] == max_seq
        assert not key[:, :, known:].any()
        assert key[:, :, :known].any(dim=(0, 1, 3)).all()
        assert inputs.unpadded().key_value[0].shape[2] == known
        assert inputs.unpadded().mask.shape[1:] == (of.new_rows, of.past_len + of.new_rows)


@pytest.mark.parametrize(
    ("name", "shape", "lacks"),
    [
        ("text_embeds", (1, 5, 8), True),
        ("text_embeds", (1, 9, 8), False),
        ("text_embeds", (1, 4, 8), False),  # neither: a mistake, and judged as such
        ("mask/full_attention", (1, 5, 5), True),
        ("decode/2/mask/full_attention", (1, 1, 8), True),
        ("decode/2/mask/full_attention", (1, 1, 9), False),
        ("prefill/cache/3/key", (1, 2, 5, 4), True),
        ("decode/0/cache/3/key", (1, 2, 6, 4), True),
        ("decode/0/text_embeds", (1, 1, 8), False),
        ("prefill/layer/0/hidden", (1, 5, 8), False),  # its padding is nobody's affair
    ],
)
def test_a_tensor_of_the_prompts_rows_alone_lacks_padding(name: str, shape: tuple[int, ...], lacks: bool) -> None:
    assert lacks_padding(name, torch.zeros(shape), length=5, max_seq=9) is lacks


def test_a_prompt_that_fills_the_buffers_has_no_padding_to_lack() -> None:
    assert not lacks_padding("text_embeds", torch.zeros(1, 9, 8), length=9, max_seq=9)
