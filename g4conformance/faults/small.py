"""Faults that hide: of a layer among others, and of what a runtime says of itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from g4conformance.faults.parts import change_call, text_model
from g4conformance.faults.patching import Patch
from g4conformance.faults.registry import At, fault
from g4conformance.runtime.contract import Runtime, StaticInputs
from g4conformance.runtime.layout import StaticLayout
from g4conformance.runtime.static import StaticGemma4Runtime
from g4conformance.stages import Stage

_BITS = 17  # of float32's 24: less than eight layers have rounded before


@fault("last-layer-in-17-bits", stage=Stage.PREFILL, at=At.GRAPH, check="G4-PREFILL-09")
def last_layer_of_the_prompt_rounded(runtime: StaticGemma4Runtime, patch: Patch) -> None:
    """The last layer's output for a prompt goes through a format of 17 significant bits, as from device to device."""
    _round_last_layer(runtime, patch, lambda rows: rows > 1)


@fault("last-layer-in-17-bits-decode", stage=Stage.DECODE, at=At.GRAPH, check="G4-DECODE-13")
def last_layer_of_a_step_rounded(runtime: StaticGemma4Runtime, patch: Patch) -> None:
    """The last layer's output at a decode step goes through a format of 17 significant bits."""
    _round_last_layer(runtime, patch, lambda rows: rows == 1)


@fault(
    "batch-cut-to-its-first",
    stage=Stage.SELF_CONSISTENCY,
    at=At.ORCHESTRATION,
    check="G4-SELF-21",
    boundary=True,
)
def batch_cut_to_its_first(runtime: Runtime, patch: Patch) -> None:
    """A runtime for one prompt at a time takes several, and serves the first as if nothing were wrong."""

    def first_only(for_layout: Any, layout: StaticLayout) -> Any:
        return for_layout(replace(layout, batch_size=1))

    def first_prefilled(prefill: Any, inputs: StaticInputs, *args: Any) -> Tensor:
        names = ("input_ids", "llm_input_ids", "attention_mask")
        logits: Tensor = prefill(replace(inputs, **{name: getattr(inputs, name)[:1] for name in names}), *args)
        return logits

    change_call(patch, runtime, "for_layout", first_only)
    change_call(patch, runtime, "prefill", first_prefilled)


def _round_last_layer(runtime: StaticGemma4Runtime, patch: Patch, affected: Any) -> None:
    def rounded(forward: Any, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        returned: Tensor = forward(hidden, *args, **kwargs)
        return _to_bits(returned) if affected(hidden.shape[1]) else returned

    change_call(patch, text_model(runtime).layers[-1], "forward", rounded)


def _to_bits(values: Tensor) -> Tensor:
    mantissa, exponent = torch.frexp(values)
    return torch.ldexp(torch.round(mantissa * 2**_BITS) / 2**_BITS, exponent)
