"""The cache's layout against its definition: which layer stores K/V, which reads whose, in what shape."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import Gemma4TextConfig

from g4conformance.fuzz.strategies import FULL, SLIDING, layer_type_mixes, legal_sharing
from g4conformance.runtime.cache import LayerSpec, SlotCache, StaticCache, allocate_cache, layer_specs

pytestmark = pytest.mark.property


def config_of(layer_types: tuple[str, ...], shared: int, **sizes: Any) -> Gemma4TextConfig:
    return Gemma4TextConfig(
        layer_types=list(layer_types), num_hidden_layers=len(layer_types), num_kv_shared_layers=shared, **sizes
    )


mixes_with_sharing = layer_type_mixes(max_layers=12).flatmap(
    lambda types: st.tuples(st.just(types), st.sampled_from(legal_sharing(types)))
)
head_counts, head_dims = st.integers(1, 4), st.sampled_from([2, 8, 14])


def defined_source(layer_types: tuple[str, ...], shared: int, layer: int) -> int:
    """The definition: a layer among the last `shared` reads the latest earlier layer of its type that is not."""
    first_shared = len(layer_types) - shared
    if layer < first_shared:
        return layer
    source = first_shared - 1
    while layer_types[source] != layer_types[layer]:
        source -= 1
    return source


@given(mixes_with_sharing)
def test_each_layer_reads_its_own_kv_or_its_donors(mix: tuple[tuple[str, ...], int]) -> None:
    layer_types, shared = mix
    specs = layer_specs(config_of(layer_types, shared))
    assert [spec.index for spec in specs] == list(range(len(layer_types)))
    assert [spec.layer_type for spec in specs] == list(layer_types)
    assert [spec.kv_source for spec in specs] == [
        defined_source(layer_types, shared, layer) for layer in range(len(layer_types))
    ]
    assert [spec.stores_kv for spec in specs] == [
        layer < len(layer_types) - shared for layer in range(len(layer_types))
    ]


@given(layer_type_mixes(), head_dims, head_dims, head_counts, head_counts, st.booleans())
def test_full_layers_have_the_global_sizes(
    layer_types: tuple[str, ...], head_dim: int, global_head_dim: int, heads: int, global_heads: int, k_eq_v: bool
) -> None:
    """The published layout: other KV heads on full layers only where keys are values."""
    config = config_of(
        layer_types, 0, head_dim=head_dim, global_head_dim=global_head_dim, num_attention_heads=12,
        num_key_value_heads=heads, num_global_key_value_heads=global_heads, attention_k_eq_v=k_eq_v,
    )  # fmt: skip
    for spec in layer_specs(config):
        full = spec.layer_type == FULL
        assert spec.head_dim == (global_head_dim if full else head_dim)
        assert spec.num_key_value_heads == (global_heads if full and k_eq_v else heads)


@given(layer_type_mixes(), st.data())
def test_any_layer_may_have_sizes_of_its_own(layer_types: tuple[str, ...], data: st.DataObject) -> None:
    """The layout of transformers 5.24, `per_layer_config`; an empty one is a model without a global head dim."""
    overridden = data.draw(st.sets(st.sampled_from(range(len(layer_types)))))
    sizes = {i: {"head_dim": data.draw(head_dims), "num_key_value_heads": data.draw(head_counts)} for i in overridden}
    config = config_of(layer_types, 0, head_dim=6, num_key_value_heads=5, per_layer_config=sizes)
    for spec in layer_specs(config):
        expected = sizes.get(spec.index, {"head_dim": 6, "num_key_value_heads": 5})
        assert {"head_dim": spec.head_dim, "num_key_value_heads": spec.num_key_value_heads} == expected


@given(st.integers(1, 8), st.data())
def test_one_layer_type_is_enough(count: int, data: st.DataObject) -> None:
    """All sliding too, which no Hugging Face config can be: its last layer is made full."""
    shared = data.draw(st.integers(0, count - 1))
    for layer_type in (SLIDING, FULL):
        own = count - shared
        config = SimpleNamespace(
            layer_types=[layer_type] * count,
            kv_sharing_modes=[None] * (own - 1) + ["store"] + ["reuse"] * shared,
            per_layer_config=[SimpleNamespace(head_dim=4, num_key_value_heads=2)] * count,
        )
        assert [spec.kv_source for spec in layer_specs(config)] == [min(i, own - 1) for i in range(count)]


@st.composite
def some_specs(draw: st.DrawFn) -> tuple[LayerSpec, ...]:
    """Specs with sizes of their own, some of which store nothing."""
    storing = draw(st.lists(st.booleans(), min_size=1, max_size=5))
    return tuple(
        LayerSpec(i, FULL, draw(st.integers(1, 4)), draw(st.integers(1, 3)), kv_source=i if stores else 99)
        for i, stores in enumerate(storing)
    )


@given(some_specs(), st.integers(1, 2), st.integers(1, 6), st.sampled_from([torch.float32, torch.bfloat16]))
def test_cache_has_zeroed_buffers_of_storing_layers_only(
    specs: tuple[LayerSpec, ...], batch: int, max_seq: int, dtype: torch.dtype
) -> None:
    buffers = allocate_cache(specs, batch, max_seq, dtype)
    assert list(buffers) == [spec.index for spec in specs if spec.kv_source == spec.index]
    for index, pair in buffers.items():
        for buffer in pair:
            assert buffer.shape == (batch, specs[index].num_key_value_heads, max_seq, specs[index].head_dim)
            assert buffer.dtype == dtype
            assert not buffer.any()
    storages = [buffer.data_ptr() for pair in buffers.values() for buffer in pair]
    assert len(set(storages)) == len(storages)


writes = st.lists(st.tuples(st.integers(0, 1), st.integers(0, 7), st.integers(1, 8)), max_size=6)


@given(writes)
def test_cache_writes_change_their_rows_and_no_others(requested: list[tuple[int, int, int]]) -> None:
    """Against a table of numbers: each write puts its own number into its rows of one layer."""
    specs = [LayerSpec(layer, FULL, 2, 3, kv_source=layer) for layer in range(2)]
    cache = StaticCache(allocate_cache(specs, 1, 8, torch.float32))
    table = {(layer, row): 0 for layer in range(2) for row in range(8)}
    for number, (layer, start, count) in enumerate(requested, start=1):
        rows = range(start, min(start + count, 8))
        new = torch.full((1, 3, len(rows), 2), float(number))
        cache.write(layer, new, -new, start)
        table |= {(layer, row): number for row in rows}
    for (layer, row), number in table.items():
        key, value = cache.read(layer)
        assert (key[:, :, row] == number).all()
        assert (value[:, :, row] == -number).all()
    cache.reset()
    assert not any(buffer.any() for layer in range(2) for buffer in cache.read(layer))


@given(st.integers(1, 8), st.data())
def test_slot_cache_merges_new_rows_and_writes_nothing(max_seq: int, data: st.DataObject) -> None:
    """Prefill brings as many rows as the buffer has, decode a single one for a single slot."""
    new_rows = data.draw(st.sampled_from([1, max_seq]))
    chosen = data.draw(st.sets(st.integers(0, max_seq - 1), max_size=new_rows))
    slot = torch.tensor([row in chosen for row in range(max_seq)])
    past = torch.randn(2, 1, 2, max_seq, 3)
    new = torch.randn(2, 1, 2, new_rows, 3)
    before = past.clone()
    cache = SlotCache(past[0], past[1], slot)
    for merged, old, fresh in zip(cache.update(new[0], new[1], layer_idx=0), past, new, strict=True):
        for row in range(max_seq):
            source = fresh[:, :, min(row, new_rows - 1)] if row in chosen else old[:, :, row]
            assert torch.equal(merged[:, :, row], source)
    assert torch.equal(past, before)
    assert cache.new is not None
    assert torch.equal(torch.stack(cache.new), new)
