"""CaseRun: what a check gets to see."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from torch import Tensor

from g4conformance.checkpoints.facts import ModelFacts
from g4conformance.expected import padded_reference
from g4conformance.runtime.layout import StaticLayout


class Mode(StrEnum):
    """Whether a stage was fed the reference's own inputs or what the runtime had made before."""

    ISOLATED = "isolated"
    ACCUMULATED = "accumulated"


class NotObserved(Exception):  # noqa: N818 - not an error: the runtime does not expose the tensor
    """The runtime did not yield the tensor of this trace name."""


@dataclass(frozen=True)
class CaseRun:
    """One case, as reference and runtime ran it, in one mode.

    Attributes:
        reference: the reference's tensors, valid rows only.
        runtime: the runtime's tensors, in the shape of the static buffers.
        has_prompt: false for a case of ids, of which the runtime has nothing to encode.
        probed: whether the runtime was asked for its self-consistency.
        quantized: whether the runtime says that it is.
        first: whether it is the first case of the run, with which questions about the whole runtime are asked.
        steps: distance of two neighbouring values of each tensor on a quantized grid, by kind of trace name.
        quality_tie: the gap between two logits of the float reference, as a fraction of their interval, below which
            quantization may swap them.
        near_tie: the gap between the two largest logits of a reference tensor below which rounding may swap them.
        teacher_forced: whether the runtime's own run was fed the reference's tokens, whatever it would have chosen.
        unpadded: names of tensors that hold the prompt's rows only, of a runtime without static buffers.
    """

    case: str
    layout: StaticLayout
    facts: ModelFacts
    mode: Mode
    reference: Mapping[str, Tensor]
    runtime: Mapping[str, Tensor]
    decode_steps: int
    gen_steps: int
    near_tie: Callable[[str], float]
    has_prompt: bool = True
    probed: bool = False
    quantized: bool = False
    first: bool = False
    quality_tie: float = 0.0
    steps: Mapping[str, float] = field(default_factory=dict)
    teacher_forced: bool = False
    unpadded: frozenset[str] = frozenset()

    @property
    def valid_length(self) -> int:
        return int(self.reference["valid_length"])

    def observed(self, name: str) -> Tensor:
        """The runtime's tensor.

        Raises:
            NotObserved: it yielded none.
        """
        if name not in self.runtime:
            raise NotObserved(name)
        return self.runtime[name].to(self.reference["input_ids"].device)

    def buffer(self, name: str) -> Tensor:
        """The runtime's tensor with its rows of padding.

        Raises:
            NotObserved: it yielded none, or only the prompt's rows.
        """
        if name in self.unpadded:
            raise NotObserved(f"rows of padding in {name}")
        return self.observed(name)

    def entering(self, name: str) -> Tensor:
        """What entered a later stage under this name: the padded reference's in isolation, else the runtime's own."""
        if self.mode is Mode.ISOLATED:
            return padded_reference(self.reference, self.layout, name)
        return self.observed(name)

    @property
    def layer_types(self) -> tuple[str, ...]:
        """Each layer type of the checkpoint once, sorted."""
        return tuple(sorted(set(self.facts.layer_types)))

    @property
    def decode_prefixes(self) -> list[str]:
        """Trace prefixes of the decode steps to judge, in order.

        Accumulated steps are those that the runtime's own generation must have made, or that the suite made in its
        place: the reference's token was chosen, and fed. What follows is judged in isolation. A teacher-forced run made
        them all.

        Raises:
            NotObserved: the runtime did not generate.
        """
        prefixes = [f"decode/{step}/" for step in range(self.decode_steps)]
        if self.mode is Mode.ISOLATED or self.teacher_forced:
            return prefixes
        own = self.observed(self._fed)[self.valid_length :].tolist()
        followed = []
        for prefix, token in zip(prefixes, own[:-1], strict=False):  # nothing is fed after the last one
            if token != int(self.reference[prefix + "token"]):
                break
            followed.append(prefix)
        return followed

    @property
    def _fed(self) -> str:
        """Trace name of prompt and continuation of the run on its own."""
        return (
            "generation/driven/token_ids" if "generation/driven/token_ids" in self.runtime else "generation/token_ids"
        )
