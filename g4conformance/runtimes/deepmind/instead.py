"""What makes a disagreement vanish: each function changes one thing of gemma, for one request."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from gemma.gm.nn.gemma4 import _modules, _transformer
from gemma.gm.nn.gemma4.vision import _modules as _vision
from gemma.gm.text import _gemma4_sampler, _prefill
from gemma.gm.utils import _cache_helper, _types
from gemma.gm.vision import _token_utils

from g4conformance.foreign import Request
from g4conformance.runtimes.deepmind.sampling import Call

Intervene = Callable[[Any, Request], AbstractContextManager[Any]]
_NONE = -99  # the id of no token


@contextmanager
def no_newlines(sampler: Any, request: Request) -> Iterator[Any]:
    """No newlines around pictures."""
    expand = _token_utils.add_variable_extra_tokens_for_images

    def expanded(tokens: Any, **given: Any) -> Any:
        (row,) = expand(tokens, **given)
        return row[row != _NONE][None]

    with (
        mock.patch.object(_token_utils, "_DOUBLE_NEW_LINE_TOKEN", _NONE),
        mock.patch.object(_token_utils, "add_variable_extra_tokens_for_images", expanded),
    ):
        yield sampler


@contextmanager
def pad_at_pictures(sampler: Any, request: Request) -> Iterator[Any]:
    """The pad id in place of the placeholder where tokens are looked up."""
    encode = _modules.Embedder.encode
    with mock.patch.object(_modules.Embedder, "encode", lambda self, ids: encode(self, jnp.maximum(ids, 0))):
        yield sampler


@contextmanager
def given_pixels(sampler: Any, request: Request) -> Iterator[Any]:
    """The request's patches, of the reference's processor, in place of its own."""

    def given(*_: Any) -> Any:
        positions = request.inputs["image_position_ids"]
        patches = int((positions >= 0).all(axis=-1).sum())
        return _transformer.PreprocessedVisionInput(
            patches=jnp.asarray(request.inputs["pixel_values"]),
            positions_xy=jnp.asarray(positions, jnp.int32),
            soft_token_counts=(patches // sampler.pooling_kernel_size**2,),
        )

    with mock.patch.object(_gemma4_sampler.Gemma4Sampler, "_preprocess_images", given):
        yield sampler


@contextmanager
def padding_masked(sampler: Any, request: Request) -> Iterator[Any]:
    """Padding patches are masked: what is added to scores is a large negative number, not 0 in place of 1."""
    attend = _vision.Attention._qkv

    def masked(self: Any, *, attn_mask: jax.Array, **given: Any) -> Any:
        return attend(self, attn_mask=jnp.where(attn_mask, 0.0, _vision.K_MASK), **given)

    with mock.patch.object(_vision.Attention, "_qkv", masked):
        yield sampler


@contextmanager
def prompt_unpadded(sampler: Any, request: Request) -> Iterator[Any]:
    """Prompts at their own length."""
    yield dataclasses.replace(sampler, pad_length=None)


@contextmanager
def pad_is_a_token(sampler: Any, request: Request) -> Iterator[Any]:
    """No id means padding; prompts have their own length, so that there is none."""
    modules = (_transformer, _types, _prefill)
    with ExitStack() as stack:
        for module in modules:
            stack.enter_context(mock.patch.object(module, "_PADDING_ID", _NONE))
        yield dataclasses.replace(sampler, pad_length=None)


@contextmanager
def prompt_once(sampler: Any, request: Request) -> Iterator[Any]:
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
def last_row_used(sampler: Any, request: Request) -> Iterator[Any]:
    """Buffers are full when each of their rows is."""
    full = property(lambda cache: cache.end_index >= cache.total_cache_length)
    with mock.patch.object(_cache_helper.Cache, "is_full", full):
        yield sampler


INSTEAD: dict[str, Intervene] = {
    "no-newlines": no_newlines,
    "pad-at-pictures": pad_at_pictures,
    "given-pixels": given_pixels,
    "padding-masked": padding_masked,
    "prompt-unpadded": prompt_unpadded,
    "pad-is-a-token": pad_is_a_token,
    "prompt-once": prompt_once,
    "last-row-used": last_row_used,
}
