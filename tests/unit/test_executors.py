"""Every executor computes what eager does on small modules, keeps what it made, and refuses in one clear line."""

from __future__ import annotations

import importlib.util
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from g4conformance.errors import ConformanceError, LoweringError
from g4conformance.executors import artefacts, registry, storing
from g4conformance.executors.artefacts import artefact_path, cached_lowering, graph_digest
from g4conformance.executors.lowering import lower_graph, lowering_error
from g4conformance.executors.registry import ALL_SCHEMES, EXECUTORS, Executor, require_expressible, require_installed

pytestmark = pytest.mark.unit

Inputs = tuple[Any, ...]
STORING = [name for name in EXECUTORS if name != "eager"]


def require_extra(executor: str) -> None:
    """Skips where the extra is not installed; the suite itself never skips."""
    spec = EXECUTORS[executor]
    if any(importlib.util.find_spec(package) is None for package in spec.packages):
        pytest.skip(f"extra {spec.extra} is not installed")


@pytest.fixture(params=EXECUTORS)
def executor(request: pytest.FixtureRequest) -> str:
    require_extra(request.param)
    return request.param


@pytest.fixture(params=STORING)
def storing_executor(request: pytest.FixtureRequest) -> str:
    require_extra(request.param)
    return request.param


# --- toys -----------------------------------------------------------------------------------------------------------


