"""The seeded family: tiny Gemma 4 checkpoints of any legal dense config, built from a spec and a seed in memory.

They are not trained, so their argmax means nothing; but every parameter matters, so every mistake shows in some tensor.
"""

from __future__ import annotations

import copy
import hashlib
import math
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from transformers import (
    AutoModelForImageTextToText,
    Gemma4Config,
    Gemma4ForConditionalGeneration,
    Gemma4ImageProcessor,
    Gemma4ImageProcessorPil,
    Gemma4Processor,
    Gemma4VideoProcessor,
    GenerationConfig,
)
from transformers.models.gemma4.modeling_gemma4 import Gemma4ClippableLinear

from g4conformance.checkpoints.checkpoint import Checkpoint, LoadOptions, attention_of_towers
from g4conformance.checkpoints.facts import model_facts
from g4conformance.checkpoints.files import DTYPES
from g4conformance.checkpoints.published import SavedLayout, make_published
from g4conformance.checkpoints.scramble import scramble_neutral_parameters
from g4conformance.fixtures import bundled_checkpoint

_SLIDING, _FULL = "sliding_attention", "full_attention"
_BIAS_STD = 0.3
_UNNORMALISED, _UNNORMALISED_SCALE = ("o_proj", "down_proj"), 0.15
_IMAGE_PROCESSORS = {"torchvision": Gemma4ImageProcessor, "pil": Gemma4ImageProcessorPil}


@dataclass(frozen=True)
class VisionSpec:
    """Sizes and features of the vision tower and of the image processor, named as in their configs.

    `head_dim` is a multiple of 4; `max_soft_tokens` is 70, 140, 280, 560 or 1120; `pooling_kernel_size` is at least 2,
    because transformers 5.24 keeps the padding and drops the image where nothing is pooled.
    """

    hidden_size: int = 28
    intermediate_size: int = 60
    num_hidden_layers: int = 2
    num_attention_heads: int = 5
    num_key_value_heads: int = 5
    head_dim: int = 16
    patch_size: int = 4
    pooling_kernel_size: int = 3
    max_soft_tokens: int = 70
    use_clipped_linears: bool = True
    standardize: bool = True


@dataclass(frozen=True)
class SeededSpec:
    """Sizes and features of a seeded checkpoint, named as in `Gemma4TextConfig`.

    As the published configs have them, `global_head_dim` is the head dim of full layers, and
    `num_global_key_value_heads` is their number of KV heads where `attention_k_eq_v` holds. The defaults turn every
    feature of E2B on, and no two sizes of one tensor or of two that could be confused are equal.

    `score_gain` is no part of a config: attention scores of the decoder are that many times as large. At 1 they stay
    below 5, and a mask's fill of -100 hides a key as well as one of -3e38 does.
    """

    layer_types: tuple[str, ...] = (_SLIDING, _SLIDING, _FULL, _SLIDING, _FULL, _SLIDING, _FULL)
    num_kv_shared_layers: int = 2
    hidden_size: int = 44
    intermediate_size: int = 52
    num_attention_heads: int = 6
    num_key_value_heads: int = 2
    num_global_key_value_heads: int | None = None
    head_dim: int = 12
    global_head_dim: int = 20
    hidden_size_per_layer_input: int = 8
    sliding_window: int = 9
    final_logit_softcapping: float | None = 3.0
    attention_k_eq_v: bool = False
    attention_bias: bool = False
    use_bidirectional_attention: str | None = None
    use_double_wide_mlp: bool = True
    score_gain: float = 1.0
    vision: VisionSpec = field(default_factory=VisionSpec)


