"""What the static buffers must hold, padding included: pure functions of the reference's trace and the layout."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from g4conformance.checkpoints.facts import ModelFacts
from g4conformance.metrics import top_two_gap
from g4conformance.runtime.contract import KeyValue, MasksAndRope, StaticInputs, StopReason
from g4conformance.runtime.inputs import pad_right
from g4conformance.runtime.layout import StaticLayout
from g4conformance.runtime.masks import mask_bias

Reference = Mapping[str, Tensor]


def padded_reference(reference: Reference, layout: StaticLayout, name: str) -> Tensor:
    """The reference's tensor in the shape of the static buffers.

    Embeddings [B, n, H] are padded with the pad id's embedding; tensors without a row axis are returned as they are.
    """
    tensor = reference[name]
    if name not in ("text_embeds", "fused_embeds"):
        return tensor
    rows = layout.max_seq - tensor.shape[1]
    return torch.cat([tensor, reference["pad_embed"].expand(tensor.shape[0], rows, -1)], dim=1)


def padded_mask(reference: Reference, layout: StaticLayout, layer_type: str) -> Tensor:
    """A mask bool [B, S, S] that agrees with the reference on valid rows and lets no row see padding.

    Rows of padding repeat the last valid row: some key must be visible to them, and which one does not matter.
    """
    mask = reference[f"mask/{layer_type}"]
    mask = torch.nn.functional.pad(mask, (0, layout.max_seq - mask.shape[2]), value=False)
    return torch.cat([mask, mask[:, -1:].expand(-1, layout.max_seq - mask.shape[1], -1)], dim=1)


def padded_rope(reference: Reference, layout: StaticLayout, layer_type: str) -> tuple[Tensor, Tensor]:
    """cos and sin [B, S, head_dim]; rows of padding do not rotate."""
    cos, sin = (reference[f"rope/{layer_type}/{part}"] for part in ("cos", "sin"))
    rows = (0, 0, 0, layout.max_seq - cos.shape[1])
    return torch.nn.functional.pad(cos, rows, value=1.0), torch.nn.functional.pad(sin, rows, value=0.0)


def static_inputs_of(reference: Reference, layout: StaticLayout, facts: ModelFacts) -> StaticInputs:
    """The request that `build_static_inputs` must produce."""
    return StaticInputs(
        input_ids=pad_right(reference["input_ids"], layout.max_seq, facts.pad_token_id),
        llm_input_ids=pad_right(reference["llm_input_ids"], layout.max_seq, facts.pad_token_id),
        attention_mask=pad_right(reference["attention_mask"], layout.max_seq, False),
        valid_length=int(reference["valid_length"]),
        pixel_values=reference.get("pixel_values"),
        image_position_ids=reference.get("image_position_ids"),
    )


def masks_and_rope_of(reference: Reference, layout: StaticLayout, facts: ModelFacts) -> MasksAndRope:
    """The reference's own masks and rotary tables, in the shape of the static buffers."""
    layer_types = sorted(set(facts.layer_types))
    masks = {layer_type: padded_mask(reference, layout, layer_type) for layer_type in layer_types}
    dtype = reference["pad_embed"].dtype
    return MasksAndRope(
        masks=masks,
        biases={layer_type: mask_bias(mask, dtype) for layer_type, mask in masks.items()},
        rope={layer_type: padded_rope(reference, layout, layer_type) for layer_type in layer_types},
    )


def key_values_of(reference: Reference, facts: ModelFacts) -> dict[int, KeyValue]:
    """The reference's K/V [B, KV, n, head_dim] after prefill, of every storing layer."""
    return {
        layer: (reference[f"prefill/layer/{layer}/key"], reference[f"prefill/layer/{layer}/value"])
        for layer in facts.storing_layers
    }


def greedy_tokens(reference: Reference) -> list[int]:
    """The reference's most likely token after prefill and after each decode step."""
    return [int(reference[name][0].argmax()) for name in logits_names(reference)]


def logits_names(reference: Reference) -> list[str]:
    """Trace names of the logits after prefill and after each decode step, in order."""
    names = ["prefill/logits"]
    while f"decode/{len(names) - 1}/logits" in reference:
        names.append(f"decode/{len(names) - 1}/logits")
    return names


STOP_REASONS = tuple(StopReason)  # a stop reason is traced as its index here


def scripted_logits(reference: Reference, facts: ModelFacts) -> Tensor:
    """Logits [n, vocab] for `select`: the reference's own rows without exact ties, and rows of our own.

    Those favour each stop token, the first and the last id; one is flat but for a single id a little above the rest.
    """
    own = [reference[name][0] for name in logits_names(reference) if top_two_gap(reference[name]) > 0]
    flat = torch.zeros_like(reference["prefill/logits"][0])
    favoured = [*sorted(facts.stop_token_ids), 0, facts.vocab_size - 1]
    peaked = [(own[0] if own else flat).clone().index_fill(0, torch.tensor(i), 31.0) for i in favoured]
    flat[facts.vocab_size // 2] = 1e-2
    return torch.stack([*own, *peaked, flat])


def generation_of(
    reference: Reference, layout: StaticLayout, facts: ModelFacts, gen_steps: int
) -> tuple[list[int], StopReason]:
    """New tokens of greedy generation and why it ends: a stop token, the number asked for, or a full buffer."""
    new: list[int] = []
    for past_len, token in enumerate(greedy_tokens(reference), start=int(reference["valid_length"])):
        new.append(token)
        if token in facts.stop_token_ids:
            return new, StopReason.STOP_TOKEN
        if len(new) >= gen_steps:
            return new, StopReason.MAX_NEW_TOKENS
        if past_len >= layout.max_seq:
            return new, StopReason.MAX_SEQ
    raise ValueError(f"the reference has {len(new)} tokens, too few for {gen_steps} new ones")
