"""Stage 8: logits become tokens, until something says stop."""

from __future__ import annotations

import torch

from g4conformance.checks.compare import Comparison, compare, holds, nothing
from g4conformance.checks.registry import check
from g4conformance.checks.run import CaseRun, Mode
from g4conformance.expected import STOP_REASONS, generation_of
from g4conformance.metrics import top_two_gap
from g4conformance.runtime.contract import StopReason
from g4conformance.stages import Stage

_STAGE = Stage.GENERATION


@check("G4-GEN-01", stage=_STAGE, budget="exact", modes=(Mode.ISOLATED,))
def selected_tokens(run: CaseRun) -> Comparison:
    """Given scripted logits, the runtime selects the most likely token of each row."""
    scripted = run.observed("generation/select/logits")
    return compare("generation/select/token_ids", scripted.argmax(-1), run.observed("generation/select/token_ids"))


@check("G4-GEN-02", stage=_STAGE, budget="exact", modes=(Mode.ISOLATED,))
def stop_set(run: CaseRun) -> Comparison:
    """Given scripted logits, the runtime stops at every stop token of config and tokenizer, and at no other token."""
    chosen = run.observed("generation/select/logits").argmax(-1)
    expected = torch.isin(chosen, torch.tensor(sorted(run.facts.stop_token_ids), device=chosen.device))
    return compare("generation/select/stops", expected, run.observed("generation/select/stops"))


@check("G4-GEN-03", stage=_STAGE, budget="exact", modes=(Mode.ACCUMULATED,))
def returned_prompt(run: CaseRun) -> Comparison:
    """The returned sequence begins with the prompt's own ids, placeholders included."""
    returned = run.observed("generation/token_ids")[: run.valid_length]
    return compare("generation/token_ids", run.reference["input_ids"][0], returned)


@check("G4-GEN-04", stage=_STAGE, budget="exact", modes=(Mode.ACCUMULATED,))
def new_tokens(run: CaseRun) -> Comparison:
    """The new tokens equal the reference's greedy ones in full length, up to a near-tie of the reference's logits."""
    expected, _ = _expected(run)
    actual = run.observed("generation/token_ids")[run.valid_length :]
    judged = _rows_before_near_tie(run, len(expected))
    if judged == len(expected):
        return compare("generation/token_ids", torch.tensor(expected), actual)
    found = compare("generation/token_ids", torch.tensor(expected)[:judged], actual[:judged])
    return found.explained(found.detail or f"compared up to a near-tie of the reference after {judged} tokens")


@check("G4-GEN-05", stage=_STAGE, budget="exact", modes=(Mode.ACCUMULATED,))
def stop_reason(run: CaseRun) -> Comparison:
    """The generation ends for the reference's reason: a stop token, the number of tokens asked for, or full buffers."""
    expected, reason = _expected(run)
    actual = STOP_REASONS[int(run.observed("generation/stop_reason"))]
    if _rows_before_near_tie(run, len(expected)) < len(expected):
        return nothing("generation/stop_reason", "not compared: a near-tie came before")
    return holds("generation/stop_reason", torch.tensor([actual is reason]), f"ended by {actual}, not by {reason}")


def _expected(run: CaseRun) -> tuple[list[int], StopReason]:
    return generation_of(run.reference, run.layout, run.facts, run.gen_steps)


def _rows_before_near_tie(run: CaseRun, count: int) -> int:
    """How many of the first `count` tokens follow from logits whose two largest are further apart than rounding."""
    names = ["prefill/logits", *(f"decode/{step}/logits" for step in range(count - 1))]
    for row, name in enumerate(names):
        if top_two_gap(run.reference[name]) <= run.near_tie(name):
            return row
    return count
