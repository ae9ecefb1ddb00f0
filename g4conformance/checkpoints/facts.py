"""ModelFacts: what a checkpoint's configs say that runtimes and checks need to know, as plain data."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from transformers import Gemma4Config


@dataclass(frozen=True)
class ModelFacts:
    """Facts of one checkpoint.

    Attributes:
        placeholder_ids: image, video and audio placeholders; the language model sees them as padding.
        stop_token_ids: union of what generation config, model config and tokenizer name as end of sequence.
        storing_layers: indices of decoder layers that store K/V.
        bidirectional_vision: whether image rows see each other both ways on sliding layers.
    """

    pad_token_id: int
    bos_token_id: int | None
    image_token_id: int
    placeholder_ids: frozenset[int]
    stop_token_ids: frozenset[int]
    sliding_window: int
    layer_types: tuple[str, ...]
    storing_layers: tuple[int, ...]
    final_logit_softcapping: float | None
    has_per_layer_inputs: bool
    bidirectional_vision: bool
    vision_layers: int
    vocab_size: int
    max_soft_tokens: int

    @property
    def default_max_seq(self) -> int:
        """Rows for the longest bundled text (twice the window) plus an image's largest soft-token budget."""
        return 2 * self.sliding_window + self.max_soft_tokens

    def donor_of(self, layer: int) -> int:
        """The layer whose K/V this one attends to: itself, or the last storing layer of its type."""
        if layer in self.storing_layers:
            return layer
        return max(i for i in self.storing_layers if self.layer_types[i] == self.layer_types[layer])


def model_facts(config: Gemma4Config, generation_config: Any, processor: Any) -> ModelFacts:
    """Collects the facts from the three places where Gemma 4 checkpoints keep them.

    `image_token_id` and the other placeholders come from the top config: `text_config` has none.
    """
    text, tokenizer = config.text_config, processor.tokenizer
    modes = text.kv_sharing_modes
    placeholders = (config.image_token_id, config.video_token_id, config.audio_token_id)
    stops = (
        _as_ids(source)
        for source in (
            generation_config.eos_token_id if generation_config is not None else None,
            config.to_dict().get("eos_token_id"),
            text.eos_token_id,
            tokenizer.eos_token_id,
        )
    )
    return ModelFacts(
        pad_token_id=text.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        image_token_id=config.image_token_id,
        placeholder_ids=frozenset(i for i in placeholders if i is not None),
        stop_token_ids=frozenset().union(*stops),
        sliding_window=text.sliding_window,
        layer_types=tuple(text.layer_types),
        storing_layers=tuple(i for i, mode in enumerate(modes) if mode != "reuse"),
        final_logit_softcapping=text.final_logit_softcapping,
        has_per_layer_inputs=bool(text.hidden_size_per_layer_input),
        bidirectional_vision=text.use_bidirectional_attention == "vision",
        vision_layers=config.vision_config.num_hidden_layers,
        vocab_size=text.vocab_size,
        max_soft_tokens=processor.image_processor.max_soft_tokens,
    )


def _as_ids(value: int | Iterable[int] | None) -> frozenset[int]:
    if value is None:
        return frozenset()
    return frozenset((value,)) if isinstance(value, int) else frozenset(value)
