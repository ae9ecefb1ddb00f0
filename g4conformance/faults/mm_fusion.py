"""Faults of stage 4: soft tokens do not land in their slot as they are."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from g4conformance.faults.parts import change_call, change_output
from g4conformance.faults.patching import Patch
from g4conformance.faults.registry import At, fault
from g4conformance.runtime.contract import Runtime
from g4conformance.runtime.static import StaticGemma4Runtime
from g4conformance.stages import Stage

_fault = partial(fault, stage=Stage.MM_FUSION, case="image-middle")


@_fault(
    "vision-scaled-by-embed-scale",
    at=At.ORCHESTRATION,
    check="G4-FUSION-01",
    source="Blaizzy/mlx-vlm/pull/906",
    boundary=True,
)
def soft_tokens_scaled_like_text(runtime: Runtime, patch: Patch) -> None:
    """Soft tokens are inserted before the text embeddings are scaled, and get scaled with them."""
    change_call(patch, runtime, "mm_fusion", lambda fuse, text, visual: fuse(text, visual * text.shape[-1] ** 0.5))


@_fault("fusion-slot-shifted", at=At.ORCHESTRATION, check="G4-FUSION-02", source="Samsung/TICO/pull/910")
def slot_shifted(runtime: StaticGemma4Runtime, patch: Patch) -> None:
    """The image's slot begins one row late, as when a token before it was not counted."""
    fusion: Any = runtime.fusion
    patch(fusion, "start", fusion.start + 1)
    patch(fusion, "end", fusion.end + 1)


@_fault(
    "vision-features-dropped",
    at=At.ORCHESTRATION,
    check="G4-FUSION-01",
    source="ikawrakow/ik_llama.cpp/pull/1893",
)
def soft_tokens_dropped(runtime: StaticGemma4Runtime, patch: Patch) -> None:
    """Fusion is skipped: the placeholders' pad embeddings stay."""
    patch(runtime, "fusion", lambda text, visual: text)


@_fault("soft-tokens-reversed", at=At.ORCHESTRATION, check="G4-FUSION-01", boundary=True)
def soft_tokens_reversed(runtime: Runtime, patch: Patch) -> None:
    """Soft tokens enter their slot in reverse order."""
    change_call(patch, runtime, "mm_fusion", lambda fuse, text, visual: fuse(text, visual.flip(0)))


@_fault("soft-tokens-added", at=At.GRAPH, check="G4-FUSION-01")
def soft_tokens_added(runtime: StaticGemma4Runtime, patch: Patch) -> None:
    """Soft tokens are added to the placeholders' embeddings, which are the pad token's and not zero."""
    slot = slice(runtime.layout.visual_start_idx, runtime.layout.visual_end_idx)
    change_call(patch, runtime, "fusion", lambda fuse, text, visual: fuse(text, visual + text[0, slot]))


@_fault("last-soft-token-lost", at=At.ORCHESTRATION, check="G4-FUSION-01")
def last_soft_token_lost(runtime: StaticGemma4Runtime, patch: Patch) -> None:
    """The slot's last row keeps its placeholder's embedding."""
    last = slice(runtime.layout.visual_end_idx - 1, runtime.layout.visual_end_idx)
    change_call(
        patch, runtime, "fusion", lambda fuse, text, visual: fuse(text, torch.cat([visual[:-1], text[0, last]]))
    )


@_fault("fused-in-half-precision", at=At.GRAPH, check="G4-FUSION-02", boundary=True)
def fused_in_half_precision(runtime: Runtime, patch: Patch) -> None:
    """The fused buffer is kept in float16, which text embeddings do not survive unchanged."""
    change_output(runtime, patch, "mm_fusion", "fused_embeds", lambda fused: fused.half().to(fused.dtype))


@_fault("stale-soft-tokens-behind-slot", at=At.STATE, check="G4-FUSION-02", boundary=True)
def soft_token_spills_over(runtime: Runtime, patch: Patch) -> None:
    """A row behind the slot holds a soft token of an earlier, longer picture."""

    def spilled(fused: Tensor) -> Tensor:
        return torch.cat([fused[:, :-1], fused[:, :1]], dim=1)

    change_output(runtime, patch, "mm_fusion", "fused_embeds", spilled)
