"""Faults of stage 6: a decoder layer, the cache or the head computes something else for the prompt."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from g4conformance.faults.parts import (
    FULL,
    change_call,
    change_output,
    text_model,
    text_norms,
)
from g4conformance.faults.patching import Patch
from g4conformance.faults.registry import At, fault
from g4conformance.faults.subjects import Subject
from g4conformance.runtime import graphs
from g4conformance.runtime.cache import SlotCache
from g4conformance.runtime.contract import Runtime
from g4conformance.runtime.static import StaticGemma4Runtime
from g4conformance.stages import Stage

_fault = partial(fault, stage=Stage.PREFILL)

# --- attention --------------------------------------------------------------------------------------------------------


@_fault("text-attn-scaled", at=At.GRAPH, check="G4-PREFILL-03", source="mlc-ai/mlc-llm/pull/3485")
def attention_scaled(runtime: StaticGemma4Runtime, patch: Patch) -> None:
    """Scores are divided by the root of the head dim; queries and keys are normalised, the scale is 1."""
    for layer in text_model(runtime).layers:
        patch(layer.self_attn, "scaling", layer.self_attn.head_dim**-0.5)


@_fault("attn-softcap-added", at=At.GRAPH, check="G4-PREFILL-03")
def attention_scores_capped(runtime: StaticGemma4Runtime, patch: Patch) -> None:
    """Attention scores are capped at 50, as in Gemma 2."""
    for layer in text_model(runtime).layers:
        change_call(patch, layer, "forward", lambda forward, *args, **kwargs: forward(*args, softcap=50.0, **kwargs))


@_fault("mask-clamped-in-attention", at=At.GRAPH, check="G4-PREFILL-03", needs=Subject.LARGE_SCORES)
def mask_clamped(runtime: StaticGemma4Runtime, patch: Patch) -> None:
    """Attention clamps the mask it is given at -100, which large scores overcome; the mask itself is right."""

    def clamped(forward: Any, *args: Any, attention_mask: Tensor, **kwargs: Any) -> Tensor:
        return forward(*args, attention_mask=attention_mask.clamp(min=-100.0), **kwargs)

    for layer in text_model(runtime).layers:
        change_call(patch, layer, "forward", clamped)


@_fault("text-v-norm-missing", at=At.GRAPH, check="G4-PREFILL-02", source="quantumaikr/quant.cpp/issues/96")
def values_not_normalised(runtime: StaticGemma4Runtime, patch: Patch) -> None:
    """The norm of values, which has no weight, is left out."""
    for layer in _storing_layers(runtime):
        patch(layer.self_attn, "v_norm", nn.Identity())


@_fault("v-norm-with-k-weight", at=At.WEIGHTS, check="G4-PREFILL-02", source="quantumaikr/quant.cpp/issues/96")
def values_normalised_as_keys(runtime: StaticGemma4Runtime, patch: Patch) -> None:
    """Values are normalised with the keys' weight."""
    for layer in _storing_layers(runtime):
        patch(layer.self_attn, "v_norm", layer.self_attn.k_norm)


@_fault("qk-norm-missing", at=At.GRAPH, check="G4-PREFILL-03")
def queries_not_normalised(runtime: StaticGemma4Runtime, patch: Patch) -> None:
    """The norm of queries is left out."""
    for layer in text_model(runtime).layers:
        patch(layer.self_attn, "q_norm", nn.Identity())


@_fault("k-norm-missing", at=At.GRAPH, check="G4-PREFILL-02")
def keys_not_normalised(runtime: StaticGemma4Runtime, patch: Patch) -> None:
    """The norm of keys is left out."""
    for layer in _storing_layers(runtime):
        patch(layer.self_attn, "k_norm", nn.Identity())


@_fault("gqa-head-mapping", at=At.GRAPH, check="G4-PREFILL-03", source="ROCm/hip-ep/pull/882")
def heads_tiled(runtime: StaticGemma4Runtime, patch: Patch) -> None:
    """K/V heads are tiled over the query heads in place of repeated: head h reads h mod n in place of h // group."""
    for layer in text_model(runtime).layers:
        attention = layer.self_attn
        heads = runtime.checkpoint.text_config.num_attention_heads
        kv_heads = heads // attention.num_key_value_groups
        order = torch.tensor([head for kv in range(kv_heads) for head in range(heads) if head % kv_heads == kv])
        inverse = order.argsort()
        # Putting head h where its K/V head is wanted, and back before the output projection, exchanges the mapping.
        change_call(patch, attention, "q_proj", partial(_permuted_output, heads=heads, order=order))
        change_call(patch, attention, "o_proj", partial(_permuted_input, heads=heads, order=inverse))


