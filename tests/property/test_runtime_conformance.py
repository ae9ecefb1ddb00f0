"""The shipped runtime conforms on any legal checkpoint and any prompt: no verdict fails, and none is missing."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from PIL import Image

from g4conformance.cases import IMAGE_MARK, Case
from g4conformance.checkpoints.checkpoint import Checkpoint, LoadOptions
from g4conformance.checkpoints.seeded import SeededSpec, seeded_checkpoint
from g4conformance.judging.judge import Bench, judge
from g4conformance.judging.observe import observe
from g4conformance.judging.verdict import Status, Verdict
from g4conformance.lengths import fit_text
from g4conformance.prompts import Request, ResolvedCase
from g4conformance.reference.noise import Noise
from g4conformance.reference.record import record_reference
from g4conformance.reference.selfcheck import measure_noise, require_sound
from g4conformance.runtime.inputs import derive_layout
from g4conformance.runtime.static import StaticGemma4Runtime

from .strategies import image_prompts, pictures, seeded_specs, texts

pytestmark = pytest.mark.property

# Each example builds, calibrates and judges a checkpoint, in four settings: an eighth of what the profile asks for.
# A failure tells its spec and seed; shrinking it would take minutes.
few = settings(max_examples=max(1, settings().max_examples // 8), phases=(Phase.explicit, Phase.reuse, Phase.generate))

CALIBRATION_TEXT = "One: A red circle at the top left on a blue background. Two: A green square at the bottom right."
CALIBRATION_STEPS = 6


@pytest.mark.parametrize("attn_implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@few
@given(
    spec=seeded_specs(),
    seed=st.integers(0, 2**16),
    text=texts(),
    image_prompt=image_prompts(),
    picture=pictures(),
    room=st.integers(0, 6),
)
def test_no_verdict_fails(
    dtype: str,
    attn_implementation: str,
    spec: SeededSpec,
    seed: int,
    text: str,
    image_prompt: str,
    picture: Image.Image,
    room: int,
) -> None:
    """A text and a picture, one after the other on one runtime; `room` rows of the buffers are left for decoding."""
    checkpoint = seeded_checkpoint(spec, seed, LoadOptions(dtype=dtype, attn_implementation=attn_implementation))
    noise = calibrated(checkpoint)
    cases = [case(checkpoint, "text", text, [], room), case(checkpoint, "image", image_prompt, [picture], room)]
    runtime = StaticGemma4Runtime(checkpoint, cases[0].request.layout)
    for one in cases:
        failed = [v for v in judged(checkpoint, runtime, one, noise) if v.status is not Status.PASS]
        assert not failed, f"{spec}, seed {seed}: {failed}"


def calibrated(checkpoint: Checkpoint) -> Noise:
    """The noise as a run calibrates it: of a text that leaves the window and of a picture, whatever is judged later."""
    processor, rows = checkpoint.processor, 2 * checkpoint.facts.sliding_window
    text = fit_text(CALIBRATION_TEXT, rows, lambda text: len(processor.tokenizer("<bos>" + text).input_ids))
    picture = Image.fromarray(np.random.default_rng(4).integers(0, 256, (66, 90, 3), dtype=np.uint8))
    room = checkpoint.facts.max_soft_tokens
    noise = measure_noise(
        checkpoint,
        [
            case(checkpoint, "calibrating text", text, [], room),
            case(checkpoint, "calibrating picture", f"Look at {IMAGE_MARK} there.", [picture], room),
        ],
    )
    if checkpoint.dtype is torch.float32:  # in bfloat16 an untrained checkpoint can amplify rounding beyond that limit
        require_sound(noise)
    return noise


def case(checkpoint: Checkpoint, name: str, prompt: str, images: list[Image.Image], room: int) -> ResolvedCase:
    """A case whose buffers have `room` rows more than its prompt, of which decoding takes at most six."""
    processor = checkpoint.processor
    rendered = processor.tokenizer.bos_token + prompt.replace(IMAGE_MARK, processor.image_token)
    inputs = checkpoint.process(rendered, images)
    max_seq = inputs["input_ids"].shape[1] + room
    layout = derive_layout(inputs, checkpoint.facts.image_token_id, max_seq)
    return ResolvedCase(
        case=Case(name, "whatever hypothesis drew", prompt=prompt, self_consistency=True),
        request=Request(rendered, tuple(images), inputs, layout),
        digest=name,
        decode_steps=min(room, CALIBRATION_STEPS),
        gen_steps=CALIBRATION_STEPS + 1,
    )


def judged(checkpoint: Checkpoint, runtime: StaticGemma4Runtime, one: ResolvedCase, noise: Noise) -> list[Verdict]:
    """The verdicts of the checks that apply to this case."""
    reference = record_reference(checkpoint, one.request.inputs, one.reference_steps, one.case.name)
    observation = observe(runtime, one, reference, checkpoint.facts)
    verdicts = judge(one, reference, observation, Bench(checkpoint.facts, noise, checkpoint.options.dtype))
    return [verdict for verdict in verdicts if verdict.status is not Status.NOT_APPLICABLE]
