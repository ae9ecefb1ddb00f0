"""What a runtime with code of its own may round otherwise: rotary tables, pixels, linear ops."""

from __future__ import annotations

import math

import pytest
import torch

from g4conformance.budgets import budget_of
from g4conformance.checkpoints.checkpoint import Checkpoint
from g4conformance.checks import CHECKS
from g4conformance.checks.registry import BudgetKind
from g4conformance.metrics import difference
from g4conformance.reference.noise import NoiseMeter
from g4conformance.reference.otherwise import with_other_way

pytestmark = pytest.mark.unit

SLIDING = "sliding_attention"


def tables(checkpoint: Checkpoint, layer_type: str = SLIDING, rows: int = 120) -> dict[str, torch.Tensor]:
    rotary = checkpoint.model.model.language_model.rotary_emb
    cos, sin = rotary(torch.zeros(1), torch.arange(rows)[None], layer_type)
    return {f"rope/{layer_type}/cos": cos, f"rope/{layer_type}/sin": sin}


@pytest.fixture(scope="module")
def foreign(tiny_checkpoint: Checkpoint) -> Checkpoint:
    (model,) = with_other_way(tiny_checkpoint).other_ways.values()
    checkpoint: Checkpoint = type(tiny_checkpoint)(
        model, tiny_checkpoint.processor, tiny_checkpoint.facts, "", tiny_checkpoint.options, ""
    )
    return checkpoint


@pytest.mark.parametrize("check", ["G4-ROPE-01", "G4-DECODE-05", "G4-INPUTS-05"])
def test_floats_that_the_shipped_runtime_takes_over_are_rounded_by_a_foreign_one(check: str) -> None:
    assert budget_of(CHECKS[check], "float32").kind is BudgetKind.EXACT
    assert budget_of(CHECKS[check].of_foreign(), "float32").kind is BudgetKind.ROUNDING


@pytest.mark.parametrize("check", ["G4-INPUTS-01", "G4-EMBED-01", "G4-MASK-01", "G4-GEN-02"])
def test_what_has_one_right_value_stays_exact(check: str) -> None:
    assert budget_of(CHECKS[check].of_foreign(), "float32").kind is BudgetKind.EXACT


@pytest.mark.parametrize("layer_type", [SLIDING, "full_attention"])
def test_tables_of_another_way_are_the_reference_s_up_to_rounding(
    tiny_checkpoint: Checkpoint, foreign: Checkpoint, layer_type: str
) -> None:
    base, exact = tables(tiny_checkpoint, layer_type), tables(foreign, layer_type)
    for name in base:
        found = difference(base[name], exact[name])
        assert 0.0 < found.max_abs < 3e-5


def test_pictures_are_turned_another_way_too(tiny_checkpoint: Checkpoint, foreign: Checkpoint) -> None:
    positions = torch.stack([torch.arange(200), torch.arange(200).flip(0)], dim=-1)[None]
    base, exact = (
        checkpoint.model.model.vision_tower.encoder.rotary_emb(torch.zeros(1), positions)[0]
        for checkpoint in (tiny_checkpoint, foreign)
    )
    assert 0.0 < difference(base, exact).max_abs < 5e-5


@pytest.mark.parametrize("damage", ["bfloat16 frequencies", "a position later", "another base"])
def test_a_wrong_table_is_far_beyond_what_a_foreign_one_may_round(
    tiny_checkpoint: Checkpoint, foreign: Checkpoint, damage: str
) -> None:
    base = tables(tiny_checkpoint)
    meter = NoiseMeter(torch.float32)
    meter.add("exact", base, tables(foreign))
    rotary = tiny_checkpoint.model.model.language_model.rotary_emb
    frequencies = rotary.sliding_attention_inv_freq
    if damage == "bfloat16 frequencies":
        frequencies = frequencies.bfloat16().float()
    elif damage == "another base":
        frequencies = frequencies**1.01
    angles = (torch.arange(120.0) + (damage == "a position later"))[None, :, None] * frequencies
    wrong = torch.cat([angles, angles], dim=-1).cos()
    name = f"rope/{SLIDING}/cos"
    found = difference(base[name], wrong)
    limit = budget_of(CHECKS["G4-ROPE-01"].of_foreign(), "float32").limit(meter.noise(), name, found)
    assert found.max_abs > 1000 * limit.largest
    assert math.isinf(limit.gain)
