"""The fixed-shape graphs: thin modules over the checkpoint's own submodules, each exportable by itself.

The mathematics stays in the Hugging Face modules. What is ours is only how their inputs and outputs are cut.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers.models.gemma4.modeling_gemma4 import (
    Gemma4ForConditionalGeneration,
    Gemma4MultimodalEmbedder,
    Gemma4TextDecoderLayer,
    Gemma4TextModel,
    Gemma4VisionEncoderLayer,
    Gemma4VisionModel,
)

from g4conformance.runtime.cache import SlotCache
from g4conformance.runtime.contract import LayerInputs
from g4conformance.runtime.layout import StaticLayout


class TokenEmbeddingGraph(nn.Module):
    """[B, S] ids -> [B, S, H], scaled."""

    def __init__(self, text_model: Gemma4TextModel) -> None:
        super().__init__()
        self.embed_tokens = text_model.embed_tokens

    def forward(self, llm_input_ids: Tensor) -> Tensor:
        return self.embed_tokens(llm_input_ids)


class PerLayerInputsGraph(nn.Module):
    """Ids [B, S] and fused embeddings [B, S, H] -> per-layer inputs [B, S, L, P].

    Borrows the two methods of `Gemma4TextModel` together with just the submodules that they use.
    """

    get_per_layer_inputs = Gemma4TextModel.get_per_layer_inputs
    project_per_layer_inputs = Gemma4TextModel.project_per_layer_inputs

    def __init__(self, text_model: Gemma4TextModel) -> None:
        super().__init__()
        self.config = text_model.config
        self.hidden_size_per_layer_input = text_model.hidden_size_per_layer_input
        self.per_layer_input_scale = text_model.per_layer_input_scale
        self.per_layer_model_projection_scale = text_model.per_layer_model_projection_scale
        self.embed_tokens_per_layer = text_model.embed_tokens_per_layer
        self.per_layer_model_projection = text_model.per_layer_model_projection
        self.per_layer_projection_norm = text_model.per_layer_projection_norm

    def forward(self, llm_input_ids: Tensor, fused_embeds: Tensor) -> Tensor:
        return self.project_per_layer_inputs(fused_embeds, self.get_per_layer_inputs(llm_input_ids))


class DecoderLayerGraph(nn.Module):
    """A layer that computes its own K/V. Returns hidden [B, Q, H] and the new K/V [B, KV, Q, D].

    Takes hidden [B, Q, H], the layer's per-layer input [B, Q, P] (None without PLE), the additive mask
    [B, 1, Q, max_seq], cos and sin [B, Q, D], the cache's key and value buffers, and the slot of the new rows, bool
    [max_seq].
    """

    def __init__(self, layer: Gemma4TextDecoderLayer) -> None:
        super().__init__()
        self.layer = layer

    def forward(
        self,
        hidden: Tensor,
        per_layer_input: Tensor | None,
        bias: Tensor,
        cos: Tensor,
        sin: Tensor,
        past_key: Tensor,
        past_value: Tensor,
        slot: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        cache = SlotCache(past_key, past_value, slot)
        hidden = self.layer(
            hidden, per_layer_input, {}, position_embeddings=(cos, sin), attention_mask=bias, cache=cache
        )
        if cache.new is None:
            raise RuntimeError(f"layer {self.layer.layer_idx} stores no K/V; it needs a SharedDecoderLayerGraph")
        return hidden, *cache.new


class SharedDecoderLayerGraph(nn.Module):
    """A layer that attends to its donor's K/V. Returns hidden [B, Q, H] only.

    Takes what `DecoderLayerGraph` takes, with the donor's key and value buffers and no slot.
    """

    def __init__(self, layer: Gemma4TextDecoderLayer) -> None:
        super().__init__()
        self.layer = layer
        self.layer_type = layer.self_attn.layer_type

    def forward(
        self,
        hidden: Tensor,
        per_layer_input: Tensor | None,
        bias: Tensor,
        cos: Tensor,
        sin: Tensor,
        key: Tensor,
        value: Tensor,
    ) -> Tensor:
        shared = {self.layer_type: (key, value)}
        return self.layer(hidden, per_layer_input, shared, position_embeddings=(cos, sin), attention_mask=bias)


def layer_arguments(inputs: LayerInputs) -> tuple[Tensor | None, ...]:
    """What the layer's graph takes: of a layer that shares, there is no slot."""
    arguments = inputs.hidden, inputs.per_layer_input, inputs.bias, *inputs.rope, *inputs.key_value
    return (*arguments, inputs.slot) if inputs.stores else arguments


