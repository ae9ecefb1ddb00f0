"""A SentencePiece model of the vocabulary in a tokenizer.json, because gemma's tokenizer reads no other.

Both merge pairs of pieces, the best first: a tokenizer.json ranks the pairs, SentencePiece scores what they become.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import Any, NamedTuple

_CONTROL = ("<pad>", "<eos>", "<bos>", "<mask>")  # the others are read where they stand in a text
_UNKNOWN = "<unk>"


class Kind(IntEnum):
    """What SentencePiece knows of a piece; its own numbers."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    BYTE = 6


class Piece(NamedTuple):
    """One entry of the vocabulary; its place in the list is its id."""

    text: str
    score: float
    kind: Kind


def pieces(described: Mapping[str, Any]) -> list[Piece]:
    """The pieces of a tokenizer.json. A piece scores the higher the earlier a pair becomes it; others score lowest."""
    vocabulary, merges = described["model"]["vocab"], described["model"]["merges"]
    special = {token["content"] for token in described["added_tokens"]}
    ranks: dict[str, int] = {}
    for rank, pair in enumerate(merges):
        ranks.setdefault("".join(pair), rank)
    ordered = sorted(vocabulary, key=lambda text: int(vocabulary[text]))
    return [Piece(text, -float(ranks.get(text, len(merges))), _kind(text, special)) for text in ordered]


def _kind(text: str, special: set[str]) -> Kind:
    if text == _UNKNOWN:
        return Kind.UNKNOWN
    if text in special:
        return Kind.CONTROL if text in _CONTROL else Kind.USER_DEFINED
    return Kind.BYTE if text.startswith("<0x") and text.endswith(">") else Kind.NORMAL


def sentencepiece_model(described: Mapping[str, Any]) -> bytes:
    """The serialized model: BPE with bytes for what it does not know, and no change to a text but for its spaces."""
    from sentencepiece import sentencepiece_model_pb2  # installed beside gemma only

    format: Any = sentencepiece_model_pb2  # its messages are made when it is imported
    model = format.ModelProto()
    for piece in pieces(described):
        model.pieces.add(piece=piece.text, score=piece.score, type=int(piece.kind))
    ids = {name: described["model"]["vocab"][f"<{name}>"] for name in ("unk", "bos", "eos", "pad")}
    trained = model.trainer_spec
    trained.model_type, trained.vocab_size, trained.byte_fallback = format.TrainerSpec.BPE, len(model.pieces), True
    trained.unk_id, trained.bos_id, trained.eos_id, trained.pad_id = (ids[n] for n in ("unk", "bos", "eos", "pad"))
    normalizer = model.normalizer_spec
    normalizer.name, normalizer.add_dummy_prefix, normalizer.remove_extra_whitespaces = "identity", False, False
    serialized: bytes = model.SerializeToString()
    return serialized
