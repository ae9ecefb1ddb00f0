"""Runtimes that are not the shipped one, as adopters write them around a torch model; each may be given a mistake."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache

from g4conformance.adopting.reporting import Reporting, report_outputs
from g4conformance.adopting.views import packed_heads, transposed, unpacked_heads
from g4conformance.checkpoints.checkpoint import Checkpoint
from g4conformance.runtime.contract import KeyValue, LayerInputs, StaticInputs
from g4conformance.runtime.graphs import DecoderLayerGraph, SharedDecoderLayerGraph, layer_arguments
from g4conformance.runtime.static import own_modules


class PrefillOnly:
    """The least that the contract asks for: no attribute of its own is known to the suite."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.model: Any = own_modules(checkpoint.model)

    def prefill(self, inputs: StaticInputs) -> Tensor:
        return self._forward(inputs.input_ids[:, : inputs.valid_length], None)

    def _forward(self, ids: Tensor, cache: DynamicCache | None) -> Tensor:
        with torch.no_grad():
            logits: Tensor = self.model(input_ids=ids, cache=cache, use_cache=cache is not None).logits
        return logits[:, -1]


class Hooked(Reporting, PrefillOnly):
    """Reports what its modules return, as they return it, and decodes."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint)
        self.cache = self._new_cache()
        text = "model.language_model"
        names = {f"{text}.embed_tokens": "text_embeds", f"{text}.layers.*": "prefill/layer/*/hidden"}
        report_outputs(self.model, names, self.report)

    def _new_cache(self) -> DynamicCache:
        return DynamicCache(config=self.model.config.text_config)

    def prefill(self, inputs: StaticInputs) -> Tensor:
        self.cache, self.step = self._new_cache(), None
        return self._forward(inputs.input_ids[:, : inputs.valid_length], self.cache)

    def decode_one(self, token: int) -> Tensor:
        self.step = 0 if self.step is None else self.step + 1
        return self._forward(torch.tensor([[token]]), self.cache)


class InNumpy(Hooked):
    """Takes and returns numpy arrays."""

    arrays = "numpy"

    def prefill(self, inputs: Any) -> Any:
        assert isinstance(inputs.input_ids, np.ndarray)
        return super().prefill(inputs).numpy()

    def decode_one(self, token: int) -> Any:
        return super().decode_one(token).numpy()

    def report(self, name: str, tensor: Any) -> None:
        super().report(name, tensor.numpy())

    def _forward(self, ids: Any, cache: DynamicCache | None) -> Tensor:
        return super()._forward(torch.as_tensor(ids), cache)


class PackedHeads(Hooked):
    """Keeps K and V as [B, S, KV * D] and hidden states as [S, B, H]; runs single layers too, and loads K/V."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint)
        self.facts = checkpoint.facts
        heads = checkpoint.text_config.per_layer_config[0].num_key_value_heads
        self.views = {
            "*/key": unpacked_heads(heads),
            "*/value": unpacked_heads(heads),
            "*/hidden": transposed(1, 0, 2),
        }

    def report(self, name: str, tensor: Tensor) -> None:
        super().report(name, tensor.transpose(0, 1) if name.endswith("hidden") else tensor)

    def _forward(self, ids: Tensor, cache: DynamicCache | None) -> Tensor:
        logits = super()._forward(ids, cache)
        assert cache is not None
        for i in self.facts.storing_layers:
            for part, rows in (("key", cache.layers[i].keys), ("value", cache.layers[i].values)):
                super().report(f"prefill/layer/{i}/{part}", packed_heads(rows[:, :, -ids.shape[1] :]))
        return logits

    def run_layer(self, i: int, inputs: LayerInputs) -> tuple[Tensor, ...]:
        layer = self.model.model.language_model.layers[i]
        graph = DecoderLayerGraph(layer) if inputs.stores else SharedDecoderLayerGraph(layer)
        with torch.no_grad():
            returned = graph(*layer_arguments(inputs))
        if not inputs.stores:
            return (returned.transpose(0, 1),)
        hidden, key, value = returned
        return hidden.transpose(0, 1), packed_heads(key), packed_heads(value)

    def load_state(self, key_values: Mapping[int, KeyValue], past_len: int) -> None:
        self.cache, self.step = self._new_cache(), None
        for i, (key, value) in key_values.items():
            self.cache.update(key, value, i)
