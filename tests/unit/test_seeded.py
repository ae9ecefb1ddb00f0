"""The seeded family: what it promises of every checkpoint, and that both layouts on disk are that checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForImageTextToText
from transformers.models.gemma4.modeling_gemma4 import Gemma4ClippableLinear

from g4conformance.checkpoints.checkpoint import Checkpoint, LoadOptions, load_checkpoint
from g4conformance.checkpoints.published import SavedLayout
from g4conformance.checkpoints.seeded import (
    SeededSpec,
    VisionSpec,
    save_seeded,
    seeded_checkpoint,
    seeded_config,
)
from g4conformance.reference.record import model_inputs

pytestmark = pytest.mark.unit

SLIDING, FULL = "sliding_attention", "full_attention"
SPECS = {
    "everything on": SeededSpec(),
    "all full, nothing on": SeededSpec(
        layer_types=(FULL, FULL),
        num_kv_shared_layers=0,
        hidden_size_per_layer_input=0,
        final_logit_softcapping=None,
        use_double_wide_mlp=False,
        vision=VisionSpec(use_clipped_linears=False, standardize=False),
    ),
    "all full, shared": SeededSpec(layer_types=(FULL, FULL, FULL), num_kv_shared_layers=2),
    "keys are values": SeededSpec(attention_k_eq_v=True, num_global_key_value_heads=3, num_kv_shared_layers=0),
    "keys are values, shared": SeededSpec(attention_k_eq_v=True, num_global_key_value_heads=1),
    "one head dim": SeededSpec(global_head_dim=12),
    "shared without per-layer inputs": SeededSpec(hidden_size_per_layer_input=0),
    "bidirectional vision, biases": SeededSpec(use_bidirectional_attention="vision", attention_bias=True),
}
any_spec = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())


@pytest.fixture(scope="module")
def everything_on() -> Checkpoint:
    return seeded_checkpoint(SeededSpec(), seed=1)


def picture(width: int = 90, height: int = 66) -> Image.Image:
    return Image.fromarray(np.random.default_rng(4).integers(0, 256, (height, width, 3), dtype=np.uint8))


def logits(checkpoint: Checkpoint) -> Tensor:
    """[1, n, vocab] of a prompt with a picture, longer than the window."""
    processed = checkpoint.process("<bos>Look at <|image|> there, at the red circle.", [picture()])
    rows = torch.arange(processed["input_ids"].shape[1])  # as an integer it would need per-layer inputs
    with torch.no_grad():
        return checkpoint.model(**model_inputs(processed, checkpoint.dtype), logits_to_keep=rows).logits


# --- on disk ---------------------------------------------------------------------------------------------------------


@any_spec
def test_both_layouts_load_bit_identical(spec: SeededSpec, tmp_path: Path) -> None:
    checkpoint = seeded_checkpoint(spec, seed=3)
    expected = logits(checkpoint)
    for layout in SavedLayout:
        save_seeded(checkpoint, tmp_path / layout, layout)
        loaded = load_checkpoint(tmp_path / layout)
        assert torch.equal(logits(loaded), expected)
        assert loaded.facts == checkpoint.facts


def test_in_bfloat16_too(tmp_path: Path, everything_on: Checkpoint) -> None:
    """Rotary frequencies stay in float32 then, in memory as after loading."""
    options = LoadOptions(dtype="bfloat16")
    expected = logits(seeded_checkpoint(SeededSpec(), 1, options))
    for layout in SavedLayout:
        save_seeded(everything_on, tmp_path / layout, layout)
        assert torch.equal(logits(load_checkpoint(tmp_path / layout, options)), expected)


def test_the_legacy_layout_is_the_published_one(tmp_path: Path) -> None:
    spec = SPECS["keys are values, shared"]
    save_seeded(seeded_checkpoint(spec, seed=3), tmp_path, SavedLayout.LEGACY)
    text = json.loads((tmp_path / "config.json").read_text())["text_config"]
    assert "per_layer_config" not in text
    assert (text["head_dim"], text["global_head_dim"]) == (12, 20)
    assert (text["num_key_value_heads"], text["num_global_key_value_heads"]) == (2, 1)
    shapes = {name: tuple(tensor.shape) for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    sliding, full = (f"model.language_model.layers.{layer}.self_attn." for layer in (5, 6))
    assert shapes[sliding + "k_proj.weight"] == shapes[sliding + "v_proj.weight"] == (2 * 12, 44)
    assert shapes[full + "k_proj.weight"] == shapes[full + "v_proj.weight"] == (1 * 20, 44)
    assert (shapes[sliding + "k_norm.weight"], shapes[full + "k_norm.weight"]) == ((12,), (20,))


def test_the_per_layer_layout_is_what_transformers_writes(tmp_path: Path, everything_on: Checkpoint) -> None:
    save_seeded(everything_on, tmp_path, SavedLayout.PER_LAYER)
    text = json.loads((tmp_path / "config.json").read_text())["text_config"]
    assert text["per_layer_config"] == {str(layer): {"head_dim": 20} for layer in (2, 4, 6)}
    assert not {"global_head_dim", "num_global_key_value_heads"} & text.keys()
    names = load_file(tmp_path / "model.safetensors").keys()
    assert not any(name.startswith("model.language_model.layers.6.self_attn.k_") for name in names)


def test_only_float32_is_saved(tmp_path: Path) -> None:
    checkpoint = seeded_checkpoint(SeededSpec(), 1, LoadOptions(dtype="bfloat16"))
    with pytest.raises(ValueError, match="only a float32 checkpoint"):
        save_seeded(checkpoint, tmp_path, SavedLayout.PER_LAYER)


def test_the_legacy_layout_refuses_what_it_cannot_say(tmp_path: Path, everything_on: Checkpoint) -> None:
    config = seeded_config(SeededSpec(), everything_on.processor)
    sizes_of_full = {"head_dim": 20, "num_key_value_heads": 1}
    config.text_config.per_layer_config = {layer: dict(sizes_of_full) for layer in (2, 4, 6)}
    with pytest.raises(ValueError, match="only with attention_k_eq_v"):
        save_seeded(seeded_checkpoint(config, seed=1), tmp_path, SavedLayout.LEGACY)


# --- values ----------------------------------------------------------------------------------------------------------


@any_spec
def test_no_value_is_what_hugging_face_initialises_neutrally(spec: SeededSpec) -> None:
    """Neutral is every tensor that a fresh model fills with one number, and its pad rows of zeros."""
    checkpoint = seeded_checkpoint(spec, seed=3)
    fresh = AutoModelForImageTextToText.from_config(checkpoint.model.config).state_dict()
    neutral = {name: tensor for name, tensor in fresh.items() if bool((tensor == tensor.flatten()[0]).all())}
    neutral |= {name: tensor[:1] for name, tensor in fresh.items() if "embed_tokens" in name}
    assert {name.rsplit(".", 1)[-1] for name in neutral} >= {"weight", "layer_scalar", "position_embedding_table"}
    for name, tensor in neutral.items():
        values = checkpoint.model.state_dict()[name].reshape(-1)[: tensor.numel()]
        assert values.isfinite().all(), name
        assert not (values == tensor.reshape(-1)).any(), name


@pytest.mark.parametrize("seed", range(3))
def test_each_clip_bound_clips_something_of_a_picture(seed: int) -> None:
    checkpoint = seeded_checkpoint(SeededSpec(), seed)
    clipped = [m for m in checkpoint.model.modules() if isinstance(m, Gemma4ClippableLinear)]
    assert len(clipped) == 7 * SeededSpec().vision.num_hidden_layers
    for linear in clipped:
        linear.register_forward_hook(assert_clips)
    logits(checkpoint)


def assert_clips(linear: Gemma4ClippableLinear, args: tuple[Tensor, ...], output: Tensor) -> None:
    (inputs,) = args
    unclipped = linear.linear(inputs.clamp(linear.input_min, linear.input_max))
    for values, low, high in ((inputs, "input_min", "input_max"), (unclipped, "output_min", "output_max")):
        assert values.min() < getattr(linear, low), low
        assert values.max() > getattr(linear, high), high
    assert not output.isnan().any()


def test_seed_and_spec_are_all_that_matters(everything_on: Checkpoint) -> None:
    before = torch.random.get_rng_state()
    again = seeded_checkpoint(SeededSpec(), seed=1)
    assert torch.equal(torch.random.get_rng_state(), before), "the caller's random numbers stay as they were"
    assert again.digest == everything_on.digest
    assert torch.equal(logits(again), logits(everything_on))
    others = [seeded_checkpoint(SeededSpec(), seed=2), seeded_checkpoint(SeededSpec(sliding_window=10), seed=1)]
    assert len({everything_on.digest, *(other.digest for other in others)}) == 3
    assert not any(torch.equal(logits(other), logits(everything_on)) for other in others)


# --- configs ---------------------------------------------------------------------------------------------------------

PROPERTIES: dict[str, Callable[[SeededSpec], bool]] = {
    "both layer types": lambda spec: {SLIDING, FULL} == set(spec.layer_types),
    "two layers of each type before the sharing point": lambda spec: all(
        spec.layer_types[: -spec.num_kv_shared_layers].count(kind) >= 2 for kind in (SLIDING, FULL)
    ),
    "each type shared": lambda spec: {SLIDING, FULL} == set(spec.layer_types[-spec.num_kv_shared_layers :]),
    "more than one KV head, fewer than query heads": lambda spec: (
        1 < spec.num_key_value_heads < spec.num_attention_heads
    ),
    "a root of hidden_size that bfloat16 rounds": lambda spec: bool(
        torch.tensor(spec.hidden_size**0.5).bfloat16().float() != torch.tensor(spec.hidden_size**0.5)
    ),
    "full layers with a head dim of their own": lambda spec: spec.head_dim != spec.global_head_dim,
    "per-layer inputs": lambda spec: spec.hidden_size_per_layer_input > 0,
    "a double-wide MLP": lambda spec: spec.use_double_wide_mlp,
    "a softcap within the logits' reach": lambda spec: spec.final_logit_softcapping == 3.0,
    "clipped linears": lambda spec: spec.vision.use_clipped_linears,
    "standardised soft tokens": lambda spec: spec.vision.standardize,
    "a window shorter than a picture": lambda spec: spec.sliding_window < spec.vision.max_soft_tokens // 2,
    "pairwise distinct sizes": lambda spec: len(set(sizes(spec))) == len(sizes(spec)),
}


def sizes(spec: SeededSpec) -> list[int]:
    """Every axis that some tensor of the default spec has."""
    text = [spec.hidden_size, spec.intermediate_size, 2 * spec.intermediate_size, spec.hidden_size_per_layer_input]
    heads = [spec.num_attention_heads, spec.num_key_value_heads]
    widths = [count * dim for count in heads for dim in (spec.head_dim, spec.global_head_dim)]
    vision = [spec.vision.hidden_size, spec.vision.intermediate_size, spec.vision.num_attention_heads,
              spec.vision.num_attention_heads * spec.vision.head_dim, 3 * spec.vision.patch_size**2]  # fmt: skip
    return [
        *text,
        *heads,
        spec.head_dim,
        spec.global_head_dim,
        spec.vision.head_dim,
        *widths,
        *vision,
        len(spec.layer_types),
    ]


@pytest.mark.parametrize("holds", PROPERTIES.values(), ids=PROPERTIES.keys())
def test_the_default_spec_has(holds: Callable[[SeededSpec], bool]) -> None:
    assert holds(SeededSpec())


@any_spec
def test_specs_become_what_they_say(spec: SeededSpec) -> None:
    checkpoint = seeded_checkpoint(spec, seed=1)
    config, facts = checkpoint.text_config, checkpoint.facts
    assert facts.layer_types == spec.layer_types
    assert len(facts.storing_layers) == len(spec.layer_types) - spec.num_kv_shared_layers
    assert facts.final_logit_softcapping == spec.final_logit_softcapping
    assert facts.has_per_layer_inputs == bool(spec.hidden_size_per_layer_input)
    assert facts.bidirectional_vision == (spec.use_bidirectional_attention == "vision")
    full = config.per_layer_config[len(spec.layer_types) - 1]
    assert full.head_dim == spec.global_head_dim
    assert full.num_key_value_heads == (spec.num_global_key_value_heads or spec.num_key_value_heads)
    assert facts.stop_token_ids == {1, 50, 106}, "the published stop set"


def test_a_whole_config_is_taken_too(everything_on: Checkpoint) -> None:
    config = seeded_config(SeededSpec(), everything_on.processor)
    assert torch.equal(logits(seeded_checkpoint(config, seed=1)), logits(everything_on))


@pytest.mark.parametrize("backend", ["torchvision", "pil"])
def test_the_image_backend_is_the_one_asked_for(backend: str) -> None:
    spec = SeededSpec(vision=replace(VisionSpec(), patch_size=2, pooling_kernel_size=2))
    checkpoint = seeded_checkpoint(spec, 1, LoadOptions(image_backend=backend))
    processor = checkpoint.processor.image_processor
    assert type(processor).__name__.endswith("Pil") == (backend == "pil")
    inputs = checkpoint.process("<bos><|image|>", [picture()])
    assert inputs["pixel_values"].shape == (1, 70 * 2**2, 3 * 2**2)


def test_what_is_no_dense_gemma_4_is_refused(everything_on: Checkpoint) -> None:
    def config(**changes: object) -> object:
        changed = seeded_config(SeededSpec(), everything_on.processor)
        for name, value in changes.items():
            setattr(changed.text_config, name, value)
        return changed

    for changes, words in (
        ({"enable_moe_block": True}, "dense"),
        ({"use_bidirectional_attention": "all"}, "causal"),
        ({"num_kv_shared_layers": 7}, "all 7 layers reuse"),
        ({"vocab_size": 100}, "the tokenizer has 512 ids"),
        ({"num_kv_shared_layers": 6}, "layer types"),
    ):
        with pytest.raises(ValueError, match=words):
            seeded_checkpoint(config(**changes), seed=1)  # type: ignore[arg-type]
