"""Faults of stage 6 in the per-layer inputs (PLE): computed, indexed or applied in another way."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from g4conformance.faults.parts import change_call, decoding, repack_middle_rows, text_model
from g4conformance.faults.patching import Patch
from g4conformance.faults.registry import At, fault
from g4conformance.runtime.static import StaticGemma4Runtime
from g4conformance.stages import Stage

_fault = partial(fault, stage=Stage.PREFILL)


@_fault(
    "ple-missing",
    at=At.GRAPH,
    check="G4-PREFILL-03",
    source="huggingface/candle/issues/3448 ggml-org/llama.cpp/issues/22243 Samsung/TICO/pull/840",
)
def not_applied(runtime: StaticGemma4Runtime, patch: Patch) -> None:
    """Layers do not add their per-layer input."""
    for layer in text_model(runtime).layers:
        patch(layer, "post_per_layer_input_norm", torch.zeros_like)


@_fault(
    "ple-table-scale-missing",
    at=At.GRAPH,
    check="G4-PREFILL-01",
    source="huggingface/transformers/pull/45207 Blaizzy/mlx-vlm/pull/893",
)
def table_not_scaled(runtime: StaticGemma4Runtime, patch: Patch) -> None:
    """Rows of the per-layer table are not multiplied by the root of their width."""
    patch(text_model(runtime).embed_tokens_per_layer, "embed_scale", torch.tensor(1.0))


@_fault("ple-rsqrt2-missing", at=At.GRAPH, check="G4-PREFILL-01")
def sum_not_scaled(runtime: StaticGemma4Runtime, patch: Patch) -> None:
    """The sum of both parts is not divided by the root of 2; the norm behind it hides that from every logit."""
    patch(runtime.per_layer_inputs, "per_layer_input_scale", 1.0)


@_fault("ple-projection-scale-missing", at=At.GRAPH, check="G4-PREFILL-01")
def projection_not_scaled(runtime: StaticGemma4Runtime, patch: Patch) -> None:
    """The context part is not divided by the root of the hidden size; the norm behind it cancels all but its eps."""
    patch(runtime.per_layer_inputs, "per_layer_model_projection_scale", 1.0)


@_fault("ple-projection-norm-missing", at=At.GRAPH, check="G4-PREFILL-01")
def projection_not_normalised(runtime: StaticGemma4Runtime, patch: Patch) -> None:
    """The context part is not normalised."""
    patch(runtime.per_layer_inputs, "per_layer_projection_norm", nn.Identity())


@_fault("ple-indexed-wrong-axis", at=At.ORCHESTRATION, check="G4-PREFILL-03", source="vllm-project/vllm/pull/47765")
def indexed_along_the_sequence(runtime: StaticGemma4Runtime, patch: Patch) -> None:
    """Layer i takes row i of the sequence for all rows, in place of slice i of the layers."""

    def layer_of(call: Any, spec: Any, graph: Any, hidden: Tensor, per_layer: Tensor, *rest: Any) -> Any:
        if not decoding(runtime):
            per_layer = per_layer[:, spec.index : spec.index + 1].expand_as(per_layer)
        return call(spec, graph, hidden, per_layer, *rest)

    change_call(patch, runtime, "_layer", layer_of)


@_fault(
    "ple-packed-layout-transposed",
    at=At.WEIGHTS,
    check="G4-PREFILL-01",
    source="huggingface/transformers/pull/45207",
)
def packed_rows_transposed(runtime: StaticGemma4Runtime, patch: Patch) -> None:
    """A packed row of the table is unpacked as (width, layers) in place of (layers, width)."""

    def transposed(lookup: Any, ids: Tensor, *rest: Any) -> Tensor:
        unpacked: Tensor = lookup(ids, *rest)
        layers, width = unpacked.shape[-2:]
        return unpacked.flatten(-2).unflatten(-1, (width, layers)).transpose(-1, -2)

    change_call(patch, runtime.per_layer_inputs, "get_per_layer_inputs", transposed)


@_fault("ple-image-rows-zeroed", at=At.ORCHESTRATION, check="G4-PREFILL-01", case="image-middle")
def image_rows_zero(runtime: StaticGemma4Runtime, patch: Patch) -> None:
    """Image rows get no per-layer inputs; the reference gives them the pad token's and the context of the picture."""
    slot = slice(runtime.layout.visual_start_idx, runtime.layout.visual_end_idx)

    def zeroed(graph: Any, ids: Tensor, embeds: Tensor) -> Tensor:
        per_layer: Tensor = graph(ids, embeds).clone()
        per_layer[:, slot] = 0.0
        return per_layer

    change_call(patch, runtime, "per_layer_inputs", zeroed)


@_fault("ple-context-from-text-embeds", at=At.ORCHESTRATION, check="G4-PREFILL-01", case="image-first")
def context_of_the_placeholders(runtime: StaticGemma4Runtime, patch: Patch) -> None:
    """The context part is projected from the text embeddings in place of the fused ones."""
    change_call(patch, runtime, "per_layer_inputs", lambda graph, ids, embeds: graph(ids, runtime.embedding(ids)))


@_fault(
    "ple-table-4bit",
    at=At.WEIGHTS,
    check="G4-PREFILL-01",
    source="raullenchai/Rapid-MLX/pull/1114 onnxruntime/mobius/pull/403",
)
def table_in_four_bits(runtime: StaticGemma4Runtime, patch: Patch) -> None:
    """The per-layer table is quantized to four bits a value."""
    embedding = text_model(runtime).embed_tokens_per_layer
    step = embedding.weight.detach().abs().amax(dim=-1, keepdim=True) / 7
    weight = (embedding.weight.detach() / step).round() * step
    patch(embedding, "weight", nn.Parameter(weight, requires_grad=False))


@_fault(
    "ple-table-repacked",
    at=At.WEIGHTS,
    check="G4-PREFILL-01",
    case="vocabulary-1",
    source="ikawrakow/ik_llama.cpp/pull/2117",
)
def a_block_of_rows_repacked(runtime: StaticGemma4Runtime, patch: Patch) -> None:
    """Four rows of the per-layer table are repacked by a kernel that is meant for matrices."""
    repack_middle_rows(patch, text_model(runtime).embed_tokens_per_layer)


@_fault("ple-gate-gelu-exact", at=At.GRAPH, check="G4-PREFILL-03")
def exact_gelu_in_the_gate(runtime: StaticGemma4Runtime, patch: Patch) -> None:
    """The gate of per-layer inputs uses GELU itself, not its tanh approximation."""
    for layer in text_model(runtime).layers:
        patch(layer, "act_fn", nn.GELU())


@_fault("ple-next-layer", at=At.ORCHESTRATION, check="G4-PREFILL-03")
def slice_of_the_layer_before(runtime: StaticGemma4Runtime, patch: Patch) -> None:
    """The last layer takes the per-layer input of the layer before it."""
    last = runtime.specs[-1]
    seen: dict[int, Tensor] = {}

    def layer_of(call: Any, spec: Any, graph: Any, hidden: Tensor, per_layer: Tensor, *rest: Any) -> Any:
        seen[spec.index] = per_layer
        return call(spec, graph, hidden, seen[spec.index - 1] if spec is last else per_layer, *rest)

    change_call(patch, runtime, "_layer", layer_of)
