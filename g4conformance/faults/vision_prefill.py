"""Faults of stage 3: patches become other soft tokens than the reference's."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.gemma4.modeling_gemma4 import Gemma4ClippableLinear

from g4conformance.faults.parts import change_call, change_output, change_pooling, change_tower, vision_model
from g4conformance.faults.patching import Patch
from g4conformance.faults.registry import At, fault
from g4conformance.faults.subjects import Subject
from g4conformance.runtime.contract import Runtime
from g4conformance.runtime.static import StaticGemma4Runtime
from g4conformance.stages import Stage

_fault = partial(fault, stage=Stage.VISION_PREFILL, case="image-middle")

# --- patch embedder ---------------------------------------------------------------------------------------------------


@_fault("pixel-rescale-missing", at=At.GRAPH, check="G4-VISION-01", source="m87-labs/kestrel/pull/163")
def pixels_not_rescaled(runtime: StaticGemma4Runtime, patch: Patch) -> None:
    """The patch embedder does not rescale pixels from [0, 1] to [-1, 1]."""
    embedder = vision_model(runtime).patch_embedder
    change_call(patch, embedder, "forward", lambda embed, pixels, *rest: embed((pixels + 1) / 2, *rest))


@_fault("pixel-rescale-twice", at=At.GRAPH, check="G4-VISION-01")
def pixels_rescaled_twice(runtime: StaticGemma4Runtime, patch: Patch) -> None:
    """Pixels are normalised to [-1, 1] before the patch embedder rescales them once more."""
    embedder = vision_model(runtime).patch_embedder
    change_call(patch, embedder, "forward", lambda embed, pixels, *rest: embed(2 * pixels - 1, *rest))


@_fault("vision-pos-table-axis-swap", at=At.WEIGHTS, check="G4-VISION-01", case="image-wide")
def position_table_axes_swapped(runtime: StaticGemma4Runtime, patch: Patch) -> None:
    """Columns are looked up in the table of rows, and rows in that of columns."""
    embedder = vision_model(runtime).patch_embedder
    patch(embedder, "position_embedding_table", nn.Parameter(embedder.position_embedding_table.detach().flip(0)))


@_fault("pos-embedding-at-padding", at=At.GRAPH, check="G4-VISION-01", case="image-wide")
def padding_gets_positions(runtime: StaticGemma4Runtime, patch: Patch) -> None:
    """Padding patches get the position embedding of the origin in place of zero."""
    embedder = vision_model(runtime).patch_embedder
    change_call(
        patch, embedder, "forward", lambda embed, pixels, ids, padding: embed(pixels, ids, torch.zeros_like(padding))
    )


@_fault("pos-table-cut-short", at=At.WEIGHTS, check="G4-VISION-01", case="image-panorama")
def far_positions_share_a_row(runtime: StaticGemma4Runtime, patch: Patch) -> None:
    """The position table is loaded as far as square pictures reach, and positions beyond its end share its last row."""
    embedder = vision_model(runtime).patch_embedder
    change_call(
        patch, embedder, "forward", lambda embed, pixels, ids, padding: embed(pixels, ids.clamp(max=63), padding)
    )


# --- encoder ----------------------------------------------------------------------------------------------------------


@_fault(
    "clip-bounds-dropped",
    at=At.WEIGHTS,
    check="G4-VISION-02",
    source="AI-Hypercomputer/maxtext/pull/4790 vllm-project/tpu-inference/pull/3355",
)
def clip_bounds_dropped(runtime: StaticGemma4Runtime, patch: Patch) -> None:
    """The clip bounds of the linear layers are not loaded."""
    for linear in _clipped_linears(runtime):
        patch(linear, "use_clipped_linears", False)


@_fault("clip-one-side-only", at=At.WEIGHTS, check="G4-VISION-02", source="AI-Hypercomputer/maxtext/pull/4790")
def outputs_not_clipped(runtime: StaticGemma4Runtime, patch: Patch) -> None:
    """Inputs of linear layers are clipped, their outputs are not."""
    for linear in _clipped_linears(runtime):
        patch(linear, "output_min", torch.tensor(-torch.inf))
        patch(linear, "output_max", torch.tensor(torch.inf))


@_fault("clip-bound-of-one-linear", at=At.WEIGHTS, check="G4-VISION-02")
def one_bound_dropped(runtime: StaticGemma4Runtime, patch: Patch) -> None:
    """A single upper bound, of the last layer's value projection, is open."""
    patch(_layers(runtime)[-1].self_attn.v_proj, "output_max", torch.tensor(torch.inf))


@_fault(
    "vision-padding-not-masked",
    at=At.ORCHESTRATION,
    check="G4-VISION-02",
    case="image-wide",
    source="AI-Hypercomputer/maxtext/pull/4790 quic/efficient-transformers/pull/1159",
)
def padding_patches_seen(runtime: StaticGemma4Runtime, patch: Patch) -> None:
    """Padding patches are visible as keys in the encoder's attention."""

    def unmask(tower: Any) -> None:
        tower.bias = torch.zeros_like(tower.bias)

    change_tower(runtime, patch, unmask)


