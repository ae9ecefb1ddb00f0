"""A case with all that reference and shipped runtime yield for it, for tests that judge or break traces."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from g4conformance.checkpoints.facts import ModelFacts
from g4conformance.expected import greedy_tokens
from g4conformance.judging.judge import Bench
from g4conformance.judging.observe import Observation, observe
from g4conformance.judging.support import refusals
from g4conformance.prompts import ResolvedCase
from g4conformance.reference.noise import Noise
from g4conformance.reference.record import record_reference
from g4conformance.runtime.static import StaticGemma4Runtime
from g4conformance.trace import Trace

DECODE_STEPS, GEN_STEPS = 2, 3
# A hand-made stand-in for calibration, the same for every tensor: 64 float32 eps, more than the runtime needs.
NOISE = Noise(eps=2.0**-17, largest={}, mean={}, gain={}, worst_peir={})


@dataclass(frozen=True)
class Recorded:
    """One case's traces, and what they are judged with."""

    case: ResolvedCase
    reference: Trace
    observation: Observation
    bench: Bench


def record_case(runtime: StaticGemma4Runtime, case: ResolvedCase) -> Recorded:
    """Runs reference and runtime through `case`, as the run's first; greedy generation meets no stop token."""
    case = replace(case, first=True)
    checkpoint = runtime.checkpoint
    reference = record_reference(checkpoint, case.request.inputs, case.reference_steps, case.case.name)
    facts = never_stopping(checkpoint.facts, reference)
    with with_facts(runtime.for_layout(case.request.layout), facts):
        observation = observe(runtime, case, reference, facts)
        observation.accumulated |= refusals(runtime, [case], reference, facts)
    return Recorded(case, reference, observation, Bench(facts, NOISE, checkpoint.options.dtype))


def never_stopping(facts: ModelFacts, reference: Trace) -> ModelFacts:
    """With a stop set of which greedy generation chooses nothing, so that every decode step is reached.

    Where the bundled checkpoint stops is its training's affair.
    """
    chosen = set(greedy_tokens(reference))
    stops = [token for token in range(facts.vocab_size) if token not in chosen]
    return replace(facts, stop_token_ids=frozenset((stops[5], stops[-5])))


@contextmanager
def with_facts(runtime: StaticGemma4Runtime, facts: ModelFacts) -> Iterator[None]:
    """`runtime` believes these facts inside this context only."""
    before = runtime.facts
    runtime.facts = facts
    try:
        yield
    finally:
        runtime.facts = before
