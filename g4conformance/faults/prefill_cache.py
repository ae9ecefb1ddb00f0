"""Faults of stage 6 around the cache: whose K/V a layer reads, and what the buffers hold after the prompt."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.models.gemma4.modeling_gemma4 import apply_rotary_pos_emb

from g4conformance.faults.parts import FULL, SLIDING, change_call, decoding, text_model
from g4conformance.faults.patching import Patch
from g4conformance.faults.registry import At, fault
from g4conformance.faults.subjects import Subject
from g4conformance.runtime.cache import StaticCache, allocate_cache
from g4conformance.runtime.contract import MasksAndRope
from g4conformance.runtime.static import StaticGemma4Runtime
from g4conformance.stages import Stage

_fault = partial(fault, stage=Stage.PREFILL)


@_fault(
    "shared-layers-recompute-kv",
    at=At.ORCHESTRATION,
    check="G4-PREFILL-03",
    source="huggingface/transformers/pull/45253 huggingface/transformers/pull/45312 unslothai/unsloth-zoo/pull/813",
)
def sharing_layers_project_their_own(runtime: StaticGemma4Runtime, patch: Patch) -> None:
    """Layers that should reuse their donor's K/V project their own, with the donor's weights."""

    def layer_of(call: Any, spec: Any, graph: Any, hidden: Tensor, per_layer: Any, attention: Any, *rest: Any) -> Any:
        if spec.stores_kv or decoding(runtime):
            return call(spec, graph, hidden, per_layer, attention, *rest)
        layers = text_model(runtime).layers
        donor, rows = layers[spec.kv_source].self_attn, layers[spec.index].input_layernorm(hidden)
        shape = (*rows.shape[:-1], -1, spec.head_dim)
        key = donor.k_norm(donor.k_proj(rows).view(shape))
        key = apply_rotary_pos_emb(key, attention[1], attention[2], unsqueeze_dim=2).transpose(1, 2)
        value = donor.v_norm(donor.v_proj(rows).view(shape)).transpose(1, 2)
        return graph(hidden, per_layer, *attention, key, value)

    change_call(patch, runtime, "_layer", layer_of)


@_fault(
    "shared-donor-wrong",
    at=At.ORCHESTRATION,
    check="G4-PREFILL-03",
    source="tenstorrent/tt-metal/pull/46247 ohdearquant/lattice/pull/1002",
)
def donor_is_the_first_of_its_type(runtime: StaticGemma4Runtime, patch: Patch) -> None:
    """Layers reuse K/V of the first layer of their type in place of the last one before the sharing point."""
    first = {spec.layer_type: spec.index for spec in reversed(runtime.specs)}
    specs = tuple(s if s.stores_kv else replace(s, kv_source=first[s.layer_type]) for s in runtime.specs)
    patch(runtime, "specs", specs)


@_fault(
    "shared-layer-overwrites-donor",
    at=At.STATE,
    check="G4-PREFILL-05",
    source="vllm-project/vllm-ascend/pull/11791 AI-Hypercomputer/maxtext/pull/4053",
)
def last_sharing_layer_writes(runtime: StaticGemma4Runtime, patch: Patch) -> None:
    """The last layer that reuses K/V writes rows of zeros into its donor's cache."""
    last = runtime.specs[-1]

    def layer_of(call: Any, spec: Any, *args: Any) -> Any:
        hidden = call(spec, *args)
        if spec is last and not decoding(runtime):
            key, value = (torch.zeros_like(buffer[:, :, :1]) for buffer in runtime.cache.read(spec.kv_source))
            runtime.cache.write(spec.kv_source, key, value, start=0)
        return hidden

    change_call(patch, runtime, "_layer", layer_of)


