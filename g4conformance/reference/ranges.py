"""The ranges of the float model's activations: what static scales should span."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from g4conformance.reference.noise import kind_of


@dataclass(frozen=True)
class Range:
    """The smallest and the largest value that was seen."""

    low: float
    high: float

    def joined(self, values: Tensor) -> Range:
        low, high = (float(bound) for bound in values.aminmax())
        return Range(min(self.low, low), max(self.high, high))


_NOTHING = Range(float("inf"), float("-inf"))


class RangeMeter:
    """Notes the inputs and outputs of linear ops while it listens, and tensors of recorded traces."""

    def __init__(self) -> None:
        self.ranges: dict[str, Range] = {}
        self._handles: list[Any] = []

    def listen(self, linears: Sequence[tuple[str, nn.Linear]]) -> None:
        """Begins to note each linear op's input and output as `<path>/input` and `<path>/output`."""
        for path, module in linears:
            self._handles.append(module.register_forward_hook(self._hook(path)))

    def stop(self) -> None:
        while self._handles:
            self._handles.pop().remove()

    def note(self, point: str, values: Tensor) -> None:
        self.ranges[point] = self.ranges.get(point, _NOTHING).joined(values)

    def note_trace(self, trace: Mapping[str, Tensor], kinds: frozenset[str]) -> None:
        """Notes tensors of these kinds, which are trace names without prefill or decode step."""
        for name, tensor in trace.items():
            if (kind := kind_of(name)) in kinds:
                self.note(kind, tensor)

    def _hook(self, path: str) -> Any:
        def noted(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
            self.note(f"{path}/input", args[0])
            self.note(f"{path}/output", output)

        return noted
