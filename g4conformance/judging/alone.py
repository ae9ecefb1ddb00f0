"""Each piece of a runtime by itself, fed with what the reference has at that place: exact blame, no accumulated error.

Decoder layers are asked of any runtime that has `run_layer`, all other graphs of a quantized one through `run_graph`.
Their tensors are traced as `<stage>/alone/...`: `vision/alone/layer/0/hidden`, `prefill/alone/layer/3/key`,
`decode/0/alone/raw_logits`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor

from g4conformance.checkpoints.facts import ModelFacts
from g4conformance.judging.observation import is_quantized, method_of
from g4conformance.layer_inputs import Pass, decode_pass, last_row, layer_inputs, prefill_pass
from g4conformance.runtime.contract import OnTensor, Runtime
from g4conformance.runtime.layout import StaticLayout


class PiecesAlone:
    """Runs the pieces of one case one by one.

    Every method raises NotObserved where the runtime does not have what it takes.
    """

    def __init__(
        self, runtime: Runtime, reference: Mapping[str, Tensor], layout: StaticLayout, facts: ModelFacts
    ) -> None:
        self.runtime, self.reference, self.layout, self.facts = runtime, reference, layout, facts
        self.quantized = is_quantized(runtime)

    def vision(self, record: OnTensor) -> None:
        """Patch embedder, each encoder layer, embedder; the pooler has nothing quantized."""
        run = method_of(self.runtime, "run_graph")
        positions = self.reference["image_position_ids"]
        entering = self.reference["pixel_values"]
        for name, leaving in self._vision_graphs():
            record(_alone("vision/", leaving), *run(name, entering, positions))
            entering = self.reference[leaving]
        soft_tokens = self.reference["vision/soft_tokens"]
        record(_alone("vision/", "visual_embeds"), *run("visual_embeds", soft_tokens, positions))

    def _vision_graphs(self) -> Iterator[tuple[str, str]]:
        """Each graph in front of the pooler, with the trace name of what it returns."""
        yield "vision/patch_embeds", "vision/patch_embeds"
        for i in range(self.facts.vision_layers):
            yield f"vision/layer/{i}", f"vision/layer/{i}/hidden"

    def prefill(self, record: OnTensor) -> None:
        """Each decoder layer, and a quantized runtime's per-layer inputs and head, at the prompt's length.

        A request begins, so that a runtime with a state is in that of a prefill.
        """
        if hasattr(self.runtime, "reset"):
            self.runtime.reset()
        self._decoder(record, prefill_pass(self.reference, self.layout, self.facts))

    def decode(self, record: OnTensor, step: int) -> None:
        """The same at a decode step."""
        self._decoder(record, decode_pass(self.reference, self.layout, self.facts, step))

    def _decoder(self, record: OnTensor, of: Pass) -> None:
        self._layers(record, of)
        if not self.quantized:
            return
        run = method_of(self.runtime, "run_graph")
        if self.facts.has_per_layer_inputs:
            record(f"{of.leaving}alone/per_layer_inputs", *run("per_layer_inputs", of.ids, of.embeds))
        record(f"{of.leaving}alone/raw_logits", *run("head", last_row(self.reference, self.facts, of)))

    def _layers(self, record: OnTensor, of: Pass) -> None:
        run = method_of(self.runtime, "run_layer")
        for i, inputs in enumerate(layer_inputs(self.reference, self.layout, self.facts, of)):
            for part, tensor in zip(("hidden", "key", "value"), run(i, inputs), strict=False):
                record(f"{of.leaving}alone/layer/{i}/{part}", tensor)


def _alone(prefix: str, name: str) -> str:
    return f"{prefix}alone/{name.removeprefix(prefix)}"
