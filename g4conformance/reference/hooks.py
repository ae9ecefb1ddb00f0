"""Listens to one forward pass of the Hugging Face model and names what it sees."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.gemma4.modeling_gemma4 import Gemma4ForConditionalGeneration

from g4conformance.checkpoints.checkpoint import Checkpoint
from g4conformance.reference.cache import RecordingCache
from g4conformance.trace import Recorder


class Listener:
    """Forward hooks that write trace names into a `Recorder`.

    `entering` and `leaving` prefix what enters the decoder and what comes out of it; `past_len` is the number of rows
    before this pass. Both are set anew for each forward pass.
    """

    def __init__(self, checkpoint: Checkpoint, record: Recorder) -> None:
        self.model: Gemma4ForConditionalGeneration = checkpoint.model
        self.rounding, self.record = checkpoint.on_key_value, record
        self.entering = self.leaving = ""
        self.past_len = 0
        self.per_layer_inputs: list[Tensor] = []

    def new_cache(self) -> RecordingCache:
        return RecordingCache(self.model.config.text_config, self._on_cache_update, self.rounding)

    def begin(self, entering: str, leaving: str, past_len: int) -> None:
        self.entering, self.leaving, self.past_len = entering, leaving, past_len
        self.per_layer_inputs = []

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Hooks are installed inside this context only."""
        with ExitStack() as stack:
            for handle in self._install():
                stack.callback(handle.remove)
            yield

    def _install(self) -> Iterator[torch.utils.hooks.RemovableHandle]:
        text = self.model.model.language_model
        yield text.embed_tokens.register_forward_hook(self._on_embedding)
        yield text.register_forward_pre_hook(self._on_text_model, with_kwargs=True)
        for i, layer in enumerate(text.layers):
            yield layer.register_forward_pre_hook(self._on_layer_input(i), with_kwargs=True)
            yield layer.register_forward_hook(self._emitter(f"layer/{i}/hidden"))
        yield from self._install_vision()

    def _install_vision(self) -> Iterator[torch.utils.hooks.RemovableHandle]:
        tower = self.model.model.vision_tower
        yield tower.patch_embedder.register_forward_hook(self._emitter("vision/patch_embeds", prefixed=False))
        for i, layer in enumerate(tower.encoder.layers):
            yield layer.register_forward_hook(self._emitter(f"vision/layer/{i}/hidden", prefixed=False))
        embed = self.model.model.embed_vision
        yield embed.register_forward_pre_hook(self._on_soft_tokens, with_kwargs=True)
        yield embed.register_forward_hook(self._emitter("visual_embeds", prefixed=False))

    def _emitter(self, name: str, prefixed: bool = True) -> Any:
        def hook(module: nn.Module, args: Any, output: Tensor) -> None:
            self.record((self.leaving if prefixed else "") + name, output)

        return hook

    def _on_embedding(self, module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        self.record(self.entering + "llm_input_ids", args[0])
        self.record(self.entering + "text_embeds", output)

    def _on_text_model(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        self.record(self.entering + "fused_embeds", kwargs["inputs_embeds"])

    def _on_soft_tokens(self, module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Any]) -> None:
        self.record("vision/soft_tokens", kwargs["inputs_embeds"] if not args else args[0])

    def _on_layer_input(self, index: int) -> Any:
        layer_types = self.model.config.text_config.layer_types
        layer_type = layer_types[index]
        is_first_of_type = layer_types.index(layer_type) == index

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if args[1] is not None:
                self._on_per_layer_input(args[1])
            if is_first_of_type:
                self._on_positions(layer_type, args[0], kwargs)

        return hook

    def _on_per_layer_input(self, per_layer_input: Tensor) -> None:
        self.per_layer_inputs.append(per_layer_input)
        if len(self.per_layer_inputs) == len(self.model.config.text_config.layer_types):
            self.record(self.entering + "per_layer_inputs", torch.stack(self.per_layer_inputs, dim=2))

    def _on_positions(self, layer_type: str, hidden: Tensor, kwargs: dict[str, Any]) -> None:
        cos, sin = kwargs["position_embeddings"]
        self.record(f"{self.entering}rope/{layer_type}/cos", cos)
        self.record(f"{self.entering}rope/{layer_type}/sin", sin)
        mask = absolute_mask(kwargs["attention_mask"], query_length=hidden.shape[1], past_len=self.past_len)
        self.record(f"{self.entering}mask/{layer_type}", mask.to(hidden.device))

    def _on_cache_update(self, layer: int, key: Tensor, value: Tensor) -> None:
        self.record(f"{self.leaving}layer/{layer}/key", key)
        self.record(f"{self.leaving}layer/{layer}/value", value)


def absolute_mask(mask: Tensor | None, query_length: int, past_len: int) -> Tensor:
    """A layer's attention mask as bool [1, Q, past_len + Q] over absolute key positions, true = may attend.

    Hugging Face gives an additive mask (eager), a boolean one (sdpa), or None where plain causal attention is meant.
    A sliding cache's mask covers only the latest keys: earlier ones are out of its window.
    """
    keys = past_len + query_length
    if mask is None:
        return torch.ones(1, query_length, keys, dtype=torch.bool).tril(past_len)
    allowed = mask[:, 0] if mask.dtype == torch.bool else mask[:, 0] == 0
    return torch.nn.functional.pad(allowed, (keys - allowed.shape[-1], 0), value=False)
