"""The quantized runtime: what its graphs hold, what was observed, and the reference that rounds as they do."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from g4conformance.cases import load_cases
from g4conformance.checkpoints.checkpoint import Checkpoint
from g4conformance.checkpoints.seeded import SeededSpec, VisionSpec, seeded_checkpoint
from g4conformance.errors import ConformanceError
from g4conformance.executors.registry import EXECUTORS
from g4conformance.fixtures import fixtures_folder
from g4conformance.judging.quantization import expected_quantization, observed_quantization
from g4conformance.options import SCHEMES as OPTIONS
from g4conformance.quantization import conversion
from g4conformance.quantization.calibration import calibration_cases, record_calibration
from g4conformance.quantization.conversion import run_by_torch
from g4conformance.quantization.graphs import QuantizedGraph, QuantizedGraphs
from g4conformance.quantization.parameters import Calibration, Quantization, quantizable
from g4conformance.quantization.reference import fake_quantized
from g4conformance.quantization.schemes import COVERAGE, SCHEMES, coverage_of, scheme_of
from g4conformance.reference.noise import kind_of
from g4conformance.reference.record import record_reference
from g4conformance.report.describe import counted, description
from g4conformance.runtime.layout import StaticLayout
from g4conformance.runtime.static import StaticGemma4Runtime
from g4conformance.shipped import shipped_runtime
from g4conformance.trace import Recorder

pytestmark = pytest.mark.unit

SLIDING, FULL = "sliding_attention", "full_attention"
SPEC = SeededSpec(
    layer_types=(SLIDING, SLIDING, FULL, SLIDING, FULL),
    num_kv_shared_layers=2,
    sliding_window=16,
    vision=VisionSpec(num_hidden_layers=2),
)
# Inputs of graphs that nothing may observe: masks, rotary tables, ids, positions, slots, and the cache, which is on its
# grid already.
UNOBSERVED = {"bias", "cos", "sin", "llm_input_ids", "position_ids", "padding", "slot", "past_key", "past_value"}


@dataclass(frozen=True)
class Quantized:
    """A runtime of one scheme with what its graphs hold."""

    runtime: StaticGemma4Runtime
    graphs: QuantizedGraphs
    quantization: Quantization

    @property
    def programs(self) -> Iterator[tuple[QuantizedGraph, GraphModule]]:
        for graph in self.graphs.graphs.values():
            for program in graph.converted.values():
                yield graph, program


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return seeded_checkpoint(SPEC, seed=5)


@pytest.fixture(scope="module")
def calibration(checkpoint: Checkpoint) -> Calibration:
    """One text and one picture: two graphs of every kind are reached."""
    cases = calibration_cases(checkpoint)
    return record_calibration(checkpoint, [cases[0], cases[-1]])


@pytest.fixture(scope="module", params=SCHEMES)
def quantized(request: pytest.FixtureRequest, checkpoint: Checkpoint, calibration: Calibration) -> Quantized:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(conversion, "_ELEMENTS", 100)  # weights are quantized in pieces of a few rows
        runtime = shipped_runtime(checkpoint, checkpoint.facts.default_max_seq, request.param, calibration=calibration)
    assert isinstance(runtime.lower, QuantizedGraphs)
    assert runtime.quantization is not None
    return Quantized(runtime, runtime.lower, runtime.quantization)


def ops(program: GraphModule, name: str) -> list[Any]:
    return [node for node in program.graph.nodes if name in str(node.target)]


def linears(program: GraphModule) -> list[Any]:
    return [node for node in program.graph.nodes if node.target is torch.ops.aten.linear.default]


# --- what the graphs hold -------------------------------------------------------------------------------------------


def test_every_linear_op_has_an_integer_weight_with_a_scale_a_channel(quantized: Quantized) -> None:
    for _, program in quantized.programs:
        assert linears(program)
        for node in linears(program):
            dequantize = node.args[1]
            assert "dequantize_per_channel" in str(dequantize.target)
            integers, scales = (getattr(program, argument.target) for argument in dequantize.args[:2])
            assert integers.dtype is torch.int8
            assert scales.shape == integers.shape[:1]
            largest = quantized.quantization.scheme.weight_max
            assert torch.equal(integers.abs().amax(dim=1), torch.full(integers.shape[:1], largest, dtype=torch.int8))


def test_quantize_and_dequantize_ops_are_as_many_as_the_scheme_says(quantized: Quantized) -> None:
    """Counted in the graph: each linear op's input and output, and what the graph returns; for weights alone, none."""
    for graph, program in quantized.programs:
        quantize, per_tensor = ops(program, "decomposed.quantize_per_tensor"), ops(program, "dequantize_per_tensor")
        if quantized.quantization.scheme.activation_bits is None:
            assert not quantize
            assert not per_tensor
            continue
        entering = {node.args[0].args[0] for node in linears(program)}
        returned = set(next(node for node in program.graph.nodes if node.op == "output").args[0])
        leaving = set() if graph.name == "head" else {next(iter(node.users)) for node in linears(program)}
        assert {str(node.target) for node in entering | leaving} == {str(quantize[0].target)}
        assert set(quantize) == entering | leaving | {node.args[0] for node in returned}
        assert {node.args[0] for node in per_tensor} == set(quantize)


