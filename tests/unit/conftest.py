"""What the unit tests share: the bundled checkpoint, one text and one image case of it, and their traces.

Fixtures import what they need when they run: with xdist, the controlling process loads this file and runs no test.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from g4conformance.cases import Case
    from g4conformance.checkpoints.checkpoint import Checkpoint
    from g4conformance.prompts import ResolvedCase
    from g4conformance.runtime.static import StaticGemma4Runtime

    from .recording import Recorded


@pytest.fixture(scope="session")
def bundled_folder() -> Path:
    from g4conformance.fixtures import bundled_checkpoint

    return bundled_checkpoint()


@pytest.fixture(scope="session")
def tiny_checkpoint(bundled_folder: Path) -> Checkpoint:
    """The bundled checkpoint in float32; tests leave its weights as they are."""
    from g4conformance.checkpoints.checkpoint import load_checkpoint

    return load_checkpoint(bundled_folder)


@pytest.fixture(scope="session")
def bundled_cases() -> tuple[Case, ...]:
    from g4conformance.cases import load_cases
    from g4conformance.fixtures import fixtures_folder

    return load_cases(fixtures_folder() / "cases.yaml")


@pytest.fixture(scope="session")
def resolved(tiny_checkpoint: Checkpoint, bundled_cases: tuple[Case, ...]) -> Callable[[str], ResolvedCase]:
    """Resolves the bundled case of a name for the bundled checkpoint, once."""
    from g4conformance.prompts import resolve

    from .recording import DECODE_STEPS, GEN_STEPS

    by_name = {case.name: case for case in bundled_cases}

    @cache
    def resolve_case(name: str) -> ResolvedCase:
        return resolve(
            by_name[name],
            tiny_checkpoint,
            max_seq=tiny_checkpoint.facts.default_max_seq,
            decode_steps=DECODE_STEPS,
            gen_steps=GEN_STEPS,
            all_cases=bundled_cases,
        )

    return resolve_case


@pytest.fixture(scope="session")
def text_case(resolved: Callable[[str], ResolvedCase]) -> ResolvedCase:
    """One token longer than the sliding window, so that both layer types have masks of their own; with probes."""
    case = resolved("window+1")
    return replace(case, case=replace(case.case, self_consistency=True))


@pytest.fixture(scope="session")
def image_case(resolved: Callable[[str], ResolvedCase]) -> ResolvedCase:
    """A picture between two pieces of text, with padding patches."""
    return resolved("image-middle")


@pytest.fixture(scope="session")
def shared_runtime(tiny_checkpoint: Checkpoint, text_case: ResolvedCase) -> StaticGemma4Runtime:
    """Weights and layouts are shared by all tests; each begins a request of its own."""
    from g4conformance.runtime.static import StaticGemma4Runtime

    return StaticGemma4Runtime(tiny_checkpoint, text_case.request.layout)


@pytest.fixture(scope="session")
def recorded(
    shared_runtime: StaticGemma4Runtime, text_case: ResolvedCase, image_case: ResolvedCase
) -> Callable[[str], Recorded]:
    """The traces of the `text` or the `image` case, recorded once; tests copy what they break."""
    from .recording import record_case

    cases = {"text": text_case, "image": image_case}
    return cache(lambda kind: record_case(shared_runtime, cases[kind]))


@pytest.fixture(scope="session")
def text(recorded: Callable[[str], Recorded]) -> Recorded:
    return recorded("text")


@pytest.fixture(scope="session")
def image(recorded: Callable[[str], Recorded]) -> Recorded:
    return recorded("image")
