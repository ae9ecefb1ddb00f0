"""One fuzz example against a clean runtime, a faulty one, and a reference that cannot judge."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest

from g4conformance.checkpoints.seeded import SeededSpec
from g4conformance.errors import UnsoundReferenceError
from g4conformance.fuzz import conformance
from g4conformance.fuzz.conformance import examine, judge_example
from g4conformance.fuzz.example import FuzzExample, Picture
from g4conformance.fuzz.search import Budget, search
from g4conformance.reference.noise import Noise
from g4conformance.runtime.static import StaticGemma4Runtime

pytestmark = pytest.mark.unit

EXAMPLE = FuzzExample(
    SeededSpec(layer_types=("sliding_attention", "full_attention"), num_kv_shared_layers=0),
    seed=0,
    dtype="float32",
    attn_implementation="eager",
    text="red",
    image_prompt="{image}",
    picture=Picture(width=12, height=9, seed=0),
    room=1,
)


@contextmanager
def embedding_scaled(runtime: StaticGemma4Runtime) -> Iterator[None]:
    embed = runtime.embedding
    runtime.embedding = lambda ids: embed(ids) * 1.5
    yield
    runtime.embedding = embed


@pytest.fixture
def unsound_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(noise: Noise) -> NoReturn:
        raise UnsoundReferenceError("a reference", "another", "Choose.")

    monkeypatch.setattr(conformance, "require_sound", refuse)


def test_the_shipped_runtime_conforms() -> None:
    assert not judge_example(EXAMPLE).alarm


def test_a_planted_fault_is_wrong_in_both_cases() -> None:
    wrong = {(v.case, v.check) for v in judge_example(EXAMPLE, embedding_scaled).wrong}
    assert {("text", "G4-EMBED-01"), ("image", "G4-EMBED-01")} <= wrong


def test_an_alarm_is_named_after_what_is_wrong_first() -> None:
    assert judge_example(EXAMPLE, embedding_scaled).alarm == "G4-EMBED-01"


def test_a_planted_fault_is_found_saved_and_replayed(tmp_path: Path) -> None:
    _, found = search(Budget(examples=5, shrink_seconds=0), seed=0, plant=embedding_scaled)
    assert found is not None
    again = FuzzExample.load(found.example.save(tmp_path))
    assert examine(again, embedding_scaled) == found.outcome
    assert not examine(again).alarm


def test_an_unsound_reference_judges_nobody_in_low_precision(unsound_reference: None) -> None:
    outcome = judge_example(replace(EXAMPLE, dtype="bfloat16"))
    assert outcome.unsound == "expected a reference, found another. Choose."
    assert not outcome.alarm


def test_an_unsound_reference_is_an_alarm_in_float32(unsound_reference: None) -> None:
    with pytest.raises(UnsoundReferenceError):
        judge_example(EXAMPLE)
    assert "UnsoundReferenceError" in examine(EXAMPLE).raised


def test_what_is_raised_is_an_alarm() -> None:
    """Sharing all layers is not legal: such a spec is never drawn, but it can be written into a file."""
    outcome = examine(replace(EXAMPLE, spec=replace(EXAMPLE.spec, num_kv_shared_layers=2)))
    assert outcome.alarm == "ValueError"
    assert "all 2 layers reuse K/V" in outcome.raised
