"""mlx-vlm's arrays in the contract's layout, without mlx: the mapping, and a watch over a model that stands for one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from g4conformance import runtimes
from g4conformance.runtimes.mlx.layouts import key_positions, padded, patches_of, tables_of, visible
from g4conformance.runtimes.mlx.watch import Rotated, Watch, spied

pytestmark = pytest.mark.unit


# --- layouts ----------------------------------------------------------------------------------------------------------


def test_patches_are_rows_of_a_picture_cut_up_channels_last() -> None:
    pixels = np.arange(3 * 4 * 6).reshape(1, 3, 4, 6)
    patches, positions = patches_of(pixels, 2)
    assert patches.shape == (1, 6, 12)
    assert positions[0].tolist() == [[0, 0], [1, 0], [2, 0], [0, 1], [1, 1], [2, 1]]
    for patch, (x, y) in zip(patches[0], positions[0], strict=True):
        cut = pixels[0, :, 2 * y : 2 * y + 2, 2 * x : 2 * x + 2]
        assert np.array_equal(patch.reshape(2, 2, 3), cut.transpose(1, 2, 0))


def test_padding_is_a_number_or_a_row() -> None:
    rows = np.ones((1, 2, 3), dtype=np.float32)
    assert padded(rows, 4, 1)[0, 2:].tolist() == [[0.0] * 3] * 2
    assert padded(rows, 4, 1, np.array([1, 2, 3]))[0, 2:].tolist() == [[1.0, 2.0, 3.0]] * 2
    assert padded(rows, 2, 1).tolist() == rows.tolist()
    assert padded(np.array([[True]]), 2, 1, False).dtype == np.bool_


def keys_of(*numbers: int) -> np.ndarray:
    """One key [1, KV = 2, K, D = 1] a number; the heads differ."""
    row = np.array(numbers, dtype=np.float32)
    return np.stack([row, row + 100])[None, :, :, None]


def test_keys_of_a_cache_that_rolled_are_known_by_their_bits() -> None:
    assert key_positions(keys_of(14, 12, 13), keys_of(10, 11, 12, 13, 14)).tolist() == [4, 2, 3]


def test_a_key_that_nobody_wrote_has_no_position() -> None:
    assert key_positions(keys_of(0, 11), keys_of(10, 11)).tolist() == [-1, 1]


def test_no_mask_attends_every_key() -> None:
    assert visible(None, np.array([3, 1, 2]), 1, 5)[0].tolist() == [[False, True, True, True, False]]


def test_a_causal_mask_ends_with_the_last_key() -> None:
    found = visible("causal", np.arange(3), 2, 3)
    assert found[0].tolist() == [[True, True, False], [True, True, True]]


def test_a_boolean_mask_is_over_the_cache_s_keys() -> None:
    mask = np.array([[[[True, False, True]]]])
    assert visible(mask, np.array([2, 0, 1]), 1, 3)[0].tolist() == [[False, True, True]]
    assert visible(mask[0, 0, 0], np.array([2, 0, 1]), 1, 3)[0].tolist() == [[False, True, True]]


def test_what_no_mask_can_show_is_an_error() -> None:
    with pytest.raises(ValueError, match="a key that was never written"):
        visible(None, np.array([0, -1]), 1, 2)
    with pytest.raises(ValueError, match="expected a boolean mask, found float32"):
        visible(np.zeros((1, 2), dtype=np.float32), np.arange(2), 1, 2)


def test_a_hidden_key_may_be_unknown() -> None:
    assert visible(np.array([[True, False]]), np.array([0, -1]), 1, 2)[0].tolist() == [[True, False]]


def test_a_rotated_unit_vector_is_the_tables() -> None:
    angle = np.array([[0.5, 2.0]])
    cos, sin = tables_of(np.concatenate([np.cos(angle), np.sin(angle)], axis=-1)[None, None])
    assert np.array_equal(cos[0], np.cos([[0.5, 2.0, 0.5, 2.0]]))
    assert np.array_equal(sin[0], np.sin([[0.5, 2.0, 0.5, 2.0]]))


# --- the watch --------------------------------------------------------------------------------------------------------


def test_spies_are_gone_afterwards_whatever_happens() -> None:
    class Doubling:
        def __call__(self, x: int) -> int:
            return 2 * x

    def used() -> None:
        with spied([(Doubling, "__call__", lambda y, _, x: seen.append((x, y)))]):
            assert Doubling()(3) == 6
            raise RuntimeError

    original, seen = vars(Doubling)["__call__"], []
    with pytest.raises(RuntimeError):
        used()
    assert seen == [(3, 6)]
    assert vars(Doubling)["__call__"] is original


class Cache:
    """Holds the last `size` keys in a ring, and hands out its own array, to which it assigns."""

    def __init__(self, size: int) -> None:
        self.offset, self.keys, self.values = 0, np.zeros((1, 1, size, 2)), np.zeros((1, 1, size, 2))

    def update_and_fetch(self, key: np.ndarray, value: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        for row in range(key.shape[2]):
            slot = (self.offset + row) % self.keys.shape[2]
            self.keys[:, :, slot], self.values[:, :, slot] = key[:, :, row], value[:, :, row]
        self.offset += key.shape[2]
        return self.keys[:, :, : self.offset], self.values[:, :, : self.offset]


class Rope:
    def __call__(self, x: np.ndarray, offset: int) -> np.ndarray:
        return x + np.arange(offset, offset + x.shape[2])[:, None]


class Layer:
    def __init__(self, layer_idx: int) -> None:
        self.layer_idx, self.layer_type = layer_idx, "sliding_attention"
        self.self_attn = Attention()

    def __call__(self, x: np.ndarray, cache: Cache) -> tuple[np.ndarray]:
        return (x + self.self_attn(x, cache),)


class Attention:
    n_kv_heads, head_dim = 1, 2

    def __init__(self) -> None:
        self.rope = Rope()

    def __call__(self, x: np.ndarray, cache: Cache) -> np.ndarray:
        key = self.rope(x[:, None], cache.offset)
        keys, values = cache.update_and_fetch(key, x[:, None])
        mask = None if x.shape[1] == 1 else "causal"
        return scaled_dot_product_attention(key, keys, values, cache=cache, mask=mask)


def scaled_dot_product_attention(q: Any, k: Any, v: Any, *, cache: Cache, mask: Any) -> np.ndarray:
    return np.zeros_like(q[:, 0])


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Cache]:
    """A model of one layer, and its cache of three keys; numpy copies nothing with `[...]`, so copies are made here."""
    layer, cache = Layer(0), Cache(3)
    text = SimpleNamespace(layers=[layer], embed_tokens=None)
    tower = SimpleNamespace(encoder=SimpleNamespace(layers=[]), patch_size=2)
    return SimpleNamespace(language_model=SimpleNamespace(model=text), vision_tower=tower), cache


def rows(*numbers: float) -> np.ndarray:
    return np.repeat(np.array(numbers, dtype=np.float64)[None, :, None], 2, axis=-1)


def test_passes_up_to_the_first_token_are_prefill_and_masks_are_over_positions(watched: tuple[Any, Cache]) -> None:
    model, cache = watched
    layer = model.language_model.model.layers[0]
    watch = Watch(model, [cache], np.array)
    points = [
        (Layer, "__call__", watch._on_layer),
        (Rope, "__call__", watch._on_rope),
        (Cache, "update_and_fetch", watch._on_key_value),
        (
            sys.modules[__name__],
            "scaled_dot_product_attention",
            lambda found, q, k, v, **how: watch._on_attention(found, q, k.copy(), v, **how),
        ),
    ]
    with spied(points):
        layer(rows(1, 2), cache)
        layer(rows(3), cache)
        watch.next_token()
        layer(rows(4), cache)
    found = watch.tensors(unit_rotated)
    assert found["prefill/layer/0/hidden"][0, :, 0].tolist() == [1, 2, 3]
    assert found["prefill/layer/0/key"][0, 0, :, 0].tolist() == [1, 3, 5]
    assert found["prefill/layer/0/value"][0, 0, :, 0].tolist() == [1, 2, 3]
    assert found["mask/sliding_attention"][0].astype(int).tolist() == [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
    assert found["decode/0/text_embeds"][0, :, 0].tolist() == [4]
    assert found["decode/0/mask/sliding_attention"][0].astype(int).tolist() == [[0, 1, 1, 1]]
    assert found["decode/0/position"].tolist() == [3]
    assert found["rope/sliding_attention/cos"].shape == (1, 3, 2)
    assert {name for name in found if "text_embeds" in name} == {"decode/0/text_embeds"}


def unit_rotated(rope: Rope, head_dim: int, how: Rotated) -> np.ndarray:
    return rope(np.zeros((1, 1, how.rows, head_dim)), how.offset)


def test_pictures_are_seen_as_they_enter_the_tower(watched: tuple[Any, Cache]) -> None:
    model, cache = watched
    whole, given = Watch(model, [cache], np.array), Watch(model, [cache], np.array)
    pixels = np.arange(3 * 4 * 4, dtype=np.float32).reshape(1, 3, 4, 4)
    patches, positions = patches_of(pixels, 2)
    whole._on_soft_tokens(np.ones((1, 1, 2)), None, pixels)
    given._on_soft_tokens(np.ones((1, 1, 2)), None, patches, positions)
    for watch in (whole, given):
        found = watch.tensors(unit_rotated)
        assert np.array_equal(found["pixel_values"], patches)
        assert np.array_equal(found["image_position_ids"], positions)
        assert found["vision/soft_tokens"].shape == (1, 2)


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_side_says_what_it_lacks_and_imports_nothing_of_ours_that_it_could_not_have() -> None:
    """Without mlx-vlm it ends with the name of the package, and before torch was asked for."""
    folder = Path(runtimes.__path__[0]) / "mlx"
    lines = f"import runpy, sys; sys.modules['torch'] = None; runpy.run_path({str(folder)!r}, run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", lines, "checkpoint", "folder"], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.strip().splitlines()[-1] == "ModuleNotFoundError: No module named 'mlx'"
