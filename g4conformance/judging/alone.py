"""Each graph of a runtime by itself, fed with what the reference has at that place: exact blame, no accumulated error.

Its tensors are traced as `<stage>/alone/...`: `vision/alone/layer/0/hidden`, `prefill/alone/layer/3/key`,
`decode/0/alone/logits`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor
from torch.nn.functional import pad

from g4conformance.checkpoints.facts import ModelFacts
from g4conformance.expected import masks_and_rope_of, static_inputs_of
from g4conformance.judging.observation import method_of
from g4conformance.runtime.contract import KeyValue, MasksAndRope, OnTensor, Runtime
from g4conformance.runtime.layout import StaticLayout
from g4conformance.runtime.masks import mask_bias


class GraphsAlone:
    """Runs the graphs of one case one by one through the runtime's `run_graph`."""

    def __init__(
        self, runtime: Runtime, reference: Mapping[str, Tensor], layout: StaticLayout, facts: ModelFacts
    ) -> None:
        self.reference, self.layout, self.facts = reference, layout, facts
        self.run = method_of(runtime, "run_graph")
        self.length = int(reference["valid_length"])

    def vision(self, record: OnTensor) -> None:
        """Patch embedder, each encoder layer, embedder; the pooler has nothing quantized."""
        positions = self.reference["image_position_ids"]
        entering = self.reference["pixel_values"]
        for name, leaving in self._vision_graphs():
            record(_alone("vision/", leaving), *self.run(name, entering, positions))
            entering = self.reference[leaving]
        record(
            _alone("vision/", "visual_embeds"),
            *self.run("visual_embeds", self.reference["vision/soft_tokens"], positions),
        )

    def _vision_graphs(self) -> Iterator[tuple[str, str]]:
        """Each graph in front of the pooler, with the trace name of what it returns."""
        yield "vision/patch_embeds", "vision/patch_embeds"
        for i in range(self.facts.vision_layers):
            yield f"vision/layer/{i}", f"vision/layer/{i}/hidden"

    def prefill(self, record: OnTensor) -> None:
        """Per-layer inputs, each decoder layer, head, at the prompt's length."""
        embeds = self._padded(self.reference["fused_embeds"])
        ids = static_inputs_of(self.reference, self.layout, self.facts).llm_input_ids
        rows = torch.arange(self.layout.max_seq, device=embeds.device)
        positional = masks_and_rope_of(self.reference, self.layout, self.facts)
        step = _Step("", "prefill/", past_len=0, slot=rows < self.length)
        self._decoder(record, step, ids, embeds, positional)

    def decode(self, record: OnTensor, index: int) -> None:
        """The same at decode step `index`."""
        prefix = f"decode/{index}/"
        past_len = self.length + index
        embeds = self.reference[prefix + "text_embeds"]
        slot = torch.arange(self.layout.max_seq, device=embeds.device) == past_len
        step = _Step(prefix, prefix, past_len, slot)
        self._decoder(record, step, self.reference[prefix + "llm_input_ids"], embeds, self._positional(prefix))

    def _decoder(self, record: OnTensor, step: _Step, ids: Tensor, embeds: Tensor, positional: MasksAndRope) -> None:
        per_layer_inputs = None
        if self.facts.has_per_layer_inputs:
            record(f"{step.leaving}alone/per_layer_inputs", *self.run("per_layer_inputs", ids, embeds))
            per_layer_inputs = self._padded(self.reference[step.entering + "per_layer_inputs"], to=embeds.shape[1])
        hidden = embeds
        for i, layer_type in enumerate(self.facts.layer_types):
            own = None if per_layer_inputs is None else per_layer_inputs[:, :, i]
            attention = positional.biases[layer_type], *positional.rope[layer_type]
            past = self._key_values(i, step)
            slot = (step.slot,) if i in self.facts.storing_layers else ()
            leaving = self.run(f"layer/{i}", hidden, own, *attention, *past, *slot)
            for part, tensor in zip(("hidden", "key", "value"), leaving, strict=False):
                record(f"{step.leaving}alone/layer/{i}/{part}", tensor)
            hidden = self._padded(self.reference[f"{step.leaving}layer/{i}/hidden"], to=embeds.shape[1])
        last = 0 if embeds.shape[1] == 1 else self.length - 1
        record(f"{step.leaving}alone/raw_logits", *self.run("head", hidden[:, last : last + 1]))

    def _padded(self, rows: Tensor, to: int | None = None) -> Tensor:
        """Rows [B, n, ...] in a buffer of as many as the graph takes; padding reaches no row of the prompt."""
        missing = (to or self.layout.max_seq) - rows.shape[1]
        return pad(rows, (0, 0) * (rows.ndim - 2) + (0, missing))

    def _positional(self, prefix: str) -> MasksAndRope:
        """Masks [B, 1, S] and rotary tables of a decode step."""
        kinds = sorted(set(self.facts.layer_types))
        missing = self.layout.max_seq - self.reference[f"{prefix}mask/{kinds[0]}"].shape[2]
        masks = {kind: pad(self.reference[f"{prefix}mask/{kind}"], (0, missing)) for kind in kinds}
        dtype = self.reference["pad_embed"].dtype
        rope = {
            kind: (self.reference[f"{prefix}rope/{kind}/cos"], self.reference[f"{prefix}rope/{kind}/sin"])
            for kind in kinds
        }
        return MasksAndRope(masks, {kind: mask_bias(mask, dtype) for kind, mask in masks.items()}, rope)

    def _key_values(self, layer: int, step: _Step) -> KeyValue:
        """The buffers [B, KV, S, D] that the layer reads: its own before this step, or its donor's with it."""
        donor = self.facts.donor_of(layer)
        past_len = step.past_len if donor == layer else int(step.slot.nonzero()[-1]) + 1
        return self._buffer(donor, "key", past_len), self._buffer(donor, "value", past_len)

    def _buffer(self, layer: int, part: str, past_len: int) -> Tensor:
        rows = [self.reference[f"prefill/layer/{layer}/{part}"]]
        rows += [self.reference[f"decode/{i}/layer/{layer}/{part}"] for i in range(past_len - self.length)]
        filled = torch.cat(rows, dim=2)[:, :, :past_len]
        return pad(filled, (0, 0, 0, self.layout.max_seq - filled.shape[2]))


class _Step:
    """Where a pass of the decoder stands: its trace prefixes, the rows before it, and those that it fills."""

    def __init__(self, entering: str, leaving: str, past_len: int, slot: Tensor) -> None:
        self.entering, self.leaving, self.past_len, self.slot = entering, leaving, past_len, slot


def _alone(prefix: str, name: str) -> str:
    return f"{prefix}alone/{name.removeprefix(prefix)}"
