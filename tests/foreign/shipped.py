"""The shipped runtime as a foreign one: it answers requests with the trace of one run.

`python shipped.py FOLDER` answers one request, `python shipped.py VECTORS MINE` all cases of recorded vectors.
"""

from __future__ import annotations

from functools import cache

import torch
from PIL import Image

from g4conformance.checkpoints.checkpoint import LoadOptions, load_checkpoint
from g4conformance.fixtures import bundled_checkpoint
from g4conformance.foreign import STOP_REASONS, Request, serve
from g4conformance.runtime.contract import StaticInputs
from g4conformance.runtime.layout import StaticLayout
from g4conformance.runtime.static import StaticGemma4Runtime
from g4conformance.trace import Recorder


@cache
def loaded(dtype: str) -> StaticGemma4Runtime:
    checkpoint = load_checkpoint(bundled_checkpoint(), LoadOptions(dtype))
    return StaticGemma4Runtime(checkpoint, StaticLayout(checkpoint.facts.default_max_seq))


def run(request: Request) -> dict[str, object]:
    runtime = loaded(request.manifest["provenance"]["dtype"])
    return answer(runtime.for_layout(layout_of(request)), request)


def layout_of(request: Request) -> StaticLayout:
    told = request.manifest["request"]["layout"]
    return StaticLayout(**{**told, "patch_grid": told["patch_grid"] and tuple(told["patch_grid"])})


def answer(runtime: StaticGemma4Runtime, request: Request) -> dict[str, object]:
    """One prefill and the decode steps that are asked for, then a generation, of which only the tokens are kept."""
    record = Recorder()
    with torch.no_grad():
        inputs = inputs_of(runtime, request, record)
        runtime.on_tensor = record
        runtime.prefill(inputs)
        for token in request.decode_tokens:
            runtime.decode_one(token)
        runtime.on_tensor = None
        generation = runtime.generate(inputs, request.gen_steps)
    record("generation/token_ids", torch.tensor(generation.token_ids))
    record("generation/stop_reason", torch.tensor(STOP_REASONS.index(generation.stop_reason)))
    rows = torch.from_numpy(request.inputs["generation/select/logits"])
    selected = [runtime.select(row[None]) for row in rows]
    record("generation/select/token_ids", torch.tensor([token for token, _ in selected]))
    record("generation/select/stops", torch.tensor([reason is not None for _, reason in selected]))
    # numpy has no bfloat16
    return {name: t.float() if t.dtype == torch.bfloat16 else t for name, t in record.tensors.items()}


def inputs_of(runtime: StaticGemma4Runtime, request: Request, record: Recorder) -> StaticInputs:
    """What the runtime makes of prompt and pictures; a case of ids has neither, and gives them."""
    if request.prompt is None:
        given = {name: torch.from_numpy(array) for name, array in request.inputs.items()}
        names = ("input_ids", "llm_input_ids", "attention_mask")
        return StaticInputs(**{name: given[name] for name in names}, valid_length=request.valid_length)
    inputs = runtime.build_static_inputs(request.prompt, [Image.open(path) for path in request.images])
    for name in ("input_ids", "llm_input_ids", "attention_mask", "pixel_values", "image_position_ids"):
        if (tensor := getattr(inputs, name)) is not None:
            record(name, tensor)
    record("valid_length", torch.tensor([inputs.valid_length]))
    return inputs


if __name__ == "__main__":
    serve(run)
