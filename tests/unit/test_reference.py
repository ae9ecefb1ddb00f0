"""The reference's helpers: masks over absolute positions, and one pass cut into prefill and decode."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers.utils import ModelOutput

from g4conformance.checkpoints.checkpoint import Checkpoint
from g4conformance.errors import UnsoundReferenceError
from g4conformance.expected import greedy_tokens
from g4conformance.prompts import ResolvedCase
from g4conformance.reference.hooks import absolute_mask
from g4conformance.reference.record import model_inputs, record_reference
from g4conformance.reference.selfcheck import split_pass

from .asserting import told
from .recording import Recorded

pytestmark = pytest.mark.unit


# --- absolute_mask --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("queries", "past"), [(3, 0), (1, 0), (1, 4), (2, 3)])
def test_no_mask_means_causal(queries: int, past: int) -> None:
    mask = absolute_mask(None, query_length=queries, past_len=past)
    assert mask.shape == (1, queries, past + queries)
    for query in range(queries):
        assert mask[0, query].tolist() == [key <= past + query for key in range(past + queries)]


def test_boolean_and_additive_masks_say_the_same() -> None:
    allowed = torch.tensor([[[[True, False, False], [True, True, False], [False, True, True]]]])
    additive = torch.zeros(1, 1, 3, 3).masked_fill(~allowed, torch.finfo(torch.float32).min)
    for mask in (allowed, additive, additive.to(torch.bfloat16)):
        assert torch.equal(absolute_mask(mask, query_length=3, past_len=0), allowed[:, 0])


def test_a_sliding_caches_narrow_mask_ends_at_the_query() -> None:
    """The cache holds the last W - 1 keys only; keys before them are out of the window."""
    narrow = torch.tensor([[[[True, True, True]]]])
    assert absolute_mask(narrow, query_length=1, past_len=4).tolist() == [[[False, False, True, True, True]]]


# --- split_pass -----------------------------------------------------------------------------------------------------


@pytest.fixture
def one_pass() -> dict[str, torch.Tensor]:
    """Five rows, row r holds r; logits of rows 2 to 4."""
    rows = torch.arange(5.0)
    return {
        "text_embeds": rows.view(1, 5, 1),
        "layer/0/hidden": rows.view(1, 5, 1),
        "layer/0/key": rows.view(1, 1, 5, 1),
        "rope/full_attention/cos": rows.view(1, 5, 1),
        "mask/full_attention": torch.ones(1, 5, 5, dtype=torch.bool),
        "visual_embeds": torch.zeros(7, 1),
        "vision/soft_tokens": torch.zeros(7, 1),
        "logits": torch.arange(2.0, 5.0).view(1, 3, 1),
    }


def test_one_pass_is_cut_into_prefill_and_decode_steps(one_pass: dict[str, torch.Tensor]) -> None:
    cut = split_pass(one_pass, length=3)
    assert cut["text_embeds"].flatten().tolist() == [0, 1, 2]
    assert cut["prefill/layer/0/hidden"].flatten().tolist() == [0, 1, 2]
    assert cut["prefill/layer/0/key"].shape == (1, 1, 3, 1)
    assert cut["prefill/logits"].tolist() == [[2]]
    for step in (0, 1):
        assert cut[f"decode/{step}/text_embeds"].tolist() == [[[3 + step]]]
        assert cut[f"decode/{step}/layer/0/hidden"].tolist() == [[[3 + step]]]
        assert cut[f"decode/{step}/layer/0/key"].tolist() == [[[[3 + step]]]]
        assert cut[f"decode/{step}/rope/full_attention/cos"].tolist() == [[[3 + step]]]
        assert cut[f"decode/{step}/logits"].tolist() == [[3 + step]]
    assert "decode/2/logits" not in cut
    assert cut["visual_embeds"].shape == (7, 1), "vision has no rows of the prompt"
    assert cut["mask/full_attention"].shape == (1, 5, 5)


def test_a_padded_pass_is_cut_to_its_prefill(one_pass: dict[str, torch.Tensor]) -> None:
    cut = split_pass(one_pass, length=3, decode=False)
    assert cut["prefill/logits"].tolist() == [[2]]
    assert cut["prefill/layer/0/hidden"].shape == (1, 3, 1)
    assert not [name for name in cut if name.startswith("decode/")]


# --- recording ------------------------------------------------------------------------------------------------------


def test_pixels_enter_in_the_models_dtype_and_nothing_foreign_enters(image_case: ResolvedCase) -> None:
    given = model_inputs({**image_case.request.inputs, "surplus": 1}, torch.bfloat16)
    assert given["pixel_values"].dtype == torch.bfloat16
    assert given["input_ids"] is image_case.request.inputs["input_ids"]
    assert "surplus" not in given


def test_a_recording_has_every_step_and_ends_there(text: Recorded) -> None:
    steps = text.case.reference_steps
    for step in range(steps):
        assert int(text.reference[f"decode/{step}/token"]) == greedy_tokens(text.reference)[step]
        assert int(text.reference[f"decode/{step}/position"]) == int(text.reference["valid_length"]) + step
        assert f"decode/{step}/logits" in text.reference
    assert not [name for name in text.reference if name.startswith(f"decode/{steps}/")]


def test_keys_are_recorded_beyond_the_sliding_window(tiny_checkpoint: Checkpoint, text: Recorded) -> None:
    length = int(text.reference["valid_length"])
    assert length > tiny_checkpoint.facts.sliding_window
    for layer in tiny_checkpoint.facts.storing_layers:
        assert text.reference[f"prefill/layer/{layer}/key"].shape[2] == length


def test_hooks_do_not_stay(tiny_checkpoint: Checkpoint, text: Recorded) -> None:
    assert len(text.reference) > 0
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in tiny_checkpoint.model.modules())


def test_other_tokens_may_be_fed(tiny_checkpoint: Checkpoint, text_case: ResolvedCase) -> None:
    trace = record_reference(tiny_checkpoint, text_case.request.inputs, steps=2, tokens=[7, 9])
    assert [int(trace[f"decode/{step}/token"]) for step in range(2)] == [7, 9]


@pytest.mark.parametrize(("healthy_passes", "where"), [(0, "prefill"), (2, "decode step 1")])
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_reference_that_is_not_finite_judges_nobody(
    tiny_checkpoint: Checkpoint, text_case: ResolvedCase, healthy_passes: int, where: str, poison: float
) -> None:
    passes = []

    def hook(module: nn.Module, args: object, output: ModelOutput) -> None:
        passes.append(output)
        if len(passes) > healthy_passes:
            output.logits[0, -1, 7] = poison

    handle = tiny_checkpoint.model.register_forward_hook(hook)
    try:
        with told(
            UnsoundReferenceError,
            expected="finite logits",
            found=f"NaN or Inf at {where} of case 'a'",
            remedy="--dtype",
        ):
            record_reference(tiny_checkpoint, text_case.request.inputs, steps=2, case="a")
    finally:
        handle.remove()
