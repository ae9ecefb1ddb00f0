"""The model and tokenizer of a checkpoint in the published layout, made of gemma's own classes.

gemma knows the published sizes and ids only: they are attributes of its classes and constants of its modules. What the
checkpoint has instead is told to it here, and nothing else is.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from gemma import gm
from gemma.gm.nn.gemma4 import _config, _modules
from gemma.gm.nn.gemma4.vision import _encoder, _transformer
from gemma.gm.text import _tokenizer
from gemma.gm.vision import _token_utils
from safetensors.flax import load_file

from g4conformance.runtimes.deepmind.vocabulary import sentencepiece_model
from g4conformance.runtimes.deepmind.weights import parameter_tree

_KINDS = {
    "sliding_attention": _modules.AttentionType.LOCAL_SLIDING,
    "full_attention": _modules.AttentionType.GLOBAL,
}


def sampler_of(checkpoint: Path, max_seq: int) -> Any:
    """A `Gemma4Sampler` in float32 with static buffers of `max_seq` rows, to which prompts are padded."""
    config = json.loads((checkpoint / "config.json").read_text())
    processor = json.loads((checkpoint / "processor_config.json").read_text())["image_processor"]
    model = gm.nn.Gemma4_E2B(config=_transformer_config(config, processor), text_only=False, dtype=jnp.float32)
    return gm.text.Gemma4Sampler(
        model=model,
        params=jax.tree.map(jnp.asarray, parameter_tree(weights_of(checkpoint))),
        tokenizer=_tokenizer_of(checkpoint, config),
        cache_length=max_seq,
        pad_length=max_seq,
        max_out_length=max_seq,
        patch_size=processor["patch_size"],
        max_soft_tokens=processor["max_soft_tokens"],
        pooling_kernel_size=processor["pooling_kernel_size"],
    )


def weights_of(checkpoint: Path) -> dict[str, Any]:
    """In float32, by their names in the checkpoint."""
    files = [load_file(path) for path in sorted(checkpoint.glob("*.safetensors"))]
    return {name: np.asarray(array, np.float32) for weights in files for name, array in weights.items()}


def _transformer_config(config: Mapping[str, Any], processor: Mapping[str, Any]) -> Any:
    """The config as its release tests have it, with this checkpoint's sizes. The base frequencies are whole numbers."""
    text = config["text_config"]
    rope, layers = text["rope_parameters"], text["num_hidden_layers"]
    shared = text["num_kv_shared_layers"] / layers
    return _config.TransformerConfig(
        num_embed=text["vocab_size"],
        embed_dim=text["hidden_size"],
        hidden_dim=text["intermediate_size"],
        num_heads=text["num_attention_heads"],
        head_dim=text["head_dim"],
        num_kv_heads=text["num_key_value_heads"],
        num_global_kv_heads=text["num_global_key_value_heads"],
        global_key_size=text["global_head_dim"],
        k_eq_v_global=text["attention_k_eq_v"],
        final_logit_softcap=text["final_logit_softcapping"],
        use_post_attn_norm=True,
        use_post_ffw_norm=True,
        attention_types=tuple(_KINDS[kind] for kind in text["layer_types"]),
        sliding_window_size=text["sliding_window"],
        global_rope_proportion=rope["full_attention"]["partial_rotary_factor"],
        local_rope_proportion=1.0,
        local_base_frequency=int(rope["sliding_attention"]["rope_theta"]),
        global_base_frequency=int(rope["full_attention"]["rope_theta"]),
        per_layer_input_dim=text["hidden_size_per_layer_input"] or 0,
        kv_cache_sharing_config=_config.KVCacheSharingConfig(shared, True, True) if shared else None,
        override_kv_shared_ffw_hidden=2 * text["intermediate_size"] if text["use_double_wide_mlp"] else None,
        use_bidirectional_attention=text["use_bidirectional_attention"],
        vision_encoder=_vision_encoder(config["vision_config"], processor),
    )


def _vision_encoder(vision: Mapping[str, Any], processor: Mapping[str, Any]) -> Any:
    if vision["head_dim"] * vision["num_attention_heads"] != vision["hidden_size"]:
        _size_vision_heads(vision["head_dim"])
    return _encoder.VisionEncoder(
        d_model=vision["hidden_size"],
        num_layers=vision["num_hidden_layers"],
        num_heads=vision["num_attention_heads"],
        ffw_hidden=vision["intermediate_size"],
        patch_size=vision["patch_size"],
        output_length=processor["max_soft_tokens"],
        pos_emb_shape_yx=(vision["position_embedding_size"], 2),
        pooling_kernel_size=vision["pooling_kernel_size"],
        use_clipped_linears=vision["use_clipped_linears"],
        standardize_embeddings=vision["standardize"],
    )


def _size_vision_heads(head_dim: int) -> None:
    """gemma's vision layers have heads of `d_model // num_heads`, as all published towers do; these have others."""

    class VisionBlock(_transformer.VisionBlock):  # type: ignore[misc]
        def __post_init__(self) -> None:
            object.__setattr__(self, "key_size", head_dim)
            super().__post_init__()

    _transformer.VisionBlock = VisionBlock


def _tokenizer_of(checkpoint: Path, config: Mapping[str, Any]) -> Any:
    """gemma's tokenizer on this checkpoint's vocabulary.

    Ids of special tokens, and of what it puts around pictures, are constants in gemma's code. Two newlines are one id
    of the published vocabulary; where there is none, one newline stands for them.
    """
    described = json.loads((checkpoint / "tokenizer.json").read_text())
    vocabulary = described["model"]["vocab"]
    own = {name: int(member) for name, member in _tokenizer.Gemma4Tokenizer.special_tokens.__members__.items()}
    own |= {
        "IMAGE_PLACEHOLDER": config["image_token_id"],
        "START_OF_IMAGE": config["boi_token_id"],
        "END_OF_IMAGE": config["eoi_token_id"],
    }
    _tokenizer.Gemma4Tokenizer.special_tokens = _tokenizer.SpecialTokens("SpecialTokens", own)
    _token_utils._DOUBLE_NEW_LINE_TOKEN = vocabulary.get("\n\n", vocabulary["<0x0A>"])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "vocabulary.model"
        path.write_bytes(sentencepiece_model(described))
        tokenizer = _tokenizer.Gemma4Tokenizer(path=str(path))
        assert tokenizer.vocab_size == len(vocabulary)  # it reads the file when it is first asked
    return tokenizer
