"""The shipped runtime conforms on any legal checkpoint and any prompt: no verdict fails, and none is missing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import Phase, event, given, settings

from g4conformance.fuzz.conformance import judge_example
from g4conformance.fuzz.example import ATTN_IMPLEMENTATIONS, DTYPES, AttnImplementation, Dtype, FuzzExample
from g4conformance.fuzz.strategies import fuzz_examples

pytestmark = pytest.mark.property

# Each example builds, calibrates and judges a checkpoint, in six settings: an eighth of what the profile asks for.
# A failure prints its example; shrinking it would take minutes, and is what `g4conformance fuzz` does.
few = settings(max_examples=max(1, settings().max_examples // 8), phases=(Phase.explicit, Phase.reuse, Phase.generate))

REPRODUCERS = sorted((Path(__file__).parent / "reproducers").glob("*.json"))


@pytest.mark.parametrize("attn_implementation", ATTN_IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@few
@given(drawn=fuzz_examples())
def test_no_verdict_fails(dtype: Dtype, attn_implementation: AttnImplementation, drawn: FuzzExample) -> None:
    """A text and a picture, one after the other on one runtime."""
    example = replace(drawn, dtype=dtype, attn_implementation=attn_implementation)
    outcome = judge_example(example)
    if outcome.unsound:
        event("not judged: the reference is unsound")
    assert not outcome.wrong, example.as_json()


@pytest.mark.parametrize("path", REPRODUCERS, ids=lambda path: path.stem)
def test_reproducers_conform(path: Path) -> None:
    outcome = judge_example(FuzzExample.load(path))
    assert not outcome.unsound, "a reproducer that is not judged tests nothing"
    assert not outcome.wrong
