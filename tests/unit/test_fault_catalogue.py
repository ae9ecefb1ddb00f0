"""The list of faults as such: nothing of the public catalogue is forgotten, and each says what it must."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import nn

from g4conformance.checks import CHECKS
from g4conformance.faults import FAULTS, Fault
from g4conformance.faults.absent import ABSENT
from g4conformance.faults.matrix import select_faults
from g4conformance.faults.patching import Patch
from g4conformance.faults.registry import DERIVED, At, fault
from g4conformance.faults.subjects import Subject
from g4conformance.session import RunOptions
from g4conformance.stages import Stage

pytestmark = pytest.mark.unit

PUBLIC_CATALOGUE = Path(__file__).with_name("public_catalogue.txt").read_text().split()


def test_every_fault_of_the_public_catalogue_is_here_or_cannot_be() -> None:
    assert len(PUBLIC_CATALOGUE) == 116
    assert set(PUBLIC_CATALOGUE) <= {*FAULTS, *ABSENT}
    assert not ABSENT.keys() & FAULTS.keys()
    assert ABSENT.keys() <= set(PUBLIC_CATALOGUE)


def test_every_stage_has_several_faults_of_its_own() -> None:
    counts = Counter(fault.stage for fault in FAULTS.values())
    assert len(FAULTS) >= 100
    assert all(counts[stage] >= 7 for stage in list(Stage)[:8])


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_fault_says_what_it_is(fault: Fault) -> None:
    assert fault.mechanism.endswith(".")
    assert fault.sources
    assert all(source == DERIVED or source.count("/") >= 3 for source in fault.sources)
    # Another stage's check may see a fault of a quantized runtime best: the first wrong tensor is not what is wrong.
    assert CHECKS[fault.check].stage is fault.stage or fault.needs is Subject.QUANTIZED
    assert fault.case in {case.name for case in RunOptions().all_cases()}


def test_every_part_of_a_runtime_has_faults() -> None:
    assert {fault.at for fault in FAULTS.values()} == set(At)


def test_every_stage_has_faults_at_the_contracts_boundary() -> None:
    boundary = {fault.stage for fault in FAULTS.values() if fault.boundary}
    assert boundary >= set(list(Stage)[:8])


def test_faults_are_selected_by_id_and_stage() -> None:
    assert [fault.id for fault in select_faults(["bos-missing", "gelu-exact"])] == ["bos-missing", "gelu-exact"]
    assert {fault.stage for fault in select_faults(stages=[Stage.DECODE])} == {Stage.DECODE}
    assert len(select_faults()) == len(FAULTS)


def test_an_id_is_taken_once() -> None:
    declare = fault("bos-missing", stage=Stage.DECODE, at=At.GRAPH, check="G4-DECODE-01")
    with pytest.raises(ValueError, match="two faults are called bos-missing"):
        declare(lambda runtime, patch: None)


# --- patches ----------------------------------------------------------------------------------------------------------


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.scale = nn.Buffer(torch.tensor(3.0))
        self.inner = nn.Linear(2, 2)
        self.eps = 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("weight", torch.zeros(2)),
        ("scale", torch.tensor(1.0)),
        ("inner", torch.zeros_like),
        ("eps", 1.0),
        ("forward", torch.zeros_like),
    ],
)
def test_a_patch_holds_inside_its_context_only(name: str, value: object) -> None:
    part = Part()
    before, names = getattr(part, name), sorted([*vars(part), *part.state_dict()])
    with Patch() as patch:
        patch(part, name, value)
        assert getattr(part, name) is value
    assert getattr(part, name) == before if name == "forward" else getattr(part, name) is before
    assert sorted([*vars(part), *part.state_dict()]) == names


def test_patches_are_undone_in_reverse_order_and_after_an_exception() -> None:
    part = Part()

    def patch_and_raise() -> None:
        with Patch() as patch:
            patch(part, "eps", 1.0)
            patch(part, "eps", 2.0)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        patch_and_raise()
    assert part.eps == 1e-6


def test_a_part_that_is_not_there_cannot_be_patched() -> None:
    with Patch() as patch, pytest.raises(AttributeError, match="Part has no norm to replace"):
        patch(Part(), "norm", None)
