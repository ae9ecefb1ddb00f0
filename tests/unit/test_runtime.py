"""StaticGemma4Runtime on the bundled checkpoint: its parts, its refusals, and that requests do not touch each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from g4conformance.checkpoints.checkpoint import Checkpoint
from g4conformance.errors import CaseError, LayoutError
from g4conformance.expected import key_values_of
from g4conformance.prompts import ResolvedCase
from g4conformance.reference.record import record_reference
from g4conformance.runtime.contract import StaticInputs
from g4conformance.runtime.graphs import softcap
from g4conformance.runtime.layout import StaticLayout
from g4conformance.runtime.masks import mask_bias
from g4conformance.runtime.static import StaticGemma4Runtime
from g4conformance.runtime.vision import StaticVisionTower
from g4conformance.trace import Recorder

from .asserting import told
from .recording import Recorded

pytestmark = pytest.mark.unit

Runtime = StaticGemma4Runtime
Resolved = Callable[[str], ResolvedCase]
CLOSE = {"rtol": 0.0, "atol": 2e-4}  # of logits that reach 30


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def built(runtime: Runtime, case: ResolvedCase) -> tuple[Runtime, StaticInputs]:
    """The runtime of the case's layout, and its request."""
    runtime = runtime.for_layout(case.request.layout)
    return runtime, runtime.build_static_inputs(case.request.prompt, case.request.images)


def prefilled(runtime: Runtime, case: ResolvedCase) -> tuple[Runtime, Tensor]:
    runtime, inputs = built(runtime, case)
    return runtime, runtime.prefill(inputs)


# --- layouts share weights ------------------------------------------------------------------------------------------


def test_weights_are_the_checkpoints_own(shared_runtime: Runtime, tiny_checkpoint: Checkpoint) -> None:
    theirs = dict(chain(tiny_checkpoint.model.named_parameters(), tiny_checkpoint.model.named_buffers()))
    for name, tensor in chain(shared_runtime.model.named_parameters(), shared_runtime.model.named_buffers()):
        assert tensor is theirs[name], name
    assert shared_runtime.model is not tiny_checkpoint.model
    modules = zip(shared_runtime.model.modules(), tiny_checkpoint.model.modules(), strict=True)
    assert all(own is not theirs for own, theirs in modules), "a fault put into a module stays in the runtime"


def test_one_runtime_a_layout(shared_runtime: Runtime) -> None:
    layout = StaticLayout(40, 3, 9)
    sibling = shared_runtime.for_layout(layout)
    assert sibling is shared_runtime.for_layout(StaticLayout(40, 3, 9))
    assert sibling is not shared_runtime
    assert sibling.for_layout(shared_runtime.layout) is shared_runtime
    assert sibling.layout == layout
    assert sibling.model is shared_runtime.model
    assert sibling.cache is not shared_runtime.cache
    assert {buffer.shape[2] for pair in sibling.cache.buffers.values() for buffer in pair} == {40}


def test_one_prompt_at_a_time(tiny_checkpoint: Checkpoint) -> None:
    with told(LayoutError, expected="batch_size=1", found="batch_size=2", remedy="one after the other"):
        StaticGemma4Runtime(tiny_checkpoint, StaticLayout(8, batch_size=2))


# --- inputs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "pictures", "found"),
    [("{mark}What?", 0, "0 images and 1 placeholders"), ("What?", 1, "1 images and 0 placeholders"),
     ("{mark}{mark}", 1, "1 images and 2 placeholders")],
)  # fmt: skip
def test_placeholders_and_images_pair_up(
    shared_runtime: Runtime, image_case: ResolvedCase, prompt: str, pictures: int, found: str
) -> None:
    mark = shared_runtime.checkpoint.processor.image_token
    with told(CaseError, expected=f"as many images as placeholders {mark!r}", found=found, remedy="its image"):
        shared_runtime.build_static_inputs(prompt.format(mark=mark), image_case.request.images * pictures)


