"""Resolves a case for one checkpoint: text rendered, lengths evaluated, processed once, layout derived."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from g4conformance.cases import FILL_MARK, IMAGE_MARK, Case
from g4conformance.checkpoints.checkpoint import Checkpoint
from g4conformance.errors import CaseError
from g4conformance.lengths import evaluate_length, fit_text
from g4conformance.runtime.inputs import derive_layout
from g4conformance.runtime.layout import StaticLayout

_ROOM_TO_DECODE = 2  # rows that a case of ids leaves in the buffers


@dataclass(frozen=True)
class Request:
    """A rendered prompt with its pictures, and the static layout that it asks for; of ids only, there is no prompt."""

    prompt: str | None
    images: tuple[Image.Image, ...]
    inputs: Mapping[str, Any]
    layout: StaticLayout


@dataclass(frozen=True)
class ResolvedCase:
    """A case ready to run on one checkpoint.

    Attributes:
        before: requests that the runtime serves first, in order.
        decode_steps: teacher-forced decode steps, no more than the buffers have room for.
        gen_steps: new tokens to generate at most.
        first: whether it is the run's first case.
    """

    case: Case
    request: Request
    digest: str
    decode_steps: int
    gen_steps: int
    before: tuple[Request, ...] = ()
    first: bool = False

    @property
    def reference_steps(self) -> int:
        """Decode steps that the reference needs: those compared, and those of the expected generation."""
        room = self.request.layout.max_seq - self.request.inputs["input_ids"].shape[1]
        return min(max(self.decode_steps, self.gen_steps - 1), room)


def resolve(
    case: Case,
    checkpoint: Checkpoint,
    *,
    max_seq: int,
    decode_steps: int,
    gen_steps: int,
    all_cases: Sequence[Case] = (),
) -> ResolvedCase:
    """Renders and processes `case`.

    Raises:
        CaseError: a prompt that is longer than `max_seq`, an unreadable image, or an unknown interrupting case.
    """
    request = _request(case, checkpoint, max_seq)
    by_name = {other.name: other for other in all_cases}
    between = tuple(_request(_interrupting(case, name, by_name), checkpoint, max_seq) for name in case.interrupted_by)
    length = request.inputs["input_ids"].shape[1]
    steps = decode_steps if case.decode_steps is None else case.decode_steps
    return ResolvedCase(
        case=case,
        request=request,
        digest=case.digest(request.prompt or str(request.inputs["input_ids"].tolist())),
        decode_steps=min(steps, max_seq - length),
        gen_steps=gen_steps if case.gen_steps is None else case.gen_steps,
        before=(request, *between) if between else (),
    )


def _interrupting(case: Case, name: str, by_name: Mapping[str, Case]) -> Case:
    if name not in by_name:
        raise CaseError(f"a known case to interrupt {case.name!r}", repr(name), "Mend interrupted_by.")
    return by_name[name]


def _request(case: Case, checkpoint: Checkpoint, max_seq: int) -> Request:
    if case.vocabulary is not None:
        ids = vocabulary_ids(checkpoint, *case.vocabulary, rows=max(1, max_seq - _ROOM_TO_DECODE))
        return Request(None, (), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, StaticLayout(max_seq))
    prompt = _render(case, checkpoint, max_seq)
    images = tuple(case.load_images())
    inputs = checkpoint.process(prompt, images)
    if (length := inputs["input_ids"].shape[1]) > max_seq:
        raise CaseError(
            f"a prompt of at most max_seq={max_seq} tokens in case {case.name!r}",
            f"{length} tokens",
            "Shorten it or raise --max-seq.",
        )
    return Request(prompt, images, inputs, derive_layout(inputs, checkpoint.facts.image_token_id, max_seq))


def vocabulary_ids(checkpoint: Checkpoint, part: int, parts: int, rows: int) -> Tensor:
    """Every `parts`-th of at most `parts * rows` ids that are spread evenly over the vocabulary: int64 [1, n].

    All ids are among them if there are no more. Placeholders are not: without a picture they stand for nothing.
    """
    text = checkpoint.text_config
    size = (
        min(text.vocab_size, text.vocab_size_per_layer_input)
        if checkpoint.facts.has_per_layer_inputs
        else text.vocab_size
    )
    known = torch.tensor([id for id in range(size) if id not in checkpoint.facts.placeholder_ids])
    chosen = known[torch.linspace(0, len(known) - 1, min(len(known), parts * rows)).round().long()]
    return chosen[part - 1 :: parts][None].to(checkpoint.device)


def _render(case: Case, checkpoint: Checkpoint, max_seq: int) -> str:
    processor = checkpoint.processor
    bos = processor.tokenizer.bos_token or ""
    if case.prompt is not None:
        prompt = bos + case.prompt.removeprefix(bos)
    elif processor.chat_template is not None:
        return str(processor.apply_chat_template(_conversation(case), add_generation_prompt=True, tokenize=False))
    else:  # a base checkpoint: what was said, without the turns
        prompt = bos + "\n".join(message["content"] for message in case.messages)
    if case.length is not None:
        prompt = prompt.replace(FILL_MARK, _fill(case, prompt, checkpoint, max_seq))
    return prompt.replace(IMAGE_MARK, processor.image_token)


def _fill(case: Case, prompt: str, checkpoint: Checkpoint, max_seq: int) -> str:
    """The beginning of the case's fill with which the prompt has the case's length."""
    length = evaluate_length(str(case.length), {"W": checkpoint.facts.sliding_window, "max_seq": max_seq})
    if length > max_seq:
        raise CaseError(f"a length of at most max_seq={max_seq} in case {case.name!r}", str(length), "Raise --max-seq.")
    tokenizer = checkpoint.processor.tokenizer
    return fit_text(case.fill, length, lambda text: len(tokenizer(prompt.replace(FILL_MARK, text)).input_ids))


def _conversation(case: Case) -> list[dict[str, Any]]:
    return [{"role": message["role"], "content": _content(message["content"])} for message in case.messages]


def _content(text: str) -> list[dict[str, str]]:
    """A message's text as the list of parts that chat templates take, split at image marks."""
    parts: list[dict[str, str]] = []
    for i, piece in enumerate(text.split(IMAGE_MARK)):
        if i:
            parts.append({"type": "image"})
        if piece.strip():
            parts.append({"type": "text", "text": piece})
    return parts
