"""Stage 3: patches become soft tokens in the language model's space."""

from __future__ import annotations

from g4conformance.checks.alone import moved, of_vision
from g4conformance.checks.compare import Comparison, compare
from g4conformance.checks.registry import Needs, check
from g4conformance.checks.run import CaseRun, Mode
from g4conformance.stages import Stage

_STAGE = Stage.VISION_PREFILL


@check("G4-VISION-01", stage=_STAGE, budget="rounding", needs=Needs.IMAGE)
def patch_embeddings(run: CaseRun) -> Comparison:
    """Patch embeddings with their position embeddings equal the reference's, padding patches included: [1, N, Hv]."""
    return compare("vision/patch_embeds", run.reference["vision/patch_embeds"], run.observed("vision/patch_embeds"))


@check("G4-VISION-02", stage=_STAGE, budget="rounding", needs=Needs.IMAGE)
def encoder_layers(run: CaseRun) -> list[Comparison]:
    """The output of each encoder layer equals the reference's at every patch that belongs to the image: [n, Hv]."""
    own = (run.reference["image_position_ids"] != -1).any(dim=-1)
    names = [f"vision/layer/{i}/hidden" for i in range(run.facts.vision_layers)]
    return [compare(name, run.reference[name][own], run.observed(name)[own]) for name in names]


@check("G4-VISION-03", stage=_STAGE, budget="rounding", needs=Needs.IMAGE)
def pooled_soft_tokens(run: CaseRun) -> Comparison:
    """Pooled, scaled soft tokens equal the reference's in number, order and value, before the embedder: [V, Hv].

    The embedder's norm has no scale and hides any constant factor, so this is the last place to see one.
    """
    return compare("vision/soft_tokens", run.reference["vision/soft_tokens"], run.observed("vision/soft_tokens"))


@check("G4-VISION-04", stage=_STAGE, budget="rounding", needs=Needs.IMAGE)
def visual_embeddings(run: CaseRun) -> Comparison:
    """Soft tokens in the language model's space equal the reference's in number, order and value: [V, H]."""
    return compare("visual_embeds", run.reference["visual_embeds"], run.observed("visual_embeds"))


@check("G4-VISION-05", stage=_STAGE, budget="step", needs=Needs.QUANTIZED_IMAGE, modes=(Mode.ISOLATED,), alone=True)
def graphs_alone(run: CaseRun) -> list[Comparison]:
    """Each quantized graph, fed with what enters the reference's, returns the same up to one quantization step."""
    return of_vision(run)


@check("G4-VISION-06", stage=_STAGE, budget="quality", needs=Needs.QUANTIZED_IMAGE, modes=(Mode.ISOLATED,), alone=True)
def few_elements_move(run: CaseRun) -> list[Comparison]:
    """Of each tensor that a quantized graph returns by itself, few elements are not the reference's value."""
    return moved(run, of_vision(run))
