"""TICO's StaticGemma4Runtime: static shapes, one vision profile a picture's grid, every stage in the open.

Its K/V buffers have `max_seq - 1` rows, and the token that is being decoded has a slot of its own behind them. Here the
buffers get a last row of zeros, and masks of decoding are laid out by absolute position. Its sines are negated in a
head's first half; here they are as the contract has them.
"""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from g4conformance.checkpoints.checkpoint import Checkpoint
from g4conformance.errors import LayoutError
from g4conformance.faults.patching import Patch
from g4conformance.runtime.contract import Generation, KeyValue, MasksAndRope, OnTensor, StaticInputs, StopReason
from g4conformance.runtime.inputs import pad_right
from g4conformance.runtime.layout import StaticLayout
from g4conformance.runtimes.spying import Spies, imported, spies

_PLACE = "tico.quantization"
Positional = tuple[Mapping[str, Tensor], Mapping[str, tuple[Tensor, Tensor]]]


def make(checkpoint: Checkpoint) -> TicoRuntime:
    """The runtime with the checkpoint's weights, as TICO leaves them before it quantizes.

    Raises:
        ConformanceError: TICO is not installed.
    """
    imported("tico", "tico")
    return TicoRuntime(checkpoint, StaticLayout(checkpoint.facts.default_max_seq))


class _TokenTaken(Exception):  # noqa: N818 - not an error: the runtime goes on to decode the token that it took
    pass


