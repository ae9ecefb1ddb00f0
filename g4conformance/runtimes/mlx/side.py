"""mlx-vlm answers a request: its processor, one run of its `generate_step`, one of its `generate`."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_vlm import generate, load
from mlx_vlm.generate import generate_step
from mlx_vlm.models.cache import make_prompt_cache
from mlx_vlm.sample_utils import make_sampler
from mlx_vlm.utils import prepare_inputs, should_add_special_tokens

from g4conformance.foreign import STOP_REASONS, Request
from g4conformance.runtimes.mlx.instead import (
    GIVEN_PIXELS,
    PAD_AT_PICTURES,
    PICTURES,
    given_pixels,
    pad_looked_up_at_pictures,
)
from g4conformance.runtimes.mlx.layouts import Array, padded
from g4conformance.runtimes.mlx.watch import Rotated, Watch, spied


class Side:
    """Answers requests with what mlx-vlm yields of `checkpoint`, or with what it would yield.

    Args:
        instead: names of `INSTEAD`.
    """

    def __init__(self, checkpoint: Path, instead: frozenset[str] = frozenset()) -> None:
        self.instead = instead
        self.model, self.processor = load(str(checkpoint))

    def __call__(self, request: Request) -> dict[str, Array]:
        self.model.set_dtype(getattr(mx, request.manifest["provenance"]["dtype"]))
        inputs = self._prepared(request)
        found = self._run(request, dict(inputs)) | self._generated(request, inputs) | self._selected(request)
        if request.prompt is not None:
            found |= self._shown(inputs)
        return self._in_static_buffers(request, found)

    # --- what is asked of it -----------------------------------------------------------------------------------------

    def _prepared(self, request: Request) -> dict[str, Any]:
        """What mlx-vlm's own `stream_generate` has prepared of prompt and pictures; a case of ids is given as such."""
        if request.prompt is None:
            return {"input_ids": mx.array(request.inputs["input_ids"][:, : request.valid_length])}
        inputs = prepare_inputs(
            self.processor,
            images=self._pictures(request),
            prompts=request.prompt,
            add_special_tokens=should_add_special_tokens(self.model.config.model_type, self.processor),
        )
        return inputs | given_pixels(request) if GIVEN_PIXELS in self.instead else inputs

    def _pictures(self, request: Request) -> list[Any] | None:
        """Their paths, as of the command line's `--image`."""
        hand_over = next((PICTURES[name] for name in PICTURES if name in self.instead), str)
        return [hand_over(path) for path in request.images] or None

    def _run(self, request: Request, inputs: dict[str, Any]) -> dict[str, Array]:
        """Prefill and the decode steps, by the generation that users call; only the choice of tokens is ours."""
        caches = make_prompt_cache(self.model.language_model)
        watch, tokens = Watch(self.model, caches, as_numpy), iter([*request.decode_tokens, 0])

        def forced(_: Any) -> Any:
            watch.next_token()
            return mx.array([next(tokens)])

        ids, pixels, mask = (inputs.pop(name, None) for name in ("input_ids", "pixel_values", "attention_mask"))
        last = len(self.model.layers) - 1
        with ExitStack() as context:
            context.enter_context(spied(watch.points()))
            if PAD_AT_PICTURES in self.instead:
                context.enter_context(pad_looked_up_at_pictures(self.model, request.facts["pad_token_id"]))
            for _ in generate_step(
                ids,
                self.model,
                pixels,
                mask,
                max_tokens=len(request.decode_tokens),
                sampler=forced,
                prompt_cache=caches,
                capture_layer_ids=[last],  # every row goes through every layer; else rows that nothing needs do not
                **inputs,
            ):
                pass
        return watch.tensors(unit_rotated)

    def _generated(self, request: Request, inputs: dict[str, Any]) -> dict[str, Array]:
        """It knows no buffers that fill up, so it is asked for no more than they hold."""
        room = request.max_seq - request.valid_length + 1  # the last token is chosen, but never fed
        asked = min(request.gen_steps, room)
        given = inputs if request.prompt is None or GIVEN_PIXELS in self.instead else {}
        result = generate(
            self.model,
            self.processor,
            request.prompt or "",
            self._pictures(request),
            max_tokens=asked,
            temperature=0.0,
            **given,
        )
        if result.finish_reason == "stop":
            reason = "stop_token"
        else:
            reason = "max_new_tokens" if asked == request.gen_steps else "max_seq"
        return {
            "generation/token_ids": np.array([*inputs["input_ids"][0].tolist(), *result.token_ids]),
            "generation/stop_reason": np.array(STOP_REASONS.index(reason)),
        }

    def _selected(self, request: Request) -> dict[str, Array]:
        """The sampler and the stop set that `generate` uses, on scripted logits."""
        logits = mx.array(request.inputs["generation/select/logits"])
        tokens = make_sampler(temp=0.0)(logits - mx.logsumexp(logits, axis=-1, keepdims=True))
        stops = self.processor.tokenizer.stopping_criteria
        stops.reset(self.model.config.eos_token_id)
        return {
            "generation/select/token_ids": as_numpy(tokens),
            "generation/select/stops": np.array([stops(token) for token in tokens.tolist()]),
        }

    def _shown(self, inputs: dict[str, Any]) -> dict[str, Array]:
        """What it made of the prompt; pictures are seen where they enter the vision tower."""
        ids = as_numpy(inputs["input_ids"])
        return {
            "input_ids": ids,
            "attention_mask": as_numpy(inputs["attention_mask"]).astype(bool),
            "valid_length": np.array([ids.shape[1]]),
        }

    # --- how it is shown ---------------------------------------------------------------------------------------------

    def _in_static_buffers(self, request: Request, found: dict[str, Array]) -> dict[str, Array]:
        """With rows of padding, which mlx-vlm does not have: its own embedding of the pad id and of an empty patch."""
        pad = request.facts["pad_token_id"]
        embed = as_numpy(self.model.get_input_embeddings(mx.array([[pad]])).inputs_embeds)
        for name, fill in (
            ("input_ids", pad),
            ("llm_input_ids", pad),
            ("attention_mask", False),
            ("text_embeds", embed),
            ("fused_embeds", embed),
        ):
            if name in found:
                found[name] = padded(found[name], request.max_seq, 1, fill)
        for name in [name for name in found if "mask/" in name]:
            found[name] = padded(found[name], request.max_seq, 2, False)
            if not name.startswith("decode/"):
                found[name] = padded(found[name], request.max_seq, 1, False)
        if request.images:
            self._with_empty_patches(found, request.inputs["pixel_values"].shape[1])
        return found

    def _with_empty_patches(self, found: dict[str, Array], count: int) -> None:
        empty = mx.zeros((1, 1, patch_width(self.model))), mx.full((1, 1, 2), -1), mx.array([[True]])
        embed = as_numpy(self.model.vision_tower.patch_embedder.embed_patches(*empty))
        fills = {"pixel_values": 0, "image_position_ids": -1, "vision/patch_embeds": embed}
        fills |= {name: 0 for name in found if name.startswith("vision/layer/")}
        for name, fill in fills.items():
            found[name] = padded(found[name], count, 1, fill)


def patch_width(model: Any) -> int:
    """Numbers in one patch."""
    return 3 * int(model.vision_tower.patch_size) ** 2


def unit_rotated(rope: Any, head_dim: int, how: Rotated) -> Any:
    """[1, 1, rows, head_dim]: what the rotation makes of ones in a head's first half, and zeros in the other."""
    shape = (1, 1, how.rows, head_dim // 2)
    return rope(mx.concatenate([mx.ones(shape, how.dtype), mx.zeros(shape, how.dtype)], axis=-1), offset=how.offset)


def as_numpy(array: Any) -> Array:
    """In numpy's dtypes, without loss: bfloat16 as float32, and integers, ids in 32 bits among them, as int64."""
    if array.dtype == mx.bfloat16:
        return np.array(array.astype(mx.float32))
    plain = np.array(array)
    return plain.astype(np.int64) if plain.dtype.kind in "iu" else plain
