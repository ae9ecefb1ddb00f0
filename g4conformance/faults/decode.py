"""Faults of stage 7: prefill is right, and a decode step is not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from g4conformance.faults.parts import (
    FULL,
    SLIDING,
    change_call,
    change_positional,
    decoding,
    text_model,
    with_masks,
    with_rope,
)
from g4conformance.faults.patching import Patch
from g4conformance.faults.registry import At, fault
from g4conformance.runtime.contract import KeyValue, MasksAndRope, Runtime
from g4conformance.runtime.static import StaticGemma4Runtime
from g4conformance.stages import Stage

_fault = partial(fault, stage=Stage.DECODE)

# --- position, masks, rotary tables -----------------------------------------------------------------------------------


@_fault(
    "decode-position-off-by-one",
    at=At.ORCHESTRATION,
    check="G4-DECODE-05",
    source="waybarrios/vllm-mlx/pull/256 ml-explore/mlx-lm/issues/1699",
)
def rotated_one_further(runtime: StaticGemma4Runtime, patch: Patch) -> None:
    """The cache's length has already grown when the token is rotated: one position too far."""
    build = runtime._positional

    def further(positions: Tensor, count: int, block: range) -> MasksAndRope:
        built = build(positions, count, block)
        return replace(built, rope=build(positions + 1, count, block).rope) if len(positions) == 1 else built

    patch(runtime, "_positional", further)


@_fault("decode-position-frozen", at=At.ORCHESTRATION, check="G4-DECODE-01")
def position_frozen(runtime: StaticGemma4Runtime, patch: Patch) -> None:
    """The position is not advanced between decode steps; the first step is right."""
    patch(runtime, "_decode_position", lambda: torch.tensor([runtime.valid_length]))


@_fault("past-len-is-max-seq", at=At.ORCHESTRATION, check="G4-DECODE-01")
def position_behind_the_padding(runtime: StaticGemma4Runtime, patch: Patch) -> None:
    """Decoding counts its positions from the end of the padded buffer in place of the prompt's."""
    padding = runtime.layout.max_seq
    patch(runtime, "_decode_position", lambda: torch.tensor([padding + runtime.past_len - runtime.valid_length]))


@_fault("decode-mask-excludes-current", at=At.ORCHESTRATION, check="G4-DECODE-03")
def current_token_hidden(runtime: StaticGemma4Runtime, patch: Patch) -> None:
    """A decoded token may attend everything before it, but not itself."""
    build = runtime._positional
    patch(runtime, "_positional", lambda p, count, block: build(p, count - 1 if len(p) == 1 else count, block))


@_fault("decode-window-ignored", at=At.ORCHESTRATION, check="G4-DECODE-03", case="decode-crosses-window")
def decode_window_ignored(runtime: StaticGemma4Runtime, patch: Patch) -> None:
    """Sliding layers see the whole past while decoding, although prefill masks it."""
    change_positional(runtime, patch, lambda built, _: with_masks(built, {SLIDING: built.masks[FULL]}), prefill=False)


@_fault("decode-window-anchored", at=At.ORCHESTRATION, check="G4-DECODE-03", case="decode-crosses-window")
def decode_window_stays(runtime: StaticGemma4Runtime, patch: Patch) -> None:
    """The window's left edge stays where prefill left it and does not move with decoding."""

    def anchored(built: MasksAndRope, positions: Tensor) -> MasksAndRope:
        left = runtime.valid_length - runtime.facts.sliding_window
        keys = torch.arange(runtime.layout.max_seq)
        return with_masks(built, {SLIDING: built.masks[FULL] & (keys > left)})

    change_positional(runtime, patch, anchored, prefill=False)


@_fault("decode-mask-fill", at=At.ORCHESTRATION, check="G4-DECODE-04", source="Samsung/TICO/pull/843")
def soft_fill_in_decode(runtime: StaticGemma4Runtime, patch: Patch) -> None:
    """While decoding, masked scores get -120 in place of the dtype's most negative number."""

    def softened(built: MasksAndRope, positions: Tensor) -> MasksAndRope:
        return replace(built, biases={kind: bias.clamp(min=-120.0) for kind, bias in built.biases.items()})

    change_positional(runtime, patch, softened, prefill=False)


@_fault("decode-empty-slots-seen", at=At.ORCHESTRATION, check="G4-DECODE-03")
def empty_slots_seen(runtime: StaticGemma4Runtime, patch: Patch) -> None:
    """A decoded token attends the row behind its own, which holds zeros."""

    def one_more(built: MasksAndRope, positions: Tensor) -> MasksAndRope:
        keys = torch.arange(runtime.layout.max_seq)
        return with_masks(built, {kind: mask | (keys == positions + 1) for kind, mask in built.masks.items()})

    change_positional(runtime, patch, one_more, prefill=False)


