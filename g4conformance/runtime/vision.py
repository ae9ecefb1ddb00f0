"""The static vision tower: a chain of graphs specialised to one patch grid."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.models.gemma4.modeling_gemma4 import Gemma4Model

from g4conformance.errors import LayoutError
from g4conformance.runtime.contract import OnTensor
from g4conformance.runtime.graphs import PatchEmbedderGraph, PoolerGraph, VisionEmbedderGraph, VisionLayerGraph
from g4conformance.runtime.inputs import patch_grid
from g4conformance.runtime.masks import mask_bias


class StaticVisionTower:
    """Encodes images of exactly one patch grid; everything that depends on the grid is a constant of its graphs."""

    def __init__(self, model: Gemma4Model, image_position_ids: Tensor, dtype: torch.dtype) -> None:
        self.image_position_ids = image_position_ids
        tower = model.vision_tower
        bias, rope = self._attention_constants(model, image_position_ids, dtype)
        self.patch_embedder = PatchEmbedderGraph(tower, image_position_ids)
        self.layers = [VisionLayerGraph(layer, image_position_ids, bias, rope) for layer in tower.encoder.layers]
        self.pooler = PoolerGraph(tower, image_position_ids)
        self.embedder = VisionEmbedderGraph(model.embed_vision)

    @staticmethod
    def _attention_constants(
        model: Gemma4Model, image_position_ids: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """The additive mask [1, 1, N, N], which hides padding patches from every patch, and cos, sin [1, N, D]."""
        visible = (image_position_ids != -1).any(dim=-1)
        patches = visible.shape[-1]
        bias = mask_bias(visible[:, None, :].expand(-1, patches, -1), dtype)
        like = torch.empty(0, dtype=dtype, device=image_position_ids.device)
        return bias, model.vision_tower.encoder.rotary_emb(like, image_position_ids)

    def __call__(self, pixel_values: Tensor, image_position_ids: Tensor, emit: OnTensor) -> Tensor:
        """[1, N, 3 * patch_size ** 2] -> [V, H].

        Raises:
            LayoutError: the image has another patch grid than the graphs.
        """
        self._require_same_grid(image_position_ids)
        hidden = self.patch_embedder(pixel_values)
        emit("vision/patch_embeds", hidden)
        for i, layer in enumerate(self.layers):
            hidden = layer(hidden)
            emit(f"vision/layer/{i}/hidden", hidden)
        soft_tokens = self.pooler(hidden)
        emit("vision/soft_tokens", soft_tokens)
        return self.embedder(soft_tokens)

    def _require_same_grid(self, image_position_ids: Tensor) -> None:
        if not torch.equal(image_position_ids, self.image_position_ids):
            raise LayoutError(
                f"an image of {_describe(self.image_position_ids)}, for which the vision graph was built",
                _describe(image_position_ids),
                "Ask for the runtime of this image's layout with for_layout.",
            )


def _describe(image_position_ids: Tensor) -> str:
    columns, rows = patch_grid(image_position_ids)
    return f"{columns} x {rows} patches padded to {image_position_ids.shape[1]}"
