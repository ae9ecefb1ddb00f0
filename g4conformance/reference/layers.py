"""The reference's decoder layers by themselves, fed with what its own trace has at that place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers.models.gemma4.modeling_gemma4 import Gemma4ForConditionalGeneration

from g4conformance.checkpoints.checkpoint import attention_of_towers
from g4conformance.checkpoints.facts import ModelFacts
from g4conformance.layer_inputs import Pass, decode_pass, layer_inputs, prefill_pass
from g4conformance.runtime.contract import LayerInputs
from g4conformance.runtime.graphs import DecoderLayerGraph, SharedDecoderLayerGraph, layer_arguments
from g4conformance.runtime.layout import StaticLayout

Reference = Mapping[str, Tensor]


def passes_of(reference: Reference, layout: StaticLayout, facts: ModelFacts, steps: int) -> list[Pass]:
    """The prompt's pass and those of the first and the last of `steps` decode steps."""
    decoded = sorted({0, steps - 1}) if steps else []
    return [
        prefill_pass(reference, layout, facts),
        *(decode_pass(reference, layout, facts, step) for step in decoded),
    ]


def expected_alone(reference: Reference, facts: ModelFacts, passes: Sequence[Pass]) -> dict[str, Tensor]:
    """What each layer must return by itself, under `<pass>/alone/layer/<i>/...`."""
    return {
        f"{of.leaving}alone/layer/{i}/{part}": reference[f"{of.leaving}layer/{i}/{part}"]
        for of in passes
        for i in range(len(facts.layer_types))
        for part in _parts(i in facts.storing_layers)
    }


def layers_alone(
    model: Gemma4ForConditionalGeneration,
    reference: Reference,
    layout: StaticLayout,
    facts: ModelFacts,
    passes: Sequence[Pass],
) -> dict[str, Tensor]:
    """What each layer of `model` returns by itself, without rows of padding, under the same names."""
    found = {}
    for of in passes:
        for i, inputs in enumerate(layer_inputs(reference, layout, facts, of)):
            returned = _run(model, i, inputs)
            for part, tensor in zip(_parts(inputs.stores), returned, strict=True):
                rows = 1 if part == "hidden" else 2
                found[f"{of.leaving}alone/layer/{i}/{part}"] = tensor.narrow(rows, 0, of.new_rows)
    return found


@torch.no_grad()
def _run(model: Gemma4ForConditionalGeneration, i: int, inputs: LayerInputs) -> tuple[Tensor, ...]:
    layer = model.model.language_model.layers[i]
    if inputs.stores:
        return DecoderLayerGraph(layer)(*layer_arguments(inputs))
    return (SharedDecoderLayerGraph(layer)(*layer_arguments(inputs)),)


def _parts(stores: bool) -> tuple[str, ...]:
    return ("hidden", "key", "value") if stores else ("hidden",)


@contextmanager
def attention_of(model: Gemma4ForConditionalGeneration, attention: str) -> Iterator[None]:
    """The model's text layers compute attention this way inside this context."""
    before = model.model.language_model.config._attn_implementation
    model.set_attn_implementation(attention_of_towers(attention))
    try:
        yield
    finally:
        model.set_attn_implementation(attention_of_towers(before))