@_fault("decode-rope-of-other-type", at=At.GRAPH, check="G4-DECODE-05")
def full_layers_not_rotated(runtime: StaticGemma4Runtime, patch: Patch) -> None:
    """While decoding, full layers' tables are made at position 0."""

    def unrotated(built: MasksAndRope, positions: Tensor) -> MasksAndRope:
        cos, sin = built.rope[FULL]
        return replace(built, rope={**built.rope, FULL: (torch.ones_like(cos), torch.zeros_like(sin))})

    change_positional(runtime, patch, unrotated, prefill=False)


@_fault("decode-rope-half-precision", at=At.GRAPH, check="G4-DECODE-05")
def tables_rounded(runtime: StaticGemma4Runtime, patch: Patch) -> None:
    """While decoding, rotary tables are looked up in bfloat16."""
    change_positional(
        runtime, patch, lambda built, _: with_rope(built, lambda t: t.bfloat16().to(t.dtype)), prefill=False
    )


# --- embeddings, per-layer inputs, layers, logits ---------------------------------------------------------------------


@_fault("decode-embedding-not-scaled", at=At.ORCHESTRATION, check="G4-DECODE-02")
def new_token_not_scaled(runtime: StaticGemma4Runtime, patch: Patch) -> None:
    """A decoded token is looked up without the scale that the prompt gets."""
    change_call(
        patch,
        runtime,
        "embedding",
        lambda embed, ids: embed(ids) * (1.0 if ids.shape[1] > 1 else runtime.checkpoint.text_config.hidden_size**-0.5),
    )


@_fault("decode-feeds-token-before", at=At.ORCHESTRATION, check="G4-DECODE-01", boundary=True)
def token_of_the_step_before(runtime: Runtime, patch: Patch) -> None:
    """From the second step on, decoding is fed the token of the step before."""
    fed: list[int] = []

    def decode(call: Any, token: int) -> Tensor:
        fed.append(token)
        return call(fed[-2] if len(fed) > 1 else token)

    change_call(patch, runtime, "decode_one", decode)


@_fault(
    "ple-skipped-in-decode",
    at=At.GRAPH,
    check="G4-DECODE-08",
    source="chrishayuk/larql/issues/98 chrishayuk/larql/pull/125 chrishayuk/larql/pull/181",
)
def per_layer_inputs_not_applied(runtime: StaticGemma4Runtime, patch: Patch) -> None:
    """The cached decode loop runs attention and MLP only, without per-layer inputs."""
    for layer in text_model(runtime).layers:
        change_call(
            patch,
            layer.post_per_layer_input_norm,
            "forward",
            lambda norm, hidden: torch.zeros_like(hidden) if decoding(runtime) else norm(hidden),
        )


@_fault("layer-scalar-skipped-in-decode", at=At.GRAPH, check="G4-DECODE-08", source="chrishayuk/larql/pull/125")
def layer_scalar_not_applied(runtime: StaticGemma4Runtime, patch: Patch) -> None:
    """The cached decode loop leaves out `layer_scalar`."""

    def unscaled(layer: Any, forward: Any, *args: Any, **kwargs: Any) -> Tensor:
        hidden: Tensor = forward(*args, **kwargs)
        return hidden / layer.layer_scalar if decoding(runtime) else hidden

    for layer in text_model(runtime).layers:
        change_call(patch, layer, "forward", partial(unscaled, layer))


@_fault("ple-stale-in-decode", at=At.STATE, check="G4-DECODE-06", source="chrishayuk/larql/issues/98")
def per_layer_inputs_of_the_prompt(runtime: StaticGemma4Runtime, patch: Patch) -> None:
    """Decoded tokens get the per-layer inputs of the prompt's last token."""
    last: list[Tensor] = []

    def stale(graph: Any, ids: Tensor, embeds: Tensor) -> Tensor:
        per_layer: Tensor = graph(ids, embeds)
        if ids.shape[1] > 1:
            last[:] = [per_layer[:, runtime.valid_length - 1 : runtime.valid_length]]
        return per_layer if ids.shape[1] > 1 else last[0]

    change_call(patch, runtime, "per_layer_inputs", stale)


@_fault("decode-v-norm-missing", at=At.GRAPH, check="G4-DECODE-07")
def new_values_not_normalised(runtime: StaticGemma4Runtime, patch: Patch) -> None:
    """The fused decode kernel leaves out the norm of values."""
    for spec in runtime.specs:
        if spec.stores_kv:
            norm = text_model(runtime).layers[spec.index].self_attn.v_norm
            change_call(patch, norm, "forward", lambda norm, value: value if decoding(runtime) else norm(value))


@_fault("decode-softcap-missing", at=At.ORCHESTRATION, check="G4-DECODE-09", source="vllm-project/vllm/pull/52173")
def decoded_logits_not_capped(runtime: StaticGemma4Runtime, patch: Patch) -> None:
    """Logits are capped after prefill and not after decode steps."""

    def uncapped(logits_of: Any, hidden: Tensor, names: Any) -> Tensor:
        if names.leaving.startswith("decode/"):
            return runtime._emit(names.leaving + "logits", runtime.head(hidden))
        return logits_of(hidden, names)

    change_call(patch, runtime, "_logits", uncapped)