def test_text_needs_neither_vision_nor_fusion(shared_runtime: Runtime, text_case: ResolvedCase) -> None:
    runtime, inputs = built(shared_runtime, text_case)
    assert inputs.pixel_values is None
    record = Recorder()
    runtime.on_tensor = record
    try:
        runtime.prefill(inputs)
    finally:
        runtime.on_tensor = None
    assert not {"visual_embeds", "fused_embeds"} & record.tensors.keys()
    assert runtime.vision is None


def test_another_slot_is_refused(shared_runtime: Runtime, image_case: ResolvedCase) -> None:
    layout = image_case.request.layout
    moved = replace(layout, visual_start_idx=layout.visual_start_idx + 1)
    with told(
        LayoutError,
        expected=f"from row {moved.visual_start_idx}",
        found=f"from row {layout.visual_start_idx}",
        remedy="for_layout",
    ):
        shared_runtime.for_layout(moved).build_static_inputs(image_case.request.prompt, image_case.request.images)


@pytest.mark.parametrize("name", ["image-wide", "image-tall"])
def test_another_patch_grid_is_refused(shared_runtime: Runtime, resolved: Resolved, name: str) -> None:
    """The other grid has as many patches and soft tokens: nothing else would tell."""
    request = resolved(name).request
    assert request.layout.patch_grid is not None
    columns, rows = request.layout.patch_grid
    runtime = shared_runtime.for_layout(replace(request.layout, patch_grid=(rows, columns)))
    with told(
        LayoutError, expected=f"{rows} x {columns} patches", found=f"{columns} x {rows} patches", remedy="for_layout"
    ):
        runtime.build_static_inputs(request.prompt, request.images)


def test_a_layout_may_leave_the_grid_open(shared_runtime: Runtime, image_case: ResolvedCase) -> None:
    request = image_case.request
    runtime = shared_runtime.for_layout(replace(request.layout, patch_grid=None))
    positions = runtime.build_static_inputs(request.prompt, request.images).image_position_ids
    assert torch.equal(positions, request.inputs["image_position_ids"])


def test_a_text_has_no_patch_grid(shared_runtime: Runtime, text_case: ResolvedCase) -> None:
    layout = replace(text_case.request.layout, patch_grid=(27, 21))
    inputs = shared_runtime.for_layout(layout).build_static_inputs(text_case.request.prompt, ())
    assert inputs.image_position_ids is None


def test_the_first_image_fixes_an_open_grid(shared_runtime: Runtime, resolved: Resolved) -> None:
    wide, tall = (resolved(name).request.inputs for name in ("image-wide", "image-tall"))
    runtime = shared_runtime.for_layout(StaticLayout(90, 5, 60))
    runtime.vision_prefill(wide["pixel_values"], wide["image_position_ids"])
    with told(
        LayoutError,
        expected="45 x 12 patches padded to 630",
        found="15 x 39 patches padded to 630",
        remedy="for_layout",
    ):
        runtime.vision_prefill(tall["pixel_values"], tall["image_position_ids"])


def test_a_picture_with_wrong_positions_spoils_nothing(shared_runtime: Runtime, resolved: Resolved) -> None:
    request = resolved("image-middle").request
    runtime = shared_runtime.for_layout(replace(request.layout, max_seq=request.layout.max_seq + 1))
    pixels, positions = request.inputs["pixel_values"], request.inputs["image_position_ids"]
    assert runtime.vision is None, "this layout has not seen a picture"
    with pytest.raises(LayoutError, match="patches"):
        runtime.vision_prefill(pixels, positions.flip(-1))
    assert runtime.vision_prefill(pixels, positions).shape[0] == request.layout.num_visual_tokens


def test_transposed_positions_are_another_grid_even_if_as_large(shared_runtime: Runtime, resolved: Resolved) -> None:
    request = resolved("image-middle").request
    runtime = shared_runtime.for_layout(request.layout)
    pixels, positions = request.inputs["pixel_values"], request.inputs["image_position_ids"]
    runtime.vision_prefill(pixels, positions)
    with pytest.raises(LayoutError, match="patches"):
        runtime.vision_prefill(pixels, positions.flip(-1))