def seeded_checkpoint(
    spec: SeededSpec | Gemma4Config,
    seed: int,
    options: LoadOptions | None = None,
    tokenizer_folder: Path | None = None,
) -> Checkpoint:
    """A checkpoint of `spec` whose every parameter is drawn from `seed`, and none of which is neutral.

    In another dtype than float32 its values are the rounded float32 ones, as if it had been saved and loaded.

    Args:
        spec: sizes, or a whole config whose token ids are the tokenizer's.
        tokenizer_folder: checkpoint whose tokenizer and generation config to take; None takes the bundled one.

    Raises:
        ValueError: not a legal dense Gemma 4 config, or one whose token ids are not the tokenizer's.
    """
    options = options or LoadOptions()
    folder = tokenizer_folder or bundled_checkpoint()
    vision = spec.vision if isinstance(spec, SeededSpec) else _vision_of(spec)
    processor = processor_for(vision, options, folder)
    config = seeded_config(spec, processor) if isinstance(spec, SeededSpec) else spec
    _require_usable(config, processor)
    drawn = _draw(config, seed)
    if isinstance(spec, SeededSpec):
        _enlarge_scores(drawn, spec.score_gain)
    model = _empty_model(config, options)
    model.load_state_dict(drawn.state_dict())
    model.generation_config = GenerationConfig.from_pretrained(folder)
    facts = model_facts(model.config, model.generation_config, processor)
    digest = _digest(drawn, processor)
    return Checkpoint(model, processor, facts, digest, options, f"seeded {digest[:12]}")


def seeded_config(spec: SeededSpec, processor: Gemma4Processor) -> Gemma4Config:
    """The config of `spec` over the vocabulary of `processor`'s tokenizer."""
    tokenizer = processor.tokenizer
    text = asdict(spec)
    vision = text.pop("vision")
    text.pop("score_gain")
    soft_tokens = vision.pop("max_soft_tokens")
    text |= {
        "layer_types": list(spec.layer_types),
        "num_hidden_layers": len(spec.layer_types),
        "vocab_size": len(tokenizer),
        "vocab_size_per_layer_input": len(tokenizer),
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "max_position_embeddings": 1024,
    }
    # The longest side that the image processor can produce, in patches.
    vision["position_embedding_size"] = soft_tokens * spec.vision.pooling_kernel_size
    return Gemma4Config(text_config=text, vision_config=vision, audio_config=None, **_token_ids(processor))


def save_seeded(checkpoint: Checkpoint, folder: Path, layout: SavedLayout, seed: int = 0) -> None:
    """Writes a float32 `checkpoint` to `folder`, so that `load_checkpoint` gets the very same model in any dtype.

    `seed` draws the legacy layout's unused weights.

    Raises:
        ValueError: the checkpoint is not float32, or the legacy layout cannot express its config.
    """
    if checkpoint.dtype is not torch.float32:
        raise ValueError(f"only a float32 checkpoint is saved without loss, not a {checkpoint.options.dtype} one")
    checkpoint.model.save_pretrained(folder)
    checkpoint.processor.save_pretrained(folder)
    if layout is SavedLayout.LEGACY:
        make_published(folder, seed)


def _token_ids(processor: Gemma4Processor) -> dict[str, Any]:
    """The top config's token ids, as the tokenizer has them."""
    tokenizer = processor.tokenizer
    return {
        "boi_token_id": tokenizer.boi_token_id,
        "eoi_token_id": tokenizer.eoi_token_id,
        "image_token_id": tokenizer.image_token_id,
        "video_token_id": processor.video_token_id,
        "boa_token_id": tokenizer.boa_token_id,
        "eoa_token_index": tokenizer.eoa_token_id,
        "audio_token_id": tokenizer.audio_token_id,
        "eos_token_id": [tokenizer.eos_token_id, tokenizer.eot_token_id],
    }


def _vision_of(config: Gemma4Config) -> VisionSpec:
    """What the image processor needs to know of a config; its soft-token budget is the smallest there is."""
    vision: Any = config.vision_config
    if vision is None:
        raise ValueError("a seeded checkpoint has a vision tower, but vision_config is None")
    return VisionSpec(patch_size=vision.patch_size, pooling_kernel_size=vision.pooling_kernel_size)


