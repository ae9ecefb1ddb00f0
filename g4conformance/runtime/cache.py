"""The static K/V cache: which layer stores, which reads whose, in what shape; and the slot cache of the graphs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import Gemma4TextConfig


@dataclass(frozen=True)
class LayerSpec:
    """What the cache needs to know about one decoder layer.

    `kv_source` is the layer whose keys and values this one attends to: itself, or its donor.
    """

    index: int
    layer_type: str
    head_dim: int
    num_key_value_heads: int
    kv_source: int

    @property
    def stores_kv(self) -> bool:
        return self.kv_source == self.index


def layer_specs(config: Gemma4TextConfig) -> tuple[LayerSpec, ...]:
    """One spec a layer, from the config's per-layer sizes and sharing modes.

    A layer that reuses K/V reads the layer of its type that stores them, which is the last of that type before the
    sharing point.
    """
    modes = config.kv_sharing_modes
    donors = {config.layer_types[i]: i for i, mode in enumerate(modes) if mode == "store"}
    return tuple(
        LayerSpec(
            index=i,
            layer_type=layer_type,
            head_dim=config.per_layer_config[i].head_dim,
            num_key_value_heads=config.per_layer_config[i].num_key_value_heads,
            kv_source=donors[layer_type] if modes[i] == "reuse" else i,
        )
        for i, layer_type in enumerate(config.layer_types)
    )


def allocate_cache(
    specs: Sequence[LayerSpec],
    batch: int,
    max_seq: int,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
) -> dict[int, tuple[Tensor, Tensor]]:
    """Zeroed key and value buffers [batch, num_key_value_heads, max_seq, head_dim] of every layer that stores."""

    def zeros(spec: LayerSpec) -> Tensor:
        return torch.zeros(batch, spec.num_key_value_heads, max_seq, spec.head_dim, dtype=dtype, device=device)

    return {spec.index: (zeros(spec), zeros(spec)) for spec in specs if spec.stores_kv}


class StaticCache:
    """The buffers of one request, and the only place that writes them."""

    def __init__(self, buffers: dict[int, tuple[Tensor, Tensor]]) -> None:
        self.buffers = buffers

    def reset(self) -> None:
        for pair in self.buffers.values():
            for buffer in pair:
                buffer.zero_()

    def read(self, layer: int) -> tuple[Tensor, Tensor]:
        """The whole key and value buffers of a storing layer."""
        return self.buffers[layer]

    def write(self, layer: int, key: Tensor, value: Tensor, start: int) -> None:
        """Puts key and value rows [B, KV, n, D] at rows `start` to `start + n` of a storing layer."""
        for buffer, rows in zip(self.buffers[layer], (key, value), strict=True):
            buffer[:, :, start : start + rows.shape[2]] = rows


class SlotCache:
    """What a decoder layer's graph sees as its cache: fixed buffers into which new rows are merged, never written.

    `slot` is bool [max_seq], true at the rows that the new keys and values occupy. The new rows are either as many as
    the buffers have (prefill) or a single one (decode), so that one `torch.where` serves both.
    """

    def __init__(self, past_key: Tensor, past_value: Tensor, slot: Tensor) -> None:
        self.past_key, self.past_value = past_key, past_value
        self.slot = slot[None, None, :, None]
        self.new: tuple[Tensor, Tensor] | None = None

    def update(self, key: Tensor, value: Tensor, layer_idx: int, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Keys and values [B, KV, max_seq, D] to attend to; keeps the new ones in `new` for the CPU side."""
        self.new = key, value
        return torch.where(self.slot, key, self.past_key), torch.where(self.slot, value, self.past_value)
