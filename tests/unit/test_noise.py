"""Rounding noise and the budgets that are made of it."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from g4conformance.budgets import Budget, budget_of
from g4conformance.checkpoints.checkpoint import DTYPES
from g4conformance.checks import CHECKS
from g4conformance.checks.registry import QUANTIZED, BudgetKind, Check
from g4conformance.errors import UnsoundReferenceError
from g4conformance.metrics import difference
from g4conformance.quantization.schemes import SCHEMES, scheme_of
from g4conformance.reference.noise import Noise, NoiseMeter, kind_of
from g4conformance.reference.selfcheck import require_sound

from .asserting import told

pytestmark = pytest.mark.unit

NOISE = Noise(
    eps=1e-3,
    largest={"logits": 0.5, "layer/3/key": 0.25, "quiet": 1e-9},
    mean={"logits": 0.1},
    gain={"logits": 0.2},
    worst_peir={"another attention implementation": 1e-4},
)
# Of a reference of four values, at most 16 and 8 on average.
FOUND = difference(torch.tensor([16.0, 8.0, 8.0, 0.0]), torch.tensor([16.0, 8.0, 8.0, 0.5]))


# --- noise ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("decode/0/logits", "logits"),
        ("prefill/logits", "logits"),
        ("decode/17/layer/3/key", "layer/3/key"),
        ("self/larger/decode/17/layer/3/key", "layer/3/key"),
        ("self/base/prefill/logits", "logits"),
        ("prefill/layer/3/key", "layer/3/key"),
        ("decode/2/text_embeds", "text_embeds"),
        ("text_embeds", "text_embeds"),
        ("vision/layer/0/hidden", "vision/layer/0/hidden"),
    ],
)
def test_prefill_and_all_decode_steps_are_of_one_kind(name: str, kind: str) -> None:
    assert kind_of(name) == kind


def test_noise_scales_with_the_reference_and_never_falls_below_eps() -> None:
    assert NOISE.allowed_largest("prefill/logits", 16.0) == 8.0
    assert NOISE.allowed_largest("decode/5/logits", 16.0) == 8.0
    assert NOISE.allowed_largest("decode/5/layer/3/key", 16.0) == 4.0
    assert NOISE.allowed_largest("quiet", 16.0) == 16e-3
    assert NOISE.allowed_largest("never met", 16.0) == 16e-3
    assert NOISE.allowed_mean("prefill/logits", 16.0) == 1.6
    assert NOISE.allowed_mean("never met", 16.0) == 16e-3


def test_the_noise_of_a_gain_shrinks_with_the_number_of_values() -> None:
    assert NOISE.allowed_gain("prefill/logits", 100) == pytest.approx(0.02)
    assert NOISE.allowed_gain("never met", 100) == pytest.approx(1e-4)


def test_of_two_noises_the_larger_of_each_kind_counts() -> None:
    other = Noise(
        eps=1e-3, largest={"logits": 0.1, "layer/3/key": 0.5}, mean={"layer/3/key": 0.3}, gain={}, worst_peir={}
    )
    joined = NOISE.joined(other)
    assert joined.largest == {"logits": 0.5, "layer/3/key": 0.5, "quiet": 1e-9}
    assert joined.mean == {"logits": 0.1, "layer/3/key": 0.3}
    assert joined.gain == NOISE.gain


def test_noise_survives_a_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "new folder" / "noise.json"
    NOISE.save(path)
    assert Noise.load(path) == NOISE
    assert [file.name for file in path.parent.iterdir()] == ["noise.json"], "no partial file stays"


@pytest.mark.parametrize("content", [None, "", "{", "[]", '{"eps": 1.0}', '{"eps": 1, "surplus": 2}'])
def test_unreadable_noise_is_measured_again(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "noise.json"
    if content is not None:
        path.write_text(content)
    assert Noise.load(path) is None


def test_noise_that_is_infinite_survives_too(tmp_path: Path) -> None:
    unsound = Noise(1e-7, {"logits": math.inf}, {}, {}, {"way": math.inf})
    unsound.save(tmp_path / "noise.json")
    assert Noise.load(tmp_path / "noise.json") == unsound
    assert "Infinity" in json.dumps(vars(unsound))


def test_the_meter_keeps_the_worst_of_each_kind() -> None:
    meter = NoiseMeter(torch.float32)
    base = {
        "decode/0/logits": torch.tensor([[0.0, 4.0]]),
        "decode/1/logits": torch.tensor([[0.0, -8.0]]),
        "input_ids": torch.tensor([[1]]),
        "silent": torch.zeros(2),
        "only in base": torch.ones(1),
    }
    other = {
        "decode/0/logits": torch.tensor([[0.0, 4.5]]),
        "decode/1/logits": torch.tensor([[0.5, -8.0]]),
        "input_ids": torch.tensor([[2]]),
        "silent": torch.ones(2),
    }
    meter.add("a way", base, other)
    meter.add("a better way", base, {name: base[name] for name in other})
    noise = meter.noise()
    assert noise.eps == torch.finfo(torch.float32).eps
    assert noise.largest == {"logits": 0.125}
    assert noise.mean == {"logits": 0.125}
    assert noise.gain == {"logits": pytest.approx(0.125 * math.sqrt(2))}
    assert noise.worst_peir == {"a way": 0.125, "a better way": 0.0}


@pytest.mark.parametrize("found", [3e-2, math.inf, math.nan])
def test_a_reference_at_odds_with_itself_stops_the_run(found: float) -> None:
    noise = Noise(eps=1e-4, largest={}, mean={}, gain={}, worst_peir={"a way": 1e-3, "another way": found})
    with told(UnsoundReferenceError, expected="a PEIR of 0.02", found="another way", remedy="No runtime was judged"):
        require_sound(noise)


def test_rounding_is_not_held_against_the_reference() -> None:
    require_sound(Noise(eps=1e-4, largest={}, mean={}, gain={}, worst_peir={"a way": 2e-2}))


# --- budgets --------------------------------------------------------------------------------------------------------


def test_a_rounding_budget_is_a_multiple_of_noise() -> None:
    limit = Budget(BudgetKind.ROUNDING, "measured", 4.0, 8.0).limit(NOISE, "prefill/logits", FOUND)
    assert (limit.largest, limit.mean, limit.gain) == (32.0, pytest.approx(3.2), pytest.approx(0.8))


def test_an_exact_budget_allows_nothing() -> None:
    limit = Budget(BudgetKind.EXACT, "", 4.0, 8.0).limit(NOISE, "prefill/logits", FOUND)
    assert (limit.largest, limit.mean, limit.gain) == (0.0, 0.0, 0.0)


def test_a_step_budget_is_a_few_steps_and_the_noise_of_floats() -> None:
    limit = Budget(BudgetKind.STEP, "measured", 4.0, steps=2.0).limit(NOISE, "prefill/logits", FOUND, step=0.5)
    assert (limit.largest, limit.mean, limit.gain) == (33.0, math.inf, math.inf)


def test_a_quality_budget_is_a_number_of_the_scheme() -> None:
    limit = Budget(BudgetKind.QUALITY, "measured", quality=0.25).limit(NOISE, "prefill/logits", FOUND, step=0.5)
    assert (limit.largest, limit.mean, limit.gain) == (0.25, 0.25, math.inf)


def test_under_a_scheme_a_gain_may_be_off_by_what_chance_makes_of_it() -> None:
    by_noise = budget_of(CHECKS["G4-PREFILL-03"], "float32")
    by_chance = budget_of(CHECKS["G4-PREFILL-03"], "float32", "w8a8")
    flipped = replace(FOUND, chance_gain=7.0)
    assert by_chance.limit(NOISE, "prefill/logits", flipped).gain == 4.0 * 7.0
    assert by_noise.limit(NOISE, "prefill/logits", flipped) == by_noise.limit(NOISE, "prefill/logits", FOUND)


@pytest.mark.parametrize("scheme", ["none", *SCHEMES])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS.keys())
def test_every_check_has_a_budget_in_every_dtype_and_scheme(check: Check, dtype: str, scheme: str) -> None:
    if scheme == "none" and check.needs in QUANTIZED:
        return  # never asked of a runtime in floating point
    budget = budget_of(check, dtype, scheme)
    assert budget.kind is check.budget
    assert budget.evidence
    assert "TODO" not in budget.evidence
    assert (budget.factor > 0) == (check.budget in (BudgetKind.ROUNDING, BudgetKind.STEP))
    assert (budget.quality > 0) <= (check.budget is BudgetKind.QUALITY)


@pytest.mark.parametrize(("dtype", "scheme"), [("float64", "none"), ("float64", "w8a8")])
def test_a_missing_budget_is_an_error_not_a_default(dtype: str, scheme: str) -> None:
    with pytest.raises(KeyError, match=rf"\[{scheme}.G4-PREFILL-04\] with {dtype}"):
        budget_of(CHECKS["G4-PREFILL-04"], dtype, scheme)


@pytest.mark.parametrize("scheme", ["none", *SCHEMES])
def test_flipped_bins_widen_rounding_budgets_where_activations_lie_on_a_grid(scheme: str) -> None:
    on_a_grid = scheme != "none" and scheme_of(scheme).activation_bits is not None
    plain, found = (budget_of(CHECKS["G4-PREFILL-03"], "float32", name).factor for name in ("none", scheme))
    assert found == (2 if on_a_grid else 1) * plain
    graph = budget_of(CHECKS["G4-PREFILL-07"], "float32", scheme)
    assert graph.factor == plain, "a graph by itself is judged in steps, which count flipped bins already"
