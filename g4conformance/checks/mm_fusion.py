"""Stage 4: soft tokens take their slot among the text embeddings."""

from __future__ import annotations

import torch

from g4conformance.checks.compare import Comparison, compare
from g4conformance.checks.registry import Needs, check
from g4conformance.checks.run import CaseRun
from g4conformance.expected import padded_reference
from g4conformance.stages import Stage

_STAGE = Stage.MM_FUSION


@check("G4-FUSION-01", stage=_STAGE, budget="exact", needs=Needs.IMAGE)
def image_rows(run: CaseRun) -> Comparison:
    """The rows of the image's slot are the soft tokens that entered, unscaled and in order: [V, H]."""
    slot = slice(run.layout.visual_start_idx, run.layout.visual_end_idx)
    return compare("fused_embeds", run.entering("visual_embeds"), run.observed("fused_embeds")[0, slot])


@check("G4-FUSION-02", stage=_STAGE, budget="exact", needs=Needs.IMAGE)
def other_rows(run: CaseRun) -> Comparison:
    """Every row outside the image's slot, padding included, is the text embedding that entered."""
    rows = torch.arange(run.layout.max_seq)
    outside = (rows < run.layout.visual_start_idx) | (rows >= run.layout.visual_end_idx)
    fused = run.buffer("fused_embeds")
    return compare("fused_embeds", run.entering("text_embeds")[:, outside], fused[:, outside])


@check("G4-FUSION-03", stage=_STAGE, budget="rounding", needs=Needs.IMAGE)
def fused_rows(run: CaseRun) -> Comparison:
    """All rows of the static buffer equal the reference's fused embeddings, padding the pad id's: [B, max_seq, H]."""
    expected = padded_reference(run.reference, run.layout, "fused_embeds")
    return compare("fused_embeds", expected, run.buffer("fused_embeds"))
