"""Stage 1: the prompt and its pictures become one request in the shape of the static buffers."""

from __future__ import annotations

import torch

from g4conformance.checks.compare import Comparison, compare, holds
from g4conformance.checks.registry import Needs, check
from g4conformance.checks.run import CaseRun
from g4conformance.expected import static_inputs_of
from g4conformance.stages import Stage

_STAGE = Stage.BUILD_STATIC_INPUTS


@check("G4-INPUTS-01", stage=_STAGE, budget="exact", needs=Needs.PROMPT)
def prompt_ids(run: CaseRun) -> list[Comparison]:
    """The prompt's ids, their number, and where they are valid equal the processor's; padding holds the pad id."""
    expected = static_inputs_of(run.reference, run.layout, run.facts)
    return [
        compare("input_ids", expected.input_ids, run.buffer("input_ids")),
        compare("attention_mask", expected.attention_mask, run.buffer("attention_mask")),
        compare("valid_length", torch.tensor([expected.valid_length]), run.observed("valid_length").reshape(1)),
    ]


@check("G4-INPUTS-02", stage=_STAGE, budget="exact", needs=Needs.PROMPT)
def placeholders_become_padding(run: CaseRun) -> Comparison:
    """In `llm_input_ids` the pad id replaces every placeholder, and nothing else changes."""
    expected = static_inputs_of(run.reference, run.layout, run.facts)
    return compare("llm_input_ids", expected.llm_input_ids, run.buffer("llm_input_ids"))


@check("G4-INPUTS-03", stage=_STAGE, budget="exact", needs=Needs.PROMPT)
def one_beginning_of_sequence(run: CaseRun) -> Comparison:
    """The prompt holds the beginning-of-sequence id once, and first, if the tokenizer has one."""
    ids = run.observed("input_ids")[0]
    if run.facts.bos_token_id is None:
        return holds("input_ids", torch.zeros(0, dtype=torch.bool), "")
    is_bos = ids == torch.tensor(run.facts.bos_token_id)
    detail = f"{int(is_bos.sum())} beginning-of-sequence ids, the first id is {int(ids[0])}"
    return holds("input_ids", torch.stack([is_bos[0], is_bos.sum() == 1]), detail)


@check("G4-INPUTS-04", stage=_STAGE, budget="exact", needs=Needs.IMAGE)
def image_span(run: CaseRun) -> Comparison:
    """The image placeholders fill the layout's slot, all of it and nothing else."""
    rows = torch.arange(run.layout.max_seq)
    slot = (rows >= run.layout.visual_start_idx) & (rows < run.layout.visual_end_idx)
    return compare("input_ids", slot[None], run.buffer("input_ids").cpu() == run.facts.image_token_id)


@check("G4-INPUTS-05", stage=_STAGE, budget="exact", foreign_budget="rounding", needs=Needs.IMAGE)
def patches(run: CaseRun) -> Comparison:
    """The patches' pixel values equal the processor's, in the model's dtype, padding patches included."""
    return compare("pixel_values", run.reference["pixel_values"], run.observed("pixel_values"))


@check("G4-INPUTS-06", stage=_STAGE, budget="exact", needs=Needs.IMAGE)
def patch_positions(run: CaseRun) -> Comparison:
    """Each patch's (x, y) equals the processor's, and padding patches hold -1."""
    return compare("image_position_ids", run.reference["image_position_ids"], run.observed("image_position_ids"))
