"""Quantization schemes as data: how many bits, and which graphs and ops they cover."""

from __future__ import annotations

from dataclasses import dataclass

from g4conformance.errors import ConformanceError

NONE = "none"
DEFAULT = "w8a16"


@dataclass(frozen=True)
class Scheme:
    """Bits of each kind of value; integers are signed.

    Weights are quantized per output channel, symmetrically and to a narrow range, so that rounding moves none by more
    than half a step. Activations are quantized per tensor, asymmetrically, with static ranges from calibration.

    Attributes:
        activation_bits: of the inputs and outputs of linear ops and of what a graph returns; None leaves all of these
            in floating point.
        logits_bits: of the logits, where activations are quantized at all. Eight bits could not tell candidates apart.
    """

    name: str
    weight_bits: int
    activation_bits: int | None
    logits_bits: int = 16

    @property
    def weight_max(self) -> int:
        """The largest integer of a weight; the smallest is its negative."""
        return int(2 ** (self.weight_bits - 1)) - 1

    def output_bits(self, graph: str) -> int | None:
        """Bits of what the graph of this name returns."""
        if self.activation_bits is None:
            return None
        return self.logits_bits if graph == "head" else self.activation_bits


SCHEMES = {
    scheme.name: scheme
    for scheme in (
        Scheme("w8a16", weight_bits=8, activation_bits=16),
        Scheme("w8a8", weight_bits=8, activation_bits=8),
        Scheme("w4a16", weight_bits=4, activation_bits=16),
        Scheme("w8", weight_bits=8, activation_bits=None),
    )
}


@dataclass(frozen=True)
class Coverage:
    """What of one kind of graph is quantized.

    Attributes:
        graph: its name, or the beginning of it up to the number of the layer.
        linears: linear ops whose inputs, weights and outputs are quantized; none leaves the graph in floating point.
        outputs: what it returns on a quantized grid.
        floating: what is computed in floating point all the same.
    """

    graph: str
    linears: tuple[str, ...]
    outputs: tuple[str, ...]
    floating: str


_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_MLP = ("gate_proj", "up_proj", "down_proj")

COVERAGE = (
    Coverage("embedding", (), (), "the lookup and its scale: a table is no matrix product"),
    Coverage("fusion/", (), (), "everything: it only moves rows"),
    Coverage(
        "per_layer_inputs",
        ("per_layer_model_projection",),
        ("per_layer_inputs",),
        "the lookup in the per-layer table, the norm, the addition and the scales",
    ),
    Coverage(
        "layer/",
        (*_ATTENTION, *_MLP, "per_layer_input_gate", "per_layer_projection"),
        ("hidden", "key", "value"),
        "norms, RoPE, attention scores, mask, softmax, GELU, residual additions, layer_scalar",
    ),
    Coverage("head", ("lm_head",), ("logits",), "the norm, and the softcap, which is no part of the graph"),
    Coverage(
        "vision/patch_embeds", ("input_proj",), ("vision/patch_embeds",), "the rescaling of pixels, position embeddings"
    ),
    Coverage(
        "vision/layer/",
        (*_ATTENTION, *_MLP),
        ("hidden",),
        "norms, RoPE, attention scores, mask, softmax, GELU, residual additions, clips",
    ),
    Coverage("vision/pooler/", (), (), "everything: it averages, scales and standardises"),
    Coverage("visual_embeds", ("embedding_projection",), ("visual_embeds",), "the norm"),
)


def coverage_of(graph: str) -> Coverage:
    """What is quantized of the graph of this name; KeyError for a name that no kind of graph has."""
    for coverage in COVERAGE:
        if graph == coverage.graph or (coverage.graph.endswith("/") and graph.startswith(coverage.graph)):
            return coverage
    raise KeyError(f"no graph is called {graph!r}")


def scheme_of(name: str) -> Scheme:
    """The scheme of this name.

    Raises:
        ConformanceError: there is none.
    """
    if name not in SCHEMES:
        raise ConformanceError(f"a scheme among {', '.join(SCHEMES)}", repr(name), "Choose one with --quant.")
    return SCHEMES[name]