def test_constants_of_the_pooler_move_with_it_and_are_not_saved(
    shared_runtime: Runtime, tiny_checkpoint: Checkpoint, image_case: ResolvedCase
) -> None:
    positions = image_case.request.inputs["image_position_ids"]
    tower: Any = StaticVisionTower(shared_runtime.model.model, positions, tiny_checkpoint.dtype)
    constants = {"position_ids", "padding"}
    assert {name for name, _ in tower.pooler.named_buffers(recurse=False)} == constants
    assert not constants & tower.pooler.state_dict().keys()


def test_one_vision_program_serves_every_grid(shared_runtime: Runtime, image_case: ResolvedCase) -> None:
    """What differs from grid to grid enters the graphs of the encoder as inputs."""
    positions = image_case.request.inputs["image_position_ids"]
    towers = [
        StaticVisionTower(shared_runtime.model.model, grid, torch.float32) for grid in (positions, positions.flip(-1))
    ]
    for graphs in zip(*([tower.patch_embedder, *tower.layers] for tower in towers), strict=True):
        assert not [name for graph in graphs for name, _ in graph.named_buffers(recurse=False)]
    assert not torch.equal(towers[0].cos, towers[1].cos)


# --- fusion ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("start", [0, 2, 5], ids=["first", "middle", "last"])
def test_fusion_fills_exactly_its_slot(shared_runtime: Runtime, start: int) -> None:
    runtime = shared_runtime.for_layout(StaticLayout(8, start, 3))
    text, visual = torch.rand(1, 8, 96), torch.rand(3, 96)
    before = text.clone()
    fused = runtime.mm_fusion(text, visual)
    assert torch.equal(fused[0, start : start + 3], visual)
    outside = [row for row in range(8) if not start <= row < start + 3]
    assert torch.equal(fused[:, outside], before[:, outside])
    assert torch.equal(text, before), "the text embeddings are left alone"


@pytest.mark.parametrize("count", [0, 2, 4])
def test_another_number_of_soft_tokens_is_refused(shared_runtime: Runtime, count: int) -> None:
    runtime = shared_runtime.for_layout(StaticLayout(8, 2, 3))
    with told(LayoutError, expected="3 soft tokens", found=str(count), remedy="for_layout"):
        runtime.mm_fusion(torch.rand(1, 8, 96), torch.rand(count, 96))


@pytest.mark.parametrize("name", ["image-first", "image-middle"])
def test_an_image_anywhere_gives_the_references_logits(
    shared_runtime: Runtime, tiny_checkpoint: Checkpoint, resolved: Resolved, name: str
) -> None:
    case = resolved(name)
    expected = record_reference(tiny_checkpoint, case.request.inputs, steps=0)["prefill/logits"]
    torch.testing.assert_close(prefilled(shared_runtime, case)[1], expected, **CLOSE)


# --- prefill --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["text", "image"])
def test_what_padding_holds_changes_no_logit(
    shared_runtime: Runtime, recorded: Callable[[str], Recorded], kind: str
) -> None:
    runtime, inputs = built(shared_runtime, recorded(kind).case)
    fused = runtime._fused_embeds(inputs)
    clean = runtime.prefill(inputs, fused)
    clean_step = runtime.decode_one(7)
    poisoned = fused.clone()
    poisoned[:, inputs.valid_length :] = torch.nan
    assert torch.equal(runtime.prefill(inputs, poisoned), clean)
    assert torch.equal(runtime.decode_one(7), clean_step)


def test_other_ids_in_padding_change_no_logit(shared_runtime: Runtime, text_case: ResolvedCase) -> None:
    runtime, inputs = built(shared_runtime, text_case)
    clean = runtime.prefill(inputs)
    other = inputs.llm_input_ids.clone()
    other[:, inputs.valid_length :] = 9
    assert torch.equal(runtime.prefill(replace(inputs, llm_input_ids=other)), clean)


@pytest.mark.parametrize("extra", [1, 37])
def test_max_seq_does_not_matter(shared_runtime: Runtime, text_case: ResolvedCase, extra: int) -> None:
    _, expected = prefilled(shared_runtime, text_case)
    runtime = shared_runtime.for_layout(StaticLayout(text_case.request.inputs["input_ids"].shape[1] + extra))
    logits = runtime.prefill(runtime.build_static_inputs(text_case.request.prompt, ()))
    torch.testing.assert_close(logits, expected, **CLOSE)


