"""Faults of stage 2: a token's embedding is not the reference's to the last bit."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from g4conformance.faults.parts import change_call, change_output, repack_middle_rows, text_model
from g4conformance.faults.patching import Patch
from g4conformance.faults.registry import At, fault
from g4conformance.faults.subjects import Subject
from g4conformance.runtime.contract import Runtime
from g4conformance.runtime.static import StaticGemma4Runtime
from g4conformance.stages import Stage

_fault = partial(fault, stage=Stage.TOKEN_EMBEDDING)


@_fault(
    "embed-scale-missing-or-twice",
    at=At.GRAPH,
    check="G4-EMBED-01",
    source="Blaizzy/mlx-vlm/pull/893 Physical-Intelligence/openpi/issues/769",
)
def not_scaled(runtime: StaticGemma4Runtime, patch: Patch) -> None:
    """Embeddings are not multiplied by the square root of the hidden size."""
    patch(text_model(runtime).embed_tokens, "embed_scale", torch.tensor(1.0))


@_fault("embed-scale-twice", at=At.GRAPH, check="G4-EMBED-01", source="Blaizzy/mlx-vlm/pull/893", boundary=True)
def scaled_twice(runtime: Runtime, patch: Patch) -> None:
    """Embeddings are scaled in the table and once more in the model."""
    change_output(runtime, patch, "token_embedding", "text_embeds", lambda e: e * e.shape[-1] ** 0.5)


@_fault(
    "embedding-table-repacked",
    at=At.WEIGHTS,
    check="G4-EMBED-01",
    case="vocabulary-1",
    source="ikawrakow/ik_llama.cpp/pull/2117",
)
def a_block_of_rows_repacked(runtime: StaticGemma4Runtime, patch: Patch) -> None:
    """Four rows of the table are repacked by a kernel that is meant for matrices."""
    repack_middle_rows(patch, text_model(runtime).embed_tokens)


@_fault(
    "embed-scale-not-rounded",
    at=At.GRAPH,
    check="G4-EMBED-01",
    needs=Subject.BFLOAT16,
    source="pegainfer-project/pegainfer/pull/832",
)
def scale_not_rounded(runtime: StaticGemma4Runtime, patch: Patch) -> None:
    """The scale is applied in float32, not rounded to the weight's dtype first."""
    weight = text_model(runtime).embed_tokens.weight
    patch(runtime, "embedding", lambda ids: (weight[ids].float() * weight.shape[1] ** 0.5).to(weight.dtype))


@_fault("pad-row-zero", at=At.WEIGHTS, check="G4-EMBED-02")
def pad_row_is_zero(runtime: StaticGemma4Runtime, patch: Patch) -> None:
    """The pad token's row is taken to be zero, as a fresh embedding's padding row is."""
    pad = runtime.facts.pad_token_id
    change_call(patch, runtime, "embedding", lambda embed, ids: embed(ids).masked_fill((ids == pad)[..., None], 0.0))


@_fault("padding-rows-not-embedded", at=At.ORCHESTRATION, check="G4-EMBED-02", boundary=True)
def padding_rows_left_empty(runtime: Runtime, patch: Patch) -> None:
    """Only the prompt's own rows are embedded; the last rows of the static buffer stay empty."""

    def emptied(embeds: Tensor) -> Tensor:
        return torch.cat([embeds[:, :-1], torch.zeros_like(embeds[:, -1:])], dim=1)

    change_output(runtime, patch, "token_embedding", "text_embeds", emptied)


@_fault("embedding-half-precision", at=At.WEIGHTS, check="G4-EMBED-01", boundary=True)
def rounded_to_bfloat16(runtime: Runtime, patch: Patch) -> None:
    """The scaled embeddings pass through bfloat16."""
    change_output(runtime, patch, "token_embedding", "text_embeds", lambda e: e.bfloat16().to(e.dtype))
