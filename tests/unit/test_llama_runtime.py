"""The foreign side of llama.cpp, as far as it needs no llama.cpp: ggml's memory, what is heard, names and layouts."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from g4conformance.runtimes.llama.ggml import Tensor, overwrite, values_of
from g4conformance.runtimes.llama.instead import Interventions, gelu
from g4conformance.runtimes.llama.listening import Heard, Listener
from g4conformance.runtimes.llama.names import (
    inputs_trace,
    joined,
    known_keys,
    pass_trace,
    prefill_trace,
    step_trace,
    wanted,
)
from g4conformance.runtimes.llama.vision import patches_of, pixels_of, vision_trace
from g4conformance.vectors.statements import statement_of

pytestmark = pytest.mark.unit

Array = NDArray[Any]
KINDS = ("sliding_attention", "full_attention", "sliding_attention")
HEADS, KV, HEAD_DIM, HIDDEN, WIDTH, ROOM = 3, 2, 4, 6, 5, 16


def tensor(name: str, array: Array, sources: Sequence[Tensor] = ()) -> Tensor:
    """One of ggml's, over the memory of `array`."""
    kinds = {"float32": 0, "float16": 1, "int32": 26, "int8": 24}
    shape = (1,) * (4 - array.ndim) + array.shape
    strides = (0,) * (4 - array.ndim) + array.strides
    made = Tensor(type=kinds[array.dtype.name], data=array.ctypes.data, name=name.encode())
    made.ne[:], made.nb[:] = shape[::-1], strides[::-1]
    made.src[: len(sources)] = [ctypes.addressof(source) for source in sources]
    made.kept = array, sources  # for as long as there is this one
    return made


