"""Requests, answered with what gemma's sampler does."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from g4conformance.foreign import STOP_REASONS, Request
from g4conformance.runtimes.deepmind.instead import INSTEAD, Given
from g4conformance.runtimes.deepmind.model import sampler_of
from g4conformance.runtimes.deepmind.names import MADE_OF_PROMPT, Recorder
from g4conformance.runtimes.deepmind.sampling import Call
from g4conformance.runtimes.deepmind.watching import Watch

Arrays = dict[str, NDArray[Any]]


class Side:
    """Answers requests, one after the other. What one has compiled serves the next ones with buffers of its length."""

    def __init__(self, checkpoint: Path, instead: Collection[str] = ()) -> None:
        self._checkpoint, self._instead = checkpoint, instead
        self._sampler_of = cache(lambda max_seq: sampler_of(checkpoint, max_seq))
        self._watch = Watch()

    def __call__(self, request: Request) -> Arrays:
        """The trace of one run, by trace name."""
        sampler, call = self._sampler_of(request.max_seq), Call(self._watch)
        recorder = self._watch.recorder = Recorder(request.facts)
        with self._watch.on(), ExitStack() as stack:
            for name in self._instead:
                sampler = stack.enter_context(INSTEAD[name](sampler, Given(request, self._checkpoint)))
            ended = call.sample(sampler, request)
            call.decode(request.decode_tokens, sampler.params)
        found = {**recorder.tensors, **call.pictures, **_selected(request, call.loop)}
        if request.prompt is None:  # the ids were given
            found = {name: tensor for name, tensor in found.items() if name not in MADE_OF_PROMPT}
        ids, rows = ({**request.inputs, **found}[name][0] for name in ("input_ids", "valid_length"))
        return {**found, **_generation(ended, ids[:rows], request.gen_steps)}


def _generation(state: Any, prompt: NDArray[Any], asked: int) -> Arrays:
    """`state` is the loop's at its end: how many steps it took, what they chose, and whether that was a stop token."""
    new, ended = int(state.step), bool(state.done[0])
    reason = "stop_token" if ended else "max_new_tokens" if new == asked else "max_seq"
    ids = np.concatenate([prompt, np.asarray(state.predicted_tokens[0, :new])])
    return {
        "generation/token_ids": ids.astype(np.int64),
        "generation/stop_reason": np.array(STOP_REASONS.index(reason)),
    }


def _selected(request: Request, loop: Any) -> Arrays:
    """What the loop's own sampling chooses of scripted logits [n, vocab], and whether it would end there."""
    logits = jnp.asarray(request.inputs["generation/select/logits"])
    chosen = np.asarray(loop.sampling.get_next_tokens(logits, rng=jax.random.key(0)), np.int64)
    return {"generation/select/token_ids": chosen, "generation/select/stops": np.isin(chosen, loop.end_tokens)}
