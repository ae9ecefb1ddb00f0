"""A prompt with a picture as users of llama-cpp-python run one: its chat handler for Gemma 4, over mtmd."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
from llama_cpp import Llama, mtmd_cpp
from llama_cpp import llama_cpp as native
from llama_cpp.llama_chat_format import Gemma4ChatHandler

from g4conformance.foreign import Request
from g4conformance.runtimes.llama.instead import Interventions
from g4conformance.runtimes.llama.listening import Listener
from g4conformance.runtimes.llama.names import Array, Trace, inputs_trace, joined, pass_trace, prefill_trace
from g4conformance.runtimes.llama.text import GREEDY, TextRuntime, calling_back, stop_reason, yielded
from g4conformance.runtimes.llama.vision import pixels_of, vision_trace, wanted_of_vision

_MARKER, _BEGIN = "<|image|>", "<bos>"
_PADDING = 0  # the row of per-layer embeddings that llama.cpp takes for a picture's rows


class PictureRuntime(TextRuntime):
    """llama.cpp with a model and its vision tower."""

    def __init__(self, model: str, mmproj: str, rows: int, instead: Sequence[str] = ()) -> None:
        super().__init__(model, rows, instead)
        self.instead = instead
        self.seer = Listener("inp_raw_scaled", wanted_of_vision, Interventions([i for i in instead if i != "causal"]))
        self._see = native.ggml_backend_sched_eval_callback(self.seer.hear)
        self.handler = _Rendered(mmproj, verbose=False)

    def answer_picture(self, request: Request) -> Trace:
        """The whole trace of a prompt with one picture."""
        kinds, pad = request.facts["layer_types"], request.facts["pad_token_id"]
        limits = {"image_min_tokens": 1, "image_max_tokens": request.facts["max_soft_tokens"]}
        if "pixels" in self.instead:
            self.handler.pixels = pixels_of(request.inputs["pixel_values"][0], request.inputs["image_position_ids"][0])
        with (
            calling_back(
                mtmd_cpp,
                "mtmd_context_params_default",
                self._see,
                **limits if "image-tokens" in self.instead else {},
            ),
            self.seer.listening() as seen,
            self.listener.listening() as heard,
            yielded(self.llama, before=self.listener.stop) as new,
        ):
            completion = self.handler.complete(self.llama, request, max_tokens=request.gen_steps, **GREEDY)
        passes = [pass_trace(one, kinds) for one in heard]
        ids = [_ids(one, request.facts["image_token_id"]) for one in passes]
        for one in passes:
            one.setdefault("token", np.full((1, len(one["position"])), _PADDING))
            one["fused_embeds"] = one.pop("text_embeds")
        prompt = np.concatenate(ids).tolist()
        trace = inputs_trace(prompt, request.max_seq, pad)
        trace |= vision_trace(seen[-1], request.inputs["image_position_ids"].shape[1])
        trace |= prefill_trace(joined(passes), request.max_seq, pad)
        told = completion["choices"][0]["finish_reason"]
        trace["generation/token_ids"] = np.array([*prompt, *new])
        trace["generation/stop_reason"] = stop_reason(told, len(new), request.gen_steps)
        trace |= self.decoded(len(prompt), request.decode_tokens, kinds)
        return trace | self.selected(request.inputs["generation/select/logits"])


def _ids(one: Trace, image: int) -> Any:
    """Of a pass over text, what was looked up; of one over a picture, the placeholder."""
    return one["token"][0] if "token" in one else np.full(len(one["position"]), image)


class _Rendered(Gemma4ChatHandler):  # type: ignore[misc]  # llama_cpp is not installed where this is type-checked
    """The handler of chats, given a chat that is rendered already.

    Attributes:
        pixels: uint8 [H, W, 3], in place of the picture's own if there are any.
    """

    pixels: Array | None = None

    def complete(self, llama: Llama, request: Request, **how: Any) -> Any:
        """It adds the beginning of the sequence itself, so that of the prompt is taken away."""
        assert request.prompt is not None
        marker = mtmd_cpp.mtmd_default_marker().decode()
        pictures = [{"type": "image_url", "image_url": {"url": path.resolve().as_uri()}} for path in request.images]
        messages = [{"role": "user", "content": pictures}]
        rendered = request.prompt.removeprefix(_BEGIN).replace(_MARKER, marker)
        return self(llama=llama, messages=messages, rendered=rendered, **how)

    def _create_bitmap_from_bytes(self, image_bytes: bytes) -> Any:
        if self.pixels is None:
            return super()._create_bitmap_from_bytes(image_bytes)
        height, width, _ = self.pixels.shape
        data = (ctypes.c_uint8 * self.pixels.size).from_buffer_copy(self.pixels.tobytes())
        return mtmd_cpp.mtmd_bitmap_init(width, height, data)

    def _get_chat_template(self, llama: Llama) -> str:
        return "{{ rendered }}"