def _require_usable(config: Gemma4Config, processor: Gemma4Processor) -> None:
    text: Any = config.text_config
    vocabulary = len(processor.tokenizer)
    if text.enable_moe_block or text.use_bidirectional_attention == "all":
        raise ValueError("a seeded checkpoint is dense and causal")
    if text.num_kv_shared_layers >= text.num_hidden_layers:
        raise ValueError(f"all {text.num_hidden_layers} layers reuse K/V, but some must store them")
    if text.vocab_size < vocabulary or config.image_token_id != processor.image_token_id:
        raise ValueError(
            f"the tokenizer has {vocabulary} ids and image token {processor.image_token_id}, "
            f"the config {text.vocab_size} and {config.image_token_id}"
        )


@cache
def _base_processor(folder: Path) -> Gemma4Processor:
    processor: Gemma4Processor = Gemma4Processor.from_pretrained(folder, local_files_only=True)
    return processor


def processor_for(vision: VisionSpec, options: LoadOptions, folder: Path) -> Gemma4Processor:
    """The processor in `folder` with an image processor of `vision`'s sizes; the tokenizer is shared."""
    base = _base_processor(folder)
    sizes: dict[str, Any] = {
        "patch_size": vision.patch_size,
        "pooling_kernel_size": vision.pooling_kernel_size,
        "max_soft_tokens": vision.max_soft_tokens,
    }
    return Gemma4Processor(
        feature_extractor=base.feature_extractor,
        image_processor=_IMAGE_PROCESSORS[options.image_backend](**sizes),
        tokenizer=base.tokenizer,
        video_processor=Gemma4VideoProcessor(**sizes),
        chat_template=base.chat_template,
        image_seq_length=vision.max_soft_tokens,
    )


def _empty_model(config: Gemma4Config, options: LoadOptions) -> Gemma4ForConditionalGeneration:
    """A model built in its dtype: casting it afterwards would round rotary frequencies, which loading does not."""
    auto_model: Any = AutoModelForImageTextToText  # its methods have no annotations
    with torch.random.fork_rng(devices=[]):
        model: nn.Module = auto_model.from_config(
            copy.deepcopy(config),
            dtype=DTYPES[options.dtype],
            attn_implementation=attention_of_towers(options.attn_implementation),
        )
    model.to(options.device).eval().requires_grad_(False)
    return cast(Gemma4ForConditionalGeneration, model)


def _draw(config: Gemma4Config, seed: int) -> Gemma4ForConditionalGeneration:
    """A float32 model with matrices of unit gain, so that signals neither vanish nor explode in any depth."""
    model = _empty_model(config, LoadOptions())
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / math.sqrt(parameter.shape[1]))
            elif name.endswith(".bias"):
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * _BIAS_STD)
    scramble_neutral_parameters(model, seed)
    _narrow_clip_bounds(model)
    return model


@torch.no_grad()
def _enlarge_scores(model: Any, gain: float) -> None:
    for layer in model.model.language_model.layers:
        layer.self_attn.q_norm.weight.mul_(gain)


def _narrow_clip_bounds(model: nn.Module) -> None:
    """Makes each bound clip where inputs are not normalised: behind attention's average and the MLP's product."""
    for name, linear in model.named_modules():
        if isinstance(linear, Gemma4ClippableLinear) and linear.use_clipped_linears and name.endswith(_UNNORMALISED):
            for bound in (linear.input_min, linear.input_max, linear.output_min, linear.output_max):
                bound.mul_(_UNNORMALISED_SCALE)


def _digest(model: Gemma4ForConditionalGeneration, processor: Gemma4Processor) -> str:
    """SHA-256 over config, image processor and all float32 values."""
    digest = hashlib.sha256(model.config.to_json_string().encode())
    digest.update(processor.image_processor.to_json_string().encode())
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()