@pytest.mark.parametrize("name", ["window", "window+1", "window-twice", "image-middle"])
def test_one_token_more_is_one_decode_step(shared_runtime: Runtime, resolved: Resolved, name: str) -> None:
    """prefill(n + 1) = prefill(n) + one decode step."""
    runtime, inputs = built(shared_runtime, resolved(name))
    expected = runtime.prefill(inputs)
    last = inputs.valid_length - 1
    token = int(inputs.input_ids[0, last])
    shorter = inputs.llm_input_ids.clone()
    shorter[0, last] = runtime.facts.pad_token_id
    runtime.prefill(replace(inputs, llm_input_ids=shorter, valid_length=last))
    torch.testing.assert_close(runtime.decode_one(token), expected, **CLOSE)


def test_given_masks_and_embeddings_are_used(shared_runtime: Runtime, text_case: ResolvedCase) -> None:
    runtime, inputs = built(shared_runtime, text_case)
    own = runtime.prefill(inputs)
    positional = runtime.masks_and_rope(inputs.valid_length)
    assert torch.equal(runtime.prefill(inputs, masks_and_rope=positional), own)
    blind = {kind: mask_bias(torch.eye(runtime.layout.max_seq).bool()[None], own.dtype) for kind in positional.masks}
    assert not torch.equal(runtime.prefill(inputs, masks_and_rope=replace(positional, biases=blind)), own)
    assert not torch.equal(runtime.prefill(inputs, runtime.token_embedding(inputs.input_ids.flip(1))), own)


def test_the_softcap_is_the_references() -> None:
    logits = torch.tensor([-400.0, -3.0, 0.0, 3.0, 400.0])
    assert torch.equal(softcap(logits, None), logits)
    assert torch.equal(softcap(logits, 30.0), torch.tanh(logits / 30.0) * 30.0)
    assert softcap(logits, 30.0).abs().max() <= 30.0
    assert softcap(logits.to(torch.bfloat16), 30.0).dtype == torch.bfloat16


# --- requests do not touch each other -------------------------------------------------------------------------------


def test_a_b_a(shared_runtime: Runtime, resolved: Resolved) -> None:
    first = resolved("a-b-a")
    for other in ("window-twice", "image-middle"):
        runtime, before = prefilled(shared_runtime, first)
        step = runtime.decode_one(7)
        between, _ = prefilled(shared_runtime, resolved(other))
        between.decode_one(9)
        runtime, after = prefilled(shared_runtime, first)
        assert torch.equal(after, before)
        assert torch.equal(runtime.decode_one(7), step)


def test_reset_forgets_everything(shared_runtime: Runtime, text_case: ResolvedCase) -> None:
    runtime, _ = prefilled(shared_runtime, text_case)
    assert runtime.past_len == runtime.valid_length > 0
    runtime.reset()
    assert (runtime.past_len, runtime.valid_length) == (0, 0)
    assert not any(bool(buffer.any()) for pair in runtime.cache.buffers.values() for buffer in pair)


# --- load_state and decode ------------------------------------------------------------------------------------------


def test_a_loaded_state_decodes_like_the_reference(shared_runtime: Runtime, text: Recorded) -> None:
    runtime, _ = prefilled(shared_runtime, text.case)
    runtime.decode_one(3)  # something to forget
    facts, length = text.bench.facts, int(text.reference["valid_length"])
    key_values = key_values_of(text.reference, facts)
    runtime.load_state(key_values, length)
    for layer, pair in key_values.items():
        for buffer, rows in zip(runtime.cache.read(layer), pair, strict=True):
            assert torch.equal(buffer[:, :, :length], rows)
            assert not bool(buffer[:, :, length:].any())
    for step in range(text.case.reference_steps):
        assert runtime.past_len == length + step
        logits = runtime.decode_one(int(text.reference[f"decode/{step}/token"]))
        torch.testing.assert_close(logits, text.reference[f"decode/{step}/logits"], **CLOSE)


