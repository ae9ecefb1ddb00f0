"""Stage 2: token ids become embeddings, scaled by the square root of the hidden size."""

from __future__ import annotations

from g4conformance.checks.compare import Comparison, compare
from g4conformance.checks.registry import check
from g4conformance.checks.run import CaseRun
from g4conformance.expected import padded_reference
from g4conformance.stages import Stage


@check("G4-EMBED-01", stage=Stage.TOKEN_EMBEDDING, budget="exact")
def prompt_rows(run: CaseRun) -> Comparison:
    """Every row of the prompt equals the reference's embedding of its id, to the last bit.

    A lookup and one multiplication by a scale in the weight's dtype have one right result: [B, valid_length, H].
    """
    rows = run.observed("text_embeds")[:, : run.valid_length]
    return compare("text_embeds", run.reference["text_embeds"], rows)


@check("G4-EMBED-02", stage=Stage.TOKEN_EMBEDDING, budget="exact")
def padding_rows_are_embedded_too(run: CaseRun) -> Comparison:
    """Every row of the static buffer, padding and image slots included, equals the reference's embedding of its id.

    Shapes: [B, max_seq, H]. Rows beyond `valid_length` count: later stages read them.
    """
    expected = padded_reference(run.reference, run.layout, "text_embeds")
    return compare("text_embeds", expected, run.buffer("text_embeds"))
