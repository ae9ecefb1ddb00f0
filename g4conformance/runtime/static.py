"""StaticGemma4Runtime: fixed-shape graphs for the tensor compute, CPU code for everything dynamic."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from PIL import Image
from torch import Tensor, nn
from transformers.models.gemma4.modeling_gemma4 import Gemma4ForConditionalGeneration

from g4conformance.errors import LayoutError
from g4conformance.runtime.cache import LayerSpec, StaticCache, allocate_cache, layer_specs
from g4conformance.runtime.contract import (
    Generation,
    KeyValue,
    LayerInputs,
    MasksAndRope,
    OnTensor,
    StaticInputs,
    StopReason,
)
from g4conformance.runtime.graphs import (
    DecoderLayerGraph,
    FusionGraph,
    HeadGraph,
    PerLayerInputsGraph,
    SharedDecoderLayerGraph,
    TokenEmbeddingGraph,
    layer_arguments,
    softcap,
)
from g4conformance.runtime.inputs import grid_position_ids, patch_grid, static_inputs
from g4conformance.runtime.layout import StaticLayout
from g4conformance.runtime.lowering import Graph, Lower, as_it_is
from g4conformance.runtime.masks import attention_mask, mask_bias
from g4conformance.runtime.vision import StaticVisionTower

if TYPE_CHECKING:
    from g4conformance.checkpoints.checkpoint import Checkpoint
    from g4conformance.quantization.parameters import Quantization


def own_modules(model: Gemma4ForConditionalGeneration) -> Gemma4ForConditionalGeneration:
    """A copy of the model's modules whose parameters and buffers are the very same tensors; nobody listens to it."""
    kept: dict[int, Any] = {id(tensor): tensor for tensor in chain(model.parameters(), model.buffers())}
    for module in model.modules():  # a copied hook would report to a copy of whoever listens
        kept |= {id(hooks): OrderedDict() for hooks in (module._forward_hooks, module._forward_pre_hooks)}
    return copy.deepcopy(model, kept)


@dataclass(frozen=True)
class TraceNames:
    """Prefixes of trace names: of what enters the decoder, and of what comes out of it."""

    entering: str
    leaving: str


_PREFILL_NAMES = TraceNames(entering="", leaving="prefill/")


