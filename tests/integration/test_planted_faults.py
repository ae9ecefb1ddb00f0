"""Faults put into the shipped runtime by hand: each must turn its own stage red, and only what is downstream of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from g4conformance.checkpoints.checkpoint import Checkpoint, load_checkpoint
from g4conformance.checks import CHECKS
from g4conformance.fixtures import bundled_checkpoint
from g4conformance.judging.verdict import Status, Verdict
from g4conformance.runtime import static
from g4conformance.runtime.contract import Generation, MasksAndRope
from g4conformance.runtime.layout import StaticLayout
from g4conformance.runtime.static import StaticGemma4Runtime
from g4conformance.session import ConformanceSession, RunOptions
from g4conformance.stages import Stage, upstream

from . import planted_self_consistency  # noqa: F401 - registers its faults
from .planting import FAULTS, Planted, planted

pytestmark = pytest.mark.selftest


def text_model(runtime: StaticGemma4Runtime) -> Any:
    return runtime.model.model.language_model


def rescaled(graph: Callable[..., Tensor], factor: float) -> Callable[..., Tensor]:
    return lambda *args: graph(*args) * factor


# --- build_static_inputs --------------------------------------------------------------------------------------------


@planted("image-first", "G4-INPUTS-02")
def image_id_left_in_llm_ids(runtime: StaticGemma4Runtime, patch: pytest.MonkeyPatch) -> None:
    runtime.facts = replace(runtime.facts, placeholder_ids=frozenset())


@planted("image-wide", "G4-INPUTS-06")
def padding_patches_at_the_origin(runtime: StaticGemma4Runtime, patch: pytest.MonkeyPatch) -> None:
    build = runtime.build_static_inputs

    def built(prompt: str, images: Any) -> Any:
        inputs = build(prompt, images)
        return replace(inputs, image_position_ids=inputs.image_position_ids.clamp(min=0))

    patch.setattr(runtime, "build_static_inputs", built)


@planted("text-only", "G4-INPUTS-03")
def beginning_of_sequence_missing(runtime: StaticGemma4Runtime, patch: pytest.MonkeyPatch) -> None:
    build = runtime.build_static_inputs
    patch.setattr(runtime, "build_static_inputs", lambda prompt, images: build(prompt.removeprefix("<bos>"), images))


# --- token_embedding ------------------------------------------------------------------------------------------------


@planted("text-only", "G4-EMBED-01")
def embedding_not_scaled(runtime: StaticGemma4Runtime, patch: pytest.MonkeyPatch) -> None:
    runtime.embedding = rescaled(runtime.embedding, runtime.checkpoint.text_config.hidden_size**-0.5)


@planted("image-first", "G4-EMBED-02")
def pad_row_is_zero(runtime: StaticGemma4Runtime, patch: pytest.MonkeyPatch) -> None:
    embed = runtime.embedding
    runtime.embedding = lambda ids: embed(ids) * (ids != runtime.facts.pad_token_id)[..., None]


# --- vision_prefill -------------------------------------------------------------------------------------------------


@planted("image-tall", "G4-VISION-03")
def soft_tokens_not_scaled(runtime: StaticGemma4Runtime, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(runtime.model.model.vision_tower.pooler, "root_hidden_size", 1.0)


@planted("image-wide", "G4-VISION-01")
def position_table_axes_swapped(runtime: StaticGemma4Runtime, patch: pytest.MonkeyPatch) -> None:
    embedder = runtime.model.model.vision_tower.patch_embedder
    embedder.position_embedding_table = torch.nn.Parameter(embedder.position_embedding_table.flip(0))


@planted("image-middle", "G4-VISION-02")
def one_clip_bound_dropped(runtime: StaticGemma4Runtime, patch: pytest.MonkeyPatch) -> None:
    runtime.model.model.vision_tower.encoder.layers[1].mlp.down_proj.output_max = torch.tensor(torch.inf)


@planted("image-wide", "G4-VISION-02")
def padding_patches_seen(runtime: StaticGemma4Runtime, patch: pytest.MonkeyPatch) -> None:
    tower = static.StaticVisionTower

    def build(*args: Any) -> Any:
        built = tower(*args)
        for layer in built.layers:
            layer.bias = torch.zeros_like(layer.bias)
        return built

    patch.setattr(static, "StaticVisionTower", build)


# --- mm_fusion ------------------------------------------------------------------------------------------------------


@planted("image-middle", "G4-FUSION-01")
def slot_shifted(runtime: StaticGemma4Runtime, patch: pytest.MonkeyPatch) -> None:
    runtime.fusion.start += 1
    runtime.fusion.end += 1


@planted("image-middle", "G4-FUSION-01")
def soft_tokens_reversed(runtime: StaticGemma4Runtime, patch: pytest.MonkeyPatch) -> None:
    fuse = runtime.fusion
    runtime.fusion = lambda text, visual: fuse(text, visual.flip(0))


# --- masks_and_rope -------------------------------------------------------------------------------------------------


@planted("window+1", "G4-MASK-01")
def window_admits_one_more(runtime: StaticGemma4Runtime, patch: pytest.MonkeyPatch) -> None:
    runtime.facts = replace(runtime.facts, sliding_window=runtime.facts.sliding_window + 1)


@planted("text-only", "G4-MASK-02")
def padding_keys_not_masked(runtime: StaticGemma4Runtime, patch: pytest.MonkeyPatch) -> None:
    build = runtime._positional
    patch.setattr(runtime, "_positional", lambda p, count, block: build(p, runtime.layout.max_seq, block))


@planted("text-only", "G4-MASK-03")
def soft_mask_fill(runtime: StaticGemma4Runtime, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(static, "mask_bias", lambda mask, dtype: (~mask).to(dtype)[:, None] * -120.0)


@planted("text-only", "G4-ROPE-01")
def layer_types_swap_tables(runtime: StaticGemma4Runtime, patch: pytest.MonkeyPatch) -> None:
    rotary = runtime.rotary
    rotary.sliding_attention_inv_freq = rotary.sliding_attention_inv_freq * 0.999


@planted("window-1", "G4-ROPE-01")
def positions_start_at_one(runtime: StaticGemma4Runtime, patch: pytest.MonkeyPatch) -> None:
    build = runtime._positional

    def shifted(positions: Tensor, count: int, block: range) -> MasksAndRope:
        return replace(build(positions, count, block), rope=build(positions + 1, count, block).rope)

    patch.setattr(runtime, "_positional", shifted)


# --- prefill --------------------------------------------------------------------------------------------------------


@planted("text-only", "G4-PREFILL-03")
def layer_scalar_dropped(runtime: StaticGemma4Runtime, patch: pytest.MonkeyPatch) -> None:
    text_model(runtime).layers[2].layer_scalar = torch.ones(1)


@planted("text-only", "G4-PREFILL-01")
def per_layer_inputs_not_halved(runtime: StaticGemma4Runtime, patch: pytest.MonkeyPatch) -> None:
    runtime.per_layer_inputs.per_layer_input_scale = 1.0  # type: ignore[union-attr]


@planted("image-first", "G4-PREFILL-01")
def per_layer_context_from_text_embeddings(runtime: StaticGemma4Runtime, patch: pytest.MonkeyPatch) -> None:
    graph = runtime.per_layer_inputs
    assert graph is not None
    runtime.per_layer_inputs = lambda ids, embeds: graph(ids, runtime.embedding(ids))


@planted("text-only", "G4-PREFILL-03")
def donor_is_the_first_of_its_type(runtime: StaticGemma4Runtime, patch: pytest.MonkeyPatch) -> None:
    first = {"sliding_attention": 0, "full_attention": 2}
    runtime.specs = tuple(s if s.stores_kv else replace(s, kv_source=first[s.layer_type]) for s in runtime.specs)


@planted("text-only", "G4-PREFILL-04")
def softcap_missing(runtime: StaticGemma4Runtime, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(static, "softcap", lambda logits, cap: logits)


@planted("text-only", "G4-PREFILL-03")
def exact_gelu(runtime: StaticGemma4Runtime, patch: pytest.MonkeyPatch) -> None:
    text_model(runtime).layers[8].mlp.act_fn = torch.nn.GELU()


@planted("text-only", "G4-PREFILL-06")
def padding_written_to_the_cache(runtime: StaticGemma4Runtime, patch: pytest.MonkeyPatch) -> None:
    write = runtime.cache.write

    def written(layer: int, key: Tensor, value: Tensor, start: int) -> None:
        write(layer, key, value, start)
        if start == 0 and key.shape[2] > 1:
            runtime.cache.buffers[layer][0][:, :, key.shape[2] :] = 0.01

    patch.setattr(runtime.cache, "write", written)


# --- decode ---------------------------------------------------------------------------------------------------------


@planted("text-only", "G4-DECODE-01")
def position_frozen(runtime: StaticGemma4Runtime, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(runtime, "_decode_position", lambda: torch.tensor([runtime.valid_length]))


@planted("decode-crosses-window", "G4-DECODE-03")
def decode_window_ignored(runtime: StaticGemma4Runtime, patch: pytest.MonkeyPatch) -> None:
    build = runtime._positional

    def unwindowed(positions: Tensor, count: int, block: range) -> MasksAndRope:
        built = build(positions, count, block)
        if len(positions) > 1:
            return built
        return replace(built, masks=dict.fromkeys(built.masks, built.masks["full_attention"]))

    patch.setattr(runtime, "_positional", unwindowed)


@planted("text-only", "G4-DECODE-10")
def new_row_not_stored(runtime: StaticGemma4Runtime, patch: pytest.MonkeyPatch) -> None:
    write = runtime.cache.write
    patch.setattr(
        runtime.cache,
        "write",
        lambda layer, k, v, start: write(layer, k, v, start) if start == 0 or layer != 4 else None,
    )


@planted("text-only", "G4-DECODE-06")
def per_layer_inputs_of_padding(runtime: StaticGemma4Runtime, patch: pytest.MonkeyPatch) -> None:
    graph = runtime.per_layer_inputs
    assert graph is not None
    runtime.per_layer_inputs = lambda ids, embeds: graph(ids if ids.shape[1] > 1 else torch.zeros_like(ids), embeds)


# --- generation -----------------------------------------------------------------------------------------------------


@planted("text-only", "G4-GEN-02")
def only_the_first_stop_token(runtime: StaticGemma4Runtime, patch: pytest.MonkeyPatch) -> None:
    runtime.facts = replace(runtime.facts, stop_token_ids=frozenset({1}))


@planted("image-first", "G4-GEN-03")
def placeholders_lost_in_returned_ids(runtime: StaticGemma4Runtime, patch: pytest.MonkeyPatch) -> None:
    generate = runtime.generate

    def generated(inputs: Any, max_new_tokens: int) -> Generation:
        done = generate(inputs, max_new_tokens)
        prompt = inputs.llm_input_ids[0, : inputs.valid_length].tolist()
        return replace(done, token_ids=(*prompt, *done.token_ids[inputs.valid_length :]))

    patch.setattr(runtime, "generate", generated)


@planted("text-only", "G4-GEN-04")
def one_token_too_many(runtime: StaticGemma4Runtime, patch: pytest.MonkeyPatch) -> None:
    generate = runtime.generate
    patch.setattr(
        runtime, "generate", lambda inputs, n: replace(done := generate(inputs, n), token_ids=(*done.token_ids, 1))
    )


# --- state between requests -----------------------------------------------------------------------------------------


@planted("a-b-a", "G4-PREFILL-06")
def cache_not_cleared_between_requests(runtime: StaticGemma4Runtime, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(runtime.cache, "reset", lambda: None)


@pytest.fixture(scope="module")
def judge_planted() -> Callable[[Planted, pytest.MonkeyPatch], list[Verdict]]:
    """Judges a fault on the bundled checkpoint, whatever `--model` says."""
    return partial(_judge_planted, load_checkpoint(bundled_checkpoint()))


def _judge_planted(checkpoint: Checkpoint, fault: Planted, patch: pytest.MonkeyPatch) -> list[Verdict]:
    clean = StaticGemma4Runtime(checkpoint, StaticLayout(checkpoint.facts.default_max_seq))
    session = ConformanceSession(checkpoint, clean, RunOptions(case_names=(fault.case,)))
    runtime = StaticGemma4Runtime(checkpoint, session.cases[fault.case].request.layout)
    fault.plant(runtime, patch)
    session.runtime = runtime
    return session.verdicts(fault.case)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_planted_fault_turns_its_stage_red(
    fault: Planted,
    judge_planted: Callable[[Planted, pytest.MonkeyPatch], list[Verdict]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    verdicts = judge_planted(fault, monkeypatch)
    wrong = {v.check: v.stage for v in verdicts if v.status is Status.FAIL}
    assert fault.check in wrong, f"not seen; wrong are {sorted(wrong)}"
    expected = wrong[fault.check]
    order = list(Stage)
    assert min(wrong.values(), key=order.index) is expected, f"blamed on an earlier stage: {wrong}"
    unrelated = {v.stage for v in verdicts if v.failed} - {expected}
    assert all(expected in upstream(stage) for stage in unrelated), f"unrelated stages are red: {unrelated}"


def test_every_stage_has_planted_faults() -> None:
    assert {CHECKS[fault.check].stage for fault in FAULTS} == set(Stage)
