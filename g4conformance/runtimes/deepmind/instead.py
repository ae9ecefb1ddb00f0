"""What makes a disagreement vanish: each function changes one thing of gemma, for one request."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from flax import linen as nn
from gemma.gm.nn.gemma4 import _layers, _modules, _transformer
from gemma.gm.nn.gemma4.vision import _modules as _vision
from gemma.gm.text import _gemma4_sampler, _prefill
from gemma.gm.utils import _cache_helper, _types
from gemma.gm.vision import _token_utils

from g4conformance.foreign import Request
from g4conformance.runtimes.deepmind.model import weights_of
from g4conformance.runtimes.deepmind.sampling import Call
from g4conformance.runtimes.deepmind.weights import output_bounds


@dataclasses.dataclass(frozen=True)
class Given:
    """What an intervention may look at: the request, and the checkpoint's folder."""

    request: Request
    checkpoint: Path


Intervene = Callable[[Any, Given], AbstractContextManager[Any]]  # yields the sampler to use
_NONE = -99  # the id of no token


@contextmanager
def no_newlines(sampler: Any, given: Given) -> Iterator[Any]:
    """No newlines around pictures."""
    expand = _token_utils.add_variable_extra_tokens_for_images

    def expanded(tokens: Any, **counts: Any) -> Any:
        (row,) = expand(tokens, **counts)
        return row[row != _NONE][None]

    with (
        mock.patch.object(_token_utils, "_DOUBLE_NEW_LINE_TOKEN", _NONE),
        mock.patch.object(_token_utils, "add_variable_extra_tokens_for_images", expanded),
    ):
        yield sampler


@contextmanager
def pad_at_pictures(sampler: Any, given: Given) -> Iterator[Any]:
    """The pad id in place of the placeholder where tokens are looked up."""
    encode = _modules.Embedder.encode
    with mock.patch.object(_modules.Embedder, "encode", lambda self, ids: encode(self, jnp.maximum(ids, 0))):
        yield sampler


@contextmanager
def given_pixels(sampler: Any, given: Given) -> Iterator[Any]:
    """The request's patches, of the reference's processor, in place of its own."""

    inputs = given.request.inputs

    def taken(*_: Any) -> Any:
        positions = inputs["image_position_ids"]
        patches = int((positions >= 0).all(axis=-1).sum())
        return _transformer.PreprocessedVisionInput(
            patches=jnp.asarray(inputs["pixel_values"]),
            positions_xy=jnp.asarray(positions, jnp.int32),
            soft_token_counts=(patches // sampler.pooling_kernel_size**2,),
        )

    with mock.patch.object(_gemma4_sampler.Gemma4Sampler, "_preprocess_images", taken):
        yield sampler


@contextmanager
def padding_masked(sampler: Any, given: Given) -> Iterator[Any]:
    """Padding patches are masked: what is added to scores is a large negative number, not 0 in place of 1."""
    attend = _vision.Attention._qkv

    def masked(self: Any, *, attn_mask: jax.Array, **qkv: Any) -> Any:
        return attend(self, attn_mask=jnp.where(attn_mask, 0.0, _vision.K_MASK), **qkv)

    with mock.patch.object(_vision.Attention, "_qkv", masked):
        yield sampler


@contextmanager
def own_bounds(sampler: Any, given: Given) -> Iterator[Any]:
    """K and V, and gate and up, are clipped to their own bounds too, which lie within those that they share."""
    pairs = output_bounds(weights_of(given.checkpoint))

    def clipped(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
        result = call(*args, **kwargs)
        of = context.module.name
        if of not in pairs or not isinstance(context.module, _layers.ClippedEinsum):
            return result
        low, high = pairs[of]  # each [layers, 2]
        shared = context.module.variables["params"]["clip_output_max"]
        layer = jnp.argmin(jnp.abs(high.max(axis=1) - shared))  # layers are scanned: only its bounds tell which it is
        halves = (2, 1, 1, 1, 1) if of == "kv_einsum" else (2, 1)  # the axis of the two, in what the einsum returns
        return jnp.clip(result, jnp.asarray(low)[layer].reshape(halves), jnp.asarray(high)[layer].reshape(halves))

    with nn.intercept_methods(clipped):
        yield sampler


@contextmanager
def prompt_unpadded(sampler: Any, given: Given) -> Iterator[Any]:
    """Prompts at their own length."""
    yield dataclasses.replace(sampler, pad_length=None)


@contextmanager
def pad_is_a_token(sampler: Any, given: Given) -> Iterator[Any]:
    """No id means padding; prompts have their own length, so that there is none."""
    modules = (_transformer, _types, _prefill)
    with ExitStack() as stack:
        for module in modules:
            stack.enter_context(mock.patch.object(module, "_PADDING_ID", _NONE))
        yield dataclasses.replace(sampler, pad_length=None)


@contextmanager
def prompt_once(sampler: Any, given: Given) -> Iterator[Any]:
    """The prompt's last token is not fed once more before the first new one."""

    def skipped(call: Call, params: Any) -> Any:
        state = call.state
        end = {"end_index": state.cache["layer_0"]["end_index"] + 1}
        return dataclasses.replace(
            state,
            cache={name: {**layer, **end} for name, layer in state.cache.items()},
            last_token_pos=state.last_token_pos + 1,
            init_cache_length=state.init_cache_length + 1,
        )

    with mock.patch.object(Call, "first_step", skipped):
        yield sampler


@contextmanager
def last_row_used(sampler: Any, given: Given) -> Iterator[Any]:
    """Buffers are full when each of their rows is."""
    full = property(lambda cache: cache.end_index >= cache.total_cache_length)
    with mock.patch.object(_cache_helper.Cache, "is_full", full):
        yield sampler


INSTEAD: dict[str, Intervene] = {
    "no-newlines": no_newlines,
    "pad-at-pictures": pad_at_pictures,
    "given-pixels": given_pixels,
    "padding-masked": padding_masked,
    "own-bounds": own_bounds,
    "prompt-unpadded": prompt_unpadded,
    "pad-is-a-token": pad_is_a_token,
    "prompt-once": prompt_once,
    "last-row-used": last_row_used,
}
