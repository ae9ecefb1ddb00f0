"""Every property of the bundled checkpoint that docs/checkpoint.md promises."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import Tensor
from transformers import AutoModelForImageTextToText, AutoProcessor
from transformers.models.gemma4.modeling_gemma4 import Gemma4ClippableLinear, Gemma4RMSNorm

from fixtures.make.case_images import CONVERTED
from fixtures.make.tasks import chat
from g4conformance.cases import load_cases
from g4conformance.checkpoints.checkpoint import Checkpoint
from g4conformance.fixtures import bundled_checkpoint, fixtures_folder
from g4conformance.prompts import resolve
from g4conformance.runtime.cache import layer_specs

pytestmark = pytest.mark.unit

SIZE_LIMIT = 6_000_000


def test_it_is_small() -> None:
    assert sum(path.stat().st_size for path in bundled_checkpoint().iterdir()) < SIZE_LIMIT


def test_it_loads_with_the_auto_classes() -> None:
    model, info = AutoModelForImageTextToText.from_pretrained(bundled_checkpoint(), output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert model.dtype == torch.bfloat16
    assert type(AutoProcessor.from_pretrained(bundled_checkpoint())).__name__ == "Gemma4Processor"


def test_sizes_that_a_port_could_confuse_are_distinct(tiny_checkpoint: Checkpoint) -> None:
    text, vision = tiny_checkpoint.text_config, tiny_checkpoint.model.config.vision_config
    sliding, full = (text.per_layer_config[text.layer_types.index(f"{kind}_attention")] for kind in ("sliding", "full"))
    sizes = {
        "hidden": text.hidden_size,
        "mlp": text.intermediate_size,
        "double mlp": 2 * text.intermediate_size,
        "query": text.num_attention_heads * sliding.head_dim,
        "full query": text.num_attention_heads * full.head_dim,
        "kv": text.num_key_value_heads * sliding.head_dim,
        "full kv": text.num_key_value_heads * full.head_dim,
        "head dim": sliding.head_dim,
        "full head dim": full.head_dim,
        "per-layer width": text.hidden_size_per_layer_input,
        "window": text.sliding_window,
        "vision hidden": vision.hidden_size,
        "vision mlp": vision.intermediate_size,
        "vision head dim": vision.head_dim,
        "vision query": vision.num_attention_heads * vision.head_dim,
        "max_seq": tiny_checkpoint.facts.default_max_seq,
        "heads": text.num_attention_heads,
        "kv heads": text.num_key_value_heads,
        "layers": text.num_hidden_layers,
    }
    assert len(set(sizes.values())) == len(sizes), sizes


def test_features_are_on(tiny_checkpoint: Checkpoint) -> None:
    text = tiny_checkpoint.text_config
    assert text.num_key_value_heads >= 2
    assert text.use_double_wide_mlp
    assert text.final_logit_softcapping == 30.0
    assert text.hidden_size_per_layer_input > 0
    assert tiny_checkpoint.model.config.vision_config.use_clipped_linears


@pytest.mark.parametrize("width", ["hidden_size", "hidden_size_per_layer_input"])
def test_embedding_scales_are_inexact_in_bfloat16(tiny_checkpoint: Checkpoint, width: str) -> None:
    scale = math.sqrt(getattr(tiny_checkpoint.text_config, width))
    assert float(torch.tensor(scale).bfloat16()) != pytest.approx(scale, abs=1e-6)


def test_donors_are_neither_first_of_their_type_nor_alone(tiny_checkpoint: Checkpoint) -> None:
    specs = layer_specs(tiny_checkpoint.text_config)
    donors = {spec.kv_source for spec in specs if not spec.stores_kv}
    assert {specs[donor].layer_type for donor in donors} == {"sliding_attention", "full_attention"}
    for donor in donors:
        same_type = [s.index for s in specs if s.stores_kv and s.layer_type == specs[donor].layer_type]
        assert len(same_type) >= 2
        assert donor == same_type[-1]


def test_no_norm_weight_or_layer_scalar_is_neutral(tiny_checkpoint: Checkpoint) -> None:
    for name, module in tiny_checkpoint.model.named_modules():
        if isinstance(module, Gemma4RMSNorm) and module.with_scale:
            assert float((module.weight - 1).abs().mean()) > 0.02, name
            assert float(module.weight.std()) > 0.01, name
    scalars = [float(layer.layer_scalar) for layer in tiny_checkpoint.model.model.language_model.layers]
    assert all(0 < scalar < 0.99 for scalar in scalars)
    assert len(set(scalars)) == len(scalars)


def test_position_table_and_pad_rows_are_not_neutral(tiny_checkpoint: Checkpoint) -> None:
    model = tiny_checkpoint.model.model
    table = model.vision_tower.patch_embedder.position_embedding_table
    assert float(table.std()) > 0.1
    assert float((table[0] - table[1]).abs().mean()) > 0.1
    for embedding in (model.language_model.embed_tokens, model.language_model.embed_tokens_per_layer):
        pad_row = embedding.weight[tiny_checkpoint.facts.pad_token_id]
        assert float(pad_row.abs().mean()) > 0.01


def test_stop_tokens_are_those_of_the_published_checkpoints(tiny_checkpoint: Checkpoint) -> None:
    generation_config = json.loads((bundled_checkpoint() / "generation_config.json").read_text())
    assert generation_config["eos_token_id"] == [1, 106, 50]
    assert tiny_checkpoint.facts.stop_token_ids == {1, 106, 50}


def test_template_renders_the_format_of_training(tiny_checkpoint: Checkpoint) -> None:
    messages = [
        {"role": "system", "content": [{"type": "text", "text": "Answer briefly."}]},
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What do you see?"}]},
    ]
    rendered = tiny_checkpoint.processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert rendered == chat("<|image|>What do you see?", "Answer briefly.")


def test_each_clip_bound_alters_some_value_of_some_case(tiny_checkpoint: Checkpoint) -> None:
    idle = {name: set(_BOUNDS) for name, _ in _clipped(tiny_checkpoint)}
    handles = [linear.register_forward_hook(_note_bounds(idle[name])) for name, linear in _clipped(tiny_checkpoint)]
    for inputs in _image_inputs(tiny_checkpoint):
        tiny_checkpoint.model.get_image_features(inputs["pixel_values"], inputs["image_position_ids"])
    for handle in handles:
        handle.remove()
    assert {name: bounds for name, bounds in idle.items() if bounds} == {}


def test_no_bundled_picture_is_uniform() -> None:
    """But for those that are there for their format, whose few colours are what they are about."""
    for path in sorted((fixtures_folder() / "images").iterdir()):
        assert _distinct_colours(path) > (1 if path.name in CONVERTED else 1000), path.name


_BOUNDS = ("input_min", "input_max", "output_min", "output_max")


def _clipped(checkpoint: Checkpoint) -> list[tuple[str, Gemma4ClippableLinear]]:
    tower = checkpoint.model.model.vision_tower
    return [(name, m) for name, m in tower.named_modules() if isinstance(m, Gemma4ClippableLinear)]


def _note_bounds(idle: set[str]) -> object:
    def hook(linear: Gemma4ClippableLinear, args: tuple[Tensor, ...], output: Tensor) -> None:
        inside = args[0].clamp(linear.input_min, linear.input_max)
        unclipped = linear.linear(inside)
        beyond = {
            "input_min": args[0] < linear.input_min,
            "input_max": args[0] > linear.input_max,
            "output_min": unclipped < linear.output_min,
            "output_max": unclipped > linear.output_max,
        }
        idle.difference_update(name for name, where in beyond.items() if bool(where.any()))

    return hook


def _image_inputs(checkpoint: Checkpoint) -> Iterator[dict[str, Tensor]]:
    cases = load_cases(fixtures_folder() / "cases.yaml")
    max_seq = checkpoint.facts.default_max_seq
    for case in cases:
        if case.images:
            yield dict(
                resolve(case, checkpoint, max_seq=max_seq, decode_steps=0, gen_steps=1, all_cases=cases).request.inputs
            )


def _distinct_colours(path: Path) -> int:
    with Image.open(path) as image:
        colours = image.convert("RGB").getcolors(maxcolors=2**24)
    return len(colours or [])
