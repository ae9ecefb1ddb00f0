"""The forward passes of a run: logged as they are made, counted, and made once more with nobody listening."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import DynamicCache

from g4conformance.checkpoints.checkpoint import Checkpoint, attention_of_towers
from g4conformance.runtime.static import StaticGemma4Runtime


@dataclass(frozen=True)
class ReferenceForward:
    """One call of the reference: how it computes attention, whether it has a cache, and whether that is new."""

    attention: str
    cached: bool
    begins: bool
    kwargs: dict[str, Any] = field(repr=False)

    @property
    def kind(self) -> str:
        rows = self.kwargs["input_ids"].shape[1]
        picture = " with a picture" if "pixel_values" in self.kwargs else ""
        return f"{'decode' if rows == 1 else f'prefill of {rows}{picture}'}, {self.attention}"


class ForwardLog:
    """What a run asked of a reference; `name` tells one model of a checkpoint from another."""

    def __init__(self, checkpoint: Checkpoint, name: str = "reference") -> None:
        self.checkpoint, self.name = checkpoint, name
        self.forwards: list[ReferenceForward] = []
        self._hook = checkpoint.model.register_forward_pre_hook(self._note, with_kwargs=True)

    def _note(self, module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        cache = kwargs.get("cache")
        given = {name: value for name, value in kwargs.items() if name != "cache"}
        begins = cache is None or cache.get_seq_length() == 0
        attention = self.checkpoint.text_config._attn_implementation
        self.forwards.append(ReferenceForward(attention, cache is not None, begins, given))

    def counts(self) -> Counter[str]:
        return Counter(f"{self.name} {forward.kind}" for forward in self.forwards)

    @torch.no_grad()
    def bare_seconds(self) -> float:
        """CPU time of all that was logged, without hooks; each kind is timed in one sequence and multiplied."""
        self._hook.remove()
        own = self.checkpoint.options.attn_implementation
        seconds: dict[str, list[float]] = {}
        for sequence in self._sequences():
            if all(forward.kind in seconds for forward in sequence):
                continue
            self.checkpoint.model.set_attn_implementation(attention_of_towers(sequence[0].attention))
            cache = DynamicCache(config=self.checkpoint.text_config) if sequence[0].cached else None
            for forward in sequence:
                call = lambda f=forward, c=cache: self.checkpoint.model(**f.kwargs, cache=c)  # noqa: E731
                seconds.setdefault(forward.kind, []).append(cpu_seconds(call))
        self.checkpoint.model.set_attn_implementation(attention_of_towers(own))
        return sum(sum(seconds[f.kind]) / len(seconds[f.kind]) for f in self.forwards)

    def _sequences(self) -> Iterator[list[ReferenceForward]]:
        """Prefills, each with the decode steps that continue it."""
        sequence: list[ReferenceForward] = []
        for forward in self.forwards:
            if forward.begins and sequence:
                yield sequence
                sequence = []
            sequence.append(forward)
        if sequence:
            yield sequence


class LoggingRuntime(StaticGemma4Runtime):
    """The shipped runtime, remembering what was asked of it from outside."""

    log: list[tuple[StaticGemma4Runtime, str, tuple[Any, ...]]] = []
    counts: Counter[str] = Counter()
    _inside = False

    def prefill(self, *args: Any) -> torch.Tensor:
        return self._logged("prefill", args)

    def decode_one(self, token: int) -> torch.Tensor:
        return self._logged("decode_one", (token,))

    def load_state(self, *args: Any) -> None:
        self._logged("load_state", args)

    def vision_prefill(self, *args: Any) -> torch.Tensor:
        return self._logged("vision_prefill", args)

    def run_layer(self, *args: Any) -> tuple[torch.Tensor, ...]:
        found: tuple[torch.Tensor, ...] = self._logged("run_layer", args)
        return found

    def run_graph(self, name: str, *inputs: Any) -> tuple[torch.Tensor, ...]:
        return self._logged("run_graph", (name, *inputs))

    def _logged(self, method: str, args: tuple[Any, ...]) -> Any:
        call = getattr(super(), method)
        if self._inside:
            return call(*args)
        self.log.append((self, method, args))
        graph = f" {str(args[0]).split('/')[0]}" if method == "run_graph" else ""
        self.counts[f"runtime {method}{graph}, {self.layout.max_seq} rows"] += 1
        self._inside = True
        try:
            return call(*args)
        finally:
            self._inside = False

    @classmethod
    @torch.no_grad()
    def bare_seconds(cls) -> float:
        """CPU time of all that was logged, with nobody listening."""
        log, cls.log = cls.log, []
        return sum(cpu_seconds(lambda r=r, m=m, a=a: getattr(StaticGemma4Runtime, m)(r, *a)) for r, m, a in log)  # type: ignore[misc]


def cpu_seconds(call: Callable[[], Any]) -> float:
    """CPU time of this process, which other processes on the machine change little."""
    start = time.process_time()
    call()
    return time.process_time() - start