@_fault(
    "vision-rope-1d-pairing",
    at=At.GRAPH,
    check="G4-VISION-02",
    source="turboderp-org/exllamav3/pull/200 Tencent/ncnn/issues/6833",
)
def rotated_across_the_whole_head(runtime: StaticGemma4Runtime, patch: Patch) -> None:
    """One rotation pairs the halves of the whole head; x and y should rotate a half of it each."""

    def rewire(tower: Any) -> None:
        embed, positions = tower.patch_embedder, tower.position_ids
        tower.patch_embedder = lambda pixels, _, padding: embed(pixels, positions, padding)
        tower.position_ids = positions[..., :1]  # one axis: the head is not split
        tower.cos, tower.sin = (_interleaved_axes(table) for table in (tower.cos, tower.sin))

    change_tower(runtime, patch, rewire)


@_fault("vision-rope-axis-swap", at=At.GRAPH, check="G4-VISION-02", case="image-wide")
def rotary_axes_swapped(runtime: StaticGemma4Runtime, patch: Patch) -> None:
    """The first half of the head rotates by y, the second by x."""

    def swap(tower: Any) -> None:
        tower.cos, tower.sin = (torch.cat(table.chunk(2, -1)[::-1], -1) for table in (tower.cos, tower.sin))

    change_tower(runtime, patch, swap)


@_fault("vision-rope-theta-10000", at=At.GRAPH, check="G4-VISION-02")
def text_theta_in_the_tower(runtime: StaticGemma4Runtime, patch: Patch) -> None:
    """Rotary frequencies are made of the text's base 10,000 in place of 100."""
    rotary = vision_model(runtime).encoder.rotary_emb
    patch(rotary, "inv_freq", rotary.inv_freq**2)  # 10,000 is 100 squared


@_fault("vision-attn-scaled", at=At.GRAPH, check="G4-VISION-02", source="mlc-ai/mlc-llm/pull/3485")
def attention_scaled(runtime: StaticGemma4Runtime, patch: Patch) -> None:
    """Scores are divided by the root of the head dim; queries and keys are normalised, the scale is 1."""
    for layer in _layers(runtime):
        patch(layer.self_attn, "scaling", layer.self_attn.head_dim**-0.5)


@_fault("vision-v-norm-missing", at=At.GRAPH, check="G4-VISION-02")
def values_not_normalised(runtime: StaticGemma4Runtime, patch: Patch) -> None:
    """The norm of values, which has no weight, is left out."""
    for layer in _layers(runtime):
        patch(layer.self_attn, "v_norm", nn.Identity())


@_fault("vision-gelu-exact", at=At.GRAPH, check="G4-VISION-02")
def exact_gelu(runtime: StaticGemma4Runtime, patch: Patch) -> None:
    """The encoder's MLPs use GELU itself, not its tanh approximation."""
    for layer in _layers(runtime):
        patch(layer.mlp, "act_fn", nn.GELU())


class _Zeros(nn.Module):
    """A module, because graphs are exported with their modules' names."""

    def forward(self, hidden: Tensor) -> Tensor:
        return torch.zeros_like(hidden)


@_fault("vision-layer-skipped", at=At.ORCHESTRATION, check="G4-VISION-02")
def last_layer_without_mlp(runtime: StaticGemma4Runtime, patch: Patch) -> None:
    """The last encoder layer's MLP is left out."""
    patch(_layers(runtime)[-1], "post_feedforward_layernorm", _Zeros())


# --- pooler and embedder ----------------------------------------------------------------------------------------------


@_fault(
    "pool-kernel-from-valid-count",
    at=At.GRAPH,
    check="G4-VISION-03",
    source="ml-explore/mlx-swift-lm/issues/289 ml-explore/mlx-swift-lm/pull/290",
)
def kernel_of_two(runtime: StaticGemma4Runtime, patch: Patch) -> None:
    """The pooling kernel is derived from the number of real patches and comes out one too small."""
    change_pooling(patch, runtime, lambda positions, k: _soft_token(positions, k - 1))


