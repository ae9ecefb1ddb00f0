"""What gemma's modules have, under the suite's trace names and in its shapes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
MADE_OF_PROMPT = ("input_ids", "llm_input_ids", "attention_mask", "valid_length")
PLACEHOLDER = -2  # gemma's id of a soft token's row


class Recorder:
    """Collects the tensors of passes: the prompt's, then one for each decode step. What comes between is not kept.

    Attributes:
        facts: what the request says of the checkpoint.
        tensors: by trace name, in the contract's shapes.
    """

    def __init__(self, facts: Mapping[str, Any]) -> None:
        self.facts = facts
        self.tensors: dict[str, Array] = {}
        self._step: int | None = None
        self._listening = False
        self._vision_layers = 0
        self._told: dict[str, Callable[..., None]] = {
            "inputs": self._inputs,
            "block": self._block,
            "cache": self._cache,
            "mask": self._mask,
            "rope": self._rope,
            "patches": lambda hidden: self._report("vision/patch_embeds", hidden),
            "vision block": self._vision_block,
            "soft tokens": lambda tokens, mask: self._report("vision/soft_tokens", tokens[mask]),
            "visual embeds": lambda embeds: self._report("visual_embeds", embeds[0]),
            "text embeds": lambda embeds: self._report(self._entering + "text_embeds", embeds),
            "fused embeds": lambda embeds: self._report("fused_embeds", embeds),
            "logits": lambda logits: self._report(self._leaving + "logits", logits.reshape(1, -1)),
        }

    def begin(self, step: int | None) -> None:
        """What is told from now on is of the prompt (None), or of this decode step."""
        self._step, self._listening, self._vision_layers = step, True, 0

    def end(self) -> None:
        self._listening = False

    def __call__(self, event: str, arrays: Mapping[str, Array], **where: int) -> None:
        """`where` has the number of the decoder layer, if it is one."""
        if self._listening:
            self._told[event](**arrays, **where)

    @property
    def _entering(self) -> str:
        return "" if self._step is None else f"decode/{self._step}/"

    @property
    def _leaving(self) -> str:
        return "prefill/" if self._step is None else self._entering

    def _report(self, name: str, array: Array) -> None:
        self.tensors[name] = array

    def _inputs(self, tokens: Array, positions: Array, per_layer_inputs: Array | None = None) -> None:
        """Ids [1, rows] as the model gets them; rows of soft tokens have the placeholder."""
        if self._step is None:
            self._ids(tokens.astype(np.int64))
        else:
            self._report(self._entering + "token", tokens.astype(np.int64))
            self._report(self._entering + "position", positions.reshape(-1).astype(np.int64))
        if per_layer_inputs is not None:
            self._report(self._entering + "per_layer_inputs", per_layer_inputs)

    def _ids(self, tokens: Array) -> None:
        """What has the pad's id is padding to gemma, wherever it stands."""
        soft, pad = tokens == PLACEHOLDER, self.facts["pad_token_id"]
        seen = tokens != pad
        self._report("input_ids", np.where(soft, self.facts["image_token_id"], tokens))
        self._report("llm_input_ids", np.where(soft, pad, tokens))
        self._report("attention_mask", seen)
        self._report("valid_length", seen.sum(axis=-1))

    def _block(self, layer: int, hidden: Array, key: Array, value: Array, end_index: Array) -> None:
        """K and V are buffers [1, rows, KV, D], written up to `end_index`; the prompt's pass has its own rows only."""
        self._report(f"{self._leaving}layer/{layer}/hidden", hidden)
        if layer in self.facts["storing_layers"]:
            end = int(end_index[0])
            new = slice(end - hidden.shape[1], end)
            for name, buffer in (("key", key), ("value", value)):
                self._report(f"{self._leaving}layer/{layer}/{name}", buffer[:, new].swapaxes(1, 2))
            if self._step is not None:
                self._cache(layer, key, value)

    def _cache(self, layer: int, key: Array, value: Array) -> None:
        """Whole buffers [1, max_seq, KV, D]."""
        if layer in self.facts["storing_layers"]:
            self._report(f"{self._leaving}cache/{layer}/key", key.swapaxes(1, 2))
            self._report(f"{self._leaving}cache/{layer}/value", value.swapaxes(1, 2))

    def _mask(self, layer: int, mask: Array) -> None:
        if self._is_first_of_its_type(layer):
            self._report(f"{self._entering}mask/{self._type(layer)}", mask)

    def _rope(self, layer: int, rotated: Array) -> None:
        """What the rotation [1, rows, D] makes of ones in a head's first half and zeros in the other."""
        if self._is_first_of_its_type(layer):
            for part, half in zip(("cos", "sin"), np.split(rotated, 2, axis=-1), strict=True):
                name = f"{self._entering}rope/{self._type(layer)}/{part}"
                self._report(name, np.concatenate([half, half], axis=-1))

    def _vision_block(self, hidden: Array) -> None:
        """The layers are one scanned module, so that only their order tells which it is."""
        self._report(f"vision/layer/{self._vision_layers}/hidden", hidden)
        self._vision_layers += 1

    def _is_first_of_its_type(self, layer: int) -> bool:
        return self.facts["layer_types"].index(self._type(layer)) == layer

    def _type(self, layer: int) -> str:
        return str(self.facts["layer_types"][layer])
