"""What the probes of self-consistency ask: requests made from a case's own, and the names of what is kept of them.

Pure functions of case, layout and checkpoint facts. The driver asks with them, and checks know by them what was asked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import cycle, islice
from typing import Any

import torch

from g4conformance.checkpoints.facts import ModelFacts
from g4conformance.runtime.contract import StaticInputs
from g4conformance.runtime.inputs import static_inputs
from g4conformance.runtime.layout import StaticLayout
from g4conformance.runtime.masks import SLIDING

MOST_DECODE_STEPS = 2  # the first after the prompt, and one that attends to a row which decode wrote


# --- what is asked --------------------------------------------------------------------------------------------------


def decode_steps(layout: StaticLayout, valid_length: int) -> int:
    """How many tokens a probe decodes after a prompt of `valid_length` rows."""
    return min(MOST_DECODE_STEPS, layout.max_seq - valid_length)


def other_layouts(layout: StaticLayout, valid_length: int, facts: ModelFacts) -> dict[str, StaticLayout]:
    """The same request's layouts of another `max_seq`, by probe: one window larger; and just as large as needed."""
    needed = valid_length + decode_steps(layout, valid_length)
    sizes = {"larger": layout.max_seq + facts.sliding_window}
    if needed < layout.max_seq:
        sizes["smaller"] = needed
    return {probe: replace(layout, max_seq=max_seq) for probe, max_seq in sizes.items()}


def begins_with_text(layout: StaticLayout) -> bool:
    """Whether row 0 is text, so that it can be another token."""
    return layout.num_visual_tokens == 0 or layout.visual_start_idx > 0


def ends_in_text(layout: StaticLayout, valid_length: int) -> bool:
    """Whether the last row is text and not the only row, so that it can be cut off or be another token."""
    return valid_length > max(1, layout.visual_end_idx)


def layers_of_reach(facts: ModelFacts) -> range:
    """The first layers, up to and including the first full one; behind that every later row can be reached."""
    return range(
        1 + next((i for i, kind in enumerate(facts.layer_types) if kind != SLIDING), len(facts.layer_types) - 1)
    )


def generated_lengths(gen_steps: int) -> tuple[int, ...]:
    """Each `max_new_tokens` that is asked of `generate`, the run's own last."""
    return (*(length for length in (1, 2) if length < gen_steps), gen_steps)


# --- what is kept ---------------------------------------------------------------------------------------------------


def logits_names(steps: int) -> list[str]:
    """Logits after prefill, then those of each decode step."""
    return ["prefill/logits", *(f"decode/{step}/logits" for step in range(steps))]


def hidden_name(layer: int) -> str:
    return f"prefill/layer/{layer}/hidden"


def row_names(facts: ModelFacts) -> list[str]:
    """Tensors of a prefill that have a row for each token: every layer's output, and K and V of storing layers."""
    hidden = [hidden_name(layer) for layer in range(len(facts.layer_types))]
    return hidden + [f"prefill/layer/{layer}/{part}" for layer in facts.storing_layers for part in ("key", "value")]


def cache_names(facts: ModelFacts, prefix: str) -> list[str]:
    """The cache's buffers after prefill (`prefill/`) or after a decode step (`decode/<t>/`)."""
    return [f"{prefix}cache/{layer}/{part}" for layer in facts.storing_layers for part in ("key", "value")]


# --- requests -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ProbeRequests:
    """Requests made from one case's, in the shape of the static buffers.

    They are made by the package's own functions: whether the runtime makes them as well is what stage 1 asks.

    Attributes:
        output: what the processor returned for the case's prompt.
        dtype: the model's.
    """

    output: Mapping[str, Any]
    layout: StaticLayout
    facts: ModelFacts
    dtype: torch.dtype

    @cached_property
    def ids(self) -> list[int]:
        """The prompt's own ids."""
        ids: list[int] = self.output["input_ids"][0].tolist()
        return ids

    @property
    def valid_length(self) -> int:
        return len(self.ids)

    @property
    def tokens(self) -> list[int]:
        """What is decoded after the prompt."""
        first = self._other(self.ids[-1])
        return [first, self._other(first)][: decode_steps(self.layout, self.valid_length)]

    @property
    def favoured(self) -> list[int]:
        """What scripted logits favour, one after the other: every stop token, and tokens that do not stop."""
        first = self._other(self.ids[-1])
        return [*sorted(self.facts.stop_token_ids), first, self._other(first)]

    def prompt(self, layout: StaticLayout | None = None) -> StaticInputs:
        """The case's own request, for `layout` if one is given."""
        return self._inputs(self.ids, layout)

    def shortened(self) -> StaticInputs:
        """Without its last token."""
        return self._inputs(self.ids[:-1])

    def first_exchanged(self) -> StaticInputs:
        """With another token in row 0, which every row attends to most, so that its reach shows above rounding."""
        return self._inputs([self._other(self.ids[0]), *self.ids[1:]])

    def last_exchanged(self) -> StaticInputs:
        """With another token in the last row."""
        return self._inputs([*self.ids[:-1], self._other(self.ids[-1])])

    def longer(self) -> StaticInputs:
        """Another request: other words, a darker picture, and much more text.

        Once its tokens are decoded, one row is left for a runtime whose reset forgets nothing.
        """
        ids = [i if i in self.facts.placeholder_ids else self._other(i) for i in self.ids]
        text = [i for i in ids if i not in self.facts.placeholder_ids]
        more = self.layout.max_seq - 1 - len(self.tokens) - self.valid_length
        pixel_values = self.output.get("pixel_values")
        darker = {} if pixel_values is None else {"pixel_values": pixel_values / 2}
        return self._inputs([*ids, *islice(cycle(text or self.tokens), max(0, more))], **darker)

    def other_padding(self) -> StaticInputs:
        """Padding rows that hold the prompt's words in place of the pad id."""
        inputs = self.prompt()
        text = [self._other(i) for i in self.ids if i not in self.facts.placeholder_ids]
        beyond = list(islice(cycle(text or self.tokens), self.layout.max_seq - self.valid_length))

        def filled(ids: torch.Tensor) -> torch.Tensor:
            return torch.cat([ids[:, : self.valid_length], ids.new_tensor([beyond])], dim=1)

        return replace(inputs, input_ids=filled(inputs.input_ids), llm_input_ids=filled(inputs.llm_input_ids))

    def _inputs(self, ids: Sequence[int], layout: StaticLayout | None = None, **changed: torch.Tensor) -> StaticInputs:
        return static_inputs(
            {**self.output, **self._of_ids(ids), **changed},
            layout or self.layout,
            pad_token_id=self.facts.pad_token_id,
            image_token_id=self.facts.image_token_id,
            placeholder_ids=self.facts.placeholder_ids,
            dtype=self.dtype,
        )

    def _of_ids(self, ids: Sequence[int]) -> dict[str, torch.Tensor]:
        """What the processor says of a prompt row by row: [1, n] each."""
        input_ids = self.output["input_ids"].new_tensor([ids])
        of_ids = {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids)}
        if "mm_token_type_ids" in self.output:
            of_ids["mm_token_type_ids"] = (input_ids == self.facts.image_token_id).to(input_ids.dtype)
        return of_ids

    def _other(self, token: int) -> int:
        """The next id of the vocabulary that is an ordinary one."""
        facts = self.facts
        special = {facts.pad_token_id, facts.bos_token_id} | facts.placeholder_ids | facts.stop_token_ids
        following = ((token + step) % facts.vocab_size for step in range(1, facts.vocab_size))
        return next(other for other in following if other not in special)
