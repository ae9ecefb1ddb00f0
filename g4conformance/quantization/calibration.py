"""Calibration: cases named for it are run by the float model, for reference, and by a runtime's observing graphs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from g4conformance.cases import load_cases
from g4conformance.checkpoints.checkpoint import Checkpoint
from g4conformance.expected import greedy_tokens, static_inputs_of
from g4conformance.fixtures import fixtures_folder
from g4conformance.prompts import ResolvedCase, resolve
from g4conformance.quantization.parameters import Calibration, CalibrationRequest, output_names, quantizable
from g4conformance.reference.ranges import RangeMeter
from g4conformance.reference.record import record_reference
from g4conformance.runtime.contract import MasksAndRope, StaticInputs
from g4conformance.runtime.static import StaticGemma4Runtime

DECODE_STEPS = 16  # captions and copies are about that long, and logits reach furthest while copying


def calibration_cases(checkpoint: Checkpoint) -> list[ResolvedCase]:
    """The bundled calibration cases; none of them is ever judged."""
    return [
        resolve(case, checkpoint, max_seq=checkpoint.facts.default_max_seq, decode_steps=DECODE_STEPS, gen_steps=1)
        for case in load_cases(fixtures_folder() / "calibration.yaml")
    ]


def record_calibration(checkpoint: Checkpoint, cases: Sequence[ResolvedCase]) -> Calibration:
    """Runs the float model over `cases`, prefill and greedy decode steps."""
    meter, requests = RangeMeter(), []
    meter.listen(quantizable(checkpoint.model))
    try:
        for case in cases:
            trace = record_reference(checkpoint, case.request.inputs, case.reference_steps, case.case.name)
            meter.note_trace(trace, _returned(checkpoint))
            tokens = tuple(greedy_tokens(trace)[: case.reference_steps])
            inputs = static_inputs_of(trace, case.request.layout, checkpoint.facts)
            requests.append(CalibrationRequest(case.request.layout, inputs, tokens))
    finally:
        meter.stop()
    ranges = dict(meter.ranges)
    ranges["logits"] = ranges.pop("lm_head/output")  # in front of the softcap; a trace has them behind it
    return Calibration(tuple(requests), ranges)


def calibrate(runtime: StaticGemma4Runtime, calibration: Calibration) -> None:
    """Feeds the calibration requests to a runtime whose graphs observe.

    Rows of padding repeat the prompt's last one, so that observers see nothing but what prompts yield.
    """
    with torch.no_grad():
        for request in calibration.requests:
            sibling = runtime.for_layout(request.layout)
            _prefill(sibling, request.inputs)
            for token in request.tokens:
                sibling.decode_one(token)
            sibling.reset()


def _returned(checkpoint: Checkpoint) -> frozenset[str]:
    """Kinds of trace names of what quantized graphs return, but for logits."""
    facts = checkpoint.facts
    graphs = [f"layer/{i}" for i in range(len(facts.layer_types))]
    graphs += [f"vision/layer/{i}" for i in range(facts.vision_layers)]
    names = {name for graph in graphs for name in output_names(graph)}
    return frozenset(names | {"per_layer_inputs", "vision/patch_embeds", "visual_embeds"})


def _prefill(runtime: StaticGemma4Runtime, inputs: StaticInputs) -> None:
    rows = torch.arange(runtime.layout.max_seq, device=inputs.input_ids.device).clamp(max=inputs.valid_length - 1)
    fused = runtime.token_embedding(inputs.llm_input_ids)
    if inputs.pixel_values is not None and inputs.image_position_ids is not None:
        fused = runtime.mm_fusion(fused, runtime.vision_prefill(inputs.pixel_values, inputs.image_position_ids))
    repeated = replace(inputs, llm_input_ids=inputs.llm_input_ids[:, rows])
    runtime.prefill(repeated, fused[:, rows], _at_rows(runtime.masks_and_rope(inputs.valid_length), rows))


def _at_rows(positional: MasksAndRope, rows: Tensor) -> MasksAndRope:
    """Masks and rotary tables of the query rows that `rows` names."""
    return MasksAndRope(
        masks={kind: mask[:, rows] for kind, mask in positional.masks.items()},
        biases={kind: bias[:, :, rows] for kind, bias in positional.biases.items()},
        rope={kind: (cos[:, rows], sin[:, rows]) for kind, (cos, sin) in positional.rope.items()},
    )