@_fault("k-cache-used-as-v", at=At.GRAPH, check="G4-PREFILL-03", source="ikawrakow/ik_llama.cpp/pull/1592")
def keys_read_as_values(runtime: StaticGemma4Runtime, patch: Patch) -> None:
    """On full layers, attention reads the cached keys in place of the values."""
    full = {spec.index for spec in runtime.specs if spec.layer_type == FULL}

    class KeysForValues(SlotCache):
        def update(self, key: Tensor, value: Tensor, layer_idx: int, **kwargs: Any) -> tuple[Tensor, Tensor]:
            keys, values = super().update(key, value, layer_idx, **kwargs)
            return keys, keys if layer_idx in full else values

    patch(graphs, "SlotCache", KeysForValues)


@_fault(
    "k-eq-v-projection-handling",
    at=At.WEIGHTS,
    check="G4-PREFILL-02",
    needs=Subject.K_EQ_V,
    source="ml-explore/mlx-swift-lm/issues/231 vllm-project/vllm/pull/41253 labscommunity/cascadia/pull/72",
)
def value_projection_transposed(runtime: StaticGemma4Runtime, patch: Patch) -> None:
    """Full layers without a value projection get a packed copy of the key projection, transposed within its heads."""
    for spec in runtime.specs:
        attention = text_model(runtime).layers[spec.index].self_attn
        if spec.stores_kv and attention.v_proj is None:
            heads, project = spec.num_key_value_heads, attention.k_proj
            patch(attention, "v_proj", partial(_transposed_heads, project, heads=heads))


# --- norms, MLP, layer scalar -----------------------------------------------------------------------------------------


@_fault(
    "rmsnorm-one-plus-weight",
    at=At.WEIGHTS,
    check="G4-PREFILL-03",
    source="kekzl/imp/pull/459 linkedin/Liger-Kernel/issues/74 ml-explore/mlx-lm/pull/1095",
)
def one_added_to_norm_weights(runtime: StaticGemma4Runtime, patch: Patch) -> None:
    """Norm weights are used as 1 + w, the convention of earlier Gemmas."""
    for norm in text_norms(runtime):
        patch(norm, "weight", nn.Parameter(norm.weight.detach() + 1.0, requires_grad=False))


@_fault("rmsnorm-eps", at=At.GRAPH, check="G4-PREFILL-03")
def larger_eps(runtime: StaticGemma4Runtime, patch: Patch) -> None:
    """Norms use an eps of 1e-5, a library's default, in place of the config's 1e-6."""
    for norm in text_norms(runtime):
        patch(norm, "eps", 1e-5)


@_fault(
    "rmsnorm-low-precision",
    at=At.GRAPH,
    check="G4-PREFILL-03",
    needs=Subject.BFLOAT16,
    source="tenstorrent/tt-metal/pull/41426 tenstorrent/tt-metal/pull/55948",
)
def norms_in_bfloat16(runtime: StaticGemma4Runtime, patch: Patch) -> None:
    """Norms add up their mean square in bfloat16; the reference computes the whole norm in float32."""
    for norm in text_norms(runtime):
        patch(norm, "forward", partial(_norm_in_own_dtype, norm))


@_fault(
    "gelu-exact",
    at=At.GRAPH,
    check="G4-PREFILL-03",
    source="tenstorrent/tt-metal/pull/55948 ml-explore/mlx-examples/issues/579",
)
def exact_gelu(runtime: StaticGemma4Runtime, patch: Patch) -> None:
    """MLPs use GELU itself, not its tanh approximation."""
    for layer in text_model(runtime).layers:
        patch(layer.mlp, "act_fn", nn.GELU())


@_fault(
    "double-wide-mlp-ignored",
    at=At.WEIGHTS,
    check="G4-PREFILL-03",
    source="linkedin/Liger-Kernel/pull/1196 huggingface/candle/pull/3488",
)
def half_of_the_wide_mlp(runtime: StaticGemma4Runtime, patch: Patch) -> None:
    """Layers that reuse K/V load only half the rows of their double-wide MLP."""
    width = runtime.checkpoint.text_config.intermediate_size
    for spec in runtime.specs:
        mlp = text_model(runtime).layers[spec.index].mlp
        if not spec.stores_kv:
            patch(mlp, "forward", partial(_narrow_mlp, mlp, width=width))


@_fault("layer-scalar-dropped", at=At.WEIGHTS, check="G4-PREFILL-03", source="cloudrift-ai/emmy/pull/371")
def layer_scalar_dropped(runtime: StaticGemma4Runtime, patch: Patch) -> None:
    """A layer's output is not multiplied by its `layer_scalar`."""
    for layer in text_model(runtime).layers:
        patch(layer, "layer_scalar", torch.ones_like(layer.layer_scalar))


