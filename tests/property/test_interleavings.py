"""However requests follow each other on one runtime, its logits are those of a fresh pass of the Hugging Face model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from PIL import Image
from torch import Tensor

from g4conformance.budgets import Limit, budget_of
from g4conformance.checkpoints.checkpoint import Checkpoint
from g4conformance.checkpoints.seeded import SeededSpec, seeded_checkpoint
from g4conformance.checks import CHECKS
from g4conformance.errors import LayoutError
from g4conformance.expected import key_values_of
from g4conformance.fuzz.cases import calibration_cases
from g4conformance.metrics import difference
from g4conformance.probe_requests import ProbeRequests
from g4conformance.reference.noise import Noise
from g4conformance.reference.record import model_inputs, record_reference
from g4conformance.reference.selfcheck import measure_noise
from g4conformance.runtime.inputs import derive_layout
from g4conformance.runtime.static import StaticGemma4Runtime

pytestmark = pytest.mark.property

# Each step of an interleaving is a pass of the model and one of the runtime: half of what the profile asks for.
# A failure tells its steps; shrinking them would take minutes.
PHASES = (Phase.explicit, Phase.reuse, Phase.generate)
few = settings(max_examples=max(1, settings().max_examples // 2), stateful_step_count=16, phases=PHASES)

SPEC, SEED = SeededSpec(), 11  # every feature of E2B, and a window of 9
ROOM = 24  # rows behind the picture, or behind the beginning of the sequence
PICTURES = 3

Output = Mapping[str, Any]


@cache
def checkpoint() -> Checkpoint:
    return seeded_checkpoint(SPEC, SEED)


@cache
def noise() -> Noise:
    return measure_noise(checkpoint(), calibration_cases(checkpoint()))


@cache
def beginning(picture: int | None) -> Output:
    """The processor's output for a prompt of nothing but its beginning, and one of three pictures of one shape."""
    tokenizer = checkpoint().processor.tokenizer
    if picture is None:
        return checkpoint().process(tokenizer.bos_token, [])
    pixels = np.random.default_rng(picture).integers(0, 256, (66, 90, 3), dtype=np.uint8)
    prompt = tokenizer.bos_token + checkpoint().processor.image_token
    return checkpoint().process(prompt, [Image.fromarray(pixels)])


def continued(output: Output | None, ids: Sequence[int]) -> Output:
    """The output of the same prompt with more text behind it; of nothing but the text if there is none."""
    more = torch.tensor([ids], dtype=torch.long)
    rows = {"input_ids": more, "attention_mask": torch.ones_like(more), "mm_token_type_ids": torch.zeros_like(more)}
    if output is None:
        return rows
    return {**output, **{name: torch.cat([output[name], rows[name]], dim=1) for name in rows if name in output}}


@torch.no_grad()
def fresh_logits(output: Output) -> Tensor:
    """[1, vocab] of the last row, in one pass without a cache."""
    inputs = model_inputs(output, checkpoint().dtype)
    last = torch.tensor([inputs["input_ids"].shape[1] - 1])
    logits: Tensor = checkpoint().model(**inputs, use_cache=False, logits_to_keep=last).logits
    return logits[:, -1]


def require_close(check: str, expected: Tensor, actual: Tensor) -> None:
    """Within what `check` allows for logits, given the checkpoint's own rounding noise."""
    found = difference(expected, actual)
    budget = budget_of(CHECKS[check], "float32")
    limit: Limit = budget.limit(noise(), "prefill/logits", found)
    assert found.max_abs <= limit.largest
    assert found.mean_abs <= limit.mean
    assert abs(found.gain - 1) <= limit.gain


def requests_of(output: Output, rows: int) -> ProbeRequests:
    """Requests made of the processor's output, for buffers of that many rows."""
    facts = checkpoint().facts
    return ProbeRequests(output, derive_layout(output, facts.image_token_id, rows), facts, checkpoint().dtype)


def with_room(output: Output) -> ProbeRequests:
    return requests_of(output, output["input_ids"].shape[1] + ROOM)


words = st.integers(300, 499)  # ordinary ids of the bundled tokenizer
texts_of_ids = st.lists(words, max_size=ROOM)
kinds = st.sampled_from(["text", "picture"])


class Interleavings(RuleBasedStateMachine):
    """Two layouts of one runtime, each with the request that it is in the middle of: its tokens so far."""

    @initialize()
    def begin(self) -> None:
        self.so_far: dict[str, Output | None] = {"text": None, "picture": None}
        layouts = {kind: with_room(beginning(picture)).layout for kind, picture in (("text", None), ("picture", 0))}
        runtime = StaticGemma4Runtime(checkpoint(), layouts["text"])
        self.runtimes = {kind: runtime.for_layout(layout) for kind, layout in layouts.items()}

    def _request(self, kind: str, picture: int, ids: list[int]) -> Output:
        return continued(beginning(None if kind == "text" else picture), ids)

    def _follow(self, kind: str, output: Output, logits: Tensor) -> None:
        self.so_far[kind] = output
        require_close("G4-DECODE-09", fresh_logits(output), logits)

    @rule(kind=kinds, picture=st.integers(0, PICTURES - 1), ids=texts_of_ids)
    @torch.no_grad()
    def prefill(self, kind: str, picture: int, ids: list[int]) -> None:
        runtime, output = self.runtimes[kind], self._request(kind, picture, ids)
        self._follow(kind, output, runtime.prefill(requests_of(output, runtime.layout.max_seq).prompt()))

    @rule(kind=kinds, picture=st.integers(0, PICTURES - 1), ids=texts_of_ids)
    @torch.no_grad()
    def load_state(self, kind: str, picture: int, ids: list[int]) -> None:
        output = self._request(kind, picture, ids)
        reference = record_reference(checkpoint(), output, steps=0)
        self.runtimes[kind].load_state(key_values_of(reference, checkpoint().facts), output["input_ids"].shape[1])
        self.so_far[kind] = output

    @rule(kind=kinds, token=words)
    @torch.no_grad()
    def decode_one(self, kind: str, token: int) -> None:
        """Of either request; after a reset the token is the first one."""
        runtime, so_far = self.runtimes[kind], self.so_far[kind]
        if so_far is not None and so_far["input_ids"].shape[1] == runtime.layout.max_seq:
            with pytest.raises(LayoutError, match="a full buffer"):
                runtime.decode_one(token)
        else:
            self._follow(kind, continued(so_far, [token]), runtime.decode_one(token))

    @rule(kind=kinds)
    def reset(self, kind: str) -> None:
        self.runtimes[kind].reset()
        self.so_far[kind] = None


TestInterleavings = Interleavings.TestCase
TestInterleavings.settings = few


@few
@given(
    length=st.integers(2, 2 * SPEC.sliding_window + 3),
    ids=st.lists(words, min_size=2 * SPEC.sliding_window + 2, max_size=2 * SPEC.sliding_window + 2),
    room=st.integers(0, 3),
)
@torch.no_grad()
def test_prefill_of_one_more_is_prefill_and_decode(length: int, ids: list[int], room: int) -> None:
    requests = requests_of(continued(beginning(None), ids[: length - 1]), length + room)
    runtime = StaticGemma4Runtime(checkpoint(), requests.layout)
    whole = runtime.prefill(requests.prompt())
    runtime.prefill(requests.shortened())
    require_close("G4-SELF-01", whole, runtime.decode_one(requests.ids[-1]))
