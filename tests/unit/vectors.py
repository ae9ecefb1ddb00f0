"""Vectors of two bundled cases and the shipped runtime's answers to them, for tests that judge or damage them."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from foreign.shipped import answer, layout_of

from g4conformance.checkpoints.checkpoint import Checkpoint
from g4conformance.foreign import requests_of, write_trace
from g4conformance.judging.verdict import Status, Verdict
from g4conformance.runtime.static import StaticGemma4Runtime
from g4conformance.session import RunOptions
from g4conformance.vectors.compare import answers_in, judge_answers
from g4conformance.vectors.reading import open_vectors
from g4conformance.vectors.record import record_vectors

CASES = ("text-only", "image-first")
OPTIONS = RunOptions(case_names=CASES, quant="none", decode_steps=2, gen_steps=3)


def record(checkpoint: Checkpoint, out: Path, options: RunOptions = OPTIONS) -> dict[str, bool]:
    """Records; by case, whether it was kept."""
    return dict(record_vectors(checkpoint, options, out))


def answered(runtime: StaticGemma4Runtime, request: Any) -> dict[str, Any]:
    return answer(runtime.for_layout(layout_of(request)), request)


def answer_all(runtime: StaticGemma4Runtime, vectors: Path, mine: Path) -> None:
    for request in requests_of(vectors):
        write_trace(request, answered(runtime, request), mine / request.folder.name)


def judged(vectors: Path, mine: Path) -> list[Verdict]:
    """The verdicts that say something."""
    opened = open_vectors(vectors)
    answers: Mapping[str, Any] = answers_in(mine, opened, CASES)
    found = [verdict for of_case in judge_answers(opened, answers) for verdict in of_case]
    return [verdict for verdict in found if verdict.status is not Status.NOT_APPLICABLE]


def copied(folder: Path, to: Path) -> Path:
    return Path(shutil.copytree(folder, to))
