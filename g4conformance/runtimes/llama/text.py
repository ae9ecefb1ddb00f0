"""A text prompt as users of llama-cpp-python run one: `Llama.tokenize`, `eval` and `create_completion`."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import llama_cpp
import numpy as np
from llama_cpp import Llama
from llama_cpp import _internals as internals
from llama_cpp import llama_cpp as native

from g4conformance.foreign import Request
from g4conformance.runtimes.llama.instead import Interventions
from g4conformance.runtimes.llama.listening import Listener
from g4conformance.runtimes.llama.names import (
    Array,
    Trace,
    inputs_trace,
    joined,
    pass_trace,
    prefill_trace,
    step_trace,
    wanted,
)

GREEDY = {"temperature": 0.0, "repeat_penalty": 1.0}
_STOP_TOKEN, _MAX_NEW_TOKENS, _MAX_SEQ = range(3)


class TextRuntime:
    """llama.cpp with one model, listened to.

    Attributes:
        llama: what users have. Its defaults are left as they are, K and V in float16 among them.
    """

    def __init__(self, model: str, rows: int, instead: Sequence[str] = ()) -> None:
        """
        Args:
            model: a GGUF file.
            rows: of the context that is asked for; llama.cpp rounds it up.
            instead: names of interventions.
        """
        self.listener = Listener("embd", wanted, Interventions(instead))
        self._hear = llama_cpp.ggml_backend_sched_eval_callback(self.listener.hear)
        kind = llama_cpp.GGML_TYPE_F32 if "kv-f32" in instead else None
        with calling_back(native, "llama_context_default_params", self._hear):
            self.llama = Llama(model, n_ctx=rows, type_k=kind, type_v=kind, verbose=False)

    def answer(self, request: Request) -> Trace:
        """The whole trace of a text prompt, or of a case of ids."""
        rows = request.valid_length
        ids = request.inputs["input_ids"][0, :rows].tolist()
        kinds, pad = request.facts["layer_types"], request.facts["pad_token_id"]
        trace: Trace = {}
        if request.prompt is not None:
            ids = self.tokenized(request.prompt)
            trace |= inputs_trace(ids, request.max_seq, pad)
        with self.listener.listening() as passes:
            self.llama.eval(ids)
        trace |= prefill_trace(joined([pass_trace(heard, kinds) for heard in passes]), request.max_seq, pad)
        trace |= self.generated(ids, request.gen_steps)
        trace |= self.decoded(len(ids), request.decode_tokens, kinds)
        return trace | self.selected(request.inputs["generation/select/logits"])

    def tokenized(self, prompt: str) -> list[int]:
        """As a chat's rendered prompt, which says itself where the beginning of the sequence is."""
        ids: list[int] = self.llama.tokenize(prompt.encode(), add_bos=False, special=True)
        return ids

    def generated(self, ids: Sequence[int], steps: int) -> Trace:
        """A greedy completion of a prompt that was just evaluated: its ids, and why it ended."""
        if len(ids) >= self.llama.n_ctx():
            return {}  # it is refused
        with yielded(self.llama) as new:
            told = self.llama.create_completion(list(ids), max_tokens=steps, **GREEDY)["choices"][0]["finish_reason"]
        return {
            "generation/token_ids": np.array([*ids, *new]),
            "generation/stop_reason": stop_reason(told, len(new), steps),
        }

    def decoded(self, rows: int, tokens: Sequence[int], kinds: Sequence[str]) -> Trace:
        """One step for each token, at the end of a prompt of `rows` rows; what came after the prompt is forgotten."""
        self.llama.n_tokens = rows
        trace: Trace = {}
        for step, token in enumerate(tokens):
            with self.listener.listening() as passes:
                self.llama.eval([token])
            trace |= step_trace(pass_trace(passes[0], kinds), step)
        return trace

    def selected(self, logits: Array) -> Trace:
        """What its greedy sampler takes of each row of logits [n, vocab], and what it takes for an end."""
        sampler = internals.LlamaSampler()
        sampler.add_greedy()
        candidates = internals.LlamaTokenDataArray(n_vocab=logits.shape[1])
        chosen = []
        for row in logits:
            candidates.copy_logits(row)
            llama_cpp.llama_sampler_apply(sampler.sampler, ctypes.byref(candidates.candidates))
            chosen.append(int(candidates.candidates_data.id[candidates.candidates.selected]))
        vocab = llama_cpp.llama_model_get_vocab(self.llama.model)
        stops = [llama_cpp.llama_vocab_is_eog(vocab, token) for token in chosen]
        return {"generation/select/token_ids": np.array(chosen), "generation/select/stops": np.array(stops)}


def stop_reason(finish_reason: str, new: int, steps: int) -> Array:
    """The contract's, of a completion of `new` tokens of at most `steps`: llama.cpp calls both limits "length"."""
    return np.array(_STOP_TOKEN if finish_reason == "stop" else _MAX_NEW_TOKENS if new == steps else _MAX_SEQ)


@contextmanager
def calling_back(module: Any, defaults: str, hear: Any, **values: Any) -> Iterator[None]:
    """What `module.defaults()` returns meanwhile has `hear` for its callback: classes have no argument for it."""
    original = getattr(module, defaults)

    def parameters() -> Any:
        found = original()
        for name, value in {"cb_eval": hear, **values}.items():
            setattr(found, name, value)
        return found

    setattr(module, defaults, parameters)
    try:
        yield
    finally:
        setattr(module, defaults, original)


@contextmanager
def yielded(llama: Llama, before: Callable[[], object] = lambda: None) -> Iterator[list[int]]:
    """The tokens that `llama.generate` yields meanwhile: a completion tells only their text.

    Args:
        before: called as a generation begins.
    """
    tokens: list[int] = []
    generate = llama.generate

    def generated(*args: Any, **kwargs: Any) -> Iterator[int]:
        before()
        for token in generate(*args, **kwargs):
            tokens.append(token)
            yield token

    llama.generate = generated
    try:
        yield tokens
    finally:
        del llama.generate