class TicoRuntime:
    """Driven through its own methods. What the contract asks for that they do not take is put in their place.

    A text without a picture has no static vision profile; its layout gets one of a single soft token, with which
    stages can be asked in isolation. The runtime's own run refuses such a prompt.
    """

    def __init__(self, checkpoint: Checkpoint, layout: StaticLayout) -> None:
        self.checkpoint, self.facts = checkpoint, checkpoint.facts
        self._runtimes: dict[StaticLayout, TicoRuntime] = {}
        self._build(layout)

    def _build(self, layout: StaticLayout) -> None:
        self.layout = layout
        self.on_tensor: OnTensor | None = None
        self.own = static_runtime(self.checkpoint, layout)
        self._runtimes[layout] = self
        self.reset()

    def for_layout(self, layout: StaticLayout) -> TicoRuntime:
        if layout not in self._runtimes:
            sibling = copy.copy(self)
            sibling._build(layout)
        return self._runtimes[layout]

    def reset(self) -> None:
        self.own.reset_cache()
        self.own.layer_caches = self.own._allocate_empty_cache(1, self.checkpoint.dtype)
        self._entering, self._leaving, self._valid_length = "", "prefill/", 0

    # --- the stages before the decoder -------------------------------------------------------------------------------

    def build_static_inputs(self, prompt: str, images: Sequence[Image.Image]) -> StaticInputs:
        """`build_static_inputs`, whose batch holds no padded ids with placeholders: those are padded here."""
        batch = self.own.build_static_inputs(prompt, list(images) or None)
        raw = batch["_raw_inputs"]["input_ids"]
        return StaticInputs(
            input_ids=pad_right(raw, self.layout.max_seq, self.facts.pad_token_id),
            llm_input_ids=batch["llm_input_ids"],
            attention_mask=batch["attention_mask"],
            valid_length=int(batch["valid_length"]),
            pixel_values=batch["pixel_values"].to(self.checkpoint.dtype),
            image_position_ids=batch["image_position_ids"],
            processor_output=batch,
        )

    @torch.no_grad()
    def token_embedding(self, llm_input_ids: Tensor) -> Tensor:
        embeds: Tensor = self.own.token_embedding(llm_input_ids)
        return embeds

    @torch.no_grad()
    def vision_prefill(self, pixel_values: Tensor, image_position_ids: Tensor) -> Tensor:
        with self._listening():
            visual: Tensor = self.own._get_or_create_vision_prefill(image_position_ids)(pixel_values)
        return visual

    @torch.no_grad()
    def mm_fusion(self, text_embeds: Tensor, visual_embeds: Tensor) -> Tensor:
        fused: Tensor = self.own.mm_fusion(text_embeds, visual_embeds)
        return fused

    def masks_and_rope(self, valid_length: int) -> MasksAndRope:
        rows = torch.arange(self.layout.max_seq)[None]
        return self._seen(self.own.build_prefill_masks_and_rope(rows, rows < valid_length))

    def _seen(self, positional: Positional) -> MasksAndRope:
        """Prefill's additive masks [B, 1, S, S] and tables, as the contract has them."""
        biases, rope = positional
        masks = {layer_type: bias[:, 0] == 0 for layer_type, bias in biases.items()}
        return MasksAndRope(masks, biases, {name: (cos, turned(sin)) for name, (cos, sin) in rope.items()})

    # --- prefill and decode ------------------------------------------------------------------------------------------

    def prefill(
        self,
        inputs: StaticInputs,
        fused_embeds: Tensor | None = None,
        masks_and_rope: MasksAndRope | None = None,
    ) -> Tensor:
        self.reset()
        with self._listening(), self._given(fused_embeds, masks_and_rope):
            logits: Tensor = self.own.prefill(self._batch(inputs))
        self._valid_length = inputs.valid_length
        return logits

    def _batch(self, inputs: StaticInputs) -> dict[str, Any]:
        """The dictionary that `build_static_inputs` returns."""
        pixel_values = torch.empty(0) if inputs.pixel_values is None else inputs.pixel_values
        return {
            "llm_input_ids": inputs.llm_input_ids,
            "pixel_values": pixel_values,
            "image_position_ids": inputs.image_position_ids,
            "attention_mask": inputs.attention_mask,
            "valid_length": torch.tensor([inputs.valid_length]),
            "_raw_inputs": {"input_ids": inputs.input_ids[:, : inputs.valid_length]},
        }

    @contextmanager
    def _given(self, fused_embeds: Tensor | None, positional: MasksAndRope | None) -> Iterator[None]:
        """Prefill computes both itself; in this context it finds those that it is given."""
        with Patch() as patch:
            if fused_embeds is not None:
                patch(self.own, "_get_or_create_vision_prefill", lambda positions: lambda pixel_values: None)
                patch(self.own.mm_fusion, "forward", lambda text_embeds, visual_embeds: fused_embeds)
            if positional is not None:
                rope = {name: (cos, turned(sin)) for name, (cos, sin) in positional.rope.items()}
                found = (positional.biases, rope)
                patch(self.own, "build_prefill_masks_and_rope", lambda input_ids, attention_mask: found)
            yield

    def load_state(self, key_values: Mapping[int, KeyValue], past_len: int) -> None:
        self.reset()
        for layer, (key, value) in key_values.items():
            cache = self.own.layer_caches[layer]
            if past_len > cache.past_k.shape[2]:
                raise LayoutError(f"at most {cache.past_k.shape[2]} rows of K/V", f"{past_len}", "Raise --max-seq.")
            cache.past_k[:, :, :past_len], cache.past_v[:, :, :past_len] = key, value
        self.own.past_len = self._valid_length = past_len

    def decode_one(self, token: int) -> Tensor:
        with self._listening():
            logits: Tensor = self.own.decode_one(torch.tensor([[token]]))
        return logits

    # --- generation --------------------------------------------------------------------------------------------------

    def select(self, logits: Tensor) -> tuple[int, StopReason | None]:
        """What `generate_greedy` takes of these logits, and whether it wants to decode it."""
        taken: list[int] = []

        def decode_one(ids: Tensor) -> Tensor:
            taken.append(int(ids))
            raise _TokenTaken

        batch = {"valid_length": torch.tensor([0]), "llm_input_ids": torch.empty(1, 0, dtype=torch.long)}
        with Patch() as patch, contextlib.redirect_stdout(io.StringIO()):
            patch(self.own, "prefill", lambda batch: logits)
            patch(self.own, "decode_one", decode_one)
            try:
                return int(self.own.generate_greedy(batch, 1)[0, -1]), StopReason.STOP_TOKEN
            except _TokenTaken:
                return taken[0], None

    def generate(self, inputs: StaticInputs, max_new_tokens: int) -> Generation:
        """`generate_greedy`, which says only ids: the reason is what its own stop token and their number say.

        It decodes every token that it takes but a stop token, the last one too, and prints each.
        """
        self.reset()
        self._valid_length = inputs.valid_length
        with self._listening(), contextlib.redirect_stdout(io.StringIO()):
            ids = self.own.generate_greedy(self._batch(inputs), max_new_tokens)[0].tolist()
        stopped = ids[-1] == self.own.text_config.eos_token_id
        return Generation(tuple(ids), StopReason.STOP_TOKEN if stopped else StopReason.MAX_NEW_TOKENS)

    # --- observation -------------------------------------------------------------------------------------------------

    @contextmanager
    def _listening(self) -> Iterator[None]:
        with spies() as spy:
            if self.on_tensor is not None:
                self._watch(spy)
            yield

    def _report(self, name: str, tensor: Tensor) -> None:
        if self.on_tensor is not None:
            self.on_tensor(name, tensor)

    def _watch(self, spy: Spies) -> None:
        own = self.own
        spy.before(own, "prefill", lambda batch: self._enter("", "prefill/"))
        spy.after(own, "prefill", self._on_logits)
        spy.before(own, "decode_one", self._before_decode)
        spy.after(own, "decode_one", self._on_logits)
        spy.after(
            own.token_embedding, "forward", lambda embeds, *_: self._report(self._entering + "text_embeds", embeds)
        )
        spy.after(own.mm_fusion, "forward", lambda fused, *_: self._report("fused_embeds", fused))
        spy.after(own, "build_prefill_masks_and_rope", lambda found, *_: self._on_positions(self._seen(found)))
        spy.after(own, "build_decode_masks_and_rope", self._on_decode_positions)
        spy.after(own, "_build_per_layer_inputs", self._on_per_layer_inputs)
        for layers in (own.prefill_layers, own.decode_layers):
            for i, layer in enumerate(layers):
                spy.after(layer, "forward", self._after_layer(i))
        spy.after(own, "_get_or_create_vision_prefill", lambda module, *_: self._watch_vision(spy, module))

    def _watch_vision(self, spy: Spies, module: Any) -> None:
        """The vision graph comes into being with the first picture."""
        if not hasattr(module, "vision_model"):  # what `_given` puts in its place
            return
        tower = self.own._wrapped_model.vision_tower.wrapped
        spy.after(tower.patch_embedder_export, "forward", lambda h, *_, **__: self._report("vision/patch_embeds", h))
        for i, layer in enumerate(tower.encoder.wrapped.layers):
            name = f"vision/layer/{i}/hidden"
            spy.after(layer, "forward", lambda hidden, *_, name=name, **__: self._report(name, hidden))
        spy.before(module.vision_projection, "forward", lambda soft: self._report("vision/soft_tokens", soft))
        spy.after(module, "forward", lambda visual, *_: self._report("visual_embeds", visual))

    def _enter(self, entering: str, leaving: str) -> None:
        self._entering, self._leaving = entering, leaving

    def _before_decode(self, ids: Tensor) -> None:
        prefix = f"decode/{self.own.past_len - self._valid_length}/"
        self._enter(prefix, prefix)
        self._report(prefix + "token", ids)
        self._report(prefix + "position", torch.tensor([self.own.past_len]))

    def _on_logits(self, logits: Tensor, *_: Any) -> None:
        for layer in self.facts.storing_layers:
            cache = self.own.layer_caches[layer]
            for part, rows in (("key", cache.past_k), ("value", cache.past_v)):
                whole = torch.nn.functional.pad(rows, (0, 0, 0, 1))
                self._report(f"{self._leaving}cache/{layer}/{part}", whole)
        self._report(self._leaving + "logits", logits)

    def _on_decode_positions(self, positional: Positional, *_: Any, **__: Any) -> None:
        biases = {name: by_position(bias, self.own.past_len)[:, None] for name, bias in positional[0].items()}
        self._on_positions(self._seen((biases, positional[1])))

    def _on_positions(self, positional: MasksAndRope) -> None:
        for layer_type in sorted(set(self.facts.layer_types)):
            self._report(f"{self._entering}mask/{layer_type}", positional.masks[layer_type])
            self._report(f"{self._entering}mask_bias/{layer_type}", positional.biases[layer_type])
            for part, table in zip(("cos", "sin"), positional.rope[layer_type], strict=True):
                self._report(f"{self._entering}rope/{layer_type}/{part}", table)

    def _on_per_layer_inputs(self, inputs: Tensor | None, *_: Any) -> None:
        if inputs is not None:
            self._report(self._entering + "per_layer_inputs", inputs)

    def _after_layer(self, i: int) -> Any:
        def seen(found: Any, *_: Any, **__: Any) -> None:
            hidden, *key_value = found if isinstance(found, tuple) else (found,)
            self._report(f"{self._leaving}layer/{i}/hidden", hidden)
            if i in self.facts.storing_layers:
                for part, rows in zip(("key", "value"), key_value, strict=True):
                    self._report(f"{self._leaving}layer/{i}/{part}", rows)

        return seen


