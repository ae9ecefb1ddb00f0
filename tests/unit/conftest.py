"""What the unit tests share: the bundled checkpoint, one text and one image case of it, and their traces."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from g4conformance.cases import Case, load_cases
from g4conformance.checkpoints.checkpoint import Checkpoint, LoadOptions, load_checkpoint
from g4conformance.checkpoints.facts import ModelFacts
from g4conformance.expected import greedy_tokens
from g4conformance.fixtures import bundled_checkpoint, fixtures_folder
from g4conformance.judging.judge import Bench
from g4conformance.judging.observe import Observation, observe
from g4conformance.prompts import ResolvedCase, resolve
from g4conformance.reference.noise import Noise
from g4conformance.reference.record import record_reference
from g4conformance.runtime.static import StaticGemma4Runtime
from g4conformance.trace import Trace

DECODE_STEPS, GEN_STEPS = 2, 3
# A hand-made stand-in for calibration, the same for every tensor: 64 float32 eps, more than the runtime needs.
NOISE = Noise(eps=2.0**-17, largest={}, mean={}, worst_peir={})


@dataclass(frozen=True)
class Recorded:
    """A case with all that reference and shipped runtime yield for it."""

    case: ResolvedCase
    reference: Trace
    observation: Observation
    bench: Bench


@pytest.fixture(scope="session")
def bundled_folder() -> Path:
    return bundled_checkpoint()


@pytest.fixture(scope="session")
def tiny_checkpoint(bundled_folder: Path) -> Checkpoint:
    """The bundled checkpoint in float32; tests leave its weights as they are."""
    return load_checkpoint(bundled_folder, LoadOptions())


@pytest.fixture(scope="session")
def bundled_cases() -> tuple[Case, ...]:
    return load_cases(fixtures_folder() / "cases.yaml")


@pytest.fixture(scope="session")
def resolved(tiny_checkpoint: Checkpoint, bundled_cases: tuple[Case, ...]) -> Callable[[str], ResolvedCase]:
    """Resolves the bundled case of a name for the bundled checkpoint, once."""
    known: dict[str, ResolvedCase] = {}
    by_name = {case.name: case for case in bundled_cases}

    def resolve_case(name: str) -> ResolvedCase:
        if name not in known:
            known[name] = resolve(
                by_name[name],
                tiny_checkpoint,
                max_seq=tiny_checkpoint.facts.default_max_seq,
                decode_steps=DECODE_STEPS,
                gen_steps=GEN_STEPS,
                all_cases=bundled_cases,
            )
        return known[name]

    return resolve_case


@pytest.fixture(scope="session")
def text_case(resolved: Callable[[str], ResolvedCase]) -> ResolvedCase:
    """One token longer than the sliding window, so that both layer types have masks of their own."""
    return resolved("window+1")


@pytest.fixture(scope="session")
def image_case(resolved: Callable[[str], ResolvedCase]) -> ResolvedCase:
    """A picture between two pieces of text, with padding patches."""
    return resolved("image-middle")


@pytest.fixture(scope="session")
def shared_runtime(tiny_checkpoint: Checkpoint, text_case: ResolvedCase) -> StaticGemma4Runtime:
    """Weights and layouts are shared by all tests; each begins a request of its own."""
    return StaticGemma4Runtime(tiny_checkpoint, text_case.request.layout)


@contextmanager
def with_facts(runtime: StaticGemma4Runtime, facts: ModelFacts) -> Iterator[None]:
    """`runtime` believes these facts inside this context only."""
    before = runtime.facts
    runtime.facts = facts
    try:
        yield
    finally:
        runtime.facts = before


def never_stopping(facts: ModelFacts, reference: Trace) -> ModelFacts:
    """With a stop set of which greedy generation chooses nothing, so that every decode step is reached.

    Where the bundled checkpoint stops is its training's affair.
    """
    chosen = set(greedy_tokens(reference))
    stops = [token for token in range(facts.vocab_size) if token not in chosen]
    return replace(facts, stop_token_ids=frozenset((stops[5], stops[-5])))


@pytest.fixture(scope="session")
def recorded(
    tiny_checkpoint: Checkpoint,
    shared_runtime: StaticGemma4Runtime,
    text_case: ResolvedCase,
    image_case: ResolvedCase,
) -> Callable[[str], Recorded]:
    """The traces of the `text` or the `image` case, recorded once and never stopping; tests copy what they break."""
    cases = {"text": text_case, "image": image_case}
    known: dict[str, Recorded] = {}

    def record(kind: str) -> Recorded:
        if kind not in known:
            case = cases[kind]
            reference = record_reference(tiny_checkpoint, case.request.inputs, case.reference_steps, case.case.name)
            facts = never_stopping(tiny_checkpoint.facts, reference)
            with with_facts(shared_runtime.for_layout(case.request.layout), facts):
                observation = observe(shared_runtime, case, reference, facts)
            bench = Bench(facts, NOISE, tiny_checkpoint.options.dtype)
            known[kind] = Recorded(case, reference, observation, bench)
        return known[kind]

    return record


@pytest.fixture(scope="session")
def text(recorded: Callable[[str], Recorded]) -> Recorded:
    return recorded("text")


@pytest.fixture(scope="session")
def image(recorded: Callable[[str], Recorded]) -> Recorded:
    return recorded("image")
