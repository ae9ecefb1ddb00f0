"""A call of `Gemma4Sampler.sample`, looked at: the prompt's pass, steps with given tokens, and what is generated.

The sampler's first step feeds the prompt's last token once more, into the same row, and chooses the first new token
from that; it drops the logits of the prompt's pass. Those are shown here. The generation is the sampler's own.
"""

from __future__ import annotations

import dataclasses
from contextlib import ExitStack
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from gemma.gm.text import _prefill, _sampler_loop, _tokenizer
from numpy.typing import NDArray
from PIL import Image

from g4conformance.foreign import Request
from g4conformance.runtimes.deepmind.watching import Watch

_BOS = "<bos>"  # the sampler puts it in front of every prompt


class Call:
    """One call, with the loop that it makes and what the prompt's pass leaves to that loop.

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
        """The loop's state at its end, after at most `gen_steps` tokens. A case of ids has no prompt to encode."""
        prompt, images = request.prompt or "", [Image.open(path) for path in request.images]
        with ExitStack() as stack:
            patch = mock.patch.object
            stack.enter_context(patch(_prefill, "prefill", self._spied_prefill(_prefill.prefill)))
            stack.enter_context(patch(_sampler_loop.SamplerLoop, "sample", self._spied_loop()))
            if request.prompt is None:
                ids = request.inputs["input_ids"][0, : request.valid_length].tolist()
                stack.enter_context(patch(_tokenizer.Gemma4Tokenizer, "encode", lambda *_, **__: ids))
            output = sampler.sample(
                prompt.removeprefix(_BOS), images=images or None, max_new_tokens=request.gen_steps, return_state=True
            )
        return output.state

    def decode(self, tokens: list[int], params: Any) -> None:
        """The loop's steps, each with its token in place of the one that the step before has chosen."""
        state = self.first_step(params)
        for step, token in enumerate(tokens):
            fed = dataclasses.replace(state, last_token=jnp.array([token]), done=jnp.zeros_like(state.done))
            with self.watch.recording(step):
                state = jax.block_until_ready(self.loop._sample_step(fed, params=params))

    def first_step(self, params: Any) -> Any:
        """The state after the prompt's last token was fed once more."""
        return self.loop._sample_step(self.state, params=params)

    def _spied_prefill(self, original: Any) -> Any:
        def prefill(**given: Any) -> Any:
            if (vision := given["vision_input"]) is not None:
                self.pictures["pixel_values"] = np.asarray(vision.patches)
                self.pictures["image_position_ids"] = np.asarray(vision.positions_xy, np.int64)
            with self.watch.recording(None):
                state = jax.block_until_ready(original(**given))
                for i in range(len(state.cache)):
                    layer = state.cache[f"layer_{i}"]
                    self.watch.recorder(
                        "cache", {"key": np.asarray(layer["k"]), "value": np.asarray(layer["v"])}, layer=i
                    )
            return state

        return prefill

    def _spied_loop(self) -> Any:
        original = _sampler_loop.SamplerLoop.sample

        def sample(loop: Any, *, init_state: Any, **given: Any) -> Any:
            self.loop, self.state = loop, init_state
            return original(loop, init_state=init_state, **given)

        return sample
