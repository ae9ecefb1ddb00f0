"""gemma4-pytorch-codex: a Gemma 4 in plain PyTorch that converts Hugging Face configs and weights by itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from g4conformance.checkpoints.checkpoint import Checkpoint
from g4conformance.checkpoints.published import published_folder
from g4conformance.runtime.contract import KeyValue
from g4conformance.runtimes.spying import Spies, imported
from g4conformance.runtimes.unpadded import OwnInputs, UnpaddedRuntime
from g4conformance.session import cache_folder


def make(checkpoint: Checkpoint) -> CodexRuntime:
    """The runtime with the checkpoint's weights, read from its folder, or from a copy in the published layout.

    Raises:
        ConformanceError: gemma4-pytorch-codex is not installed, or the checkpoint is not in a folder.
    """
    codex = imported("gemma4_pt_codex", "codex")
    folder = published_folder(checkpoint.name, cache_folder())
    config = codex.native_config_from_hf_path(folder)
    if config.vision is not None:  # the config does not say it, only the image processor's does
        config.vision.output_length = checkpoint.facts.max_soft_tokens
    model = codex.Gemma4Model(config)
    model.load_state_dict(codex.convert_hf_state_dict_to_native(config, codex.load_hf_state_dict(folder)))
    model = model.to(checkpoint.dtype).eval().requires_grad_(False)
    return CodexRuntime(checkpoint, model, codex.Gemma4Tokenizer.from_pretrained(folder))


class CodexRuntime(UnpaddedRuntime):
    """Driven through `build_processor`, `forward` and `generate`, as `generate_text` drives them."""

    def __init__(self, checkpoint: Checkpoint, model: Any, tokenizer: Any) -> None:
        self.model, self.tokenizer, self.dtype = model, tokenizer, checkpoint.dtype
        self.parts = imported("gemma4_pt_codex.model", "codex")
        self.layers = imported("gemma4_pt_codex.text", "codex")
        self.placeholder = model.config.text.image_placeholder_token_id
        self.stop_tokens = frozenset({tokenizer.eos_token_id})  # what `generate_text` stops at
        super().__init__(checkpoint.facts)

    def _preprocess(self, prompt: str, images: Sequence[Image.Image]) -> OwnInputs:
        """The prompt is rendered and has its beginning-of-sequence token, so `add_bos` is off."""
        batch = self.model.build_processor(self.tokenizer)(prompt, images=list(images) or None, add_bos=False)
        if batch.image_batch is None:
            return OwnInputs(batch.input_ids)
        pixel_values, positions = batch.image_batch.pixel_values[0], batch.image_batch.image_position_ids[0]
        return OwnInputs(batch.input_ids, pixel_values.to(self.dtype), positions)

    def _embed(self, ids: Tensor) -> Tensor:
        embeds: Tensor = self.model.text.embed_tokens(ids)
        return embeds

    def _see(self, pixel_values: Tensor, positions: Tensor) -> Tensor:
        tokens, mask = self.model.encode_images_to_text(pixel_values, positions)
        return tokens[mask]

    def _fuse(self, embeds: Tensor, visual: Tensor, slot: Tensor) -> Tensor:
        fused: Tensor = self.parts.merge_flat_embeddings(embeds, visual[None], slot)
        return fused

    def _visual(self, own: OwnInputs) -> dict[str, Tensor]:
        """What `prepare_inputs` makes of a picture."""
        if own.pixel_values is None:
            return {}
        tokens, mask = self.model.encode_images_to_text(own.pixel_values, own.positions)
        return {"vision_tokens": tokens, "vision_token_mask": mask}

    def _prefill(self, own: OwnInputs, embeds: Tensor | None) -> Tensor:
        given = {"inputs_embeds": embeds} if embeds is not None else self._visual(own)
        return self._forward(own.ids, **given)

    def _decode(self, token: int) -> Tensor:
        return self._forward(torch.tensor([[token]]), kv_cache=self.cache)

    def _forward(self, ids: Tensor, **given: Any) -> Tensor:
        seen = torch.ones_like(ids, dtype=torch.bool)
        output = self.model(ids, attention_mask=seen, return_kv_cache=True, **given)
        self.cache = output.kv_cache
        logits: Tensor = output.logits[:, -1]
        return logits

    def _load(self, key_values: Mapping[int, KeyValue], past_len: int) -> Any:
        rows = torch.arange(past_len)[None]
        seen = torch.ones_like(rows, dtype=torch.bool)
        layers: list[Any] = [None] * self.model.config.text.num_layers
        for layer, (key, value) in key_values.items():
            layers[layer] = self.layers.LayerKVCache(key, value, rows, seen)
        return self.layers.TextKVCache(layers)

    def _sample(self, logits: Tensor) -> int:
        return int(self.model._sample_next_token(logits, do_sample=False, temperature=1.0, top_k=None))

    def _generate(self, own: OwnInputs, max_new_tokens: int) -> Tensor:
        seen = torch.ones_like(own.ids, dtype=torch.bool)
        ids: Tensor = self.model.generate(
            own.ids,
            attention_mask=seen,
            max_new_tokens=max_new_tokens,
            eos_token_id=self.tokenizer.eos_token_id,
            **self._visual(own),
        )
        return ids

    # --- observation -------------------------------------------------------------------------------------------------

    def _watch(self, spy: Spies) -> None:
        text = self.model.text
        spy.before(self.model, "forward", lambda ids, **_: self._begin_pass(ids))
        spy.after(self.model, "forward", self._on_logits)
        spy.after(text, "embed_tokens", lambda embeds, *_: self._report_embeds("text_embeds", embeds))
        spy.after(self.parts, "merge_flat_embeddings", lambda fused, *_: self._report_embeds("fused_embeds", fused))
        spy.after(text, "_build_per_layer_inputs", self._on_per_layer_inputs)
        spy.before(self.layers, "apply_text_rope", self._on_rope)
        for i, layer in enumerate(text.layers):
            spy.before(layer, "forward", self._before_layer(i))
            spy.after(layer, "forward", self._after_layer(i))
        if self.model.vision is not None:
            self._watch_vision(spy)

    def _watch_vision(self, spy: Spies) -> None:
        encoder = self.model.vision.encoder
        spy.after(encoder.patch_embed, "forward", lambda hidden, *_: self._report("vision/patch_embeds", hidden))
        for i, layer in enumerate(encoder.layers):
            name = f"vision/layer/{i}/hidden"
            spy.after(layer, "forward", lambda hidden, *_, name=name: self._report(name, hidden))
        spy.after(encoder, "forward", lambda found, *_: self._report("vision/soft_tokens", found[0][0][found[0][1]]))
        spy.after(self.model, "encode_images_to_text", lambda f, *_: self._report("visual_embeds", f[0][f[1]]))

    def _on_logits(self, output: Any, *_: Any, **__: Any) -> None:
        self._report(self._leaving + "logits", output.logits[:, -1])

    def _on_per_layer_inputs(self, inputs: Tensor | None, *_: Any) -> None:
        if inputs is not None:
            self._report(self._entering + "per_layer_inputs", inputs)

    def _before_layer(self, i: int) -> Any:
        def seen(hidden: Tensor, positions: Tensor, mask: Tensor, *_: Any, **given: Any) -> None:
            self._layer = i
            if not self._is_first_of_its_type(i):
                return
            if self._entering:
                self._report(self._entering + "position", positions.flatten())
            window, past = self.model.text.layers[i].attn.sliding_window, given["kv_cache"]
            if window is not None:  # as the attention narrows it
                keys = positions if past is None else torch.cat([past.positions, positions], dim=-1)
                mask = mask & self.layers.create_sliding_mask(positions, window, cache_positions=keys)
            self._report_mask(i, mask)

        return seen

    def _on_rope(self, x: Tensor, positions: Tensor, **how: Any) -> None:
        """The table that it does not have: what this very rotation does to a unit vector."""
        if self._is_first_of_its_type(self._layer):
            unit = torch.zeros(1, positions.shape[1], 1, x.shape[-1])
            unit[..., : x.shape[-1] // 2] = 1.0
            rotate = imported("gemma4_pt_codex.layers", "codex").apply_text_rope
            self._report_rope(self._layer, rotate(unit, positions, **how)[:, :, 0].to(x.dtype))

    def _after_layer(self, i: int) -> Any:
        def seen(found: tuple[Tensor, Any], hidden: Tensor, *_: Any, **__: Any) -> None:
            out, cache = found
            self._report(f"{self._leaving}layer/{i}/hidden", out)
            if i in self.facts.storing_layers:
                rows = hidden.shape[1]
                self._report(f"{self._leaving}layer/{i}/key", cache.key[:, :, -rows:])
                self._report(f"{self._leaving}layer/{i}/value", cache.value[:, :, -rows:])

        return seen
