"""What enters each decoder layer in the shape of the static buffers: pure functions of the reference's trace."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from g4conformance.checkpoints.facts import ModelFacts
from g4conformance.expected import masks_and_rope_of, static_inputs_of
from g4conformance.runtime.contract import KeyValue, LayerInputs, MasksAndRope
from g4conformance.runtime.layout import StaticLayout
from g4conformance.runtime.masks import mask_bias

Reference = Mapping[str, Tensor]


@dataclass(frozen=True)
class Pass:
    """One pass through the decoder: the prompt's, or that of one decode step.

    Attributes:
        entering, leaving: trace prefixes of what enters the decoder and of what comes out of it.
        ids: what the embeddings are of, int64 [B, Q].
        embeds: [B, Q, H].
        positional: masks [B, Q, S] and rotary tables [B, Q, D].
        past_len, new_rows: rows before it, and of it; Q may be more.
    """

    entering: str
    leaving: str
    ids: Tensor
    embeds: Tensor
    positional: MasksAndRope
    past_len: int
    new_rows: int

    @property
    def query_rows(self) -> int:
        return self.embeds.shape[1]


def prefill_pass(reference: Reference, layout: StaticLayout, facts: ModelFacts) -> Pass:
    """The prompt's pass; embeddings of padding, which reach no row of the prompt, are zero."""
    return Pass(
        entering="",
        leaving="prefill/",
        ids=static_inputs_of(reference, layout, facts).llm_input_ids,
        embeds=_padded(reference["fused_embeds"], layout.max_seq),
        positional=masks_and_rope_of(reference, layout, facts),
        past_len=0,
        new_rows=int(reference["valid_length"]),
    )


def decode_pass(reference: Reference, layout: StaticLayout, facts: ModelFacts, step: int) -> Pass:
    """The pass of a decode step."""
    prefix = f"decode/{step}/"
    return Pass(
        entering=prefix,
        leaving=prefix,
        ids=reference[prefix + "llm_input_ids"],
        embeds=reference[prefix + "text_embeds"],
        positional=_positional(reference, layout, facts, prefix),
        past_len=int(reference["valid_length"]) + step,
        new_rows=1,
    )


def _positional(reference: Reference, layout: StaticLayout, facts: ModelFacts, prefix: str) -> MasksAndRope:
    """Masks [B, 1, S] and rotary tables of a decode step."""
    kinds = sorted(set(facts.layer_types))
    missing = layout.max_seq - reference[f"{prefix}mask/{kinds[0]}"].shape[2]
    masks = {kind: pad(reference[f"{prefix}mask/{kind}"], (0, missing)) for kind in kinds}
    dtype = reference["pad_embed"].dtype
    rope = {kind: (reference[f"{prefix}rope/{kind}/cos"], reference[f"{prefix}rope/{kind}/sin"]) for kind in kinds}
    return MasksAndRope(masks, {kind: mask_bias(mask, dtype) for kind, mask in masks.items()}, rope)


def layer_inputs(reference: Reference, layout: StaticLayout, facts: ModelFacts, of: Pass) -> Iterator[LayerInputs]:
    """What enters each layer in turn, by the reference."""
    per_layer_inputs, hidden = None, of.embeds
    if facts.has_per_layer_inputs:
        per_layer_inputs = _padded(reference[of.entering + "per_layer_inputs"], of.query_rows)
    rows = torch.arange(layout.max_seq, device=hidden.device)
    for i, layer_type in enumerate(facts.layer_types):
        stores = i in facts.storing_layers
        known = of.past_len if stores else of.past_len + of.new_rows
        yield LayerInputs(
            hidden=hidden,
            per_layer_input=None if per_layer_inputs is None else per_layer_inputs[:, :, i],
            mask=of.positional.masks[layer_type],
            bias=of.positional.biases[layer_type],
            rope=of.positional.rope[layer_type],
            key_value=_buffers(reference, layout, facts.donor_of(i), known),
            slot=(rows >= of.past_len) & (rows < of.past_len + of.new_rows),
            past_len=of.past_len,
            new_rows=of.new_rows,
            stores=stores,
        )
        hidden = _padded(reference[f"{of.leaving}layer/{i}/hidden"], of.query_rows)


def last_row(reference: Reference, facts: ModelFacts, of: Pass) -> Tensor:
    """What enters the head: [B, 1, H]."""
    hidden = reference[f"{of.leaving}layer/{len(facts.layer_types) - 1}/hidden"]
    return hidden[:, of.new_rows - 1 : of.new_rows]


def _buffers(reference: Reference, layout: StaticLayout, layer: int, known: int) -> KeyValue:
    """The layer's K and V buffers [B, KV, S, D] with the first `known` rows filled."""
    key, value = (_buffer(reference, layout, layer, part, known) for part in ("key", "value"))
    return key, value


def _buffer(reference: Reference, layout: StaticLayout, layer: int, part: str, known: int) -> Tensor:
    rows = [reference[f"prefill/layer/{layer}/{part}"]]
    rows += [reference[f"decode/{i}/layer/{layer}/{part}"] for i in range(known - rows[0].shape[2])]
    filled = torch.cat(rows, dim=2)[:, :, :known]
    return pad(filled, (0, 0, 0, layout.max_seq - filled.shape[2]))


def _padded(rows: Tensor, to: int) -> Tensor:
    """Rows [B, n, ...] in a buffer of `to` rows."""
    return pad(rows, (0, 0) * (rows.ndim - 2) + (0, to - rows.shape[1]))