def test_the_model_s_linear_ops_are_all_covered_and_said_to_be(quantized: Quantized, checkpoint: Checkpoint) -> None:
    paths = {path for path, _ in quantizable(checkpoint.model)}
    assert quantized.quantization.linears.keys() == paths
    for name, graph in quantized.quantization.graphs.items():
        assert {path.rpartition(".")[2] for path in graph.linears} - {"linear"} <= set(coverage_of(name).linears)


def test_graphs_without_linear_ops_stay_as_they_are(quantized: Quantized) -> None:
    uncovered = {coverage.graph for coverage in COVERAGE if not coverage.linears}
    assert uncovered == {"embedding", "fusion/", "vision/pooler/"}
    assert all(coverage_of(name).linears for name in quantized.quantization.graphs)


def test_each_layer_has_its_own_weights_and_scales(quantized: Quantized) -> None:
    same_kind = [quantized.quantization.graphs[f"layer/{i}"] for i in (0, 1)]
    first, second = (next(iter(graph.linears.values())) for graph in same_kind)
    assert first.weight is not None
    assert second.weight is not None
    assert not torch.equal(first.weight.integers, second.weight.integers)
    assert not torch.equal(first.weight.scale, second.weight.scale)
    if quantized.quantization.scheme.activation_bits is not None:
        assert first.input != second.input
        assert same_kind[0].outputs != same_kind[1].outputs


def test_programs_of_one_graph_at_several_lengths_have_the_same_scales(quantized: Quantized) -> None:
    for graph in quantized.graphs.graphs.values():
        read = [[node.args[1:] for node in ops(program, "quantize_per_tensor")] for program in graph.converted.values()]
        assert all(parameters == read[0] for parameters in read)
    assert len(quantized.graphs.graphs["layer/0"].converted) == 2  # prefill and decode


def test_other_buffers_are_served_with_the_calibrated_scales(quantized: Quantized, calibration: Calibration) -> None:
    before = quantized.quantization.digest
    runtime = quantized.runtime.for_layout(StaticLayout(calibration.requests[0].inputs.valid_length + 3))
    inputs = runtime.build_static_inputs("One: A red", [])
    with torch.no_grad():
        logits = runtime.prefill(inputs)
        usual = quantized.runtime.prefill(quantized.runtime.build_static_inputs("One: A red", []))
    torch.testing.assert_close(logits, usual, rtol=0.02, atol=0.02)
    assert runtime.quantization is not None
    assert runtime.quantization.digest == before


def test_programs_of_one_graph_share_its_integers_and_hold_no_float_weight(quantized: Quantized) -> None:
    programs = list(quantized.graphs.graphs["layer/0"].converted.values())
    integers = [{b.data_ptr() for b in program.buffers() if b.dtype is torch.int8} for program in programs]
    assert len(programs) > 1
    assert integers[0]
    assert all(held == integers[0] for held in integers)
    assert not [name for name, _ in programs[0].named_parameters() if name.endswith(("proj.weight", "gate.weight"))]


