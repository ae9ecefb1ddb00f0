"""Looks at what gemma's own modules take and return while it runs compiled, as its users run it.

Flax lets calls of modules be intercepted. They are intercepted once, while JAX traces them; what is wanted of them is
sent out of the compiled program by callbacks, each time that it runs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from gemma.gm.math import _positional_embeddings
from gemma.gm.nn.gemma4 import _modules, _transformer
from gemma.gm.nn.gemma4.vision import _encoder, _layers
from gemma.gm.nn.gemma4.vision import _transformer as _vision

from g4conformance.runtimes.deepmind.names import Recorder

Arrays = Mapping[str, jax.Array]

# Which methods of which modules, as what event, and what of their result.
_SEEN: tuple[tuple[type, str, str, Callable[[Any], Arrays]], ...] = (
    (_modules.Embedder, "encode", "text embeds", lambda embeds: {"embeds": embeds}),
    (_transformer.Transformer, "_encode_vision", "visual embeds", lambda embeds: {"embeds": embeds}),
    (_transformer.Transformer, "_merge_mm_embeddings", "fused embeds", lambda embeds: {"embeds": embeds}),
    (_transformer.Transformer, "__call__", "logits", lambda output: {"logits": output.logits}),
    (_layers.VisionEntry, "__call__", "patches", lambda hidden: {"hidden": hidden}),
    (_vision.VisionBlock, "__call__", "vision block", lambda output: {"hidden": output[0]}),
    (
        _encoder.VisionEncoder,
        "__call__",
        "soft tokens",
        lambda outputs: dict(zip(("tokens", "mask"), outputs[0], strict=True)),
    ),
)


class Watch:
    """Sends tensors to a recorder.

    Attributes:
        recorder: the one of now; a program that was compiled before it came sends to it too.
    """

    def __init__(self) -> None:
        self.recorder: Recorder
        self._layer: int | None = None  # the decoder layer that is being traced
        self._mask: jax.Array | None = None
        self._rotations = 0

    @contextmanager
    def on(self) -> Iterator[None]:
        """Everything that is traced in this context is looked at, now and whenever it runs again."""
        near, rotated = _modules._create_sliding_mask, _positional_embeddings.apply_rope
        with ExitStack() as stack:
            stack.enter_context(nn.intercept_methods(self._intercept))
            stack.enter_context(mock.patch.object(nn, "scan", _unverified(nn.scan)))
            stack.enter_context(mock.patch.object(_modules, "_create_sliding_mask", self._sliding_mask(near)))
            stack.enter_context(mock.patch.object(_positional_embeddings, "apply_rope", self._rope(rotated)))
            yield

    @contextmanager
    def recording(self, step: int | None) -> Iterator[None]:
        """What runs in this context is the prompt's pass (None), or that of a decode step."""
        jax.effects_barrier()  # callbacks may be late
        self.recorder.begin(step)
        yield
        jax.effects_barrier()
        self.recorder.end()

    def _intercept(self, call: Any, args: Any, kwargs: Any, context: Any) -> Any:
        module, method = context.module, context.method_name
        if isinstance(module, _modules.Block) and method == "__call__":
            return self._block(int(module.name.removeprefix("layer_")), call, args, kwargs)
        if isinstance(module, _modules.Attention) and method == "__call__":
            self._mask, self._rotations = args[3], 0
            if module.attn_type is _modules.AttentionType.GLOBAL:
                self._send("mask", {"mask": args[3]})
        result = call(*args, **kwargs)
        if isinstance(module, _transformer.Transformer) and method == "_encode_and_get_inputs":
            found = {"tokens": kwargs["tokens"], "positions": result.positions}
            own = result.per_layer_inputs
            self._send("inputs", found if own is None else found | {"per_layer_inputs": own})
        for of, name, event, pick in _SEEN:
            if isinstance(module, of) and method == name:
                self._send(event, pick(result))
        return result

    def _block(self, layer: int, call: Any, args: Any, kwargs: Any) -> Any:
        self._layer = layer
        cache, hidden = call(*args, **kwargs)
        found = {"hidden": hidden, "key": cache["k"], "value": cache["v"], "end_index": cache["end_index"]}
        self._send("block", found)
        self._layer = None
        return cache, hidden

    def _sliding_mask(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            near = original(*args, **kwargs)
            self._send("mask", {"mask": self._mask & near})
            return near

        return watched

    def _rope(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """The table that it does not have: what a query's very rotation does to ones in a head's first half."""

        def watched(inputs: jax.Array, positions: jax.Array, **how: Any) -> Any:
            if self._layer is not None and self._rotations == 0:
                unit = jnp.zeros((*positions.shape, 1, inputs.shape[-1])).at[..., : inputs.shape[-1] // 2].set(1.0)
                self._send("rope", {"rotated": original(unit, positions, **how)[:, :, 0]})
            self._rotations += 1
            return original(inputs, positions, **how)

        return watched

    def _send(self, event: str, tensors: Arrays) -> None:
        where = {} if self._layer is None else {"layer": self._layer}

        def arrived(arrays: Arrays) -> None:
            self.recorder(event, {name: np.array(array) for name, array in arrays.items()}, **where)

        jax.debug.callback(arrived, dict(tensors), ordered=True)


def _unverified(scan: Callable[..., Any]) -> Callable[..., Any]:
    """Flax verifies that a scanned module makes no constant of what it is fed, and takes a callback for one."""
    return functools.partial(scan, check_constancy_invariants=False)
