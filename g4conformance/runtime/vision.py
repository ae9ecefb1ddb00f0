"""The static vision tower: a chain of graphs specialised to one patch grid."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.models.gemma4.modeling_gemma4 import Gemma4Model

from g4conformance.errors import LayoutError
from g4conformance.runtime.contract import OnTensor
from g4conformance.runtime.graphs import (
    PatchEmbedderGraph,
    PoolerGraph,
    VisionEmbedderGraph,
    VisionLayerGraph,
    padding_patches,
)
from g4conformance.runtime.inputs import patch_grid
from g4conformance.runtime.lowering import Lower, as_it_is
from g4conformance.runtime.masks import mask_bias


class StaticVisionTower:
    """Encodes images of exactly one patch grid; everything that depends on the grid is a constant.

    Attributes:
        image_position_ids: (x, y) of each patch, int64 [1, N, 2], -1 at padding patches.
        bias: the additive mask [1, 1, N, N], which hides padding patches from every patch.
        cos, sin: rotary tables [1, N, head_dim].
    """

    def __init__(
        self, model: Gemma4Model, image_position_ids: Tensor, dtype: torch.dtype, lower: Lower = as_it_is
    ) -> None:
        tower = model.vision_tower
        self.image_position_ids = self.position_ids = image_position_ids
        self.padding = padding_patches(image_position_ids)
        self.bias = mask_bias(~self.padding[:, None, :].expand(-1, self.padding.shape[1], -1), dtype)
        like = torch.empty(0, dtype=dtype, device=image_position_ids.device)
        self.cos, self.sin = tower.encoder.rotary_emb(like, image_position_ids)
        self.patch_embedder = lower("vision/patch_embeds", PatchEmbedderGraph(tower))
        layers = enumerate(tower.encoder.layers)
        self.layers = [lower(f"vision/layer/{i}", VisionLayerGraph(layer)) for i, layer in layers]
        columns, rows = patch_grid(image_position_ids)
        self.pooler = lower(f"vision/pooler/{columns}x{rows}", PoolerGraph(tower, image_position_ids))
        self.embedder = lower("visual_embeds", VisionEmbedderGraph(model.embed_vision))

    def __call__(self, pixel_values: Tensor, image_position_ids: Tensor, emit: OnTensor) -> Tensor:
        """[1, N, 3 * patch_size ** 2] -> [V, H].

        Raises:
            LayoutError: the image has another patch grid than the graphs.
        """
        self._require_same_grid(image_position_ids)
        hidden = self.run_graph("vision/patch_embeds", pixel_values)
        emit("vision/patch_embeds", hidden)
        for i in range(len(self.layers)):
            hidden = self.run_graph(f"vision/layer/{i}", hidden)
            emit(f"vision/layer/{i}/hidden", hidden)
        soft_tokens = self.pooler(hidden)
        emit("vision/soft_tokens", soft_tokens)
        return self.run_graph("visual_embeds", soft_tokens)

    def run_graph(self, name: str, entering: Tensor) -> Tensor:
        """What the graph of this name makes of the tensor that varies; the constants are the grid's."""
        if name == "vision/patch_embeds":
            return self.patch_embedder(entering, self.position_ids, self.padding)
        if name == "visual_embeds":
            return self.embedder(entering)
        layer = self.layers[int(name.removeprefix("vision/layer/"))]
        return layer(entering, self.position_ids, self.bias, self.cos, self.sin)

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
