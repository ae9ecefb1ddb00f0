"""What a case needs that not every runtime supports, and whether what is not supported is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from g4conformance.adopting.boundary import Boundary
from g4conformance.adopting.capabilities import Capabilities
from g4conformance.checkpoints.facts import ModelFacts
from g4conformance.expected import key_values_of
from g4conformance.judging.driving import given_inputs, inputs_of, runtime_for, serve
from g4conformance.prompts import ResolvedCase
from g4conformance.runtime.contract import Runtime, StaticInputs
from g4conformance.trace import Recorder

REFUSED = "self/refused/"


def needed_by(case: ResolvedCase, facts: ModelFacts) -> tuple[str, ...]:
    """Names of the capabilities that serving the case takes, beside those that are methods."""
    requests = (case.request, *case.before)
    pictures = max(len(request.images) for request in requests)
    rows = max(request.inputs["input_ids"].shape[1] for request in requests) + case.reference_steps
    needs = {
        "images": pictures > 0,
        "several_images": pictures > 1,
        "bidirectional_vision": pictures > 0 and facts.bidirectional_vision,
        "beyond_window": rows > facts.sliding_window,
    }
    return tuple(name for name, needed in needs.items() if needed)


def lacking(runtime: Any, case: ResolvedCase, facts: ModelFacts) -> tuple[str, ...]:
    """Of what the case needs, what the runtime does not support."""
    supported = Capabilities(runtime)
    return tuple(name for name in needed_by(case, facts) if not getattr(supported, name))


def refusals(
    runtime: Any, cases: Iterable[ResolvedCase], reference: Mapping[str, Tensor], facts: ModelFacts
) -> dict[str, Tensor]:
    """Asks once for each thing that the runtime declares not to support: whether it raised, bool [1].

    What none of `cases` needs cannot be asked for.

    Args:
        reference: the trace of any case.
    """
    asking = _Asking(Boundary(runtime, hide=False), tuple(cases), reference, facts)
    found = {}
    for name in Capabilities(runtime).refused:
        if (ask := asking.way(name)) is not None:
            found[REFUSED + name] = torch.tensor([_raises(ask)])
    return found


def _raises(ask: Callable[[], object]) -> bool:
    try:
        with torch.no_grad():
            ask()
    except Exception:  # whatever it raises tells whoever asked that it was not done
        return True
    return False


class _Asking:
    """Ways of asking a runtime for what it does not support."""

    def __init__(
        self, runtime: Any, cases: tuple[ResolvedCase, ...], reference: Mapping[str, Tensor], facts: ModelFacts
    ) -> None:
        self.runtime: Runtime = runtime
        self.cases, self.reference, self.facts = cases, reference, facts
        self.plain = next((case for case in cases if not case.request.images), cases[0])

    def way(self, name: str) -> Callable[[], object] | None:
        """The call that must raise; None if no case needs the capability."""
        ways: dict[str, Callable[[], object]] = {
            "batches": self._two_at_a_time,
            "load_state": lambda: self.runtime.load_state(key_values_of(self.reference, self.facts), self._length),
            "decoding": self._decode,
            "generation": lambda: self.runtime.generate(self._inputs(self.plain), 1),
        }
        if name in ways:
            return ways[name]
        case = next((case for case in self.cases if name in needed_by(case, self.facts)), None)
        return None if case is None else lambda: self._serve(case)

    @property
    def _length(self) -> int:
        return int(self.reference["valid_length"])

    def _inputs(self, case: ResolvedCase) -> StaticInputs:
        given = given_inputs(case.request, self.facts, self.reference["pad_embed"].dtype)
        return inputs_of(runtime_for(self.runtime, case.request.layout), case.request, given)

    def _serve(self, case: ResolvedCase) -> None:
        runtime = runtime_for(self.runtime, case.request.layout)
        serve(runtime, self._inputs(case), case.gen_steps, self.facts, Recorder())

    def _decode(self) -> None:
        inputs = self._inputs(self.plain)
        self.runtime.prefill(inputs)
        self.runtime.decode_one(int(inputs.input_ids[0, 0]))

    def _two_at_a_time(self) -> None:
        inputs = self._inputs(self.plain)
        runtime = runtime_for(self.runtime, replace(self.plain.request.layout, batch_size=2))
        twice = {name: getattr(inputs, name).repeat(2, 1) for name in ("input_ids", "llm_input_ids", "attention_mask")}
        runtime.prefill(replace(inputs, **twice))
