"""gemma4-pt-claude: a Gemma 4 in plain PyTorch with a K/V cache of slots, which roll on sliding layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from g4conformance.checkpoints.checkpoint import Checkpoint
from g4conformance.checkpoints.published import published_folder
from g4conformance.runtime.contract import KeyValue
from g4conformance.runtime.masks import SLIDING
from g4conformance.runtimes.spying import Spies, imported
from g4conformance.runtimes.unpadded import OwnInputs, UnpaddedRuntime
from g4conformance.session import cache_folder


def make(checkpoint: Checkpoint) -> ClaudeRuntime:
    """The runtime with the checkpoint's weights, read from its folder, or from a copy in the published layout.

    Its factories know the published sizes only, so its config is made by hand, and its tokenizer is told the ids of
    the checkpoint's image tokens.

    Raises:
        ConformanceError: gemma4-pt-claude is not installed, or the checkpoint is not in a folder.
    """
    claude = imported("gemma4_pt_claude", "claude")
    folder = published_folder(checkpoint.name, cache_folder())
    model = claude.Gemma4Model(native_config(checkpoint))
    imported("gemma4_pt_claude.load", "claude").load_weights(model, folder, format="hf", strict=True)
    model = model.to(checkpoint.dtype).eval().requires_grad_(False)
    tokenizer = claude.Gemma4Tokenizer(str(folder))
    config = checkpoint.model.config
    tokenizer.START_OF_IMAGE, tokenizer.END_OF_IMAGE = config.boi_token_id, config.eoi_token_id
    return ClaudeRuntime(checkpoint, model, tokenizer)


def native_config(checkpoint: Checkpoint) -> Any:
    """The runtime's own config of the checkpoint's sizes and features."""
    config = imported("gemma4_pt_claude.config", "claude")
    top: Any = checkpoint.model.config
    return config.Gemma4Config(
        text=_text_config(config, top.text_config),
        vision=_vision_config(config, top.vision_config, top.text_config, checkpoint.facts.max_soft_tokens),
    )


def _text_config(config: Any, text: Any) -> Any:
    kinds = {SLIDING: config.AttentionType.LOCAL_SLIDING, "full_attention": config.AttentionType.GLOBAL}
    full = text.per_layer_config["full_attention"]
    sliding = text.per_layer_config[SLIDING] if SLIDING in text.layer_types else full
    rope = text.rope_parameters
    shared = text.num_kv_shared_layers / text.num_hidden_layers
    return config.TextConfig(
        vocab_size=text.vocab_size,
        embed_dim=text.hidden_size,
        hidden_dim=text.intermediate_size,
        num_heads=text.num_attention_heads,
        head_dim=sliding.head_dim,
        num_kv_heads=sliding.num_key_value_heads,
        num_layers=text.num_hidden_layers,
        sliding_window_size=text.sliding_window,
        final_logit_softcap=text.final_logit_softcapping,
        local_rope_base=rope[SLIDING]["rope_theta"],
        global_rope_base=rope["full_attention"]["rope_theta"],
        global_rope_proportion=rope["full_attention"]["partial_rotary_factor"],
        per_layer_input_dim=text.hidden_size_per_layer_input or 0,
        attention_pattern=tuple(kinds[kind] for kind in text.layer_types),
        kv_sharing=config.KVCacheSharingConfig(shared, share_global=True, share_local=True) if shared else None,
        k_eq_v_global=text.attention_k_eq_v,
        bidirectional_vision=text.use_bidirectional_attention == "vision",
        num_global_kv_heads=full.num_key_value_heads,
        global_head_dim=full.head_dim,
        override_kv_shared_ffw_hidden=2 * text.intermediate_size if text.use_double_wide_mlp else None,
    )


def _vision_config(config: Any, vision: Any, text: Any, max_soft_tokens: int) -> Any:
    return config.VisionConfig(
        d_model=vision.hidden_size,
        num_layers=vision.num_hidden_layers,
        num_heads=vision.num_attention_heads,
        head_dim=vision.head_dim,
        ffw_hidden=vision.intermediate_size,
        patch_size=vision.patch_size,
        output_length=max_soft_tokens,
        pooling_kernel_size=vision.pooling_kernel_size,
        position_embedding_size=vision.position_embedding_size,
        use_clipped_linear=vision.use_clipped_linears,
        standardize=vision.standardize,
        rms_norm_eps=vision.rms_norm_eps,
        rope_base_frequency=vision.rope_parameters["rope_theta"],
        text_embed_dim=text.hidden_size,
    )


class ClaudeRuntime(UnpaddedRuntime):
    """Driven through `Composer.compose`, `forward` and `generate`."""

    placeholder = -2

    def __init__(self, checkpoint: Checkpoint, model: Any, tokenizer: Any) -> None:
        self.model, self.dtype = model, checkpoint.dtype
        self.parts, self.generation, self.layers = (
            imported(f"gemma4_pt_claude.{name}", "claude") for name in ("model", "generate", "attention")
        )
        self.composer = imported("gemma4_pt_claude.composer", "claude").Composer(tokenizer, model.cfg)
        self.stop_tokens = self.generation.DEFAULT_STOP_TOKENS
        super().__init__(checkpoint.facts)

    def _preprocess(self, prompt: str, images: Sequence[Image.Image]) -> OwnInputs:
        composed = self.composer.compose(prompt, images=list(images))
        if composed.pixel_values is None:
            return OwnInputs(composed.input_ids)
        return OwnInputs(composed.input_ids, composed.pixel_values.to(self.dtype), composed.image_position_ids)

    def _embed(self, ids: Tensor) -> Tensor:
        embeds: Tensor = self.model.text_decoder.embedder.encode(ids)
        return embeds

    def _see(self, pixel_values: Tensor, positions: Tensor) -> Tensor:
        pooled, mask = self.model.vision_encoder(pixel_values, positions)
        visual: Tensor = self.model.embed_vision(pooled)[mask]
        self._report("visual_embeds", visual)
        return visual

    def _fuse(self, embeds: Tensor, visual: Tensor, slot: Tensor) -> Tensor:
        valid = torch.ones(1, len(visual), dtype=torch.bool)
        fused: Tensor = self.parts.merge_multimodal_embeddings(embeds, visual[None], valid, slot)
        return fused

    def _visual(self, own: OwnInputs) -> dict[str, Tensor]:
        if own.pixel_values is None or own.positions is None:
            return {}
        image_mask = own.ids == self.placeholder
        return {"pixel_values": own.pixel_values, "image_position_ids": own.positions, "image_mask": image_mask}

    def _prefill(self, own: OwnInputs, embeds: Tensor | None) -> Tensor:
        """With a cache as `generate` allocates it, sliding layers' rolling."""
        self.cache = self._new_cache(own.ids.shape[1])
        if embeds is not None:
            return self._decode_embeds(own, embeds)
        return self._forward(own.ids, **self._visual(own))

    def _new_cache(self, prefill_len: int | None) -> Any:
        rows = self.layout.max_seq
        return self.generation.init_cache(self.model.cfg, 1, rows, dtype=self.dtype, prefill_len=prefill_len)

    def _decode_embeds(self, own: OwnInputs, embeds: Tensor) -> Tensor:
        """`forward` behind its fusion: it takes no embeddings itself."""
        decoder = self.model.text_decoder
        self._begin_pass(own.ids)
        is_image = own.ids == self.placeholder
        ids = own.ids.masked_fill(is_image, 0)
        given = decoder.embedder.encode_per_layer_input(embeds, ids) if decoder.embedder.pli_embedding else None
        logits, self.cache = decoder(
            embeds,
            torch.arange(ids.shape[1])[None],
            per_layer_inputs=given,
            cache=self.cache,
            bidirectional_mask=is_image if self.model.cfg.text.bidirectional_vision else None,
            logits_to_keep=1,
        )
        return logits[:, -1]

    def _decode(self, token: int) -> Tensor:
        if self.cache is None:
            self.cache = self._new_cache(None)
        return self._forward(torch.tensor([[token]]))

    def _forward(self, ids: Tensor, **given: Tensor) -> Tensor:
        logits, self.cache = self.model(ids, cache=self.cache, logits_to_keep=1, **given)
        return logits[:, -1]

    def _load(self, key_values: Mapping[int, KeyValue], past_len: int) -> Any:
        """Written by the runtime's own cache code, one layer after the other."""
        cache = self._new_cache(past_len)
        rows = torch.arange(past_len)[None]
        for layer, (key, value) in key_values.items():
            own = cache[f"layer_{layer}"]
            attention = self.model.text_decoder.blocks[layer].attn
            attention._write_cache(own, key.transpose(1, 2), value.transpose(1, 2), rows, 0)
            own |= {"end_index": own["end_index"] + past_len, "offset": past_len}
        return cache

    def _sample(self, logits: Tensor) -> int:
        return int(self.generation._sample_token(logits, temperature=0.0))

    def _generate(self, own: OwnInputs, max_new_tokens: int) -> Tensor:
        ids: Tensor = self.generation.generate(
            self.model, own.ids, max_new_tokens=max_new_tokens, temperature=0.0, **self._visual(own)
        )
        return ids

    # --- observation -------------------------------------------------------------------------------------------------

    def _watch(self, spy: Spies) -> None:
        decoder = self.model.text_decoder
        spy.before(self.model, "forward", lambda ids, **_: self._begin_pass(ids))
        spy.after(decoder, "forward", lambda found, *_, **__: self._report(self._leaving + "logits", found[0][:, -1]))
        spy.after(decoder.embedder, "encode", lambda embeds, *_: self._report_embeds("text_embeds", embeds))
        spy.after(decoder.embedder, "encode_per_layer_input", self._on_per_layer_inputs)
        spy.after(self.parts, "merge_multimodal_embeddings", lambda f, *_: self._report_embeds("fused_embeds", f))
        spy.before(self.layers, "apply_rope", self._on_rope)
        for i, block in enumerate(decoder.blocks):
            spy.before(block, "forward", self._before_layer(i))
            spy.after(block, "forward", self._after_layer(i))
            spy.before(block.attn, "_write_cache", self._on_key_value(i))
            spy.before(block.attn, "_sdpa_attention", self._on_attention(i))
        self._watch_vision(spy)

    def _watch_vision(self, spy: Spies) -> None:
        encoder = self.model.vision_encoder
        spy.after(encoder.patch_embedder, "forward", lambda hidden, *_: self._report("vision/patch_embeds", hidden))
        for i, layer in enumerate(encoder.layers):
            name = f"vision/layer/{i}/hidden"
            spy.after(layer, "forward", lambda hidden, *_, name=name: self._report(name, hidden))
        spy.after(encoder, "forward", self._on_soft_tokens)
        spy.after(self.model.embed_vision, "forward", lambda v, *_: self._report("visual_embeds", v[self._soft_tokens]))

    def _on_soft_tokens(self, found: tuple[Tensor, Tensor], *_: Any) -> None:
        hidden, self._soft_tokens = found
        self._report("vision/soft_tokens", hidden[self._soft_tokens])

    def _on_per_layer_inputs(self, inputs: Tensor, *_: Any) -> None:
        self._report(self._entering + "per_layer_inputs", inputs)

    def _before_layer(self, i: int) -> Any:
        def seen(
            hidden: Tensor, positions: Tensor, *_: Any, cache: Any = None, shared_kv_cache: Any = None, **__: Any
        ) -> None:
            self._layer, self._slots = i, cache or shared_kv_cache
            if i == 0 and self._entering:
                self._report(self._entering + "position", positions.flatten())

        return seen

    def _after_layer(self, i: int) -> Any:
        return lambda found, *_, **__: self._report(f"{self._leaving}layer/{i}/hidden", found[1])

    def _on_key_value(self, i: int) -> Any:
        def seen(cache: Any, key: Tensor, value: Tensor, *_: Any) -> None:
            self._report(f"{self._leaving}layer/{i}/key", key.transpose(1, 2))
            self._report(f"{self._leaving}layer/{i}/value", value.transpose(1, 2))

        return seen

    def _on_attention(self, i: int) -> Any:
        """The mask is over the cache's slots; each slot knows its absolute position."""

        def seen(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> None:
            if self._is_first_of_its_type(i):
                filled = self._slots["valid_mask"][0]
                absolute = torch.zeros(1, mask.shape[1], self.layout.max_seq, dtype=torch.bool)
                absolute[:, :, self._slots["positions"][0, filled].long()] = mask[:, :, filled]
                self._report_mask(i, absolute)

        return seen

    def _on_rope(self, x: Tensor, positions: Tensor, *how: Any) -> None:
        """The table that it does not have: what this very rotation does to a unit vector."""
        if self._is_first_of_its_type(self._layer):
            unit = torch.zeros(1, positions.shape[1], 1, x.shape[-1])
            unit[..., : x.shape[-1] // 2] = 1.0
            rotate = imported("gemma4_pt_claude.layers", "claude").apply_rope
            self._report_rope(self._layer, rotate(unit, positions, *how)[:, :, 0].to(x.dtype))