@_fault(
    "cache-single-head-dim",
    at=At.ORCHESTRATION,
    check="G4-PREFILL-02",
    source="Samsung/TICO/pull/840",
    raises=True,
)
def one_head_dim_for_all_buffers(runtime: StaticGemma4Runtime, patch: Patch) -> None:
    """All cache buffers get the sliding layers' head dim; full layers have another, and do not fit."""
    _reallocate(runtime, patch, head_dim=next(s.head_dim for s in runtime.specs if s.layer_type == SLIDING))


@_fault(
    "kv-heads-not-per-layer",
    at=At.ORCHESTRATION,
    check="G4-PREFILL-02",
    needs=Subject.K_EQ_V,
    source="labscommunity/cascadia/pull/72",
    raises=True,
)
def one_number_of_kv_heads(runtime: StaticGemma4Runtime, patch: Patch) -> None:
    """All cache buffers get the sliding layers' number of K/V heads."""
    sliding = next(s for s in runtime.specs if s.layer_type == SLIDING)
    _reallocate(runtime, patch, num_key_value_heads=sliding.num_key_value_heads)


@_fault("cache-keeps-padding-kv", at=At.ORCHESTRATION, check="G4-PREFILL-06", source="Samsung/TICO/pull/849")
def padding_written_to_the_cache(runtime: StaticGemma4Runtime, patch: Patch) -> None:
    """Prefill copies all rows of the static buffer into the cache, padding's included."""

    def graph_of(index: int, graph: Any, hidden: Tensor, *args: Any) -> Any:
        result = graph(hidden, *args)
        if hidden.shape[1] > 1 and isinstance(result, tuple):
            runtime.cache.write(index, result[1], result[2], start=0)
        return result

    patch(runtime, "layers", [partial(graph_of, i, graph) for i, graph in enumerate(runtime.layers)])


@_fault("cache-half-precision", at=At.STATE, check="G4-PREFILL-05")
def cache_in_half_precision(runtime: StaticGemma4Runtime, patch: Patch) -> None:
    """The cache keeps K/V in float16."""

    def rounded(write: Any, layer: int, key: Tensor, value: Tensor, start: int) -> None:
        write(layer, key.half().to(key.dtype), value.half().to(value.dtype), start=start)

    change_call(patch, runtime.cache, "write", rounded)


@_fault("cache-not-cleared", at=At.STATE, check="G4-PREFILL-06", case="a-b-a")
def cache_not_cleared(runtime: StaticGemma4Runtime, patch: Patch) -> None:
    """The cache is not cleared between requests, so that rows of a longer one remain behind a shorter one."""
    patch(runtime.cache, "reset", lambda: None)


@_fault("shared-layers-not-windowed", at=At.ORCHESTRATION, check="G4-PREFILL-03", case="window-twice")
def sharing_layers_not_windowed(runtime: StaticGemma4Runtime, patch: Patch) -> None:
    """Sliding layers that reuse K/V attend with the full layers' mask."""
    full: list[Tensor] = []

    def decoder(call: Any, ids: Tensor, hidden: Tensor, positional: MasksAndRope, *rest: Any) -> Tensor:
        full[:] = [positional.biases[FULL]]
        return call(ids, hidden, positional, *rest)

    def layer_of(call: Any, spec: Any, graph: Any, hidden: Tensor, per_layer: Any, attention: Any, *rest: Any) -> Any:
        if not spec.stores_kv and not decoding(runtime):
            attention = (full[0], *attention[1:])
        return call(spec, graph, hidden, per_layer, attention, *rest)

    change_call(patch, runtime, "_decoder", decoder)
    change_call(patch, runtime, "_layer", layer_of)


def _reallocate(runtime: StaticGemma4Runtime, patch: Patch, **sizes: Any) -> None:
    """Gives the runtime a cache whose buffers all have these sizes."""
    specs = [replace(spec, **sizes) for spec in runtime.specs]
    checkpoint, layout = runtime.checkpoint, runtime.layout
    buffers = allocate_cache(specs, layout.batch_size, layout.max_seq, checkpoint.dtype, checkpoint.device)
    patch(runtime, "cache", StaticCache(buffers))
