"""Grids and losses against brute force: exact fractions, and sums in plain Python."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torchao.quantization.pt2e import MinMaxObserver  # importing it makes the ops

from g4conformance.checks import CHECKS
from g4conformance.checks.run import CaseRun, Mode
from g4conformance.judging.quantization import _grid_of
from g4conformance.quantization.parameters import ActivationQuantization, WeightQuantization
from g4conformance.reference.ranges import Range
from g4conformance.runtime.layout import StaticLayout

pytestmark = pytest.mark.property

FLOATS = st.floats(-1e4, 1e4, width=32, allow_subnormal=False)
BITS = st.sampled_from((8, 16))
SCALES = st.floats(2.0**-12, 8.0, width=32, allow_subnormal=False)


def grid(bits: int, scale: float, zero_point: int) -> ActivationQuantization:
    bound = 2 ** (bits - 1)
    return ActivationQuantization(scale, max(-bound, min(bound - 1, zero_point)), -bound, bound - 1)


@given(st.lists(FLOATS, min_size=1, max_size=8), BITS, SCALES, st.integers(-(2**15), 2**15 - 1))
def test_fake_quantization_is_the_nearest_value_of_the_grid(
    values: list[float], bits: int, scale: float, zero_point: int
) -> None:
    """No value of the grid is nearer by more than float32's rounding."""
    quantization = grid(bits, scale, zero_point)
    step = Fraction(scale)
    low, high = ((q - quantization.zero_point) * step for q in (quantization.quant_min, quantization.quant_max))
    found = quantization.fake_quantized(torch.tensor(values))
    for value, rounded in zip(values, found.tolist(), strict=True):
        exact = min(max(Fraction(value), low), high)
        assert abs(Fraction(rounded) - exact) <= step / 2 + abs(exact) * Fraction(2) ** -21 + step * Fraction(2) ** -6


@given(st.lists(FLOATS, min_size=1, max_size=8), BITS, SCALES, st.integers(-(2**15), 2**15 - 1))
def test_fake_quantization_is_what_the_ops_of_a_graph_compute(
    values: list[float], bits: int, scale: float, zero_point: int
) -> None:
    quantization, tensor = grid(bits, scale, zero_point), torch.tensor(values)
    dtype = {8: torch.int8, 16: torch.int16}[bits]
    arguments = (quantization.scale, quantization.zero_point, quantization.quant_min, quantization.quant_max, dtype)
    ops = torch.ops.quantized_decomposed
    integers = ops.quantize_per_tensor.default(tensor, *arguments)
    assert torch.equal(quantization.fake_quantized(tensor), ops.dequantize_per_tensor.default(integers, *arguments))


@given(st.lists(st.lists(st.integers(-127, 127), min_size=3, max_size=3), min_size=1, max_size=4), st.data())
def test_a_dequantized_weight_is_integer_times_scale(rows: list[list[int]], data: st.DataObject) -> None:
    scales = data.draw(st.lists(SCALES, min_size=len(rows), max_size=len(rows)))
    weight = WeightQuantization(torch.tensor(rows, dtype=torch.int8), torch.tensor(scales))
    for row, scale, found in zip(rows, scales, weight.dequantized(torch.float32).tolist(), strict=True):
        assert found == [float(torch.tensor(float(q)) * torch.tensor(scale)) for q in row]


@given(st.lists(FLOATS, min_size=2, max_size=8), BITS)
def test_the_expected_grid_is_that_of_an_observer(values: list[float], bits: int) -> None:
    dtype = {8: torch.int8, 16: torch.int16}[bits]
    bound = 2 ** (bits - 1)
    observer = MinMaxObserver(
        dtype=dtype, qscheme=torch.per_tensor_affine, quant_min=-bound, quant_max=bound - 1, eps=2.0**-40
    )
    observer(torch.tensor(values))
    scale, _ = observer.calculate_qparams()
    low, high, step = _grid_of(Range(min(values), max(values)), 2**bits - 1)
    assert low <= 0.0 <= high
    assert float(scale) == pytest.approx(float(step), rel=1e-5, abs=2.0**-40)


# --- losses ---------------------------------------------------------------------------------------------------------

POSITIONS = st.integers(1, 3)


