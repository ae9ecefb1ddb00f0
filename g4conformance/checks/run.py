"""CaseRun: what a check gets to see."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from torch import Tensor

from g4conformance.checkpoints.facts import ModelFacts
from g4conformance.expected import generation_of, padded_reference
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
        near_tie: the gap between the two largest logits of a reference tensor below which rounding may swap them.
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

        Accumulated steps are those of the reference's generation, up to where the runtime's own left its tokens; what
        follows is judged in isolation.

        Raises:
            NotObserved: the runtime does not show a step that it must have made.
        """
        prefixes = [f"decode/{step}/" for step in range(self.decode_steps)]
        if self.mode is Mode.ISOLATED:
            return prefixes
        new_tokens, _ = generation_of(self.reference, self.layout, self.facts, self.gen_steps)
        followed = []
        for prefix in prefixes[: len(new_tokens) - 1]:
            if int(self.runtime.get(prefix + "token", -1)) != int(self.reference[prefix + "token"]):
                break
            followed.append(prefix)
        if not followed and prefixes and len(new_tokens) > 1 and not self._left_at_once():
            raise NotObserved("decode/0/token")
        return followed

    def _left_at_once(self) -> bool:
        """Whether the runtime's own generation chose another first token than the reference."""
        own = self.observed("generation/token_ids")[self.valid_length :]
        return len(own) > 0 and int(own[0]) != int(self.reference["decode/0/token"])
