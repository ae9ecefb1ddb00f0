"""The reference's K/V cache, listening."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformers import DynamicCache

OnUpdate = Callable[[int, Tensor, Tensor], None]
OnKeyValue = Callable[[int, tuple[Tensor, Tensor]], tuple[Tensor, Tensor]]


class RecordingCache(DynamicCache):
    """A `DynamicCache` that reports each layer's new keys and values as they arrive.

    They are taken here because a sliding layer keeps only its last W - 1 rows. `rounding` is what a quantized cache
    does to them before it keeps them.
    """

    def __init__(self, config: Any, on_update: OnUpdate, rounding: OnKeyValue | None = None) -> None:
        super().__init__(config=config)
        self.on_update, self.rounding = on_update, rounding

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Keys and values [B, KV, n, D] after RoPE and norm, as `DynamicCache` takes them."""
        if self.rounding is not None:
            key_states, value_states = self.rounding(layer_idx, (key_states, value_states))
        self.on_update(layer_idx, key_states, value_states)
        updated: tuple[Tensor, Tensor] = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        return updated
