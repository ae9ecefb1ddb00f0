"""UnpaddedRuntime: what runtimes without static buffers have in common.

Such a runtime runs a prompt at its own length. The suite speaks of buffers of `max_seq` rows, so prompts are cut to
their own rows on the way in. On the way out, embeddings get rows of padding that the runtime's own embedding makes,
and masks get columns of keys that it does not have, which nothing can attend to. Whole K/V buffers are not observed:
there are none.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from g4conformance.checkpoints.facts import ModelFacts
from g4conformance.errors import LayoutError
from g4conformance.runtime.contract import Generation, KeyValue, MasksAndRope, OnTensor, StaticInputs, StopReason
from g4conformance.runtime.inputs import pad_right
from g4conformance.runtime.layout import StaticLayout
from g4conformance.runtimes.spying import Spies, spies


@dataclass(frozen=True)
class OwnInputs:
    """A request as the runtime has it.

    Attributes:
        ids: int64 [1, n], with the runtime's own placeholder where a picture goes.
        pixel_values: [1, N, 3 * patch_size ** 2]; positions: int64 [1, N, 2]; both None without a picture.
    """

    ids: Tensor
    pixel_values: Tensor | None = None
    positions: Tensor | None = None


class UnpaddedRuntime(ABC):
    """Implements `g4conformance.runtime.contract.Runtime` by what an adapter says of one runtime.

    Masks that the suite gives are not taken: these runtimes make their own from positions, wherever they are asked.

    Attributes:
        placeholder: the id that the runtime has where a picture goes.
        stop_tokens: ids at which the runtime ends a generation.
    """

    placeholder: int
    stop_tokens: frozenset[int]

    def __init__(self, facts: ModelFacts) -> None:
        self.facts = facts
        self._runtimes: dict[StaticLayout, UnpaddedRuntime] = {}
        self._begin_layout(StaticLayout(facts.default_max_seq))

    def _begin_layout(self, layout: StaticLayout) -> None:
        self.layout = layout
        self.on_tensor: OnTensor | None = None
        self.reset()

    def for_layout(self, layout: StaticLayout) -> UnpaddedRuntime:
        """A runtime that shares the model; only how many rows the suite counts differs."""
        if layout not in self._runtimes:
            sibling = copy.copy(self)
            sibling._begin_layout(layout)
            self._runtimes[layout] = sibling
        return self._runtimes[layout]

    def reset(self) -> None:
        self.cache: Any = None
        self._prefilled, self._steps = False, 0
        self._entering = self._leaving = ""

    # --- what an adapter says ----------------------------------------------------------------------------------------

    @abstractmethod
    def _preprocess(self, prompt: str, images: Sequence[Image.Image]) -> OwnInputs:
        """What the runtime's own tokenizer and image preprocessing make of a prompt."""

    @abstractmethod
    def _embed(self, ids: Tensor) -> Tensor:
        """[1, n] -> [1, n, H]."""

    @abstractmethod
    def _see(self, pixel_values: Tensor, positions: Tensor) -> Tensor:
        """[1, N, 3 * patch_size ** 2], [1, N, 2] -> [V, H]."""

    @abstractmethod
    def _fuse(self, embeds: Tensor, visual: Tensor, slot: Tensor) -> Tensor:
        """[1, n, H], [V, H], bool [1, n] -> [1, n, H]."""

    @abstractmethod
    def _prefill(self, own: OwnInputs, embeds: Tensor | None) -> Tensor:
        """Logits [1, vocab] of the last row; the K/V go to `self.cache`."""

    @abstractmethod
    def _decode(self, token: int) -> Tensor:
        """Logits [1, vocab]; where there is no cache yet, of a first row."""

    @abstractmethod
    def _load(self, key_values: Mapping[int, KeyValue], past_len: int) -> Any:
        """A cache with these K/V [1, KV, past_len, head_dim]."""

    @abstractmethod
    def _sample(self, logits: Tensor) -> int:
        """The token that the runtime's greedy sampling takes of logits [1, vocab]."""

    @abstractmethod
    def _generate(self, own: OwnInputs, max_new_tokens: int) -> Tensor:
        """Ids [1, n + new], by the runtime's own generation."""

    @abstractmethod
    def _watch(self, spy: Spies) -> None:
        """Has the runtime's own functions looked at, and `_report` told of what they return."""

    # --- the contract ------------------------------------------------------------------------------------------------

    def build_static_inputs(self, prompt: str, images: Sequence[Image.Image]) -> StaticInputs:
        """The runtime's own preprocessing, padded for the suite.

        Raises:
            LayoutError: it makes more rows of the prompt than the layout has.
        """
        own = self._preprocess(prompt, images)
        rows, max_seq = own.ids.shape[1], self.layout.max_seq
        if rows > max_seq:
            raise LayoutError(f"a prompt of at most max_seq={max_seq} tokens", f"{rows} tokens", "Raise --max-seq.")
        pad, is_image = self.facts.pad_token_id, own.ids == self.placeholder
        return StaticInputs(
            input_ids=pad_right(own.ids.masked_fill(is_image, self.facts.image_token_id), max_seq, pad),
            llm_input_ids=pad_right(own.ids.masked_fill(is_image, pad), max_seq, pad),
            attention_mask=pad_right(torch.ones_like(own.ids, dtype=torch.bool), max_seq, False),
            valid_length=rows,
            pixel_values=own.pixel_values,
            image_position_ids=own.positions,
        )

    def token_embedding(self, llm_input_ids: Tensor) -> Tensor:
        return self._embed(llm_input_ids)

    def vision_prefill(self, pixel_values: Tensor, image_position_ids: Tensor) -> Tensor:
        with self._listening():
            return self._see(pixel_values, image_position_ids)

    def mm_fusion(self, text_embeds: Tensor, visual_embeds: Tensor) -> Tensor:
        rows = torch.arange(text_embeds.shape[1])
        slot = (rows >= self.layout.visual_start_idx) & (rows < self.layout.visual_end_idx)
        return self._fuse(text_embeds, visual_embeds, slot[None])

    def prefill(
        self,
        inputs: StaticInputs,
        fused_embeds: Tensor | None = None,
        masks_and_rope: MasksAndRope | None = None,
    ) -> Tensor:
        self.reset()
        with self._listening():
            embeds = None if fused_embeds is None else fused_embeds[:, : inputs.valid_length]
            return self._prefill(self._own(inputs), embeds)

    def load_state(self, key_values: Mapping[int, KeyValue], past_len: int) -> None:
        self.reset()
        self.cache, self._prefilled = self._load(key_values, past_len), True

    def decode_one(self, token: int) -> Tensor:
        self._prefilled = True
        with self._listening():
            return self._decode(token)

    def select(self, logits: Tensor) -> tuple[int, StopReason | None]:
        token = self._sample(logits)
        return token, StopReason.STOP_TOKEN if token in self.stop_tokens else None

    def generate(self, inputs: StaticInputs, max_new_tokens: int) -> Generation:
        """The runtime's own generation. It knows no buffers that fill up, so it is asked for no more than they hold."""
        self.reset()
        room = self.layout.max_seq - inputs.valid_length + 1  # the last token is chosen, but never fed
        own = self._own(inputs)
        with self._listening():
            ids = self._generate(own, min(max_new_tokens, room))[0]
        ids = torch.where(ids == self.placeholder, self.facts.image_token_id, ids)
        new = ids[inputs.valid_length :].tolist()
        if new[-1] in self.stop_tokens:
            reason = StopReason.STOP_TOKEN
        else:
            reason = StopReason.MAX_NEW_TOKENS if len(new) == max_new_tokens else StopReason.MAX_SEQ
        return Generation(tuple(ids.tolist()), reason)

    def _own(self, inputs: StaticInputs) -> OwnInputs:
        ids = inputs.input_ids[:, : inputs.valid_length]
        ids = ids.masked_fill(ids == self.facts.image_token_id, self.placeholder)
        return OwnInputs(ids, inputs.pixel_values, inputs.image_position_ids)

    # --- observation -------------------------------------------------------------------------------------------------

    @contextmanager
    def _listening(self) -> Iterator[None]:
        """What the runtime does in this context is reported, if anybody listens."""
        with spies() as spy:
            if self.on_tensor is not None:
                self._pad_embed = self._embed(torch.tensor([[self.facts.pad_token_id]]))  # before it is looked at
                self._watch(spy)
            yield

    def _begin_pass(self, ids: Tensor) -> None:
        """To be called with the ids [1, n] of every forward pass, before it: the first one of a request is prefill."""
        self._entering, self._leaving = "", "prefill/"
        if self._prefilled:
            self._entering = self._leaving = f"decode/{self._steps}/"
            self._report(self._entering + "token", ids)
            self._steps += 1
        self._prefilled = True

    def _report(self, name: str, tensor: Tensor) -> None:
        if self.on_tensor is not None:
            self.on_tensor(name, tensor)

    def _report_embeds(self, name: str, embeds: Tensor) -> None:
        """Embeddings [1, n, H]; behind those of a prompt come rows of padding, up to `max_seq`."""
        missing = 0 if self._entering else self.layout.max_seq - embeds.shape[1]
        self._report(self._entering + name, torch.cat([embeds, self._pad_embed.expand(-1, missing, -1)], dim=1))

    def _report_mask(self, layer: int, mask: Tensor) -> None:
        """A mask bool [1, Q, K] over absolute positions; rows that are not there attend nothing."""
        max_seq = self.layout.max_seq
        rows = 0 if self._entering else max_seq - mask.shape[1]
        mask = torch.nn.functional.pad(mask, (0, max_seq - mask.shape[2], 0, rows), value=False)
        self._report(f"{self._entering}mask/{self.facts.layer_types[layer]}", mask)

    def _report_rope(self, layer: int, rotated: Tensor) -> None:
        """What the runtime's rotation [1, n, D] makes of ones in a head's first half and zeros in the other."""
        cos, sin = rotated.chunk(2, dim=-1)
        for part, half in (("cos", cos), ("sin", sin)):
            name = f"{self._entering}rope/{self.facts.layer_types[layer]}/{part}"
            self._report(name, torch.cat([half, half], dim=-1))

    def _is_first_of_its_type(self, layer: int) -> bool:
        return self.facts.layer_types.index(self.facts.layer_types[layer]) == layer
