"""Boundary: a runtime as the suite drives it, whatever arrays it computes in and whatever layout it keeps them in."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import Tensor

from g4conformance.adopting.arrays import as_numpy, as_tensor, mapped
from g4conformance.adopting.capabilities import hidden_methods, method_of_its_own
from g4conformance.adopting.views import Views, viewed
from g4conformance.errors import ConformanceError
from g4conformance.runtime.contract import OnTensor, Runtime

# Methods that return one tensor, and its trace name.
_RETURNED = {
    "token_embedding": "text_embeds",
    "vision_prefill": "visual_embeds",
    "mm_fusion": "fused_embeds",
    "prefill": "prefill/logits",
    "decode_one": "decode/0/logits",  # whichever step: views that tell steps apart make no sense
}
_METHODS = {
    *("for_layout", "reset", "build_static_inputs", "masks_and_rope", "load_state", "select", "generate"),
    *("run_graph", "run_layer"),
    *_RETURNED,
}


def at_boundary(runtime: Any) -> Runtime:
    """`runtime` seen from the suite's side; one that is, is returned as it is.

    Raises:
        ConformanceError: what it says of itself (`arrays`, `views`, `capabilities`) is not what the contract knows.
    """
    seen: Any = runtime if isinstance(runtime, Boundary) else Boundary(runtime)
    return seen


class Boundary:
    """Has the methods that the runtime has and supports. They take and return tensors, in the contract's layouts.

    Args:
        hide: whether methods that the runtime declares not to support are not to be seen.
    """

    def __init__(self, runtime: Any, hide: bool = True) -> None:
        self.inner = runtime
        self.hidden = hidden_methods(runtime) if hide else frozenset[str]()
        self.views: Views = getattr(runtime, "views", {})
        arrays = getattr(runtime, "arrays", "torch")
        if arrays not in ("torch", "numpy"):
            raise ConformanceError("'torch' or 'numpy' as the runtime's `arrays`", repr(arrays), "Say one of them.")
        self.takes_numpy = arrays == "numpy"

    def __getattr__(self, name: str) -> Any:
        if name not in _METHODS:
            return getattr(self.inner, name)
        method = None if name in self.hidden else method_of_its_own(self.inner, name)
        if method is None:
            raise AttributeError(name)
        return self._converting(name, method)

    @property
    def on_tensor(self) -> OnTensor | None:
        found: OnTensor | None = getattr(self.inner, "on_tensor", None)
        return found

    @on_tensor.setter
    def on_tensor(self, record: OnTensor | None) -> None:
        """A runtime that takes no such attribute reports nothing."""
        given = None if record is None else lambda name, tensor: record(name, self._seen(name, tensor))
        try:
            self.inner.on_tensor = given
        except AttributeError:
            return

    def _seen(self, name: str, value: Any) -> Tensor:
        return viewed(self.views, name, as_tensor(value))

    def _converting(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def call(*args: Any) -> Any:
            returned = method(*(mapped(as_numpy, args) if self.takes_numpy else args))
            if name in _RETURNED:
                return self._seen(_RETURNED[name], returned)
            if name == "for_layout":
                return at_boundary(returned)
            if name == "run_layer":
                return self._layer(args[0], returned)
            return mapped(as_tensor, returned)

        return call

    def _layer(self, index: int, returned: Any) -> tuple[Tensor, ...]:
        """What a layer returns, each part under the views of its trace name in prefill."""
        parts = returned if isinstance(returned, tuple | list) else (returned,)
        names = (f"prefill/layer/{index}/{part}" for part in ("hidden", "key", "value"))
        return tuple(self._seen(name, part) for name, part in zip(names, parts, strict=False))