def numbers(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


# --- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_a_tensor_is_read_as_it_lies(dtype: Any) -> None:
    array = numbers(2, 3, 4).astype(dtype)
    permuted = array.transpose(1, 0, 2)[:, :, 1:3]
    found = values_of(tensor("a", permuted))
    assert found.dtype == np.float32
    assert np.array_equal(found[0], permuted.astype(np.float32))


def test_what_is_read_is_a_copy_and_what_is_written_is_not() -> None:
    array = numbers(2, 3)
    made = tensor("a", array)
    found = values_of(made)
    overwrite(made, np.zeros((1, 1, 2, 3)))
    assert found.any()
    assert not array.any()


def test_a_type_that_numpy_lacks_is_named() -> None:
    with pytest.raises(ValueError, match="a is of ggml's type 24"):
        values_of(tensor("a", np.zeros(2, np.int8)))


# --- listening --------------------------------------------------------------------------------------------------------


def compute(listener: Listener, made: Tensor) -> bool:
    """What ggml's scheduler does with one tensor of a graph; whether it was shown."""
    asked = listener.hear(ctypes.addressof(made), True, None)
    if asked:
        assert listener.hear(ctypes.addressof(made), False, None)
    return asked


def a_listener(wanted: dict[str, tuple[int, ...]]) -> Listener:
    return Listener("embd", wanted.get, Interventions([]))


def test_only_what_is_wanted_is_heard_and_only_while_listening() -> None:
    listener, array = a_listener({"a": (0,)}), numbers(2)
    made = tensor("a", array, [tensor("b", array)])
    assert not compute(listener, made)
    with listener.listening() as passes:
        assert compute(listener, made)
        assert not compute(listener, tensor("b", array))
        listener.stop()
        assert not compute(listener, made)
    assert [sorted(heard) for heard in passes] == [["a", "a:0"]]


def test_a_pass_begins_with_its_first_tensor_or_where_one_comes_again() -> None:
    listener, array = a_listener({"embd": (), "a": (), "b": ()}), numbers(2)
    with listener.listening() as passes:
        for name in ("embd", "a", "a", "b", "embd", "a"):  # text, a picture's rows, text
            compute(listener, tensor(name, array))
    assert [sorted(heard) for heard in passes] == [["a", "embd"], ["a", "b"], ["a", "embd"]]


def test_what_goes_wrong_in_the_callback_is_raised_where_one_listens() -> None:
    listener, bytes_ = a_listener({"a": ()}), np.zeros(2, np.int8)
    made = tensor("a", bytes_)
    with pytest.raises(AssertionError), listener.listening():
        compute(listener, made)  # llama.cpp is told to stop
    with pytest.raises(ValueError, match="ggml's type"), listener.listening():
        pass


def test_masks_are_changed_before_they_are_used() -> None:
    mask, scores, positions = np.zeros((1, 1, 2, 4), np.float32), numbers(2), np.array([1, 2], np.int32)
    causal = Interventions(["causal"])
    causal.prepare(tensor("Qcur_pos-0", scores, [tensor("q", scores), tensor("p", positions)]))
    entering = tensor("mask", mask)
    causal.prepare(tensor("kq_soft_max-0", scores, [tensor("kq", scores), entering]))
    assert (mask[0, 0] == 0).tolist() == [[True, True, False, False], [True, True, True, False]]


def test_gelu_is_the_config_s() -> None:
    x = numbers(1000) * 4
    expected = torch.nn.functional.gelu(torch.from_numpy(x), approximate="tanh").numpy()
    assert np.allclose(gelu(x), expected, rtol=0, atol=1e-6)


# --- names ------------------------------------------------------------------------------------------------------------


def heard_of(rows: int, first: int = 0, ids: bool = True, keys: int = ROOM) -> Heard:
    """What llama.cpp tells of a pass over `rows` rows from position `first`; layer 2 shares its K and V."""
    positions = np.arange(first, first + rows)
    before = numbers(1, rows, HEADS, HEAD_DIM)
    cos, sin = np.cos(positions)[:, None, None], np.sin(positions)[:, None, None]
    a, b = np.split(before, 2, axis=-1)
    after = np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(np.float32)
    visible = np.arange(keys)[None] <= positions[:, None]
    heard: Heard = {
        "inp_scaled": numbers(1, 1, rows, HIDDEN),
        "inp_per_layer": numbers(1, rows, len(KINDS), WIDTH),
        "result_output": numbers(1, 1, 1, 7),
    }
    if ids:
        heard["embd:1"] = positions.astype(np.int32)[None, None, None] + 100
        heard["embd"] = numbers(1, 1, rows, HIDDEN)
    for i in range(len(KINDS)):
        heard |= {
            f"l_out-{i}": numbers(1, 1, rows, HIDDEN, seed=i),
            f"Qcur_normed-{i}": before,
            f"Qcur_pos-{i}": after,
            f"Qcur_pos-{i}:1": positions.astype(np.int32)[None, None, None],
            f"kq_soft_max-{i}:1": np.where(visible, 0, -np.inf).astype(np.float32)[None, None],
            f"kq-{i}:0": numbers(1, KV, keys, HEAD_DIM),
            f"kqv-{i}:0": numbers(1, KV, HEAD_DIM, keys),
        }
        if i < 2:
            heard[f"Kcur_pos-{i}"] = numbers(1, rows, KV, HEAD_DIM, seed=i)
            heard[f"Vcur_normed-{i}"] = numbers(1, rows, KV, HEAD_DIM, seed=9 + i)
    return heard


def test_every_tensor_that_is_mapped_is_asked_for() -> None:
    assert all(wanted(name.partition(":")[0]) is not None for name in heard_of(3))
    assert wanted("Qcur_pos-12") == (1,)
    assert wanted("ffn_out-0") is None


def test_names_and_shapes_are_the_contract_s() -> None:
    trace = prefill_trace(joined([pass_trace(heard_of(5), KINDS)]), rows=9, pad=0)
    assert all(statement_of(name) for name in trace)
    shapes = {name: array.shape for name, array in trace.items()}
    assert shapes["text_embeds"] == (1, 5, HIDDEN)
    assert shapes["per_layer_inputs"] == (1, 5, len(KINDS), WIDTH)
    assert shapes["mask/full_attention"] == (1, 5, 5)
    assert shapes["mask_bias/full_attention"] == (1, 1, 5, 5)
    assert shapes["rope/sliding_attention/cos"] == (1, 5, HEAD_DIM)
    assert shapes["prefill/layer/2/hidden"] == (1, 5, HIDDEN)
    assert shapes["prefill/layer/1/key"] == shapes["prefill/cache/1/value"] == (1, KV, 5, HEAD_DIM)
    assert shapes["prefill/logits"] == (1, 7)
    assert "prefill/layer/2/key" not in shapes, "it shares"
    assert trace["llm_input_ids"].tolist() == [[100, 101, 102, 103, 104, 0, 0, 0, 0]]


def test_heads_come_before_rows() -> None:
    heard = heard_of(5)
    trace = pass_trace(heard, KINDS)
    assert np.array_equal(trace["layer/0/key"][0, 1], heard["Kcur_pos-0"][0, :, 1])
    assert np.array_equal(trace["layer/1/value"][0, 1], heard["Vcur_normed-1"][0, :, 1])
    assert np.array_equal(trace["cache/1/value"][0, 1, 2], heard["kqv-1:0"][0, 1, :, 2])


def test_rotary_tables_are_the_angles_by_which_queries_were_turned() -> None:
    trace = pass_trace(heard_of(5, first=3), KINDS)
    angles = np.tile(np.arange(3, 8)[:, None], HEAD_DIM)
    assert np.allclose(trace["rope/full_attention/cos"], np.cos(angles), atol=1e-6)
    assert np.allclose(trace["rope/full_attention/sin"], np.sin(angles), atol=1e-6)


def test_passes_over_pieces_of_a_prompt_are_one() -> None:
    pieces = [pass_trace(heard_of(2, 0, keys=2), KINDS), pass_trace(heard_of(3, 2), KINDS)]
    whole = joined(pieces)
    assert whole["position"].tolist() == [0, 1, 2, 3, 4]
    assert whole["token"].shape == (1, 5)
    assert whole["layer/0/key"].shape == (1, KV, 5, HEAD_DIM)
    assert whole["mask/full_attention"][0].tolist() == np.tri(5, dtype=bool).tolist()
    assert np.isneginf(whole["mask_bias/full_attention"][0, 0, 0, 1:]).all()
    assert np.array_equal(whole["cache/0/key"], pieces[1]["cache/0/key"][:, :, :5])


def test_a_step_knows_its_position_and_the_keys_until_then() -> None:
    trace = step_trace(pass_trace(heard_of(1, first=6), KINDS), step=1)
    assert all(statement_of(name) for name in trace)
    assert trace["decode/1/position"].tolist() == [6]
    assert trace["decode/1/token"].tolist() == [[106]]
    assert trace["decode/1/mask/sliding_attention"].tolist() == [[[True] * 7]]
    assert trace["decode/1/cache/0/key"].shape == (1, KV, 7, HEAD_DIM)


def test_tensors_without_keys_are_left_alone() -> None:
    array = numbers(1, 5, HIDDEN)
    assert known_keys("layer/0/hidden", array, 3) is array


def test_padding_of_ids_is_the_suite_s_and_a_prompt_that_is_too_long_is_told_whole() -> None:
    trace = inputs_trace([2, 7, 9], rows=5, pad=0)
    assert trace["input_ids"].tolist() == [[2, 7, 9, 0, 0]]
    assert trace["attention_mask"].tolist() == [[True, True, True, False, False]]
    assert trace["valid_length"].tolist() == [3]
    assert inputs_trace([2, 7, 9], rows=2, pad=0)["input_ids"].tolist() == [[2, 7, 9]]


# --- vision -----------------------------------------------------------------------------------------------------------


def seen_of(rows: int, columns: int, patch: int = 2) -> Heard:
    patches = rows * columns
    return {
        "inp_raw_scaled": 2 * numbers(1, 3, rows * patch, columns * patch) - 1,
        "pos_embd": numbers(1, 1, patches, HIDDEN),
        "layer_out-0": numbers(1, 1, patches, HIDDEN),
        "pooled": numbers(1, 1, 2, HIDDEN),
        "projected": numbers(1, 1, 2, WIDTH),
    }


def test_a_picture_s_names_are_the_contract_s_and_its_padding_is_not_made_up() -> None:
    trace = vision_trace(seen_of(2, 3), patches=8)
    assert all(statement_of(name) for name in trace)
    assert trace["pixel_values"].shape == (1, 8, 12)
    assert np.allclose(trace["pixel_values"][:, :6], patches_of(numbers(3, 4, 6), 2), atol=1e-6)
    assert not trace["pixel_values"][0, 6:].any()
    assert trace["vision/layer/0/hidden"].shape == (1, 8, HIDDEN)
    assert "vision/patch_embeds" not in trace
    assert "vision/patch_embeds" in vision_trace(seen_of(2, 3), patches=6)
    assert sorted(vision_trace(seen_of(2, 3), patches=5)) == ["vision/soft_tokens", "visual_embeds"]


def test_patches_and_pixels_are_each_other_s_way_back() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (4, 6, 3), np.uint8)
    patches = patches_of(pixels.transpose(2, 0, 1) / np.float32(255), patch=2)
    assert np.array_equal(patches[1, :3] * 255, pixels[0, 2])
    positions = np.array([[x, y] for y in range(2) for x in range(3)] + [[-1, -1]])
    padded = np.concatenate([patches, np.zeros((1, 12))])
    assert np.array_equal(pixels_of(padded, positions), pixels)