@_fault("pool-raster-instead-of-2d", at=At.GRAPH, check="G4-VISION-03")
def pooled_along_rows(runtime: StaticGemma4Runtime, patch: Patch) -> None:
    """Soft tokens average consecutive patches of a row in place of a square."""
    change_pooling(patch, runtime, lambda positions, k: (torch.arange(positions.shape[1]) // k**2)[None])


@_fault("pool-grid-transposed", at=At.GRAPH, check="G4-VISION-03")
def soft_tokens_column_first(runtime: StaticGemma4Runtime, patch: Patch) -> None:
    """Soft tokens are numbered down the columns in place of along the rows."""

    def column_first(positions: Tensor, k: int) -> Tensor:
        x, y = (positions // k).unbind(-1)
        return y + (y.max() + 1) * x

    change_pooling(patch, runtime, column_first)


@_fault(
    "negative-pad-coords-sort-first",
    at=At.ORCHESTRATION,
    check="G4-VISION-03",
    source="keras-team/keras-hub/pull/2758",
)
def padding_sorted_to_the_front(runtime: StaticGemma4Runtime, patch: Patch) -> None:
    """Patches are sorted by position before pooling, and padding's -1 puts it in front of the picture."""

    def sorted_first(pool: Any, hidden: Tensor, positions: Tensor, padding: Tensor, length: int) -> Any:
        order = torch.argsort((~padding[0]).int(), stable=True)
        return pool(hidden[:, order], positions, padding, length)

    change_call(patch, vision_model(runtime).pooler, "forward", sorted_first)


@_fault(
    "soft-token-suffix-not-stripped",
    at=At.GRAPH,
    check="G4-VISION-03",
)
def empty_soft_tokens_kept(runtime: StaticGemma4Runtime, patch: Patch) -> None:
    """The pooled tensor keeps the empty rows of the soft-token budget behind the picture's."""
    budget = runtime.facts.max_soft_tokens
    change_tower(runtime, patch, lambda tower: setattr(tower.pooler, "num_soft_tokens", budget))


@_fault("pool-sqrt-hidden-omitted", at=At.GRAPH, check="G4-VISION-03")
def soft_tokens_not_scaled(runtime: StaticGemma4Runtime, patch: Patch) -> None:
    """Pooled features are not multiplied by the root of the hidden size; the embedder's norm hides it from logits."""
    patch(vision_model(runtime).pooler, "root_hidden_size", 1.0)


@_fault(
    "standardize-omitted",
    at=At.GRAPH,
    check="G4-VISION-03",
    needs=Subject.STANDARDIZED,
    source="vllm-project/vllm/issues/40290",
)
def not_standardised(runtime: StaticGemma4Runtime, patch: Patch) -> None:
    """Pooled features are not standardised with `std_bias` and `std_scale`."""
    change_tower(runtime, patch, lambda tower: setattr(tower.pooler, "standardize", False))


@_fault(
    "vision-fp16-pooler-overflow",
    at=At.GRAPH,
    check="G4-VISION-03",
    needs=Subject.LARGE_VISION,
    source="huggingface/transformers/pull/46277 vllm-project/vllm/issues/40290 unslothai/unsloth-zoo/pull/931",
)
def pooled_in_half_precision(runtime: StaticGemma4Runtime, patch: Patch) -> None:
    """Pooled features are scaled in float16, where they overflow before they are standardised."""

    def halved(pool: Any, *args: Any) -> tuple[Tensor, Tensor]:
        pooled, mask = pool(*args)
        return pooled.half(), mask

    change_call(patch, vision_model(runtime).pooler, "forward", halved)


@_fault("vision-embedder-norm-missing", at=At.GRAPH, check="G4-VISION-04")
def embedder_without_norm(runtime: StaticGemma4Runtime, patch: Patch) -> None:
    """Soft tokens are projected into the language model's space without the norm before it."""
    patch(runtime.model.model.embed_vision, "embedding_pre_projection_norm", nn.Identity())


@_fault("visual-embeds-half-precision", at=At.GRAPH, check="G4-VISION-04", boundary=True)
def handed_over_in_half_precision(runtime: Runtime, patch: Patch) -> None:
    """Visual embeddings are handed to the language model in float16."""
    change_output(runtime, patch, "vision_prefill", "visual_embeds", lambda e: e.half().to(e.dtype))


@_fault("visual-embeds-stale", at=At.STATE, check="G4-VISION-04", case="image-a-b-a", boundary=True)
def picture_of_the_request_before(runtime: Runtime, patch: Patch) -> None:
    """A picture gets the visual embeddings of the picture before it."""
    before: list[Tensor] = []

    def stale(embeds: Tensor) -> Tensor:
        previous = before.pop() if before else embeds
        before.append(embeds)
        return previous

    change_output(runtime, patch, "vision_prefill", "visual_embeds", stale)


def _layers(runtime: StaticGemma4Runtime) -> Any:
    return vision_model(runtime).encoder.layers


def _clipped_linears(runtime: StaticGemma4Runtime) -> Iterator[Any]:
    for module in vision_model(runtime).modules():
        if isinstance(module, Gemma4ClippableLinear):
            yield module


def _interleaved_axes(table: Tensor) -> Tensor:
    """[x, x, y, y] to [x, y, x, y], quarters of the last axis."""
    first, second, third, fourth = table.chunk(4, -1)
    return torch.cat([first, third, second, fourth], -1)


def _soft_token(positions: Tensor, k: int) -> Tensor:
    """The soft token [1, N] of each patch position [1, N, 2] under a kernel of k x k."""
    x, y = (positions // k).unbind(-1)
    return x + ((positions[..., 0].max() + 1) // k) * y
