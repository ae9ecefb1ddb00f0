"""Every kind of graph exports at fixed shapes, and the exported program computes what the module computes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from g4conformance.prompts import ResolvedCase
from g4conformance.runtime.cache import LayerSpec
from g4conformance.runtime.graphs import DecoderLayerGraph, FusionGraph, SharedDecoderLayerGraph
from g4conformance.runtime.layout import StaticLayout
from g4conformance.runtime.masks import attention_mask, mask_bias
from g4conformance.runtime.static import StaticGemma4Runtime
from g4conformance.runtime.vision import StaticVisionTower

pytestmark = pytest.mark.unit

Runtime = StaticGemma4Runtime
MAX_SEQ = 40  # longer than the sliding window
Inputs = tuple[Tensor, ...]


@dataclass(frozen=True)
class Exportable:
    """A graph with inputs to export it on, and others of the same shapes to run it on."""

    graph: nn.Module
    example: Inputs
    others: tuple[Inputs, ...]


@dataclass(frozen=True)
class Bench:
    """What the graphs of a kind are taken from."""

    runtime: Runtime
    vision: StaticVisionTower

    @property
    def hidden_size(self) -> int:
        return int(self.runtime.checkpoint.text_config.hidden_size)

    @property
    def patches(self) -> int:
        return int(self.vision.image_position_ids.shape[1])


@pytest.fixture(scope="module")
def bench(shared_runtime: Runtime, image_case: ResolvedCase) -> Bench:
    runtime = shared_runtime.for_layout(StaticLayout(MAX_SEQ, 4, 9))
    positions = image_case.request.inputs["image_position_ids"]
    return Bench(runtime, StaticVisionTower(runtime.model.model, positions, runtime.checkpoint.dtype))


# --- one builder a kind of graph ------------------------------------------------------------------------------------


def random_inputs(seed: int, *shapes: tuple[int, ...]) -> Inputs:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(shape, generator=generator) for shape in shapes)


def of_floats(graph: nn.Module, *shapes: tuple[int, ...]) -> Exportable:
    return Exportable(graph, random_inputs(0, *shapes), (random_inputs(1, *shapes), random_inputs(2, *shapes)))


def random_ids(bench: Bench, seed: int, rows: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(bench.runtime.facts.vocab_size, (1, rows), generator=generator)


def token_embedding(bench: Bench, rows: int) -> Exportable:
    first, *others = ((random_ids(bench, seed, rows),) for seed in range(3))
    return Exportable(bench.runtime.embedding, first, tuple(others))


def per_layer_inputs(bench: Bench, rows: int) -> Exportable:
    assert bench.runtime.per_layer_inputs is not None
    shape = (1, rows, bench.hidden_size)
    first, *others = ((random_ids(bench, seed, rows), *random_inputs(seed, shape)) for seed in range(3))
    return Exportable(bench.runtime.per_layer_inputs, first, tuple(others))


def decoder_layer(bench: Bench, layer_type: str, shares: bool, past_lens: tuple[int, int, int], new: int) -> Exportable:
    """A decoder layer at the query length of prefill (`new` > 1: all rows of the buffer) or of decode (one row)."""
    specs = bench.runtime.specs
    spec = next(s for s in specs if s.layer_type == layer_type and s.stores_kv is not shares)
    graph = bench.runtime.layers[spec.index]
    assert type(graph) is (SharedDecoderLayerGraph if shares else DecoderLayerGraph)
    first, *others = (layer_inputs(bench, spec, past_len, new, seed) for seed, past_len in enumerate(past_lens))
    return Exportable(graph, first, tuple(others))


def layer_inputs(bench: Bench, spec: LayerSpec, past_len: int, new: int, seed: int) -> Inputs:
    """What the runtime feeds a layer for `new` rows at `past_len`; prefill has all rows of the buffer as queries."""
    runtime, queries = bench.runtime, MAX_SEQ if new > 1 else 1
    positions = torch.arange(past_len, past_len + queries)
    rows = torch.arange(MAX_SEQ)
    mask = attention_mask(
        spec.layer_type, positions, rows < past_len + new, sliding_window=runtime.facts.sliding_window
    )
    width = runtime.checkpoint.text_config.hidden_size_per_layer_input
    past = (1, spec.num_key_value_heads, MAX_SEQ, spec.head_dim)
    hidden, per_layer_input, key, value = random_inputs(
        seed, (1, queries, bench.hidden_size), (1, queries, width), past, past
    )
    cos, sin = runtime.rotary(hidden, positions[None], spec.layer_type)
    slot = (rows >= past_len) & (rows < past_len + new)
    common = (hidden, per_layer_input, mask_bias(mask, hidden.dtype), cos, sin, key, value)
    return (*common, slot) if spec.stores_kv else common


def fusion(start: int) -> Callable[[Bench], Exportable]:
    return lambda bench: of_floats(
        FusionGraph(StaticLayout(MAX_SEQ, start, 9)), (1, MAX_SEQ, bench.hidden_size), (9, bench.hidden_size)
    )


def patch_embedder(bench: Bench) -> Exportable:
    graph, tower = bench.vision.patch_embedder, bench.vision
    shape = (1, bench.patches, graph.patch_embedder.input_proj.in_features)
    return with_constants(of_floats(graph, shape), (tower.position_ids, tower.padding))


def vision_layer(bench: Bench) -> Exportable:
    tower = bench.vision
    floats = of_floats(tower.layers[1], (1, bench.patches, bench.runtime.model.config.vision_config.hidden_size))
    return with_constants(floats, (tower.position_ids, tower.bias, tower.cos, tower.sin))


def with_constants(exportable: Exportable, constants: Inputs) -> Exportable:
    """The same with inputs of the patch grid behind the one that varies."""
    others = tuple((*inputs, *constants) for inputs in exportable.others)
    return Exportable(exportable.graph, (*exportable.example, *constants), others)


def pooler(bench: Bench) -> Exportable:
    return of_floats(bench.vision.pooler, (1, bench.patches, bench.runtime.model.config.vision_config.hidden_size))


def vision_embedder(bench: Bench) -> Exportable:
    width = bench.runtime.model.config.vision_config.hidden_size
    return of_floats(bench.vision.embedder, (bench.vision.pooler.num_soft_tokens, width))


FULL, SLIDING = "full_attention", "sliding_attention"
PREFILL = {"past_lens": (0, 0, 0), "new": MAX_SEQ - 3}
DECODE = {"past_lens": (5, MAX_SEQ - 1, 17), "new": 1}  # the program is made for one slot and run on others

GRAPHS: dict[str, Callable[[Bench], Exportable]] = {
    "token embedding, prefill": lambda bench: token_embedding(bench, MAX_SEQ),
    "token embedding, decode": lambda bench: token_embedding(bench, 1),
    "per-layer inputs, prefill": lambda bench: per_layer_inputs(bench, MAX_SEQ),
    "per-layer inputs, decode": lambda bench: per_layer_inputs(bench, 1),
    "sliding layer, prefill": lambda bench: decoder_layer(bench, SLIDING, False, **PREFILL),
    "sliding layer, decode": lambda bench: decoder_layer(bench, SLIDING, False, **DECODE),
    "full layer, prefill": lambda bench: decoder_layer(bench, FULL, False, **PREFILL),
    "full layer, decode": lambda bench: decoder_layer(bench, FULL, False, **DECODE),
    "shared sliding layer, prefill": lambda bench: decoder_layer(bench, SLIDING, True, **PREFILL),
    "shared sliding layer, decode": lambda bench: decoder_layer(bench, SLIDING, True, **DECODE),
    "shared full layer, prefill": lambda bench: decoder_layer(bench, FULL, True, **PREFILL),
    "shared full layer, decode": lambda bench: decoder_layer(bench, FULL, True, **DECODE),
    "head": lambda bench: of_floats(bench.runtime.head, (1, 1, bench.hidden_size)),
    "fusion at row 0": fusion(0),
    "fusion in the middle": fusion(11),
    "fusion at the end": fusion(MAX_SEQ - 9),
    "patch embedder": patch_embedder,
    "vision layer": vision_layer,
    "pooler": pooler,
    "vision embedder": vision_embedder,
}


# --- the tests ------------------------------------------------------------------------------------------------------


def outputs_of(graph: Callable[..., Tensor | Inputs], inputs: Inputs) -> Inputs:
    found = graph(*inputs)
    return (found,) if isinstance(found, Tensor) else tuple(found)


@pytest.mark.parametrize("build", GRAPHS.values(), ids=GRAPHS.keys())
def test_the_exported_program_computes_the_same(bench: Bench, build: Callable[[Bench], Exportable]) -> None:
    exportable = build(bench)
    with torch.no_grad():
        program = torch.export.export(exportable.graph, exportable.example, strict=False)
        require_fixed(program)
        module = program.module()
        seen = [outputs_of(module, exportable.example)]
        for inputs in exportable.others:
            expected, actual = outputs_of(exportable.graph, inputs), outputs_of(module, inputs)
            torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
            seen.append(actual)
    assert not torch.equal(seen[0][0], seen[1][0]), "an input that changes nothing was baked into the program"


def require_fixed(program: torch.export.ExportedProgram) -> None:
    """No dimension is symbolic, and neither buffers nor inputs are written."""
    values = [node.meta.get("val") for node in program.graph.nodes]
    assert all(isinstance(dim, int) for value in values if isinstance(value, Tensor) for dim in value.shape)
    assert not program.range_constraints
    assert not program.graph_signature.buffers_to_mutate
    assert not program.graph_signature.user_inputs_to_mutate
