"""The foreign side of google-deepmind's gemma, as far as it needs no gemma: weights, names and the vocabulary."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.torch import load_file

from g4conformance.checkpoints.published import write_published
from g4conformance.runtimes.deepmind.names import MADE_OF_PROMPT, PLACEHOLDER, Recorder
from g4conformance.runtimes.deepmind.vocabulary import Kind, pieces
from g4conformance.runtimes.deepmind.weights import bounds, join_heads, output_bounds, parameter_tree, split_heads
from g4conformance.vectors.statements import statement_of

pytestmark = pytest.mark.unit

Array = NDArray[Any]
_LAYER = "model.language_model.layers.{}."
_VISION = "model.vision_tower.encoder.layers.{}."


@pytest.fixture(scope="module")
def weights(bundled_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Array]:
    """The bundled checkpoint's, in the published layout."""
    folder = tmp_path_factory.mktemp("published") / "checkpoint"
    write_published(bundled_folder, folder)
    return {name: tensor.float().numpy() for name, tensor in load_file(folder / "model.safetensors").items()}


@pytest.fixture(scope="module")
def tree(weights: Mapping[str, Array]) -> dict[str, Any]:
    return parameter_tree(weights)


def rows(width: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal((5, width)).astype(np.float32)


# --- weights ----------------------------------------------------------------------------------------------------------


def leaves(tree: Mapping[str, Any]) -> list[Array]:
    return [leaf for value in tree.values() for leaf in (leaves(value) if isinstance(value, dict) else [value])]


def test_every_weight_goes_somewhere_once(weights: Mapping[str, Array], tree: Mapping[str, Any]) -> None:
    clips = {name for name in weights if name.endswith(("_min", "_max"))}
    assert sum(leaf.size for leaf in leaves(tree) if leaf.shape != (3,)) == sum(
        array.size for name, array in weights.items() if name not in clips
    )


@pytest.mark.parametrize("layer", [0, 2, 5])
def test_einsums_of_a_decoder_layer_are_its_linear_ops(
    weights: Mapping[str, Array], tree: Mapping[str, Any], layer: int
) -> None:
    own, prefix = tree[f"layer_{layer}"], _LAYER.format(layer)
    q, k, v, o = (weights[f"{prefix}self_attn.{name}_proj.weight"] for name in "qkvo")
    attention, x = own["attn"], rows(q.shape[1])
    queries = np.einsum("td,ndh->tnh", x, attention["q_einsum"]["w"])
    keys_and_values = np.einsum("td,ckdh->ctkh", x, attention["kv_einsum"]["w"])
    np.testing.assert_allclose(queries.reshape(5, -1), x @ q.T, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(keys_and_values[0].reshape(5, -1), x @ k.T, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(keys_and_values[1].reshape(5, -1), x @ v.T, rtol=1e-4, atol=1e-4)
    out = np.einsum("tnh,nhd->td", queries, attention["attn_vec_einsum"]["w"])
    np.testing.assert_allclose(out, x @ q.T @ o.T, rtol=1e-3, atol=1e-3)
    gate_and_up = np.einsum("td,cfd->tcf", x, own["mlp"]["gating_einsum"])
    for i, name in enumerate(("gate", "up")):
        weight = weights[f"{prefix}mlp.{name}_proj.weight"]
        np.testing.assert_allclose(gate_and_up[:, i], x @ weight.T, rtol=1e-4, atol=1e-4)
    down = weights[f"{prefix}mlp.down_proj.weight"]
    np.testing.assert_array_equal(own["mlp"]["linear"], down.T)


def test_per_layer_inputs_are_projected_to_their_layer(weights: Mapping[str, Array], tree: Mapping[str, Any]) -> None:
    embedder = tree["embedder"]
    weight = weights["model.language_model.per_layer_model_projection.weight"]
    x = rows(weight.shape[1])
    projected = np.einsum("td,dnp->tnp", x, embedder["per_layer_model_projection"]["w"])
    np.testing.assert_allclose(projected.reshape(5, -1), x @ weight.T, rtol=1e-4, atol=1e-4)
    table = weights["model.language_model.embed_tokens_per_layer.weight"]
    np.testing.assert_array_equal(embedder["per_layer_embeddings"][7, 1], table[7, 12:24])


def test_vision_layers_are_stacked(weights: Mapping[str, Array], tree: Mapping[str, Any]) -> None:
    block = tree["vision_encoder"]["transformer"]["stacked_layers"]["block"]
    for i in range(3):
        weight = weights[_VISION.format(i) + "self_attn.v_proj.linear.weight"]
        x = rows(weight.shape[1])
        values = np.einsum("td,kdh->tkh", x, block["attn"]["kv_einsum"]["w"][i, 1])
        np.testing.assert_allclose(values.reshape(5, -1), x @ weight.T, rtol=1e-4, atol=1e-4)
        norm = weights[_VISION.format(i) + "post_feedforward_layernorm.weight"]
        np.testing.assert_array_equal(block["post_ffw_norm"]["scale"][i], norm)


def test_heads_are_split_and_joined() -> None:
    weight = np.arange(24.0).reshape(6, 4)  # two heads of three, four features
    assert split_heads(weight, 3).shape == (2, 4, 3)
    np.testing.assert_array_equal(split_heads(weight, 3)[1, :, 0], weight[3])
    np.testing.assert_array_equal(join_heads(weight.T, 3)[1, 0], weight[3])


def test_an_einsum_for_two_projections_has_the_wider_bounds() -> None:
    given = {"k.input_min": np.array(-1.0), "k.input_max": np.array(2.0)}
    given |= {"v.input_min": np.array(-3.0), "v.input_max": np.array(1.0)}
    assert bounds(given, "k", "v") == {"clip_input_min": -3.0, "clip_input_max": 2.0}
    assert bounds({}, "k", "v") == {}


def test_output_bounds_of_two_projections_are_told_apart(weights: Mapping[str, Array]) -> None:
    low, high = output_bounds(weights)["kv_einsum"]
    assert low.shape == high.shape == (3, 2)
    assert high[1, 1] == weights[_VISION.format(1) + "self_attn.v_proj.output_max"]
    assert (low < high).all()


# --- the vocabulary ---------------------------------------------------------------------------------------------------


def test_pieces_keep_their_ids_and_merges_their_order(bundled_folder: Path) -> None:
    described = json.loads((bundled_folder / "tokenizer.json").read_text())
    found = pieces(described)
    assert [piece.text for piece in found] == sorted(described["model"]["vocab"], key=described["model"]["vocab"].get)
    by_text = {piece.text: piece for piece in found}
    first, second = ("".join(pair) for pair in described["model"]["merges"][:2])
    assert by_text[first].score > by_text[second].score > by_text["<0x41>"].score
    kinds = {text: by_text[text].kind for text in ("<unk>", "<bos>", "<|turn>", "<|image|>", "<0x0A>", first)}
    assert list(kinds.values()) == [
        Kind.UNKNOWN,
        Kind.CONTROL,
        Kind.USER_DEFINED,
        Kind.USER_DEFINED,
        Kind.BYTE,
        Kind.NORMAL,
    ]


# --- names ------------------------------------------------------------------------------------------------------------

FACTS = {
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "storing_layers": [0, 1],
    "image_token_id": 9,
    "pad_token_id": 0,
}


@pytest.fixture
def recorder() -> Recorder:
    recorder = Recorder(FACTS)
    recorder.begin(None)
    return recorder


def test_ids_of_soft_tokens_are_the_suite_s(recorder: Recorder) -> None:
    recorder("inputs", {"tokens": np.array([[2, PLACEHOLDER, 5, 0]]), "positions": np.arange(4)[None]})
    found = recorder.tensors
    assert found["input_ids"].tolist() == [[2, 9, 5, 0]]
    assert found["llm_input_ids"].tolist() == [[2, 0, 5, 0]]
    assert found["attention_mask"].tolist() == [[True, True, True, False]]
    assert found["valid_length"].tolist() == [3]
    assert set(found) == set(MADE_OF_PROMPT)


def test_of_a_buffer_the_rows_of_this_pass_are_new(recorder: Recorder) -> None:
    buffer = np.arange(4.0)[None, :, None, None] * np.ones((1, 4, 2, 6))
    block = {"key": buffer, "value": -buffer, "end_index": np.array([3])}
    recorder.begin(0)
    recorder("block", {"hidden": np.zeros((1, 1, 8)), **block}, layer=1)
    recorder("block", {"hidden": np.zeros((1, 1, 8)), **block}, layer=2)
    found = recorder.tensors
    assert found["decode/0/layer/1/key"].shape == (1, 2, 1, 6)
    assert found["decode/0/layer/1/key"].max() == found["decode/0/layer/1/key"].min() == 2.0
    assert found["decode/0/cache/1/value"].shape == (1, 2, 4, 6)
    assert "decode/0/layer/2/hidden" in found
    assert "decode/0/layer/2/key" not in found  # it stores nothing of its own


def test_the_prompt_s_pass_shows_no_buffer_but_the_whole_one(recorder: Recorder) -> None:
    part, whole = np.zeros((1, 3, 2, 6)), np.zeros((1, 5, 2, 6))
    recorder("block", {"hidden": np.zeros((1, 3, 8)), "key": part, "value": part, "end_index": np.array([3])}, layer=0)
    assert "prefill/cache/0/key" not in recorder.tensors
    recorder("cache", {"key": whole, "value": whole}, layer=0)
    recorder("cache", {"key": whole, "value": whole}, layer=2)
    assert recorder.tensors["prefill/cache/0/key"].shape == (1, 2, 5, 6)
    assert "prefill/cache/2/key" not in recorder.tensors


def test_one_layer_of_a_type_shows_its_mask_and_table(recorder: Recorder) -> None:
    for layer in range(3):
        recorder("mask", {"mask": np.full((1, 2, 2), layer)}, layer=layer)
        recorder("rope", {"rotated": np.array([[[1.0, 2.0, 3.0, 4.0]]]) + layer}, layer=layer)
    found = recorder.tensors
    assert found["mask/sliding_attention"].max() == 0
    assert found["mask/full_attention"].min() == 1
    assert found["rope/sliding_attention/cos"].tolist() == [[[1.0, 2.0, 1.0, 2.0]]]
    assert found["rope/full_attention/sin"].tolist() == [[[4.0, 5.0, 4.0, 5.0]]]


def test_vision_layers_are_told_apart_by_their_order(recorder: Recorder) -> None:
    for layer in range(2):
        recorder("vision block", {"hidden": np.full((1, 3, 4), layer)})
    assert [recorder.tensors[f"vision/layer/{i}/hidden"].max() for i in range(2)] == [0, 1]


def test_nothing_between_passes_is_kept(recorder: Recorder) -> None:
    recorder.end()
    recorder("logits", {"logits": np.zeros((1, 4))})
    assert recorder.tensors == {}


def test_every_name_is_a_trace_name(recorder: Recorder) -> None:
    tensors = {"embeds": np.zeros((1, 2, 4))}
    hidden = np.zeros((1, 2, 4))
    block = {"key": np.zeros((1, 2, 1, 4)), "value": np.zeros((1, 2, 1, 4)), "end_index": np.array([2])}
    for step in (None, 0):
        recorder.begin(step)
        recorder("inputs", {"tokens": np.array([[2, 3]]), "positions": np.array([[0, 1]]), "per_layer_inputs": hidden})
        for event in ("text embeds", "visual embeds", "fused embeds"):
            recorder(event, tensors)
        for event in ("patches", "vision block"):
            recorder(event, {"hidden": hidden})
        recorder("soft tokens", {"tokens": hidden, "mask": np.ones((1, 2), dtype=bool)})
        recorder("block", {"hidden": hidden, **block}, layer=0)
        recorder("cache", {"key": block["key"], "value": block["value"]}, layer=0)
        recorder("mask", {"mask": np.ones((1, 2, 2), dtype=bool)}, layer=0)
        recorder("rope", {"rotated": hidden}, layer=0)
        recorder("logits", {"logits": np.zeros((1, 1, 7))})
    assert all(statement_of(name) for name in recorder.tensors)
    assert recorder.tensors["prefill/logits"].shape == (1, 7)


# --- the command ------------------------------------------------------------------------------------------------------


def test_without_gemma_the_command_says_what_is_missing(tmp_path: Path) -> None:
    """It finds g4conformance by itself: nothing but gemma's own environment is needed."""
    folder = Path(__file__).parents[2] / "g4conformance" / "runtimes" / "deepmind"
    ran = subprocess.run([sys.executable, "-S", str(folder), "checkpoint", "request"], capture_output=True, text=True)
    assert ran.returncode != 0
    assert "No module named" in ran.stderr.splitlines()[-1]
    assert "g4conformance" not in ran.stderr.splitlines()[-1]