def test_a_weight_is_quantized_piece_by_piece_as_the_op_quantizes_it_whole(
    quantized: Quantized, checkpoint: Checkpoint
) -> None:
    bound = quantized.quantization.scheme.weight_max
    for path, linear in quantized.quantization.linears.items():
        assert linear.weight is not None
        weight, scale = checkpoint.model.get_parameter(f"{path}.weight").detach(), linear.weight.scale
        zero = torch.zeros_like(scale, dtype=torch.int64)
        whole = torch.ops.quantized_decomposed.quantize_per_channel(weight, scale, zero, 0, -bound, bound, torch.int8)
        assert torch.equal(linear.weight.integers, whole), path


def test_torch_runs_a_program_thriftily_to_the_same_bits(quantized: Quantized) -> None:
    graph = quantized.graphs.graphs["head"]
    for signature, program in graph.converted.items():
        inputs = tuple(torch.randn(shape).to(dtype) for shape, dtype in signature)
        thrifty = run_by_torch("head", program, inputs)
        assert isinstance(thrifty, GraphModule)
        assert not ops(thrifty, "dequantize_per_channel")
        with torch.no_grad():
            assert all(map(torch.equal, thrifty(*inputs), program(*inputs)))


def test_a_weight_with_zero_points_is_left_to_the_op(quantized: Quantized) -> None:
    """Such a weight is a mistake, which must show."""
    program = copy.deepcopy(next(iter(quantized.graphs.graphs["head"].converted.values())))
    (zero_points,) = (node.args[2].target for node in ops(program, "dequantize_per_channel"))
    program.get_buffer(zero_points).add_(1)
    thrifty = run_by_torch("head", program, ())
    assert isinstance(thrifty, GraphModule)
    assert ops(thrifty, "dequantize_per_channel")


def test_programs_share_the_float_tensors_that_they_keep(quantized: Quantized, checkpoint: Checkpoint) -> None:
    own = {tensor.data_ptr() for tensor in checkpoint.model.parameters()}
    program = next(iter(quantized.graphs.graphs["layer/0"].converted.values()))
    norms = [tensor for name, tensor in program.named_parameters() if "norm" in name]
    assert norms
    assert all(norm.data_ptr() in own for norm in norms)


# --- what was observed ----------------------------------------------------------------------------------------------


def test_masks_rotary_tables_ids_and_cache_are_not_quantized(quantized: Quantized) -> None:
    met = set()
    for _, program in quantized.programs:
        inputs = {node for node in program.graph.nodes if node.op == "placeholder" and node.target in UNOBSERVED}
        met |= {str(node.target) for node in inputs}
        assert not [node for node in ops(program, "quantize") if inputs & set(node.args)]
    assert met == UNOBSERVED


def test_no_scale_has_seen_a_mask_s_fill(quantized: Quantized) -> None:
    linears_ = quantized.quantization.linears.values()
    points = [point for linear in linears_ for point in (linear.input, linear.output) if point is not None]
    points += quantized.quantization.outputs.values()
    assert bool(points) == (quantized.quantization.scheme.activation_bits is not None)
    assert all(0.0 < point.scale * 2**8 < 1e4 for point in points)


def test_grids_and_weights_are_what_the_float_model_says(
    quantized: Quantized, checkpoint: Checkpoint, calibration: Calibration
) -> None:
    scheme = quantized.quantization.scheme
    expected = expected_quantization(scheme, checkpoint.model, calibration.ranges)
    observed = observed_quantization(quantized.quantization, checkpoint.model)
    assert expected.keys() == observed.keys() - {"quantization/unequal_pairs"}
    assert not observed["quantization/unequal_pairs"].any()
    for name, tensor in expected.items():
        if "/bits/" in name:
            assert torch.equal(observed[name], tensor)
        elif "/grid/" in name:
            torch.testing.assert_close(observed[name][2], tensor[2], rtol=1e-5, atol=0.0)
        else:
            assert float(observed[name].max()) <= 0.5001


def test_a_graph_that_calibration_did_not_reach_is_told(checkpoint: Checkpoint) -> None:
    graphs = QuantizedGraphs(scheme_of("w8a8"))
    StaticGemma4Runtime(checkpoint, StaticLayout(20), graphs)
    with pytest.raises(ConformanceError, match="a calibration case that reaches the graph"):
        graphs.convert()


def test_calibration_cases_never_judge() -> None:
    judging = load_cases(fixtures_folder() / "cases.yaml")
    calibrating = load_cases(fixtures_folder() / "calibration.yaml")
    assert not {case.name for case in judging} & {case.name for case in calibrating}
    assert not {image for case in judging for image in case.images} & {i for case in calibrating for i in case.images}
    prompts = {str((case.prompt, case.messages, case.fill, case.vocabulary)) for case in judging}
    assert not prompts & {str((case.prompt, case.messages, case.fill, case.vocabulary)) for case in calibrating}


