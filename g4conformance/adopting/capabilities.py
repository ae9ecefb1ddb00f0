"""Capabilities: what a runtime supports, as its methods show or as it declares.

    capabilities = {"images": False}

What it does not support is not judged. It must be refused with an error when it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from g4conformance.errors import ConformanceError
from g4conformance.runtime.contract import Runtime


class Capabilities:
    """What `runtime` supports; each property's docstring is its definition.

    Raises:
        ConformanceError: it declares something that is no capability.
    """

    def __init__(self, runtime: object) -> None:
        self._runtime = runtime
        self._declared: Mapping[str, bool] = getattr(runtime, "capabilities", {})
        for name in self._declared:
            if name not in NAMES:
                raise ConformanceError(
                    f"capabilities among {', '.join(NAMES)}", repr(name), "Mend the runtime's `capabilities`."
                )

    @property
    def images(self) -> bool:
        """A prompt may hold a picture."""
        return self._declared.get("images", True)

    @property
    def several_images(self) -> bool:
        """A prompt may hold more than one picture."""
        return self._declared.get("several_images", self.images)

    @property
    def bidirectional_vision(self) -> bool:
        """The rows of a picture see each other both ways, on checkpoints that are made so."""
        return self._declared.get("bidirectional_vision", self.images)

    @property
    def beyond_window(self) -> bool:
        """Prompt and continuation may be longer than the sliding window."""
        return self._declared.get("beyond_window", True)

    @property
    def batches(self) -> bool:
        """Several prompts may be served at a time, in a layout with that `batch_size`."""
        return self._declared.get("batches", True)

    @property
    def load_state(self) -> bool:
        """K/V that were computed elsewhere may be taken over: the method `load_state`."""
        return self._has("load_state")

    @property
    def decoding(self) -> bool:
        """Single tokens may be fed after a prompt: the method `decode_one`."""
        return self._has("decode_one", "decoding")

    @property
    def generation(self) -> bool:
        """A whole continuation may be asked for: the method `generate`."""
        return self._has("generate", "generation")

    def _has(self, method: str, name: str = "") -> bool:
        return self._declared.get(name or method, True) and method_of_its_own(self._runtime, method) is not None

    @property
    def refused(self) -> tuple[str, ...]:
        """Names of what the runtime declares that it does not support, though it could be asked for it."""
        return tuple(name for name in NAMES if self._declared.get(name) is False and self._can_be_asked(name))

    def _can_be_asked(self, name: str) -> bool:
        return name not in METHODS or method_of_its_own(self._runtime, METHODS[name]) is not None


NAMES = tuple(name for name, value in vars(Capabilities).items() if isinstance(value, property) and name != "refused")
METHODS = {"load_state": "load_state", "decoding": "decode_one", "generation": "generate"}


def method_of_its_own(runtime: object, name: str) -> Callable[..., Any] | None:
    """The runtime's method of this name; None where it has none, or only inherits the contract's empty one."""
    method = getattr(runtime, name, None)
    return None if getattr(method, "__func__", None) is vars(Runtime).get(name, method) else method


def definition(name: str) -> str:
    """What the capability of this name is, in one sentence."""
    return str(vars(Capabilities)[name].__doc__)


def hidden_methods(runtime: Any) -> frozenset[str]:
    """Methods that are there, and that the runtime declares not to support."""
    return frozenset(METHODS[name] for name in Capabilities(runtime).refused if name in METHODS)
