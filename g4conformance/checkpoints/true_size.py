"""Checkpoints of a published geometry with random weights, in memory, for as many layers as the machine has room for.

Drawing five billion values takes minutes and proves nothing, so every matrix is tiled from one block of normal values,
each from an offset of its own: no two layers are equal. Each parameter is memory of its own, as in a loaded checkpoint.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForImageTextToText,
    Gemma4AudioConfig,
    Gemma4Config,
    Gemma4ForConditionalGeneration,
    GenerationConfig,
)

from g4conformance.checkpoints.checkpoint import Checkpoint, LoadOptions, attention_of_towers
from g4conformance.checkpoints.facts import model_facts
from g4conformance.checkpoints.files import DTYPES
from g4conformance.checkpoints.scramble import scramble_neutral_parameters
from g4conformance.checkpoints.seeded import SeededSpec, VisionSpec, processor_for, seeded_config
from g4conformance.fixtures import bundled_checkpoint

_GROUP = ("sliding_attention",) * 4 + ("full_attention",)
_E2B_GROUPS, _E2B_SHARED_GROUPS = 7, 4
_BLOCK = 4_194_301  # a prime, so that rows of no matrix begin at the same place of the block twice
_BIAS_STD = 0.3
_ADDED, _KEPT = 0.15, 0.9  # of a layer's own output, and of what passes through it


@dataclass(frozen=True)
class Geometry:
    """Sizes of a checkpoint whose vocabulary is larger than the borrowed tokenizer's.

    Attributes:
        position_embedding_size: positions that the vision tower's table knows along each side.
        audio: sizes of the audio tower, named as in `Gemma4AudioConfig`; None leaves it out. It is held, never run.
    """

    spec: SeededSpec
    vocab_size: int
    position_embedding_size: int
    audio: dict[str, Any] | None = None


def e2b(layers: int = 35) -> Geometry:
    """Gemma 4 E2B's geometry, with every other size as it is, for `layers` decoder layers.

    Four of E2B's seven groups of five layers reuse K/V; of fewer groups as large a part does, but never all.

    Raises:
        ValueError: `layers` is no positive multiple of five, so that the pattern of layer types would break.
    """
    groups, rest = divmod(layers, len(_GROUP))
    if rest or groups < 1:
        raise ValueError(f"E2B's layers come in groups of {len(_GROUP)}; {layers} is no multiple of that")
    shared = min(groups - 1, round(groups * _E2B_SHARED_GROUPS / _E2B_GROUPS))
    spec = SeededSpec(
        layer_types=_GROUP * groups,
        num_kv_shared_layers=shared * len(_GROUP),
        hidden_size=1536,
        intermediate_size=6144,
        num_attention_heads=8,
        num_key_value_heads=1,
        head_dim=256,
        global_head_dim=512,
        hidden_size_per_layer_input=256,
        sliding_window=512,
        final_logit_softcapping=30.0,
        vision=VisionSpec(
            hidden_size=768,
            intermediate_size=3072,
            num_hidden_layers=16,
            num_attention_heads=12,
            num_key_value_heads=12,
            head_dim=64,
            patch_size=16,
            max_soft_tokens=280,
            standardize=False,
        ),
    )
    return Geometry(spec, vocab_size=262_144, position_embedding_size=10_240, audio={})


def tiled_checkpoint(geometry: Geometry, seed: int = 0, options: LoadOptions | None = None) -> Checkpoint:
    """A checkpoint of `geometry` whose every parameter follows from `seed`; its digest is of config and seed.

    Memory never holds more than the parameters, in their dtype, and one block. Tokenizer, chat template and token ids
    are the bundled checkpoint's, images are processed in the geometry's own patches.
    """
    options = options or LoadOptions(dtype="bfloat16")
    processor = processor_for(geometry.spec.vision, options, bundled_checkpoint())
    config = _config(geometry, processor)
    model = _allocated(config, options)
    _fill(model, torch.Generator().manual_seed(seed))
    scramble_neutral_parameters(model, seed)
    _calm(model)
    model.generation_config = GenerationConfig.from_pretrained(bundled_checkpoint())
    facts = model_facts(model.config, model.generation_config, processor)
    digest = hashlib.sha256(f"{config.to_json_string()}\ntiled from seed {seed}".encode()).hexdigest()
    return Checkpoint(model, processor, facts, digest, options, f"tiled {digest[:12]}")


def _config(geometry: Geometry, processor: Any) -> Gemma4Config:
    config: Any = seeded_config(geometry.spec, processor)
    config.text_config.vocab_size = config.text_config.vocab_size_per_layer_input = geometry.vocab_size
    config.vision_config.position_embedding_size = geometry.position_embedding_size
    if geometry.audio is not None:
        config.audio_config = Gemma4AudioConfig(**geometry.audio)
    return config


def _allocated(config: Gemma4Config, options: LoadOptions) -> Gemma4ForConditionalGeneration:
    """A model with parameters that hold nothing yet, and with the buffers that its modules compute from the config."""
    auto_model: Any = AutoModelForImageTextToText  # its methods have no annotations
    with torch.device("meta"):
        model = auto_model.from_config(
            config, dtype=DTYPES[options.dtype], attn_implementation=attention_of_towers(options.attn_implementation)
        )
    model.to_empty(device=options.device)
    model.tie_weights()
    for parameter in model.parameters():
        parameter._is_hf_initialized = True  # transformers would draw it, and be a minute about it
    model.initialize_weights()
    return model.eval().requires_grad_(False)


def _fill(model: nn.Module, generator: torch.Generator) -> None:
    """Matrices of unit gain, tiled from one block; biases likewise; all other parameters one."""
    block = torch.randn(_BLOCK, generator=generator)
    for name, parameter in model.named_parameters():
        offset = int(torch.randint(_BLOCK, (), generator=generator))
        if parameter.ndim >= 2:
            _tile(parameter.view(-1), block, offset, 1 / math.sqrt(parameter[0].numel()))
        elif name.endswith(".bias"):
            _tile(parameter, block, offset, _BIAS_STD)
        else:
            parameter.fill_(1.0)


def _calm(model: nn.Module) -> None:
    """Makes every layer add little to what passes through it, as trained layers do.

    Of 35 layers that add as much as they are given, bfloat16 makes noise: the logits of two sound attention
    implementations differed by a PEIR of 0.68.
    """
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if ".post_" in name and "norm" in name:
            tensor.mul_(_ADDED)
        elif name.endswith("layer_scalar"):
            tensor.mul_(1.0 - _KEPT).add_(_KEPT)


def _tile(values: Tensor, block: Tensor, offset: int, scale: float) -> None:
    """Fills `values` [n] with the block times `scale`, from `offset` on and then over and over."""
    first, others = values[: len(block) - offset], values[len(block) - offset :]
    torch.mul(block[offset : offset + len(first)], scale, out=first)
    for part in others.split(len(block)):
        torch.mul(block[: len(part)], scale, out=part)
