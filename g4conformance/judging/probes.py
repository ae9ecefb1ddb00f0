"""Probes of self-consistency: asks a runtime one thing in several ways, and records what it yields as `self/<probe>/`.

The order matters: a probe of what an earlier request leaves behind follows one that leaves something.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor

from g4conformance.checks.run import NotObserved
from g4conformance.judging.driving import accepted
from g4conformance.judging.observation import (
    Observation,
    errors_of,
    listening,
    method_of,
    record_generation,
    record_selection,
)
from g4conformance.probe_requests import (
    ProbeRequests,
    begins_with_text,
    cache_names,
    ends_in_text,
    generated_lengths,
    hidden_name,
    layers_of_reach,
    other_layouts,
    row_names,
)
from g4conformance.runtime.contract import Runtime, StaticInputs
from g4conformance.runtime.layout import StaticLayout
from g4conformance.trace import Recorder


def run_probes(runtime: Runtime, requests: ProbeRequests, gen_steps: int, observation: Observation) -> None:
    """Runs every probe that the case has room for.

    What one raises or lacks is noted under `self/<probe>`; what it yielded before is kept, and the next one follows.
    """
    _Probes(runtime, requests, gen_steps, observation).run()


class _ProbeRecorder(Recorder):
    """Keeps what the probe asks for; of what the runtime reports meanwhile, only what is wanted."""

    def __init__(self, wanted: Collection[str]) -> None:
        super().__init__()
        self.wanted = wanted

    def __call__(self, name: str, tensor: Tensor) -> None:
        if name in self.wanted:
            self.keep(name, tensor)

    def keep(self, name: str, tensor: Tensor) -> None:
        super().__call__(name, tensor)


class _Probes:
    """The probes of one case."""

    def __init__(self, runtime: Runtime, requests: ProbeRequests, gen_steps: int, observation: Observation) -> None:
        self.runtime, self.requests, self.gen_steps, self.observation = runtime, requests, gen_steps, observation
        self.layout, self.facts, self.length = requests.layout, requests.facts, requests.valid_length
        self.prompt, self.tokens = requests.prompt(), requests.tokens
        self.rows, self.cache = row_names(self.facts), cache_names(self.facts, "prefill/")

    def run(self) -> None:
        self._probe("base", self._serve, self.prompt, wanted=[*self.rows, *self.cache])
        self._probe("again", self._serve, self.prompt)
        self._what_padding_holds()
        self._what_a_request_leaves_behind()
        self._other_tokens()
        for probe, layout in other_layouts(self.layout, self.length, self.facts).items():
            self._probe(probe, self._serve_for_layout, layout)
        for length in generated_lengths(self.gen_steps):
            self._probe("generate", self._generate, length)
        self._probe("select", self._select)

    def _probe(self, probe: str, ask: Callable[..., None], *args: Any, wanted: Collection[str] = ()) -> None:
        record = _ProbeRecorder(wanted)
        with listening(self.runtime, record), errors_of(self.observation, f"self/{probe}"):
            ask(record, *args)
        self.observation.accumulated |= {f"self/{probe}/{name}": tensor for name, tensor in record.tensors.items()}

    # --- groups of probes ---------------------------------------------------------------------------------------

    def _what_padding_holds(self) -> None:
        if self.layout.max_seq > self.length:
            self._probe("nan_padding", self._nan_padding, wanted=self.rows)
            self._probe("other_padding", self._prefill, self.requests.other_padding(), wanted=self.rows)

    def _what_a_request_leaves_behind(self) -> None:
        """The case's own request after a longer one, after a reset, and after both."""
        first_cache = cache_names(self.facts, "decode/0/")
        self._probe("reset_after_prompt", self._reset, wanted=first_cache)
        self._probe("longer", self._serve_longer)
        self._probe("after_longer", self._serve, self.prompt, wanted=self.cache)
        self._probe("longer", self._serve_longer)
        self._probe("reset_after_longer", self._reset, wanted=first_cache)
        self._probe("after_reset", self._serve, self.prompt, wanted=self.cache)

    def _other_tokens(self) -> None:
        reached = [hidden_name(layer) for layer in layers_of_reach(self.facts)]
        if begins_with_text(self.layout):
            self._probe("first_exchanged", self._prefill, self.requests.first_exchanged(), wanted=reached)
        self._probe("loaded", self._load)
        if ends_in_text(self.layout, self.length):
            self._probe("last_exchanged", self._prefill, self.requests.last_exchanged(), wanted=self.rows)
            self._probe("shortened", self._prefill_and_decode_the_last)

    # --- probes -------------------------------------------------------------------------------------------------

    def _prefill(self, record: _ProbeRecorder, inputs: StaticInputs) -> None:
        record.keep("prefill/logits", self.runtime.prefill(inputs))

    def _decode(self, record: _ProbeRecorder, runtime: Runtime) -> None:
        for step, token in enumerate(self.tokens):
            record.keep(f"decode/{step}/logits", method_of(runtime, "decode_one")(token))

    def _serve(self, record: _ProbeRecorder, inputs: StaticInputs) -> None:
        self._prefill(record, inputs)
        self._decode(record, self.runtime)

    def _serve_longer(self, record: _ProbeRecorder) -> None:
        """Leaves something behind; of interest is only that its logits are others."""
        self._prefill(record, self.requests.longer())
        self._decode(_ProbeRecorder(()), self.runtime)

    def _serve_for_layout(self, record: _ProbeRecorder, layout: StaticLayout) -> None:
        runtime: Runtime = method_of(self.runtime, "for_layout")(layout)
        record.keep("prefill/logits", runtime.prefill(self.requests.prompt(layout)))
        self._decode(record, runtime)

    def _prefill_and_decode_the_last(self, record: _ProbeRecorder) -> None:
        self.runtime.prefill(self.requests.shortened())
        record.keep("decode/0/logits", method_of(self.runtime, "decode_one")(self.requests.ids[-1]))

    def _nan_padding(self, record: _ProbeRecorder) -> None:
        embeds = self._fused_embeds().clone()
        embeds[:, self.length :] = torch.nan
        if accepted(self.runtime.prefill, 2) < 2:
            raise NotObserved("prefill's fused_embeds")
        record.keep("prefill/logits", self.runtime.prefill(self.prompt, embeds))

    def _fused_embeds(self) -> Tensor:
        """What the runtime's own stages make of the prompt: [B, S, H]."""
        embeds: Tensor = method_of(self.runtime, "token_embedding")(self.prompt.llm_input_ids)
        if self.prompt.pixel_values is None:
            return embeds
        vision, fuse = method_of(self.runtime, "vision_prefill"), method_of(self.runtime, "mm_fusion")
        fused: Tensor = fuse(embeds, vision(self.prompt.pixel_values, self.prompt.image_position_ids))
        return fused

    def _reset(self, record: _ProbeRecorder) -> None:
        method_of(self.runtime, "reset")()
        record.keep("decode/0/logits", method_of(self.runtime, "decode_one")(self.requests.ids[0]))

    def _load(self, record: _ProbeRecorder) -> None:
        """Loads the K/V that the prompt's first run yielded."""
        load = method_of(self.runtime, "load_state")
        key_values = {i: (self._base_rows(i, "key"), self._base_rows(i, "value")) for i in self.facts.storing_layers}
        load(key_values, self.length)
        self._decode(record, self.runtime)

    def _base_rows(self, layer: int, part: str) -> Tensor:
        name = f"prefill/layer/{layer}/{part}"
        if f"self/base/{name}" not in self.observation.accumulated:
            raise NotObserved(name)
        return self.observation.accumulated[f"self/base/{name}"][:, :, : self.length]

    def _generate(self, record: _ProbeRecorder, length: int) -> None:
        generation = method_of(self.runtime, "generate")(self.prompt, length)
        record_generation(record.keep, f"{length}/", generation)

    def _select(self, record: _ProbeRecorder) -> None:
        favoured = torch.tensor(self.requests.favoured)
        rows = torch.nn.functional.one_hot(favoured, self.facts.vocab_size).to(self.requests.dtype)
        record.keep("favoured", favoured)
        record_selection(record.keep, "", self.runtime, rows)
