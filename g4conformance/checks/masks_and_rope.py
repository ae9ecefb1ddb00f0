"""Stage 5: which keys each query may attend, and the rotary tables, by layer type."""

from __future__ import annotations

import torch
from torch import Tensor

from g4conformance.checks.compare import Comparison, compare, holds
from g4conformance.checks.registry import check
from g4conformance.checks.run import CaseRun
from g4conformance.expected import padded_mask
from g4conformance.stages import Stage

_STAGE = Stage.MASKS_AND_ROPE
# Scores of a masked key must vanish after softmax in every dtype; float16 cannot hold less than -65,504.
_LARGEST_FILL = -1e4


@check("G4-MASK-01", stage=_STAGE, budget="exact")
def mask_patterns(run: CaseRun) -> list[Comparison]:
    """For each layer type, every query of the prompt may attend exactly the keys that the reference allows."""
    return [_mask(run, layer_type) for layer_type in run.layer_types]


@check("G4-MASK-02", stage=_STAGE, budget="exact")
def padding_is_hidden(run: CaseRun) -> list[Comparison]:
    """For each layer type, no query may attend a key of padding, but for a padding row itself."""
    found = []
    for name in (f"mask/{layer_type}" for layer_type in run.layer_types):
        mask = run.buffer(name)
        itself = torch.eye(mask.shape[-1], dtype=torch.bool, device=mask.device)
        seen = (mask & ~itself)[:, :, run.valid_length :]
        found.append(compare(name, torch.zeros_like(seen), seen))
    return found


@check("G4-MASK-03", stage=_STAGE, budget="exact")
def mask_fill(run: CaseRun) -> list[Comparison]:
    """What is added to attention scores is 0 where the mask allows, else at most -10,000; no row is all infinite."""
    return [fill_comparison(run, "", layer_type) for layer_type in run.layer_types]


@check("G4-ROPE-01", stage=_STAGE, budget="exact", foreign_budget="rounding")
def rotary_tables(run: CaseRun) -> list[Comparison]:
    """For each layer type, cos and sin equal the reference's at every row of the prompt: [B, n, head_dim]."""
    names = [f"rope/{layer_type}/{part}" for layer_type in run.layer_types for part in ("cos", "sin")]
    return [compare(name, run.reference[name], run.observed(name)[:, : run.valid_length]) for name in names]


def _mask(run: CaseRun, layer_type: str) -> Comparison:
    name = f"mask/{layer_type}"
    expected = padded_mask(run.reference, run.layout, layer_type)[:, : run.valid_length]
    if name in run.unpadded:
        expected = run.reference[name]
    actual = run.observed(name)[:, : run.valid_length]
    return explain_mask(compare(name, expected, actual), expected, actual, first_query=0)


def explain_mask(found: Comparison, expected: Tensor, actual: Tensor, first_query: int) -> Comparison:
    """Adds, in words, the first query whose keys differ; masks are bool [B, Q, K]."""
    if found.difference is None or found.difference.equal:
        return found
    row = int((expected != actual).any(dim=-1)[0].nonzero()[0])
    attended, allowed = _keys(actual[0, row]), _keys(expected[0, row])
    return found.explained(f"query {first_query + row} attends keys {attended}, the reference allows {allowed}")


def fill_comparison(run: CaseRun, prefix: str, layer_type: str) -> Comparison:
    """The additive mask against the boolean one of the same runtime: bool [B, Q, K], true where right."""
    name = f"{prefix}mask_bias/{layer_type}"
    mask, bias = run.observed(f"{prefix}mask/{layer_type}"), run.observed(name)
    well_formed = compare(name, torch.zeros_like(mask[:, None], dtype=torch.float32), bias)
    if well_formed.difference is None:
        return well_formed
    bias = bias[:, 0]
    sees_a_key = mask.any(dim=-1, keepdim=True)
    right = torch.where(mask, bias == 0, (bias <= _LARGEST_FILL) & (torch.isfinite(bias) | sees_a_key))
    return holds(name, right, f"masked scores get {float(bias.max()):g} to {float(bias.min()):g}")


def _keys(row: Tensor) -> str:
    """The true entries as ranges, such as 0..3, 7..9."""
    keys = row.nonzero().flatten().tolist()
    ranges: list[list[int]] = []
    for key in keys:
        if ranges and key == ranges[-1][1] + 1:
            ranges[-1][1] = key
        else:
            ranges.append([key, key])
    return ", ".join(f"{first}..{last}" if last > first else f"{first}" for first, last in ranges) or "none"
