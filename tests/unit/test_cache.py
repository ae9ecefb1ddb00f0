"""The static cache: its shapes come from the config alone, and only the CPU side writes it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import Gemma4TextConfig

from g4conformance.checkpoints.checkpoint import Checkpoint
from g4conformance.runtime.cache import LayerSpec, SlotCache, StaticCache, allocate_cache, layer_specs

pytestmark = pytest.mark.unit

S, F = "sliding_attention", "full_attention"


def config(layer_types: str, **overrides: Any) -> Gemma4TextConfig:
    """A small text config; `layer_types` is a word of S and F."""
    sizes = {
        "num_hidden_layers": len(layer_types),
        "layer_types": [{"S": S, "F": F}[letter] for letter in layer_types],
        "hidden_size": 12,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "head_dim": 4,
        "global_head_dim": 10,
        "vocab_size": 16,
    }
    return Gemma4TextConfig(**{**sizes, **overrides})


def shapes(text_config: Gemma4TextConfig, batch: int = 1, max_seq: int = 7) -> dict[int, tuple[int, ...]]:
    buffers = allocate_cache(layer_specs(text_config), batch, max_seq, torch.float32)
    assert all(key.shape == value.shape for key, value in buffers.values())
    return {layer: tuple(key.shape) for layer, (key, _) in buffers.items()}


# --- which layer stores what ----------------------------------------------------------------------------------------


def test_specs_of_a_mixed_model() -> None:
    assert layer_specs(config("SSF")) == (
        LayerSpec(0, S, head_dim=4, num_key_value_heads=3, kv_source=0),
        LayerSpec(1, S, head_dim=4, num_key_value_heads=3, kv_source=1),
        LayerSpec(2, F, head_dim=10, num_key_value_heads=3, kv_source=2),
    )


@pytest.mark.parametrize(
    ("text_config", "expected"),
    [
        pytest.param(config("FF"), {0: (1, 3, 7, 10), 1: (1, 3, 7, 10)}, id="all full"),
        pytest.param(config("SFS" + "F"), {0: (1, 3, 7, 4), 1: (1, 3, 7, 10), 2: (1, 3, 7, 4), 3: (1, 3, 7, 10)},
                     id="mixed"),
        pytest.param(config("SF", global_head_dim=4), {0: (1, 3, 7, 4), 1: (1, 3, 7, 4)}, id="one head dim"),
        pytest.param(
            config("SF", num_global_key_value_heads=2, attention_k_eq_v=True),
            {0: (1, 3, 7, 4), 1: (1, 2, 7, 10)},
            id="other KV heads on full layers",
        ),
        pytest.param(
            config("SF", num_global_key_value_heads=2, attention_k_eq_v=False),
            {0: (1, 3, 7, 4), 1: (1, 3, 7, 10)},
            id="other KV heads need attention_k_eq_v",
        ),
        pytest.param(
            config("SFSF", num_kv_shared_layers=2), {0: (1, 3, 7, 4), 1: (1, 3, 7, 10)}, id="half of the layers share"
        ),
    ],
)  # fmt: skip
def test_buffers_exist_for_storing_layers_only(
    text_config: Gemma4TextConfig, expected: dict[int, tuple[int, ...]]
) -> None:
    assert shapes(text_config) == expected


def test_all_sliding_layers() -> None:
    """Hugging Face makes the last layer full; a config that says otherwise must still be served."""
    text_config = config("SSF")
    text_config.layer_types = [S, S, S]
    text_config.per_layer_config = {}
    assert shapes(text_config) == dict.fromkeys(range(3), (1, 3, 7, 4))


@pytest.mark.parametrize(
    ("layer_types", "shared", "sources"),
    [
        ("SSFSF", 0, [0, 1, 2, 3, 4]),
        ("SSFSF", 1, [0, 1, 2, 3, 2]),
        ("SSFSF", 2, [0, 1, 2, 1, 2]),
        ("SFSFSSF", 3, [0, 1, 2, 3, 2, 2, 3]),
        ("FSFSF", 2, [0, 1, 2, 1, 2]),
    ],
)
def test_donors_are_the_last_of_their_type_before_sharing(layer_types: str, shared: int, sources: list[int]) -> None:
    specs = layer_specs(config(layer_types, num_kv_shared_layers=shared))
    assert [spec.kv_source for spec in specs] == sources
    assert [spec.stores_kv for spec in specs] == [source == i for i, source in enumerate(sources)]
    for spec in specs:
        donor = specs[spec.kv_source]
        assert (donor.layer_type, donor.head_dim) == (spec.layer_type, spec.head_dim)


def test_allocation_takes_batch_length_dtype_and_is_zero() -> None:
    specs = layer_specs(config("SF"))
    buffers = allocate_cache(specs, batch=2, max_seq=5, dtype=torch.bfloat16)
    assert {layer: key.shape for layer, (key, _) in buffers.items()} == {0: (2, 3, 5, 4), 1: (2, 3, 5, 10)}
    tensors = [tensor for pair in buffers.values() for tensor in pair]
    assert {tensor.dtype for tensor in tensors} == {torch.bfloat16}
    assert not any(bool(tensor.any()) for tensor in tensors)
    assert len({tensor.data_ptr() for tensor in tensors}) == 4, "no buffer is another's"


def test_the_bundled_checkpoint(tiny_checkpoint: Checkpoint) -> None:
    facts = tiny_checkpoint.facts
    specs = layer_specs(tiny_checkpoint.text_config)
    assert tuple(spec.index for spec in specs if spec.stores_kv) == facts.storing_layers
    for spec, layer in zip(specs, tiny_checkpoint.model.model.language_model.layers, strict=True):
        assert spec.head_dim == layer.self_attn.head_dim
        assert spec.stores_kv is not layer.self_attn.is_kv_shared_layer


# --- writing and reading --------------------------------------------------------------------------------------------


@pytest.fixture
def cache() -> StaticCache:
    return StaticCache(allocate_cache(layer_specs(config("SF")), 1, 5, torch.float32))


def test_write_touches_its_rows_of_its_layer_only(cache: StaticCache) -> None:
    key, value = torch.rand(1, 3, 2, 10), torch.rand(1, 3, 2, 10)
    cache.write(1, key, value, start=2)
    for buffer, rows in zip(cache.read(1), (key, value), strict=True):
        assert torch.equal(buffer[:, :, 2:4], rows)
        assert not bool(buffer[:, :, [0, 1, 4]].any())
    assert not any(bool(buffer.any()) for buffer in cache.read(0))


def test_reset_zeroes_in_place(cache: StaticCache) -> None:
    cache.write(0, torch.ones(1, 3, 5, 4), torch.ones(1, 3, 5, 4), start=0)
    before = cache.read(0)
    cache.reset()
    assert all(buffer is now and not bool(buffer.any()) for buffer, now in zip(before, cache.read(0), strict=True))


def test_write_beyond_the_buffer_is_an_error(cache: StaticCache) -> None:
    with pytest.raises(RuntimeError):
        cache.write(0, torch.ones(1, 3, 2, 4), torch.ones(1, 3, 2, 4), start=4)


def test_a_layer_that_stores_nothing_has_no_buffer() -> None:
    shared = StaticCache(allocate_cache(layer_specs(config("SFSF", num_kv_shared_layers=2)), 1, 5, torch.float32))
    with pytest.raises(KeyError):
        shared.read(2)


@pytest.mark.parametrize(
    ("slot", "new_rows"), [([0, 1, 2], 5), ([2], 1), ([4], 1), ([0, 1, 2, 3, 4], 5)], ids=["prefill", "decode", "last",
                                                                                          "full"]
)  # fmt: skip
def test_slot_cache_merges_without_writing(slot: list[int], new_rows: int) -> None:
    past_key, past_value = torch.rand(1, 2, 5, 4), torch.rand(1, 2, 5, 4)
    before = past_key.clone(), past_value.clone()
    key, value = torch.rand(1, 2, new_rows, 4), torch.rand(1, 2, new_rows, 4)
    is_slot = torch.zeros(5, dtype=torch.bool)
    is_slot[slot] = True
    cache = SlotCache(past_key, past_value, is_slot)
    assert cache.new is None
    merged = cache.update(key, value, layer_idx=0)
    for found, past, new in zip(merged, before, (key, value), strict=True):
        expected = past.clone()
        expected[:, :, slot] = new[:, :, slot] if new_rows > 1 else new
        assert torch.equal(found, expected)
    assert cache.new is not None
    assert cache.new[0] is key
    assert cache.new[1] is value
    assert torch.equal(past_key, before[0])
    assert torch.equal(past_value, before[1])
