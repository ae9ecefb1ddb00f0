"""Says to PT2E where a graph's values are quantized: at its linear ops and at what it returns, and nowhere else."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torchao.quantization.pt2e import MinMaxObserver, PerChannelMinMaxObserver
from torchao.quantization.pt2e.quantizer import QuantizationAnnotation, QuantizationSpec, Quantizer

from g4conformance.quantization.schemes import Scheme

_KEY = "quantization_annotation"
_INTEGERS = {4: torch.int8, 8: torch.int8, 16: torch.int16}  # four bits live in eight


class LinearQuantizer(Quantizer):
    """Annotates every linear op's input, weight and output, and every output of the graph.

    Only these are observed, so masks, rotary tables and ids never are: they reach no linear op, and no graph returns
    them.
    """

    def __init__(self, scheme: Scheme, graph: str) -> None:
        super().__init__()
        self.weight = weight_spec(scheme)
        self.activation = activation_spec(scheme.activation_bits)
        self.output = activation_spec(scheme.output_bits(graph))
        self.is_head = graph == "head"

    def annotate(self, model: GraphModule) -> GraphModule:
        for node in model.graph.nodes:
            if node.target is torch.ops.aten.linear.default:
                self._annotate_linear(node)
        if self.output is not None:
            for returned in _returned(model):
                if _KEY not in returned.meta or returned.meta[_KEY].output_qspec is None:
                    returned.meta[_KEY] = QuantizationAnnotation(output_qspec=self.output, _annotated=True)
        return model

    def _annotate_linear(self, node: Node) -> None:
        activation, weight = node.args[0], node.args[1]
        assert isinstance(activation, Node)
        assert isinstance(weight, Node)
        inputs = {weight: self.weight}
        if self.activation is not None:
            inputs[activation] = self.activation
        # The head's own output is what its graph returns, and gets the bits of logits there.
        output = None if self.is_head else self.activation
        node.meta[_KEY] = QuantizationAnnotation(input_qspec_map=inputs, output_qspec=output, _annotated=True)

    def validate(self, model: GraphModule) -> None:
        """Nothing to validate: there is no target that could lack an op."""


class WeightObserver(PerChannelMinMaxObserver):
    """Sees a weight [out, in] once, in its own dtype: it never changes, and a head in float32 is gigabytes."""

    min_val: Tensor
    max_val: Tensor

    def forward(self, weight: Tensor) -> Tensor:
        if self.min_val.numel() == 0:
            self.min_val, self.max_val = (bound.to(self.min_val.dtype) for bound in torch.aminmax(weight, dim=1))
        return weight


def weight_spec(scheme: Scheme) -> QuantizationSpec:
    """Signed, symmetric, one scale an output channel."""
    return QuantizationSpec(
        dtype=_INTEGERS[scheme.weight_bits],
        observer_or_fake_quant_ctr=WeightObserver,
        quant_min=-scheme.weight_max,
        quant_max=scheme.weight_max,
        qscheme=torch.per_channel_symmetric,
        ch_axis=0,
    )


def activation_spec(bits: int | None) -> QuantizationSpec | None:
    """Signed, asymmetric, one scale a tensor; None for no bits."""
    if bits is None:
        return None
    return QuantizationSpec(
        dtype=_INTEGERS[bits],
        observer_or_fake_quant_ctr=MinMaxObserver,
        quant_min=-(2 ** (bits - 1)),
        quant_max=2 ** (bits - 1) - 1,
        qscheme=torch.per_tensor_affine,
    )


def _returned(model: GraphModule) -> list[Node]:
    output = next(node for node in model.graph.nodes if node.op == "output")
    return [node for node in output.args[0] if isinstance(node, Node)]
