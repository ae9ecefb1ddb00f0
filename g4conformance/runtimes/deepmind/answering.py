"""One request, answered as `Gemma4Sampler.sample` answers it: a prompt, steps with given tokens, and a generation.

The sampler's first step feeds the prompt's last token once more, into the same row, and chooses the first new token
from that; it drops the logits of the prompt's pass. Those are shown here. The generation is the sampler's own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from gemma.gm.text import _prefill, _sampler_loop, _tokenizer
from numpy.typing import NDArray
from PIL import Image

from g4conformance.foreign import STOP_REASONS, Request
from g4conformance.runtimes.deepmind.model import sampler_of
from g4conformance.runtimes.deepmind.names import Recorder
from g4conformance.runtimes.deepmind.watching import Watch

Arrays = Mapping[str, NDArray[Any]]
_BOS = "<bos>"  # the sampler puts it in front of every prompt
_MADE = ("input_ids", "llm_input_ids", "attention_mask", "valid_length")


def answer(request: Request, checkpoint: Path) -> Arrays:
    """The trace of one run, by trace name."""
    sampler = sampler_of(checkpoint, request.max_seq)
    watch = Watch(Recorder(request.facts))
    with watch.on():
        run = _Run(watch)
        output = run.sample(sampler, request)
        run.decode(request.decode_tokens, sampler.params)
    found = watch.recorder.tensors | run.pictures
    if request.prompt is None:
        for name in _MADE:  # they were given
            del found[name]
        prompt = request.inputs["input_ids"][0, : request.valid_length]
    else:
        prompt = found["input_ids"][0, : int(found["valid_length"][0])]
    return found | _generation(output.state, prompt, request.gen_steps) | _selected(request, run.loop)


class _Run:
    """A sampler's call, with the loop that it makes and what its prompt's pass leaves to that loop.

    Attributes:
        loop, state: of the sampler, before the first step.
        pictures: its patches [1,N,3 * patch_size ** 2] and their positions [1,N,2].
    """

    def __init__(self, watch: Watch) -> None:
        self.watch = watch
        self.loop: Any = None
        self.state: Any = None
        self.pictures: dict[str, NDArray[Any]] = {}

    def sample(self, sampler: Any, request: Request) -> Any:
        prompt, images = request.prompt or "", [Image.open(path) for path in request.images]
        with ExitStack() as stack:
            patch = mock.patch.object
            stack.enter_context(patch(_prefill, "prefill", self._spied_prefill(_prefill.prefill)))
            stack.enter_context(patch(_sampler_loop.SamplerLoop, "sample", self._spied_loop()))
            if request.prompt is None:
                ids = request.inputs["input_ids"][0, : request.valid_length].tolist()
                stack.enter_context(patch(_tokenizer.Gemma4Tokenizer, "encode", lambda *_, **__: ids))
            return sampler.sample(
                prompt.removeprefix(_BOS), images=images or None, max_new_tokens=request.gen_steps, return_state=True
            )

    def _spied_prefill(self, original: Any) -> Any:
        def prefill(**given: Any) -> Any:
            if (vision := given["vision_input"]) is not None:
                self.pictures["pixel_values"] = np.asarray(vision.patches)
                self.pictures["image_position_ids"] = np.asarray(vision.positions_xy, np.int64)
            with self.watch.recording(None):
                return original(**given)

        return prefill

    def _spied_loop(self) -> Any:
        original = _sampler_loop.SamplerLoop.sample

        def sample(loop: Any, *, init_state: Any, **given: Any) -> Any:
            self.loop, self.state = loop, init_state
            return original(loop, init_state=init_state, **given)

        return sample

    def decode(self, tokens: list[int], params: Any) -> None:
        """The loop's steps, each with its token in place of the one that the step before has chosen."""
        state = self.loop._sample_step(self.state, params=params)
        for step, token in enumerate(tokens):
            fed = dataclasses.replace(state, last_token=jnp.array([token]), done=jnp.zeros_like(state.done))
            with self.watch.recording(step):
                state = jax.block_until_ready(self.loop._sample_step(fed, params=params))


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
