"""What each tensor of a case is, in words: its kind, its axes, and a sentence."""

from __future__ import annotations

import re
from dataclasses import dataclass

_PLACES = {"<i>": r"\d+", "<t>": r"\d+", "<layer_type>": r"\w+"}


@dataclass(frozen=True)
class Statement:
    """What tensors of one kind are.

    Attributes:
        kind: trace name with `<i>` for a layer, `<t>` for a decode step, `<layer_type>` for a type of layers.
        axes: what each axis counts; rows are those of the prompt, or the one of a decode step.
        what: one sentence.
    """

    kind: str
    axes: tuple[str, ...]
    what: str

    def describes(self, name: str) -> bool:
        return re.fullmatch(_pattern(self.kind), name) is not None


def _pattern(kind: str) -> str:
    pattern = re.escape(kind)
    for place, matching in _PLACES.items():
        pattern = pattern.replace(re.escape(place), matching)
    return pattern


_ONCE = (
    Statement("input_ids", ("batch", "rows"), "token ids of the prompt, image placeholders kept"),
    Statement("attention_mask", ("batch", "rows"), "true at the prompt's own rows"),
    Statement("valid_length", ("one",), "number of the prompt's own rows"),
    Statement("pixel_values", ("image", "patches", "pixels"), "patches as the image processor makes them"),
    Statement("image_position_ids", ("image", "patches", "xy"), "column and row of each patch, -1 for padding patches"),
    Statement("decode_tokens", ("steps",), "the token to feed at each decode step: the reference's most likely ones"),
    Statement("pad_embed", ("hidden",), "the scaled embedding of the pad id, which padding rows hold"),
    Statement("vision/patch_embeds", ("image", "patches", "vision hidden"), "patch embeddings with their positions'"),
    Statement("vision/layer/<i>/hidden", ("image", "patches", "vision hidden"), "output of vision encoder layer <i>"),
    Statement("vision/soft_tokens", ("soft tokens", "vision hidden"), "pooled and scaled soft tokens"),
    Statement("visual_embeds", ("soft tokens", "hidden"), "soft tokens in the language model's space"),
    Statement("generation/select/logits", ("requests", "vocabulary"), "scripted logits to select the next token from"),
    Statement("generation/select/token_ids", ("requests",), "the token selected from each row of scripted logits"),
    Statement("generation/select/stops", ("requests",), "whether that token ends the generation"),
    Statement("generation/token_ids", ("ids",), "the prompt's ids and the new ones of greedy generation"),
    Statement("generation/stop_reason", (), "0 a stop token, 1 the number of new tokens asked for, 2 full buffers"),
)

_OF_A_PASS = (
    Statement("llm_input_ids", ("batch", "rows"), "token ids with the pad id in place of image placeholders"),
    Statement("text_embeds", ("batch", "rows", "hidden"), "scaled token embeddings"),
    Statement("fused_embeds", ("batch", "rows", "hidden"), "text embeddings, with soft tokens in the image's slot"),
    Statement("per_layer_inputs", ("batch", "rows", "layers", "per-layer width"), "what each layer adds of its own"),
    Statement("mask/<layer_type>", ("batch", "rows", "keys"), "true where a row may attend the absolute position"),
    Statement("mask_bias/<layer_type>", ("batch", "heads", "rows", "keys"), "what is added to attention scores"),
    Statement("rope/<layer_type>/cos", ("batch", "rows", "head dim"), "cosines of the rotary embedding"),
    Statement("rope/<layer_type>/sin", ("batch", "rows", "head dim"), "sines of the rotary embedding"),
)

_OF_A_DECODER = (
    Statement("layer/<i>/hidden", ("batch", "rows", "hidden"), "output of decoder layer <i>"),
    Statement("layer/<i>/key", ("batch", "KV heads", "rows", "head dim"), "new keys of layer <i>, after norm and RoPE"),
    Statement("layer/<i>/value", ("batch", "KV heads", "rows", "head dim"), "new values of layer <i>, after norm"),
    Statement("cache/<i>/key", ("batch", "KV heads", "max_seq", "head dim"), "layer <i>'s key buffer afterwards"),
    Statement("cache/<i>/value", ("batch", "KV heads", "max_seq", "head dim"), "layer <i>'s value buffer afterwards"),
    Statement("logits", ("batch", "vocabulary"), "logits of the last row, after the softcap"),
)

_OF_A_STEP = (
    Statement("token", ("batch", "one"), "the token that is fed"),
    Statement("position", ("one",), "its absolute position"),
)


def _under(prefix: str, statements: tuple[Statement, ...], when: str) -> tuple[Statement, ...]:
    return tuple(Statement(prefix + s.kind, s.axes, f"{when}: {s.what}") for s in statements)


STATEMENTS = (
    *_ONCE,
    *_OF_A_PASS,
    *_under("prefill/", _OF_A_DECODER, "prefill"),
    *_under("decode/<t>/", (*_OF_A_STEP, *_OF_A_PASS, *_OF_A_DECODER), "decode step <t>"),
)


def statement_of(name: str) -> Statement | None:
    """The statement about the tensor of this name; None for a name that vectors know nothing of."""
    return next((statement for statement in STATEMENTS if statement.describes(name)), None)