@_fault("decode-logits-stale", at=At.STATE, check="G4-DECODE-09", boundary=True)
def logits_of_the_step_before(runtime: Runtime, patch: Patch) -> None:
    """A decode step returns the logits of the step before it, as from an output buffer that is read too early."""
    before: list[Tensor] = []

    def late(call: Any, token: int) -> Tensor:
        listener = runtime.on_tensor
        logits_name: list[str] = []

        def quiet(name: str, tensor: Tensor) -> None:
            if name.endswith("/logits"):
                logits_name.append(name)
            elif listener is not None:
                listener(name, tensor)

        runtime.on_tensor = quiet
        try:
            logits: Tensor = call(token)
        finally:
            runtime.on_tensor = listener
        stale = before.pop() if before else logits
        before.append(logits)
        for name in logits_name:
            if listener is not None:
                listener(name, stale)
        return stale

    change_call(patch, runtime, "decode_one", late)


# --- cache ------------------------------------------------------------------------------------------------------------


@_fault(
    "shared-kv-not-extended",
    at=At.STATE,
    check="G4-DECODE-08",
    source="Samsung/TICO/pull/849 vllm-project/vllm/pull/43185",
)
def sharing_layers_see_prefill_only(runtime: StaticGemma4Runtime, patch: Patch) -> None:
    """Layers that reuse K/V keep reading what prefill left and never see decoded rows."""

    def prefilled(layer: int) -> tuple[Tensor, ...]:
        written = torch.arange(runtime.layout.max_seq) < runtime.valid_length
        return tuple(buffer * written[:, None] for buffer in runtime.cache.read(layer))

    _change_shared_kv(runtime, patch, prefilled)


@_fault("shared-kv-from-own-empty-cache", at=At.STATE, check="G4-DECODE-08", source="Samsung/TICO/pull/849")
def sharing_layers_see_zeros(runtime: StaticGemma4Runtime, patch: Patch) -> None:
    """While decoding, layers that reuse K/V read a cache of their own, which nobody writes."""
    _change_shared_kv(runtime, patch, lambda layer: tuple(torch.zeros_like(b) for b in runtime.cache.read(layer)))


@_fault("cache-delta-not-written", at=At.STATE, check="G4-DECODE-10")
def new_row_not_stored(runtime: StaticGemma4Runtime, patch: Patch) -> None:
    """A decoded token sees its own K/V, but they are not stored for the next one."""
    change_call(
        patch, runtime.cache, "write", lambda write, layer, k, v, start: None if start else write(layer, k, v, start)
    )


@_fault("cache-delta-one-slot-off", at=At.STATE, check="G4-DECODE-10")
def new_row_one_slot_further(runtime: StaticGemma4Runtime, patch: Patch) -> None:
    """On full layers, a decoded token's K/V are stored one row too far."""
    full = {spec.index for spec in runtime.specs if spec.layer_type == FULL}

    def further(write: Any, layer: int, key: Tensor, value: Tensor, start: int) -> None:
        write(layer, key, value, start + 1 if start and layer in full else start)

    change_call(patch, runtime.cache, "write", further)


@_fault("cache-values-not-written", at=At.STATE, check="G4-DECODE-10")
def new_values_not_stored(runtime: StaticGemma4Runtime, patch: Patch) -> None:
    """Decoding stores keys, but no values."""

    def keys_only(write: Any, layer: int, key: Tensor, value: Tensor, start: int) -> None:
        write(layer, key, torch.zeros_like(value) if start else value, start)

    change_call(patch, runtime.cache, "write", keys_only)


@_fault("state-handed-over-short", at=At.STATE, check="G4-DECODE-08", boundary=True)
def last_prompt_row_not_handed_over(runtime: Runtime, patch: Patch) -> None:
    """The state that decoding takes over lacks the prompt's last row: it holds zeros."""

    def short(load: Any, key_values: Mapping[int, KeyValue], past_len: int) -> None:
        load({layer: (_without_last_row(k), _without_last_row(v)) for layer, (k, v) in key_values.items()}, past_len)

    change_call(patch, runtime, "load_state", short)


def _without_last_row(rows: Tensor) -> Tensor:
    return torch.cat([rows[:, :, :-1], torch.zeros_like(rows[:, :, -1:])], dim=2)


def _change_shared_kv(runtime: StaticGemma4Runtime, patch: Patch, read: Any) -> None:
    """While decoding, layers that reuse K/V read `read(donor)`."""

    def layer_of(call: Any, spec: Any, graph: Any, hidden: Tensor, per_layer: Any, attention: Any, *rest: Any) -> Any:
        if spec.stores_kv or not decoding(runtime):
            return call(spec, graph, hidden, per_layer, attention, *rest)
        return graph(hidden, per_layer, *attention, *read(spec.kv_source))

    change_call(patch, runtime, "_layer", layer_of)
