"""What llama.cpp's eval callback hears: copies of named tensors, pass by pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from numpy.typing import NDArray

from g4conformance.runtimes.llama.ggml import Tensor, name_of, source_of, tensor_at, values_of

Heard = dict[str, NDArray[Any]]
Wanted = Callable[[str], tuple[int, ...] | None]


class Intervening(Protocol):
    """What changes tensors as they come into being; see `instead.py`."""

    def prepare(self, tensor: Tensor) -> None: ...

    def concern(self, tensor: Tensor) -> bool: ...

    def happen(self, tensor: Tensor) -> None: ...


class Listener:
    """Is asked about every tensor of a graph before it is computed, and shown those that it wants.

    Attributes:
        hear: for the callback's slot of a context's parameters; the native type is llama_cpp's to make.
    """

    def __init__(self, begins: str, wanted: Wanted, interventions: Intervening) -> None:
        """
        Args:
            begins: the name of a tensor that begins a pass wherever it is made; one that is heard twice does too.
            wanted: by a tensor's name, which of the tensors that entered its operation are wanted beside it; None if
                it is not wanted itself.
        """
        self._begins, self._wanted, self._interventions = begins, wanted, interventions
        self._passes: list[Heard] | None = None
        self._error: Exception | None = None

    def hear(self, address: int, ask: bool, _: Any) -> bool:
        """llama.cpp's question whether the tensor is wanted, or, if it was, its news that it is computed."""
        try:
            tensor = tensor_at(address)
            concerned = self._interventions.concern(tensor)
            sources = None if self._passes is None else self._wanted(name_of(tensor))
            if ask:
                self._interventions.prepare(tensor)
                return concerned or sources is not None
            if concerned:
                self._interventions.happen(tensor)
            if sources is not None:
                self._keep(tensor, sources)
        except Exception as error:  # nothing can be raised through C
            self._error = error
            return False
        return True

    def _keep(self, tensor: Tensor, sources: tuple[int, ...]) -> None:
        assert self._passes is not None
        name = name_of(tensor)
        if name == self._begins or not self._passes or name in self._passes[-1]:
            self._passes.append({})
        self._passes[-1][name] = values_of(tensor)
        for i in sources:
            self._passes[-1][f"{name}:{i}"] = values_of(source_of(tensor, i))

    @contextmanager
    def listening(self) -> Iterator[list[Heard]]:
        """The passes that are made meanwhile, each a dict of arrays; those that entered an operation as `name:i`."""
        passes: list[Heard] = []
        self._passes = passes
        try:
            yield passes
        finally:
            self._passes = None
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        """Hears no more, before `listening` is left."""
        self._passes = None