def test_a_state_that_is_too_long_is_refused(shared_runtime: Runtime) -> None:
    with told(LayoutError, expected="at most max_seq=8 rows", found="9", remedy="--max-seq"):
        shared_runtime.for_layout(StaticLayout(8)).load_state({}, 9)


def test_a_state_may_fill_the_buffer(shared_runtime: Runtime, text: Recorded) -> None:
    length = int(text.reference["valid_length"])
    runtime = shared_runtime.for_layout(StaticLayout(length))
    runtime.load_state(key_values_of(text.reference, text.bench.facts), length)
    assert runtime.past_len == length
    with told(LayoutError, expected="one more token", found="a full buffer", remedy="--max-seq"):
        runtime.decode_one(7)


@pytest.mark.parametrize("kind", ["image", "video", "audio"])
def test_a_placeholder_fed_back_is_treated_as_by_the_reference(
    shared_runtime: Runtime, tiny_checkpoint: Checkpoint, text_case: ResolvedCase, kind: str
) -> None:
    token = getattr(tiny_checkpoint.model.config, f"{kind}_token_id")
    reference = record_reference(tiny_checkpoint, text_case.request.inputs, steps=1, tokens=[token])
    runtime, _ = prefilled(shared_runtime, text_case)
    torch.testing.assert_close(runtime.decode_one(token), reference["decode/0/logits"], **CLOSE)
    ordinary, _ = prefilled(shared_runtime, text_case)
    assert not torch.allclose(ordinary.decode_one(9), reference["decode/0/logits"], **CLOSE)


@pytest.mark.parametrize(("name", "room"), [("fills-max-seq", 0), ("fills-while-decoding", 2)])
def test_a_full_buffer_is_an_error(shared_runtime: Runtime, resolved: Resolved, name: str, room: int) -> None:
    runtime, _ = prefilled(shared_runtime, resolved(name))
    for _ in range(room):
        runtime.decode_one(7)
    before = [buffer.clone() for pair in runtime.cache.buffers.values() for buffer in pair]
    max_seq = runtime.layout.max_seq
    with told(LayoutError, expected=f"max_seq={max_seq} rows", found="a full buffer", remedy="Raise --max-seq"):
        runtime.decode_one(7)
    assert runtime.past_len == max_seq
    now = [buffer for pair in runtime.cache.buffers.values() for buffer in pair]
    assert all(torch.equal(one, other) for one, other in zip(before, now, strict=True))


def test_graphs_never_write(shared_runtime: Runtime, text_case: ResolvedCase) -> None:
    """Every graph of the runtime is a module without state of its own: buffers in, new rows out."""
    runtime, _ = prefilled(shared_runtime, text_case)
    assert all(isinstance(graph, nn.Module) for graph in runtime.layers)
    written: list[int] = []
    write = runtime.cache.write
    runtime.cache.write = lambda layer, key, value, start: written.append(layer)  # type: ignore[method-assign]
    before = {layer: key.clone() for layer, (key, _) in runtime.cache.buffers.items()}
    try:
        runtime.decode_one(7)
    finally:
        runtime.cache.write = write  # type: ignore[method-assign]
    assert written == list(runtime.facts.storing_layers)
    assert all(torch.equal(runtime.cache.read(layer)[0], key) for layer, key in before.items())


def test_a_fresh_runtime_is_a_reset_one(tiny_checkpoint: Checkpoint) -> None:
    """The first token that is fed has row 0, and its decode step number 0, in both."""
    runtime = StaticGemma4Runtime(tiny_checkpoint, StaticLayout(8))
    traces = []
    for _ in range(2):
        runtime.on_tensor = record = Recorder()
        runtime.decode_one(5)
        traces.append(record.tensors)
        runtime.on_tensor = None
        runtime.reset()
    fresh, reset = traces
    assert fresh.keys() == reset.keys()
    assert all(torch.equal(fresh[name], reset[name]) for name in fresh)
    assert int(fresh["decode/0/position"]) == 0
