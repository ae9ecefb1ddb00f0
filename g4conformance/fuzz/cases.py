"""The cases of a fuzz example: the two that are judged, and the two that calibrate noise."""

from __future__ import annotations

from collections.abc import Sequence

from PIL import Image

from g4conformance.cases import IMAGE_MARK, Case
from g4conformance.checkpoints.checkpoint import Checkpoint
from g4conformance.fuzz.example import FuzzExample, Picture
from g4conformance.lengths import fit_text
from g4conformance.prompts import Request, ResolvedCase
from g4conformance.runtime.inputs import derive_layout
from g4conformance.session import CALIBRATION_STEPS

DECODE_STEPS = 6
_TEXT = "One: A red circle at the top left on a blue background. Two: A green square at the bottom right."
_IMAGE_PROMPT = f"Look at {IMAGE_MARK} there."
_PICTURE = Picture(width=90, height=66, seed=4)


def judged_cases(example: FuzzExample, checkpoint: Checkpoint) -> list[ResolvedCase]:
    """The text and the picture of `example`, in buffers that have its room."""
    return [
        _resolved(checkpoint, "text", example.text, [], example.room, DECODE_STEPS),
        _resolved(checkpoint, "image", example.image_prompt, [example.picture.image()], example.room, DECODE_STEPS),
    ]


def calibration_cases(checkpoint: Checkpoint) -> list[ResolvedCase]:
    """A text that leaves the window and a picture, whatever is judged later, as in a run.

    The two bundled cases of a run will not do: their prompts alone are longer than twice a window of a few tokens.
    """
    tokenizer = checkpoint.processor.tokenizer
    text = fit_text(_TEXT, 2 * checkpoint.facts.sliding_window, lambda text: len(tokenizer("<bos>" + text).input_ids))
    room = checkpoint.facts.max_soft_tokens
    return [
        _resolved(checkpoint, "calibrating text", text, [], room, CALIBRATION_STEPS),
        _resolved(checkpoint, "calibrating picture", _IMAGE_PROMPT, [_PICTURE.image()], room, CALIBRATION_STEPS),
    ]


def _resolved(
    checkpoint: Checkpoint, name: str, prompt: str, images: Sequence[Image.Image], room: int, steps: int
) -> ResolvedCase:
    """A case whose buffers have `room` rows more than its prompt; generation goes one token beyond the decode steps."""
    processor = checkpoint.processor
    rendered = processor.tokenizer.bos_token + prompt.replace(IMAGE_MARK, processor.image_token)
    inputs = checkpoint.process(rendered, images)
    max_seq = inputs["input_ids"].shape[1] + room
    layout = derive_layout(inputs, checkpoint.facts.image_token_id, max_seq)
    return ResolvedCase(
        case=Case(name, "a random prompt", prompt=prompt, self_consistency=True),
        request=Request(rendered, tuple(images), inputs, layout),
        digest=name,
        decode_steps=min(room, steps),
        gen_steps=steps + 1,
    )