# --- the reference that rounds ----------------------------------------------------------------------------------------


def test_the_fake_quantized_model_shares_the_weights_and_leaves_the_float_model_alone(
    quantized: Quantized, checkpoint: Checkpoint
) -> None:
    inputs = checkpoint.process("One: A red circle", [])
    before = record_reference(checkpoint, inputs, 1)
    fake = fake_quantized(checkpoint, quantized.quantization)
    rounded = record_reference(fake, inputs, 1)
    after = record_reference(checkpoint, inputs, 1)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert not torch.equal(before["prefill/logits"], rounded["prefill/logits"])
    own = {id(tensor) for tensor in checkpoint.model.parameters()}
    assert all(id(tensor) in own for tensor in fake.model.parameters())
    assert fake.digest != checkpoint.digest


def test_the_reference_and_the_runtime_are_on_the_same_grids(quantized: Quantized, checkpoint: Checkpoint) -> None:
    """Whatever a graph returns is a whole number of steps away from zero, in both."""
    fake = fake_quantized(checkpoint, quantized.quantization)
    runtime, record = quantized.runtime, Recorder()
    inputs = runtime.build_static_inputs("One: A red circle", [])
    runtime.on_tensor = record
    try:
        with torch.no_grad():
            runtime.prefill(inputs)
    finally:
        runtime.on_tensor = None
    reference = record_reference(fake, checkpoint.process("One: A red circle", []), 0)
    compared = 0
    for name, quantization in quantized.quantization.outputs.items():
        for traces in (record.tensors, reference):
            for rows in on_grid(traces, name):
                steps = rows.double() / quantization.scale
                torch.testing.assert_close(steps, steps.round(), rtol=0.0, atol=1e-2)
                compared += 1
    assert (compared > 0) == (quantized.quantization.scheme.activation_bits is not None)


def on_grid(traces: Mapping[str, Tensor], kind: str) -> Iterator[Tensor]:
    """Tensors of a kind, but for logits, whose grid the softcap bends."""
    for name, tensor in traces.items():
        if kind_of(name) == kind and kind != "logits":
            yield tensor


# --- data -----------------------------------------------------------------------------------------------------------


def test_the_option_offers_every_scheme() -> None:
    assert set(OPTIONS) == {*SCHEMES, "none"}


def test_an_unknown_scheme_is_told() -> None:
    with pytest.raises(ConformanceError, match="w8a16, w8a8, w4a16, w8"):
        scheme_of("w2a2")


def test_coverage_names_every_linear_op_of_the_model(checkpoint: Checkpoint) -> None:
    named = {linear for coverage in COVERAGE for linear in coverage.linears}
    leaves = {leaf(path) for path, _ in quantizable(checkpoint.model)}
    assert leaves == named


def leaf(path: str) -> str:
    """The name of a linear op; in the vision tower it is that of the wrapper that clips."""
    parts = path.split(".")
    return parts[-2] if parts[-1] == "linear" else parts[-1]


def test_description_and_counts_can_be_read(quantized: Quantized) -> None:
    text = description()
    assert all(scheme in text for scheme in (*SCHEMES, "none"))
    assert all(coverage.graph.split("/")[0] in text for coverage in COVERAGE)
    assert all(executor in text for executor in EXECUTORS)
    lines = counted(quantized.quantization).splitlines()
    (layer,) = (line.split() for line in lines if line.startswith("layer/0 "))
    program = next(iter(quantized.graphs.graphs["layer/0"].converted.values()))
    assert layer[1:] == [
        str(len(linears(program))),
        str(len(linears(program))),
        "int8",
        str(quantized.quantization.scheme.weight_max),
        str(len(ops(program, "decomposed.quantize_per_tensor"))),
        str(len(ops(program, "dequantize_per"))),
    ]


def test_the_audio_tower_is_left_out() -> None:
    model = nn.ModuleDict({"audio_tower": nn.Linear(2, 2), "lm_head": nn.Linear(2, 2)})
    assert [path for path, _ in quantizable(model)] == ["lm_head"]
