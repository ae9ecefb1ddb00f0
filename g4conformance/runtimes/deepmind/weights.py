"""gemma's parameter tree made of a checkpoint's weights under their Hugging Face names.

A linear weight there is [out, in]. Here every projection is an einsum whose axes are named: heads are an axis of their
own, K and V lie in one array, and so do gate and up. Nothing is computed; values are only moved.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Weights = Mapping[str, Array]
Tree = dict[str, Any]

_NORMS = {
    "pre_attention_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "pre_ffw_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_CLIPPED = {"min": np.min, "max": np.max}


def parameter_tree(weights: Weights) -> Tree:
    """The parameters of a `Gemma4_E2B`, or of any dense one with its features, in the dtype of `weights`."""
    text = _under(weights, "model.language_model.")
    tree = {"embedder": _embedder(text), "final_norm": _scale(text, "norm")}
    for i in range(_layers(text)):
        tree[f"layer_{i}"] = _block(_under(text, f"layers.{i}."))
    if vision := _under(weights, "model.vision_tower."):
        projection = weights["model.embed_vision.embedding_projection.weight"]
        tree["embedder"]["mm_input_projection"] = {"w": projection.T}
        tree["vision_encoder"] = _vision_encoder(vision)
    return tree


def _embedder(text: Weights) -> Tree:
    tree: Tree = {"input_embedding": text["embed_tokens.weight"]}
    if "embed_tokens_per_layer.weight" in text:
        table, layers = text["embed_tokens_per_layer.weight"], _layers(text)
        projection = text["per_layer_model_projection.weight"]
        tree["per_layer_embeddings"] = table.reshape(len(table), layers, -1)
        tree["per_layer_model_projection"] = {"w": projection.T.reshape(projection.shape[1], layers, -1)}
        tree["per_layer_projection_norm"] = _scale(text, "per_layer_projection_norm")
    return tree


def _block(layer: Weights) -> Tree:
    """One decoder layer. The published layout has K and V weights in layers that reuse others' too, as gemma has."""
    gate, up, down = (layer[f"mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
    tree: Tree = {name: _scale(layer, of) for name, of in _NORMS.items()}
    tree |= {"attn": _attention(layer), "skip_scale": layer["layer_scalar"]}
    tree["mlp"] = {"gating_einsum": np.stack([gate, up]), "linear": down.T}
    if "per_layer_input_gate.weight" in layer:
        tree["per_layer_input_gate"] = {"w": layer["per_layer_input_gate.weight"].T}
        tree["per_layer_projection"] = {"w": layer["per_layer_projection.weight"].T}
        tree["post_per_layer_input_norm"] = _scale(layer, "post_per_layer_input_norm")
    return tree


def _attention(layer: Weights) -> Tree:
    own = _under(layer, "self_attn.")
    head_dim = len(own["q_norm.weight"])
    key, value = (split_heads(own[f"{name}_proj.weight"], head_dim) for name in ("k", "v"))
    return {
        "q_einsum": {"w": split_heads(own["q_proj.weight"], head_dim)},
        "kv_einsum": {"w": np.stack([key, value])},
        "attn_vec_einsum": {"w": join_heads(own["o_proj.weight"], head_dim)},
        "query_norm": _scale(own, "q_norm"),
        "key_norm": _scale(own, "k_norm"),
    }


def split_heads(weight: Array, head_dim: int) -> Array:
    """[heads * head_dim, features], as a query's, to [heads, features, head_dim]."""
    return weight.reshape(-1, head_dim, weight.shape[1]).swapaxes(1, 2)


def join_heads(weight: Array, head_dim: int) -> Array:
    """[features, heads * head_dim], as an output's, to [heads, head_dim, features]."""
    return weight.T.reshape(-1, head_dim, weight.shape[0])


# --- the vision tower -------------------------------------------------------------------------------------------------


def _vision_encoder(vision: Weights) -> Tree:
    """Its layers are scanned: each parameter has all of them, along its first axis."""
    layers = [_vision_block(_under(vision, f"encoder.layers.{i}.")) for i in range(_layers(vision))]
    table = vision["patch_embedder.position_embedding_table"]  # [2, positions, features]
    entry = {"input_projection": {"w": vision["patch_embedder.input_proj.weight"].T}, "pos_emb": table.swapaxes(0, 1)}
    return {"entry": entry, "transformer": {"stacked_layers": {"block": _stacked(layers)}}}


def _vision_block(layer: Weights) -> Tree:
    own, mlp = _under(layer, "self_attn."), _under(layer, "mlp.")
    head_dim = len(own["q_norm.weight"])
    q, k, v = (split_heads(_linear(own, f"{name}_proj"), head_dim) for name in "qkv")
    attention = {
        "q_einsum": {"w": q, **bounds(own, "q_proj")},
        "kv_einsum": {"w": np.stack([k, v]), **bounds(own, "k_proj", "v_proj")},
        "attn_vec_einsum": {"w": join_heads(_linear(own, "o_proj"), head_dim), **bounds(own, "o_proj")},
        "query_norm": _scale(own, "q_norm"),
        "key_norm": _scale(own, "k_norm"),
    }
    gate_and_up = np.stack([_linear(mlp, "gate_proj"), _linear(mlp, "up_proj")])
    feed_forward = {
        "gating_einsum": {"w": gate_and_up, **bounds(mlp, "gate_proj", "up_proj")},
        "linear": {"w": _linear(mlp, "down_proj").T, **bounds(mlp, "down_proj")},
    }
    return {name: _scale(layer, of) for name, of in _NORMS.items()} | {"attn": attention, "mlp": feed_forward}


def bounds(weights: Weights, *projections: str) -> Tree:
    """The bounds of one clipped einsum: where it stands for two projections, the wider of theirs."""
    return {
        f"clip_{side}_{end}": widest(np.stack([weights[f"{name}.{side}_{end}"] for name in projections]))
        for side in ("input", "output")
        for end, widest in _CLIPPED.items()
        if f"{projections[0]}.{side}_{end}" in weights
    }


def output_bounds(weights: Weights) -> dict[str, tuple[Array, Array]]:
    """The least and greatest output, each [layers, 2], of the two projections that one clipped einsum stands for."""
    vision = _under(weights, "model.vision_tower.encoder.")
    pairs = {"kv_einsum": ("self_attn.k_proj", "self_attn.v_proj"), "gating_einsum": ("mlp.gate_proj", "mlp.up_proj")}

    def outputs(names: tuple[str, str], end: str) -> Array:
        return np.array([[vision[f"layers.{i}.{name}.output_{end}"] for name in names] for i in range(_layers(vision))])

    return {einsum: (outputs(names, "min"), outputs(names, "max")) for einsum, names in pairs.items()}


def _linear(weights: Weights, name: str) -> Array:
    """Of a clipped linear op, or of a plain one."""
    return weights[f"{name}.linear.weight" if f"{name}.linear.weight" in weights else f"{name}.weight"]


def _stacked(layers: list[Tree]) -> Tree:
    first = layers[0]
    return {
        name: _stacked([layer[name] for layer in layers])
        if isinstance(first[name], dict)
        else np.stack([layer[name] for layer in layers])
        for name in first
    }


# --- names ------------------------------------------------------------------------------------------------------------


def _under(weights: Weights, prefix: str) -> dict[str, Array]:
    return {name.removeprefix(prefix): array for name, array in weights.items() if name.startswith(prefix)}


def _scale(weights: Weights, name: str) -> Tree:
    return {"scale": weights[f"{name}.weight"]}


def _layers(weights: Weights) -> int:
    return 1 + max(int(found[1]) for name in weights if (found := re.search(r"(?:^|\.)layers\.(\d+)\.", name)))