class StaticGemma4Runtime:
    """A Gemma 4 runtime for one static layout. Implements `g4conformance.runtime.contract.Runtime`.

    Prefill and decode run the same decoder-layer graphs at two query lengths. Graphs never write: they return the new
    K/V, and the CPU side puts them into the cache.
    """

    capabilities: Mapping[str, bool] = {"batches": False}

    def __init__(self, checkpoint: Checkpoint, layout: StaticLayout, lower: Lower = as_it_is) -> None:
        self._build(checkpoint, own_modules(checkpoint.model), layout, lower)
        self._runtimes = {layout: self}

    def _build(
        self, checkpoint: Checkpoint, model: Gemma4ForConditionalGeneration, layout: StaticLayout, lower: Lower
    ) -> None:
        if layout.batch_size != 1:
            raise LayoutError("batch_size=1", f"batch_size={layout.batch_size}", "Run prompts one after the other.")
        self.checkpoint, self.model, self.layout, self.lower = checkpoint, model, layout, lower
        self.on_tensor: OnTensor | None = None
        self.facts = checkpoint.facts
        self.specs = layer_specs(checkpoint.text_config)
        text_model = model.model.language_model
        self.embedding = lower("embedding", TokenEmbeddingGraph(text_model))
        self.per_layer_inputs: Graph | None = None
        if self.facts.has_per_layer_inputs:
            self.per_layer_inputs = lower("per_layer_inputs", PerLayerInputsGraph(text_model))
        self.layers = [
            lower(f"layer/{spec.index}", _layer_graph(text_model.layers[spec.index], spec)) for spec in self.specs
        ]
        self.rotary = text_model.rotary_emb
        self.head = lower("head", HeadGraph(model))
        self.fusion = lower(f"fusion/{layout.visual_start_idx}-{layout.visual_end_idx}", FusionGraph(layout))
        self.vision: StaticVisionTower | None = None
        self.cache = StaticCache(
            allocate_cache(self.specs, layout.batch_size, layout.max_seq, checkpoint.dtype, checkpoint.device)
        )
        self.valid_length = 0
        self.past_len = 0

    # --- layouts and requests ---------------------------------------------------------------------------------------

    def for_layout(self, layout: StaticLayout) -> StaticGemma4Runtime:
        """The runtime of `layout`, built once; weights and modules are shared by all of them."""
        if layout not in self._runtimes:
            sibling = object.__new__(type(self))
            sibling._build(self.checkpoint, self.model, layout, self.lower)
            sibling._runtimes = self._runtimes
            self._runtimes[layout] = sibling
        return self._runtimes[layout]

    def reset(self) -> None:
        self.cache.reset()
        self.valid_length = self.past_len = 0

    # --- the stages before the decoder ------------------------------------------------------------------------------

    def build_static_inputs(self, prompt: str, images: Sequence[Image.Image]) -> StaticInputs:
        """Runs the processor once and fits its output to the layout.

        Raises:
            CaseError: a placeholder without an image, or an image without a placeholder.
            LayoutError: the prompt is too long, or its image does not lie in the layout's slot or patch grid.
        """
        output = self.checkpoint.process(prompt, images)
        inputs = static_inputs(
            output,
            self.layout,
            pad_token_id=self.facts.pad_token_id,
            image_token_id=self.facts.image_token_id,
            placeholder_ids=self.facts.placeholder_ids,
            dtype=self.checkpoint.dtype,
        )
        self._require_patch_grid(inputs.image_position_ids)
        return inputs

    def _require_patch_grid(self, image_position_ids: Tensor | None) -> None:
        expected = self.layout.patch_grid
        if image_position_ids is None or expected is None:
            return
        if (found := patch_grid(image_position_ids)) != expected:
            raise LayoutError(
                f"an image of {expected[0]} x {expected[1]} patches, as the layout says",
                f"{found[0]} x {found[1]} patches",
                "Ask for the runtime of this image's layout with for_layout.",
            )

    def token_embedding(self, llm_input_ids: Tensor) -> Tensor:
        """[B, S] -> [B, S, H]; padding and image rows hold the pad id's embedding."""
        return self._emit("text_embeds", self.embedding(llm_input_ids))

    def vision_prefill(self, pixel_values: Tensor, image_position_ids: Tensor) -> Tensor:
        """[1, N, 3 * patch_size ** 2], [1, N, 2] -> [V, H]; the first image fixes a grid that the layout leaves open.

        Raises:
            LayoutError: the image has another patch grid.
        """
        tower = self._tower_for(image_position_ids)
        return self._emit("visual_embeds", tower(pixel_values, image_position_ids, self._emit))

    def _tower_for(self, image_position_ids: Tensor) -> StaticVisionTower:
        if self.vision is None:
            self.vision = self._vision_tower(image_position_ids)
        return self.vision

    def _vision_tower(self, image_position_ids: Tensor) -> StaticVisionTower:
        """Graphs for the layout's patch grid, or for this image's where the layout leaves it open."""
        grid = self.layout.patch_grid or patch_grid(image_position_ids)
        constants = grid_position_ids(grid, image_position_ids.shape[1]).to(image_position_ids.device)
        return StaticVisionTower(self.model.model, constants, self.checkpoint.dtype, self.lower)

    def mm_fusion(self, text_embeds: Tensor, visual_embeds: Tensor) -> Tensor:
        """[B, S, H], [V, H] -> [B, S, H], with the soft tokens in the layout's slot.

        Raises:
            LayoutError: the number of soft tokens is not the layout's.
        """
        if visual_embeds.shape[0] != self.layout.num_visual_tokens:
            raise LayoutError(
                f"{self.layout.num_visual_tokens} soft tokens, as the layout says",
                f"{visual_embeds.shape[0]}",
                "Ask for the runtime of this image's layout with for_layout.",
            )
        return self._emit("fused_embeds", self.fusion(text_embeds, visual_embeds))

    def masks_and_rope(self, valid_length: int) -> MasksAndRope:
        """Masks [B, S, S] and rotary tables [B, S, D] of a prompt of `valid_length` rows, for each layer type."""
        positions = torch.arange(self.layout.max_seq, device=self.checkpoint.device)
        return self._emit_positions("", self._positional(positions, valid_length, self._image_block()))

    def _image_block(self) -> range:
        """Rows that see each other both ways: the image's, on models with bidirectional vision attention."""
        if self.facts.bidirectional_vision:
            return range(self.layout.visual_start_idx, self.layout.visual_end_idx)
        return range(0)

    def _positional(self, query_positions: Tensor, key_count: int, image_block: range) -> MasksAndRope:
        key_valid = torch.arange(self.layout.max_seq, device=query_positions.device) < key_count
        layer_types = sorted({spec.layer_type for spec in self.specs})
        like = torch.empty(0, dtype=self.checkpoint.dtype, device=query_positions.device)
        masks = {
            layer_type: attention_mask(
                layer_type,
                query_positions,
                key_valid,
                sliding_window=self.facts.sliding_window,
                image_block=image_block,
            )
            for layer_type in layer_types
        }
        return MasksAndRope(
            masks=masks,
            biases={layer_type: mask_bias(mask, self.checkpoint.dtype) for layer_type, mask in masks.items()},
            rope={layer_type: self.rotary(like, query_positions[None], layer_type) for layer_type in layer_types},
        )

    # --- prefill and decode -----------------------------------------------------------------------------------------

    def prefill(
        self,
        inputs: StaticInputs,
        fused_embeds: Tensor | None = None,
        masks_and_rope: MasksAndRope | None = None,
    ) -> Tensor:
        """Logits [B, vocab] of the prompt's last row. Begins a new request; K/V of padding rows are never written."""
        self.reset()
        self.valid_length = inputs.valid_length
        if fused_embeds is None:
            fused_embeds = self._fused_embeds(inputs)
        if masks_and_rope is None:
            masks_and_rope = self.masks_and_rope(inputs.valid_length)
        hidden = self._decoder(inputs.llm_input_ids, fused_embeds, masks_and_rope, inputs.valid_length, _PREFILL_NAMES)
        return self._logits(hidden[:, inputs.valid_length - 1 : inputs.valid_length], _PREFILL_NAMES)

    def _fused_embeds(self, inputs: StaticInputs) -> Tensor:
        text_embeds = self.token_embedding(inputs.llm_input_ids)
        if inputs.pixel_values is None or inputs.image_position_ids is None:
            return text_embeds
        return self.mm_fusion(text_embeds, self.vision_prefill(inputs.pixel_values, inputs.image_position_ids))

    def decode_one(self, token: int) -> Tensor:
        """Feeds one token at the next position: logits [B, vocab].

        A placeholder id is embedded as padding, which is what the reference does with one that brings no features.

        Raises:
            LayoutError: the buffers are full.
        """
        if self.past_len >= self.layout.max_seq:
            raise LayoutError(
                f"room for one more token in max_seq={self.layout.max_seq} rows", "a full buffer", "Raise --max-seq."
            )
        prefix = f"decode/{self.past_len - self.valid_length}/"
        position = self._decode_position()
        llm_token = self.facts.pad_token_id if token in self.facts.placeholder_ids else token
        ids = torch.tensor([[llm_token]], device=self.checkpoint.device)
        self._emit(prefix + "token", torch.tensor([[token]]))
        self._emit(prefix + "position", position)
        embeds = self._emit(prefix + "text_embeds", self.embedding(ids))
        positional = self._emit_positions(prefix, self._positional(position, self.past_len + 1, range(0)))
        names = TraceNames(entering=prefix, leaving=prefix)
        return self._logits(self._decoder(ids, embeds, positional, 1, names), names)

    def _decode_position(self) -> Tensor:
        """The absolute position of the token being fed: int64 [1]."""
        return torch.tensor([self.past_len], device=self.checkpoint.device)

    def _decoder(
        self, ids: Tensor, hidden: Tensor, positional: MasksAndRope, new_rows: int, names: TraceNames
    ) -> Tensor:
        """Runs all layers over [B, Q, H] and appends `new_rows` rows of K/V, the first ones of Q, to the cache."""
        per_layer_inputs = self._per_layer_inputs(ids, hidden, names)
        for spec, graph in zip(self.specs, self.layers, strict=True):
            per_layer_input = None if per_layer_inputs is None else per_layer_inputs[:, :, spec.index]
            attention = positional.biases[spec.layer_type], *positional.rope[spec.layer_type]
            hidden = self._layer(spec, graph, hidden, per_layer_input, attention, new_rows, names)
            self._emit(f"{names.leaving}layer/{spec.index}/hidden", hidden)
        self.past_len += new_rows
        self._emit_cache(names)
        return hidden

    def _per_layer_inputs(self, llm_input_ids: Tensor, embeds: Tensor, names: TraceNames) -> Tensor | None:
        if self.per_layer_inputs is None:
            return None
        return self._emit(names.entering + "per_layer_inputs", self.per_layer_inputs(llm_input_ids, embeds))

    def _layer(
        self,
        spec: LayerSpec,
        graph: Graph,
        hidden: Tensor,
        per_layer_input: Tensor | None,
        attention: tuple[Tensor, Tensor, Tensor],
        new_rows: int,
        names: TraceNames,
    ) -> Tensor:
        past = self.cache.read(spec.kv_source)
        if not spec.stores_kv:
            return graph(hidden, per_layer_input, *attention, *past)
        rows = torch.arange(self.layout.max_seq, device=hidden.device)
        slot = (rows >= self.past_len) & (rows < self.past_len + new_rows)
        hidden, key, value = graph(hidden, per_layer_input, *attention, *past, slot)
        self._emit(f"{names.leaving}layer/{spec.index}/key", key)
        self._emit(f"{names.leaving}layer/{spec.index}/value", value)
        self.cache.write(spec.index, key[:, :, :new_rows], value[:, :, :new_rows], start=self.past_len)
        return hidden

    def _logits(self, hidden_row: Tensor, names: TraceNames) -> Tensor:
        """[B, 1, H] -> [B, vocab], after the softcap."""
        return self._emit(names.leaving + "logits", softcap(self.head(hidden_row), self.facts.final_logit_softcapping))

    def load_state(self, key_values: Mapping[int, KeyValue], past_len: int) -> None:
        """Begins a request whose first `past_len` rows were prefilled elsewhere.

        Raises:
            LayoutError: they do not fit.
        """
        if past_len > self.layout.max_seq:
            raise LayoutError(f"at most max_seq={self.layout.max_seq} rows", f"{past_len}", "Raise --max-seq.")
        self.reset()
        for layer, (key, value) in key_values.items():
            self.cache.write(layer, key, value, start=0)
        self.valid_length = self.past_len = past_len

    # --- generation -------------------------------------------------------------------------------------------------

    def select(self, logits: Tensor) -> tuple[int, StopReason | None]:
        """Greedy: the most likely token of [B, vocab], and whether it is in the checkpoint's stop set."""
        token = int(logits[0].argmax())
        return token, StopReason.STOP_TOKEN if token in self.facts.stop_token_ids else None

    def generate(self, inputs: StaticInputs, max_new_tokens: int) -> Generation:
        """Prefill, then greedy decoding until a stop token, `max_new_tokens`, or a full buffer.

        Raises:
            ValueError: `max_new_tokens` is below 1.
        """
        if max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
        prompt = inputs.input_ids[0, : inputs.valid_length].tolist()
        logits, new = self.prefill(inputs), []
        while True:
            token, stop = self.select(logits)
            new.append(token)
            if stop is None and len(new) >= max_new_tokens:
                stop = StopReason.MAX_NEW_TOKENS
            if stop is None and self.past_len >= self.layout.max_seq:
                stop = StopReason.MAX_SEQ
            if stop is not None:
                return Generation(tuple(prompt + new), stop)
            logits = self.decode_one(token)

    # --- graphs by themselves ---------------------------------------------------------------------------------------

    @property
    def quantization(self) -> Quantization | None:
        """Scales and integers of the graphs as they are now; None where they are in floating point."""
        read = getattr(self.lower, "quantization", None)
        return None if read is None else read(self.model)

    def run_layer(self, i: int, inputs: LayerInputs) -> tuple[Tensor, ...]:
        """What one decoder layer's graph returns, by itself."""
        return _as_tuple(self.layers[i](*layer_arguments(inputs)))

    def run_graph(self, name: str, *inputs: Tensor | None) -> tuple[Tensor, ...]:
        """What one graph beside the decoder layers returns, by itself; see the contract for its inputs."""
        if name.startswith("vis"):
            entering, image_position_ids = inputs
            assert entering is not None
            assert image_position_ids is not None
            return _as_tuple(self._tower_for(image_position_ids).run_graph(name, entering))
        graphs: dict[str, Any] = {"head": self.head, "per_layer_inputs": self.per_layer_inputs}
        return _as_tuple(graphs[name](*inputs))

    # --- observation ------------------------------------------------------------------------------------------------

    def _emit(self, name: str, tensor: Tensor) -> Tensor:
        if self.on_tensor is not None:
            self.on_tensor(name, tensor)
        return tensor

    def _emit_positions(self, prefix: str, positional: MasksAndRope) -> MasksAndRope:
        for layer_type, mask in positional.masks.items():
            self._emit(f"{prefix}mask/{layer_type}", mask)
            self._emit(f"{prefix}mask_bias/{layer_type}", positional.biases[layer_type])
        for layer_type, (cos, sin) in positional.rope.items():
            self._emit(f"{prefix}rope/{layer_type}/cos", cos)
            self._emit(f"{prefix}rope/{layer_type}/sin", sin)
        return positional

    def _emit_cache(self, names: TraceNames) -> None:
        for layer, (key, value) in self.cache.buffers.items():
            self._emit(f"{names.leaving}cache/{layer}/key", key)
            self._emit(f"{names.leaving}cache/{layer}/value", value)


def _layer_graph(layer: nn.Module, spec: LayerSpec) -> nn.Module:
    return DecoderLayerGraph(layer) if spec.stores_kv else SharedDecoderLayerGraph(layer)


def _as_tuple(found: Any) -> tuple[Tensor, ...]:
    return found if isinstance(found, tuple) else (found,)


def is_shipped(runtime: object) -> bool:
    """Whether it is this runtime, whose graphs are the reference's own modules; any other has kernels of its own."""
    return isinstance(runtime, StaticGemma4Runtime)