class HeadGraph(nn.Module):
    """Final norm and vocabulary projection of one row: [B, 1, H] -> [B, vocab], before the softcap."""

    def __init__(self, model: Gemma4ForConditionalGeneration) -> None:
        super().__init__()
        self.norm = model.model.language_model.norm
        self.lm_head = model.lm_head

    def forward(self, hidden: Tensor) -> Tensor:
        return self.lm_head(self.norm(hidden))[:, 0]


class FusionGraph(nn.Module):
    """Puts soft tokens [V, H] into their fixed slot of text embeddings [B, S, H]; also at row 0 and at the end."""

    def __init__(self, layout: StaticLayout) -> None:
        super().__init__()
        self.start, self.end = layout.visual_start_idx, layout.visual_end_idx

    def forward(self, text_embeds: Tensor, visual_embeds: Tensor) -> Tensor:
        soft_tokens = visual_embeds.to(text_embeds.dtype).expand(text_embeds.shape[0], -1, -1)
        return torch.slice_scatter(text_embeds, soft_tokens, dim=1, start=self.start, end=self.end)


class PatchEmbedderGraph(nn.Module):
    """Patches [1, N, 3 * patch_size ** 2] -> [1, N, Hv], given positions [1, N, 2] and which are padding [1, N]."""

    def __init__(self, tower: Gemma4VisionModel) -> None:
        super().__init__()
        self.patch_embedder = tower.patch_embedder

    def forward(self, pixel_values: Tensor, position_ids: Tensor, padding: Tensor) -> Tensor:
        return self.patch_embedder(pixel_values, position_ids, padding)


class VisionLayerGraph(nn.Module):
    """One encoder layer, [1, N, Hv] -> [1, N, Hv].

    Takes hidden, the positions [1, N, 2], the additive mask [1, 1, N, N], cos and sin [1, N, D]. They are constant for
    one patch grid, and inputs so that one program serves every grid.
    """

    def __init__(self, layer: Gemma4VisionEncoderLayer) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, hidden: Tensor, position_ids: Tensor, bias: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return self.layer(hidden, position_embeddings=(cos, sin), attention_mask=bias, position_ids=position_ids)


class PoolerGraph(nn.Module):
    """Encoder output [1, N, Hv] -> soft tokens [V, Hv]: pooled in a fixed grid, scaled, standardised if configured."""

    def __init__(self, tower: Gemma4VisionModel, image_position_ids: Tensor) -> None:
        super().__init__()
        self.pooler = tower.pooler
        self.position_ids = nn.Buffer(image_position_ids, persistent=False)
        self.padding = nn.Buffer(padding_patches(image_position_ids), persistent=False)
        kernel_area = tower.config.pooling_kernel_size**2
        self.output_length = image_position_ids.shape[1] // kernel_area
        self.num_soft_tokens = int((~self.padding).sum()) // kernel_area
        self.standardize = tower.config.standardize
        if self.standardize:
            self.std_bias, self.std_scale = tower.std_bias, tower.std_scale

    def forward(self, hidden: Tensor) -> Tensor:
        pooled, _ = self.pooler(hidden, self.position_ids, self.padding, self.output_length)
        pooled = pooled[0, : self.num_soft_tokens]
        if self.standardize:
            pooled = (pooled - self.std_bias.float()) * self.std_scale.float()
        return pooled.to(hidden.dtype)


class VisionEmbedderGraph(nn.Module):
    """Soft tokens [V, Hv] -> the language model's space, [V, H]."""

    def __init__(self, embed_vision: Gemma4MultimodalEmbedder) -> None:
        super().__init__()
        self.embed_vision = embed_vision

    def forward(self, soft_tokens: Tensor) -> Tensor:
        return self.embed_vision(soft_tokens)


def softcap(logits: Tensor, cap: float | None) -> Tensor:
    """cap * tanh(logits / cap), in the logits' dtype and in the reference's order of operations; None caps nothing."""
    return logits if cap is None else torch.tanh(logits / cap) * cap


def padding_patches(image_position_ids: Tensor) -> Tensor:
    """Which patches of positions [1, N, 2] are padding: bool [1, N]."""
    return (image_position_ids == -1).all(dim=-1)