class Toy(nn.Module):
    """Ids, a mask and an input that may be absent; two outputs of two dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 8)
        self.linear = nn.Linear(8, 4, bias=False)

    def forward(self, ids: Tensor, extra: Tensor | None, mask: Tensor, past: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.where(mask[:, None], self.table(ids), past)
        if extra is not None:
            hidden = hidden * extra
        return nn.functional.gelu(self.linear(hidden), approximate="tanh"), ids + 1


class OneTensor(nn.Module):
    """Returns a Tensor, not a tuple."""

    def __init__(self, scale: float = 2.0) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(8, 4, bias=False), scale

    def forward(self, hidden: Tensor) -> Tensor:
        return self.linear(hidden) * self.scale


class OneTuple(OneTensor):
    """Returns a tuple of one Tensor."""

    def forward(self, hidden: Tensor) -> tuple[Tensor]:  # type: ignore[override]
        return (super().forward(hidden),)


class Impossible(nn.Module):
    """Calls an op that no exporter knows."""

    def forward(self, hidden: Tensor) -> Tensor:
        return torch.ops.g4toy.unknown(hidden)


@pytest.fixture(scope="session", autouse=True)
def unknown_op() -> object:
    """Defines g4toy::unknown, which eager and torch.export can run."""
    library = torch.library.Library("g4toy", "DEF")
    library.define("unknown(Tensor x) -> Tensor")
    library.impl("unknown", lambda x: x + 1, "CompositeExplicitAutograd")
    return library


def toy_inputs(seed: int, extra: bool) -> Inputs:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(5, 8, generator=generator)
    ids = torch.randint(7, (5,), generator=generator)
    mask = torch.rand(5, generator=generator) < 0.5
    return ids, hidden.flip(0) if extra else None, mask, hidden


def hidden_inputs(seed: int) -> Inputs:
    return (torch.randn(3, 8, generator=torch.Generator().manual_seed(seed)),)


def seeded(module: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return module().eval()


def quantized(bits: int) -> nn.Module:
    """A toy whose int8 weight and int8 or int16 activations were quantized by PT2E."""
    pt2e = pytest.importorskip("torchao.quantization.pt2e")
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
    from torchao.quantization.pt2e.quantizer import QuantizationAnnotation, QuantizationSpec, Quantizer

    dtype, top = (torch.int8, 127) if bits == 8 else (torch.int16, 32767)
    activation = QuantizationSpec(dtype, pt2e.MinMaxObserver, -top - 1, top, torch.per_tensor_affine)
    weight = QuantizationSpec(torch.int8, pt2e.PerChannelMinMaxObserver, -127, 127, torch.per_channel_symmetric, 0)

    class ToyQuantizer(Quantizer):
        def annotate(self, model: torch.fx.GraphModule) -> torch.fx.GraphModule:
            for node in model.graph.find_nodes(op="call_function", target=torch.ops.aten.linear.default):
                node.meta["quantization_annotation"] = QuantizationAnnotation(
                    {node.args[0]: activation, node.args[1]: weight}, activation, _annotated=True
                )
            return model

        def validate(self, model: torch.fx.GraphModule) -> None:
            pass

    with torch.no_grad():
        prepared = prepare_pt2e(
            torch.export.export(seeded(OneTensor), hidden_inputs(0), strict=False).module(), ToyQuantizer()
        )
        for seed in range(4):
            prepared(*hidden_inputs(seed))
        return convert_pt2e(prepared)


def require_same(actual: object, expected: object, step: float = 1e-6) -> None:
    """Same structure, dtypes and shapes; values within `step`."""
    assert type(actual) is type(expected)
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=step)


# --- same results as eager ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("extra", [True, False], ids=["all inputs", "a None input"])
def test_ids_masks_and_several_outputs(
    executor: str, extra: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    module = seeded(Toy)
    lowered = lower_graph(executor, "toy", module, toy_inputs(0, extra), tmp_path / "toy")
    chatter = "".join(capfd.readouterr()).splitlines()
    # ExecuTorch's library looks at the processor when it is loaded first, before anybody could silence it.
    assert not [line for line in chatter if not line.startswith("[cpuinfo_utils.cpp")], "lowering chatters"
    first = lowered(*toy_inputs(1, extra))
    kept = tuple(tensor.clone() for tensor in first)
    second = lowered(*toy_inputs(2, extra))
    with torch.no_grad():
        require_same(first, module(*toy_inputs(1, extra)))
        require_same(second, module(*toy_inputs(2, extra)))
    assert all(map(torch.equal, first, kept)), "the second call overwrote the results of the first"


def test_a_slice_may_enter_where_a_dense_tensor_was_the_example_and_the_other_way_round(
    executor: str, tmp_path: Path
) -> None:
    module = seeded(OneTuple)
    (dense,) = hidden_inputs(1)
    sliced = torch.stack([dense, dense], dim=-1)[..., 0]
    assert not sliced.is_contiguous()
    for name, example, given in (("dense", dense, sliced), ("sliced", sliced, dense)):
        lowered = lower_graph(executor, "toy", module, (example,), tmp_path / name)
        with torch.no_grad():
            require_same(lowered(given), module(given))


def test_a_tuple_of_one_stays_one_when_it_is_loaded_too(executor: str, tmp_path: Path) -> None:
    module = seeded(OneTuple)
    for _ in ("made", "loaded"):
        lowered = lower_graph(executor, "toy", module, hidden_inputs(0), tmp_path / "toy")
        with torch.no_grad():
            require_same(lowered(*hidden_inputs(1)), module(*hidden_inputs(1)))


@pytest.mark.parametrize("bits", [8, 16])
def test_quantized_graphs(executor: str, bits: int, tmp_path: Path) -> None:
    module = quantized(bits)
    require_expressible(executor, f"w8a{bits}")
    lowered = lower_graph(executor, "toy", module, hidden_inputs(0), tmp_path / "toy")
    with torch.no_grad():
        expected, actual = module(*hidden_inputs(1)), lowered(*hidden_inputs(1))
        unquantized = seeded(OneTensor)(*hidden_inputs(1))
    # A value between two quantized ones may go to either; there are 2 ** bits over a range of about 8.
    require_same(actual, expected, step=10 / 2**bits)
    assert not torch.equal(actual, unquantized), "nothing was quantized"


# --- artefacts ------------------------------------------------------------------------------------------------------


def count_making(monkeypatch: pytest.MonkeyPatch, executor: str) -> list[Path]:
    """Gets an entry whenever the executor makes an artefact rather than loading it."""
    made: list[Path] = []

    def counting(path: Path, make: Callable[[Path], bool]) -> storing.Seal:
        def counted(target: Path) -> bool:
            made.append(target)
            return make(target)

        return storing.stored(path, counted)

    monkeypatch.setattr(f"{EXECUTORS[executor].module}.stored", counting)
    return made


def only_artefact(folder: Path) -> Path:
    (found,) = (path for path in folder.iterdir() if path.suffix not in {".seal", ".lock"})
    return found


def test_an_artefact_is_made_once_and_again_where_it_is_damaged(
    storing_executor: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    making = count_making(monkeypatch, storing_executor)
    module = seeded(OneTensor)
    expected = module(*hidden_inputs(1)).detach()
    for number_made, damage in ((1, None), (1, None), (2, bytes.__len__), (2, None)):
        if damage is not None:
            whole = only_artefact(tmp_path)
            content = whole.read_bytes()
            whole.unlink()  # a new file: a loaded library may still be mapped from the old one
            whole.write_bytes(content[: damage(content) // 2])
        lowered = cached_lowering(storing_executor, "toy", module, hidden_inputs(0), tmp_path)
        require_same(lowered(*hidden_inputs(1)), expected)
        assert len(making) == number_made
    assert not list(tmp_path.glob(".making-*"))


def test_what_fails_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    making = count_making(monkeypatch, "export")
    with pytest.raises(LoweringError):
        lower_graph("export", "toy", seeded(OneTensor), (torch.zeros(3, 5),), tmp_path / "toy")
    assert making
    assert not list(tmp_path.iterdir())


def test_digests_differ_by_graph_weights_scalars_and_shapes(tmp_path: Path) -> None:
    example = hidden_inputs(0)
    other_weight = seeded(OneTensor)
    other_weight.linear.weight.data[0, 0] += 1
    digests = [
        graph_digest(seeded(OneTensor), example),
        graph_digest(other_weight, example),
        graph_digest(seeded(lambda: OneTensor(3.0)), example),
        graph_digest(seeded(Toy), toy_inputs(0, True)),
        graph_digest(seeded(Toy), toy_inputs(0, False)),
    ]
    assert len(set(digests)) == len(digests)
    assert digests[0] == graph_digest(seeded(OneTensor), example)
    paths = {
        artefact_path(tmp_path, executor, key, inputs)
        for executor in ("export", "inductor")
        for key in ("a", "b")
        for inputs in (example, (torch.zeros(1, 8),), (example[0].half(),), (None,))
    }
    assert len(paths) == 16


def test_another_version_is_another_artefact(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before = artefact_path(tmp_path, "export", "key", ())
    monkeypatch.setattr(artefacts, "version", lambda package: "0.0.0")
    assert artefact_path(tmp_path, "export", "key", ()) != before


def test_artefacts_that_no_run_uses_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, example = seeded(OneTensor), hidden_inputs(0)
    cached_lowering("export", "toy", module, example, tmp_path, key="old")
    monkeypatch.setattr(artefacts.time, "time", lambda: (tmp_path / "x").parent.stat().st_mtime + 31 * 86_400)
    cached_lowering("export", "toy", module, example, tmp_path, key="new")
    assert not [path for path in tmp_path.iterdir() if path.suffix == ".pt2"], "the clock made all of them old"


# --- refusals -------------------------------------------------------------------------------------------------------


def test_an_unknown_executor_and_scheme_are_refused() -> None:
    with pytest.raises(ConformanceError, match=r"expected an executor among eager, export, .*, found 'tensorrt'\."):
        require_installed("tensorrt")
    with pytest.raises(ConformanceError, match=r"expected a scheme among none, .*, w8, found 'w2'\."):
        require_expressible("eager", "w2")


def test_an_impossible_pair_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    toy = Executor("toy", "", "", refused_schemes={"w8a16": "no int16"}, refused_dtypes={"bfloat16": "no bfloat16"})
    monkeypatch.setitem(registry.EXECUTORS, "toy", toy)
    require_expressible("toy", "w8")
    for scheme, dtype, reason in (("w8a16", "float32", r"w8a16 \(no int16\)"), ("w8", "bfloat16", r"\(no bfloat16\)")):
        with pytest.raises(ConformanceError, match=reason) as refused:
            require_expressible("toy", scheme, dtype)
        assert "\n" not in str(refused.value)
        assert "toy" not in refused.value.remedy
        assert "eager" in refused.value.remedy


def test_the_table_speaks_of_schemes_and_of_extras_that_exist() -> None:
    for executor in EXECUTORS.values():
        assert set(executor.refused_schemes) < set(ALL_SCHEMES)
        assert (executor.extra is None) == (not executor.packages)


def test_a_missing_extra_is_one_line_that_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for executor in ("onnxruntime", "executorch"):
        with pytest.raises(ConformanceError, match=rf"pip install 'g4conformance\[{executor}\]'") as refused:
            require_installed(executor)
        assert "\n" not in str(refused.value)


@pytest.mark.parametrize("executor_name", ["onnxruntime", "executorch"])
def test_a_graph_that_cannot_be_lowered_names_graph_executor_and_op(executor_name: str, tmp_path: Path) -> None:
    require_extra(executor_name)
    with pytest.raises(LoweringError, match="unknown") as failed:
        cached_lowering(executor_name, "layer 3, decode", Impossible(), hidden_inputs(0), tmp_path)
    error = failed.value
    assert (error.graph, error.executor) == ("layer 3, decode", executor_name)
    assert error.op is not None
    assert "g4toy" in error.op
    assert "\n" not in str(error)
    assert error.__cause__ is None
    assert error.__suppress_context__
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


@pytest.mark.parametrize(
    ("message", "op"),
    [
        (
            "No decompositions registered for the complex-valued input <OpOverload(op='aten.foo', overload='x')>",
            "aten.foo",
        ),
        ("Missing out variants: {'g4toy::unknown'}", "g4toy::unknown"),
        ("cannot lower torch.ops.aten.bar.default", "aten.bar"),
        ("in quantized_decomposed.quantize_per_tensor.default: no", "quantized_decomposed.quantize_per_tensor"),
        ("atomic::op in torch::jit and std::vector", "atomic::op"),
        ("std::bad_alloc in c10::Error, onnxruntime::Graph", None),
        ("NOT_IMPLEMENTED : Could not find an implementation for Gemm(13) node with name 'x'", "Gemm"),
        ("no op at all", None),
    ],
)
def test_the_op_is_found_in_the_chain_of_causes_and_only_one_line_is_told(message: str, op: str | None) -> None:
    try:
        try:
            raise ValueError(f"\n{message}\nsecond line")
        except ValueError as inner:
            raise RuntimeError("conversion failed") from inner
    except RuntimeError as outer:
        error = lowering_error("onnxruntime", "head", outer)
    assert (error.op, error.cause) == (op, f"ValueError: {message}")