@_fault("layer-scalar-on-delta", at=At.GRAPH, check="G4-PREFILL-03", source="quantumaikr/quant.cpp/issues/96")
def layer_scalar_on_delta(runtime: StaticGemma4Runtime, patch: Patch) -> None:
    """`layer_scalar` scales what the layer adds in place of the whole state."""

    def scaled(layer: Any, forward: Any, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        before = hidden.clone()
        after: Tensor = forward(hidden, *args, **kwargs)
        return before + layer.layer_scalar * (after / layer.layer_scalar - before)

    for layer in text_model(runtime).layers:
        change_call(patch, layer, "forward", partial(scaled, layer))


@_fault("hidden-half-precision", at=At.GRAPH, check="G4-PREFILL-03", case="window")
def hidden_through_half_precision(runtime: StaticGemma4Runtime, patch: Patch) -> None:
    """The hidden state passes through float16 between two layers."""
    layer = text_model(runtime).layers[5]
    change_call(
        patch,
        layer,
        "forward",
        lambda forward, hidden, *args, **kwargs: forward(hidden.half().float(), *args, **kwargs),
    )


# --- head -------------------------------------------------------------------------------------------------------------


@_fault(
    "final-softcap-missing",
    at=At.ORCHESTRATION,
    check="G4-PREFILL-04",
    source="NVIDIA-NeMo/Megatron-Bridge/pull/4645 vllm-project/vllm/pull/52173 unslothai/unsloth-zoo/pull/1029",
)
def logits_not_capped(runtime: StaticGemma4Runtime, patch: Patch) -> None:
    """Logits are not capped after the head."""
    patch(runtime, "facts", replace(runtime.facts, final_logit_softcapping=None))


@_fault(
    "final-softcap-formula",
    at=At.GRAPH,
    check="G4-PREFILL-04",
    source="unslothai/unsloth-zoo/pull/593 NVIDIA-NeMo/Megatron-Bridge/pull/4645",
)
def logits_capped_twice(runtime: StaticGemma4Runtime, patch: Patch) -> None:
    """Logits are capped twice."""
    cap = runtime.facts.final_logit_softcapping
    change_call(patch, runtime, "head", lambda head, hidden: graphs.softcap(head(hidden), cap))


@_fault("logits-row-wrong", at=At.ORCHESTRATION, check="G4-PREFILL-04")
def logits_of_the_row_before(runtime: StaticGemma4Runtime, patch: Patch) -> None:
    """Logits are taken from the row before the prompt's last one."""

    def shifted(decoder: Any, ids: Tensor, *args: Any) -> Tensor:
        hidden: Tensor = decoder(ids, *args)
        return hidden if ids.shape[1] == 1 else hidden.roll(1, dims=1)

    change_call(patch, runtime, "_decoder", shifted)


@_fault("final-norm-missing", at=At.GRAPH, check="G4-PREFILL-04")
def head_without_norm(runtime: StaticGemma4Runtime, patch: Patch) -> None:
    """The head projects the last layer's output without the final norm."""
    patch(runtime.head, "norm", nn.Identity())


@_fault("logits-half-precision", at=At.GRAPH, check="G4-PREFILL-04", boundary=True)
def logits_in_half_precision(runtime: Runtime, patch: Patch) -> None:
    """Prefill's logits come back in float16."""
    change_output(runtime, patch, "prefill", "prefill/logits", lambda logits: logits.half().to(logits.dtype))


@_fault("logits-scaled", at=At.GRAPH, check="G4-PREFILL-04", boundary=True)
def logits_with_a_temperature(runtime: Runtime, patch: Patch) -> None:
    """Prefill's logits come back divided by a temperature of 1.01; no argmax moves."""
    change_output(runtime, patch, "prefill", "prefill/logits", lambda logits: logits / 1.01)


def _storing_layers(runtime: StaticGemma4Runtime) -> list[Any]:
    layers = text_model(runtime).layers
    return [layers[spec.index] for spec in runtime.specs if spec.stores_kv]


def _permuted_output(project: Any, hidden: Tensor, *, heads: int, order: Tensor) -> Tensor:
    return project(hidden).unflatten(-1, (heads, -1))[..., order, :].flatten(-2)


def _permuted_input(project: Any, hidden: Tensor, *, heads: int, order: Tensor) -> Tensor:
    return project(hidden.unflatten(-1, (heads, -1))[..., order, :].flatten(-2))


def _transposed_heads(project: Any, hidden: Tensor, *, heads: int) -> Tensor:
    return project(hidden).unflatten(-1, (heads, -1)).transpose(-1, -2).flatten(-2)


def _norm_in_own_dtype(norm: Any, hidden: Tensor) -> Tensor:
    total = torch.zeros_like(hidden[..., 0])
    for column in hidden.unbind(-1):  # torch's own mean would add up in float32
        total = total + column.pow(2)
    mean_squared = (total / hidden.shape[-1])[..., None] + norm.eps
    return hidden * torch.rsqrt(mean_squared) * norm.weight


def _narrow_mlp(mlp: Any, hidden: Tensor, *, width: int) -> Tensor:
    gate = nn.functional.linear(hidden, mlp.gate_proj.weight[:width])
    up = nn.functional.linear(hidden, mlp.up_proj.weight[:width])
    return nn.functional.linear(mlp.act_fn(gate) * up, mlp.down_proj.weight[:, :width])
