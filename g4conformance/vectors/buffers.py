"""The reference's trace in the shape of the static buffers: what a runtime that makes no mistake would yield."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor
from torch.nn.functional import pad

from g4conformance.checkpoints.facts import ModelFacts
from g4conformance.expected import masks_and_rope_of, padded_reference, static_inputs_of
from g4conformance.judging.given import positional_tensors
from g4conformance.runtime.layout import StaticLayout
from g4conformance.runtime.masks import mask_bias


def in_static_buffers(reference: Mapping[str, Tensor], layout: StaticLayout, facts: ModelFacts) -> dict[str, Tensor]:
    """Every tensor of the reference under its name; padded, where a static runtime's buffer is larger.

    Rows of padding that no check looks at are left out.
    """
    inputs = static_inputs_of(reference, layout, facts)
    tensors = dict(reference)
    for name in ("text_embeds", "fused_embeds"):
        if name in reference:
            tensors[name] = padded_reference(reference, layout, name)
    tensors |= {name: getattr(inputs, name) for name in ("input_ids", "llm_input_ids", "attention_mask")}
    tensors |= positional_tensors(masks_and_rope_of(reference, layout, facts))
    for name in reference:
        if name.startswith("decode/") and "/mask/" in name:
            mask = pad(reference[name], (0, layout.max_seq - reference[name].shape[2]))
            tensors[name] = mask
            tensors[name.replace("/mask/", "/mask_bias/")] = mask_bias(mask, reference["pad_embed"].dtype)
    return tensors