def static_runtime(checkpoint: Checkpoint, layout: StaticLayout) -> Any:
    """TICO's own runtime of a copy of the model, which it wraps in place."""
    debug = imported(f"{_PLACE}.recipes.debug.static_gemma4_runtime", "tico")
    profile = vision_profile(checkpoint, layout)
    own_layout = debug.StaticGemma4Layout(layout.max_seq, profile.visual_start_idx, profile.num_visual_tokens)
    model = copy.deepcopy(checkpoint.model)
    return debug.StaticGemma4Runtime(model, checkpoint.processor, layout=own_layout, vision_profile=profile)


def vision_profile(checkpoint: Checkpoint, layout: StaticLayout) -> Any:
    """A profile of the layout's picture, entered into TICO's registry, where it looks profiles up by name."""
    profiles = imported(f"{_PLACE}.wrapq.wrappers.gemma4.static_vision_profile", "tico")
    vision: Any = checkpoint.model.config.vision_config
    kernel = vision.pooling_kernel_size
    columns, rows = layout.patch_grid or (kernel, kernel)
    profile = profiles.Gemma4StaticVisionProfile(
        name=f"{columns}x{rows}-{layout.visual_start_idx}-{vision.patch_size}-{checkpoint.facts.max_soft_tokens}",
        visual_start_idx=layout.visual_start_idx,
        num_visual_tokens=layout.num_visual_tokens or 1,
        max_soft_tokens=checkpoint.facts.max_soft_tokens,
        patch_grid_height=rows,
        patch_grid_width=columns,
        patch_size=vision.patch_size,
        pooling_kernel_size=kernel,
        tokenizer_add_bos_token=bool(getattr(checkpoint.processor.tokenizer, "add_bos_token", False)),
    )
    profiles._PROFILE_REGISTRY[profile.name] = profile
    return profile


def turned(sin: Tensor) -> Tensor:
    """Sines with the first half of each head negated; twice is nothing."""
    first, second = sin.chunk(2, dim=-1)
    return torch.cat([-first, second], dim=-1)


def by_position(bias: Tensor, past_len: int) -> Tensor:
    """A mask of decoding [B, 1, S], whose last slot is the current token's, with that at its position `past_len`."""
    moved = bias.clone()
    moved[..., past_len], moved[..., -1] = bias[..., -1], bias[..., past_len]
    return moved