@st.composite
def logits(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    """Float and quantized logits [positions, 9] without exact ties."""
    count = draw(POSITIONS)
    pairs = []
    for _ in range(2):
        rows = [draw(st.permutations(range(9))) for _ in range(count)]
        noise = draw(st.lists(st.floats(0.0, 0.4), min_size=9 * count, max_size=9 * count))
        pairs.append(torch.tensor(rows, dtype=torch.float64) + torch.tensor(noise).reshape(count, 9))
    return pairs[0], pairs[1]


def loss(check: str, floating: Tensor, own: Tensor, tie: float = 0.0) -> float:
    """What a check finds between two stacks of logits."""
    names = ["prefill/logits", *(f"decode/{i}/logits" for i in range(len(floating) - 1))]
    tokens = own.argmax(dim=-1)
    reference = {f"float/{name}": floating[i : i + 1] for i, name in enumerate(names)}
    reference |= {f"decode/{i}/token": tokens[i] for i in range(len(own) - 1)}
    reference |= {"valid_length": torch.tensor(0), "input_ids": torch.zeros(1, 0)}
    runtime = {name: own[i : i + 1] for i, name in enumerate(names)} | {"generation/token_ids": tokens}
    run = CaseRun(
        case="a",
        layout=StaticLayout(8),
        facts=None,  # type: ignore[arg-type]
        mode=Mode.ACCUMULATED,
        reference=reference,
        runtime=runtime,
        decode_steps=len(own) - 1,
        gen_steps=len(own),
        near_tie=lambda name: 0.0,
    )
    (found,) = CHECKS[check](replace(run, quality_tie=tie))
    assert found.difference is not None
    return found.difference.max_abs


def divergences(floating: Tensor, own: Tensor) -> list[float]:
    def softmax(row: list[float]) -> list[float]:
        powers = [math.exp(value) for value in row]
        return [power / sum(powers) for power in powers]

    pairs = [(softmax(p), softmax(q)) for p, q in zip(floating.tolist(), own.tolist(), strict=True)]
    return [sum(a * math.log(a / b) for a, b in zip(p, q, strict=True)) for p, q in pairs]


@given(logits())
def test_divergences_are_those_of_plain_sums(pair: tuple[Tensor, Tensor]) -> None:
    expected = divergences(*pair)
    assert loss("G4-QUANT-06", *pair) == pytest.approx(sum(expected) / len(expected), abs=1e-9)
    assert loss("G4-QUANT-08", *pair) == pytest.approx(max(expected), abs=1e-9)
    assert min(expected) - 1e-9 <= loss("G4-QUANT-07", *pair) <= max(expected) + 1e-9


@given(logits())
def test_peir_is_the_greatest_error_over_all_positions(pair: tuple[Tensor, Tensor]) -> None:
    floating, own = (tensor.flatten().tolist() for tensor in pair)
    errors = [abs(a - b) for a, b in zip(floating, own, strict=True)]
    assert loss("G4-QUANT-05", *pair) == pytest.approx(max(errors) / (max(floating) - min(floating)))


@given(logits(), st.sampled_from((0.0, 0.05, 0.2)), st.sampled_from((1, 5)))
def test_lost_tokens_are_those_that_clearly_belong_to_the_best(
    pair: tuple[Tensor, Tensor], tie: float, count: int
) -> None:
    lost = clear = 0
    for floating, own in zip(pair[0].tolist(), pair[1].tolist(), strict=True):
        ranked = sorted(range(9), key=lambda i: -floating[i])
        kept = sorted(range(9), key=lambda i: -own[i])[:count]
        bar = floating[ranked[count]] + tie * (max(floating) - min(floating))
        sure = [token for token in ranked[:count] if floating[token] > bar]
        clear += len(sure)
        lost += sum(token not in kept for token in sure)
    check = {1: "G4-QUANT-09", 5: "G4-QUANT-10"}[count]
    assert loss(check, *pair, tie) == pytest.approx(lost / max(clear, 1))


@given(logits(), st.sampled_from((0.0, 0.05, 0.2)))
def test_partings_are_counted_from_the_first_clear_one(pair: tuple[Tensor, Tensor], tie: float) -> None:
    floating, own = pair[0].tolist(), pair[1].tolist()
    behind = 0
    for position in range(len(own)):
        token = max(range(9), key=lambda i: own[position][i])
        row = floating[position]
        if max(row) - row[token] > tie * (max(row) - min(row)):
            behind = len(own) - position
            break
    assert loss("G4-QUANT-11", *pair, tie) == pytest.approx(behind / len(own))
