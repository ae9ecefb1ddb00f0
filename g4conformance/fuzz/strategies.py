"""What the fuzz and the property tests draw: legal checkpoints, layer-type mixes, prompts, pictures, whole examples."""

from __future__ import annotations

import math
from typing import Any

from hypothesis import strategies as st

from g4conformance.cases import IMAGE_MARK
from g4conformance.checkpoints.seeded import SeededSpec, VisionSpec
from g4conformance.fuzz.example import ATTN_IMPLEMENTATIONS, DTYPES, FuzzExample, Picture

SLIDING, FULL = "sliding_attention", "full_attention"

# Ordinary words, pieces that tokenize byte by byte, white space, and Gemma 4's turn tokens; no placeholders.
_TOKEN_TEXTS = (
    "red", " circle", " at", " the", " top", "Describe", "?", ".", " ", "\n", "  ", "7", "Ωß", "水", "🦜", "<", "|>",
    "<|turn>", "<turn|>", "<unused3>",
)  # fmt: skip


def layer_type_mixes(max_layers: int = 7) -> st.SearchStrategy[tuple[str, ...]]:
    """Layer types of a decoder; Hugging Face makes the last one full whatever is asked for."""
    beginnings = st.lists(st.sampled_from([SLIDING, FULL]), max_size=max_layers - 1)
    return beginnings.map(lambda types: (*types, FULL))


def legal_sharing(layer_types: tuple[str, ...]) -> list[int]:
    """How many of the last layers may reuse K/V: each type must have a layer before them to reuse from."""
    count = len(layer_types)
    return [n for n in range(count) if set(layer_types[: count - n]) == set(layer_types)]


@st.composite
def attention_heads(draw: st.DrawFn) -> dict[str, Any]:
    """Numbers of heads that divide each other, with KV heads of their own on full layers or not."""
    k_eq_v = draw(st.booleans())
    sliding, full = draw(st.sampled_from([(1, 1), (1, 2), (2, 1), (2, 2), (2, 4), (3, 1), (3, 2)]))
    return {
        "num_attention_heads": draw(st.sampled_from([1, 2])) * math.lcm(sliding, full if k_eq_v else 1),
        "num_key_value_heads": sliding,
        "num_global_key_value_heads": full if k_eq_v else None,
        "attention_k_eq_v": k_eq_v,
    }


@st.composite
def vision_specs(draw: st.DrawFn) -> VisionSpec:
    kv_heads = draw(st.sampled_from([1, 2, 3]))
    return VisionSpec(
        hidden_size=draw(st.sampled_from([20, 28, 36])),
        intermediate_size=draw(st.sampled_from([24, 44])),
        num_hidden_layers=draw(st.integers(1, 3)),
        num_attention_heads=kv_heads * draw(st.sampled_from([1, 2])),
        num_key_value_heads=kv_heads,
        head_dim=draw(st.sampled_from([8, 12, 16])),
        patch_size=draw(st.sampled_from([2, 3, 4])),
        pooling_kernel_size=draw(st.sampled_from([2, 3])),
        use_clipped_linears=draw(st.booleans()),
        standardize=draw(st.booleans()),
    )


@st.composite
def seeded_specs(draw: st.DrawFn) -> SeededSpec:
    """Any legal dense Gemma 4 at toy size, every feature on or off."""
    layer_types = draw(layer_type_mixes())
    return SeededSpec(
        layer_types=layer_types,
        num_kv_shared_layers=draw(st.sampled_from(legal_sharing(layer_types))),
        hidden_size=draw(st.sampled_from([24, 40, 56])),
        intermediate_size=draw(st.sampled_from([20, 36, 68])),
        **draw(attention_heads()),
        head_dim=draw(st.sampled_from([6, 8, 12, 20])),
        global_head_dim=draw(st.sampled_from([8, 12, 16, 32])),
        hidden_size_per_layer_input=draw(st.sampled_from([0, 4, 10])),
        sliding_window=draw(st.integers(2, 20)),
        final_logit_softcapping=draw(st.sampled_from([None, 2.0, 30.0])),
        attention_bias=draw(st.booleans()),
        use_bidirectional_attention=draw(st.sampled_from([None, "vision"])),
        use_double_wide_mlp=draw(st.booleans()),
        vision=draw(vision_specs()),
    )


def texts(max_pieces: int = 12) -> st.SearchStrategy[str]:
    """Texts of known pieces and of any characters at all."""
    pieces = st.sampled_from(_TOKEN_TEXTS) | st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=3)
    return st.lists(pieces, min_size=1, max_size=max_pieces).map("".join)


def image_prompts() -> st.SearchStrategy[str]:
    """A picture's mark with text before it, after it, around it, or without any."""
    some = texts(max_pieces=6) | st.just("")
    return st.tuples(some, some).map(IMAGE_MARK.join)


def pictures() -> st.SearchStrategy[Picture]:
    """Pictures of any shape."""
    sides = st.integers(4, 90)
    return st.builds(Picture, width=sides, height=sides, seed=st.integers(0, 99))


def fuzz_examples() -> st.SearchStrategy[FuzzExample]:
    """Everything at random; what comes first in a list, and small numbers, are what an example shrinks to."""
    return st.builds(
        FuzzExample,
        spec=seeded_specs(),
        seed=st.integers(0, 2**16),
        dtype=st.sampled_from(DTYPES),
        attn_implementation=st.sampled_from(ATTN_IMPLEMENTATIONS),
        text=texts(),
        image_prompt=image_prompts(),
        picture=pictures(),
        room=st.integers(0, 6),
    )
