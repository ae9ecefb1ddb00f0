"""Diagnosis: fingerprints survive on disk, and the most similar one is named first."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from g4conformance.checks import CHECKS
from g4conformance.checks.compare import compare
from g4conformance.checks.run import Mode
from g4conformance.faults import FAULTS
from g4conformance.faults.diagnosis import suspects
from g4conformance.faults.fingerprints import Fingerprint, fingerprint_of, load, save
from g4conformance.faults.subjects import Subject
from g4conformance.judging.judge import judge
from g4conformance.judging.traits import Traits, traits_of
from g4conformance.judging.verdict import Status, Verdict
from g4conformance.report.suspects import likely, suspect_data, suspect_lines
from g4conformance.stages import Stage

from .recording import Recorded

pytestmark = pytest.mark.unit

HIDDEN = Traits("prefill/layer/0/hidden", 0.5, 0.8, (1.0, 1.0, 1.0), (0, 0, 0))
LOGITS = Traits("prefill/logits", 0.1, 1.3, (1.0, 0.9), (0, 3))
KNOWN: dict[str, Fingerprint] = {
    "layer-scalar-dropped": {"text-only": {"G4-PREFILL-03": HIDDEN, "G4-PREFILL-04": LOGITS}},
    "gelu-exact": {"text-only": {"G4-PREFILL-03": replace(HIDDEN, size=1e-4, gain=1.0)}},
    "final-softcap-missing": {"text-only": {"G4-PREFILL-04": LOGITS}, "window": {"G4-PREFILL-04": LOGITS}},
}


def verdict(check: str, traits: Traits | None, case: str = "text-only", status: Status = Status.FAIL) -> Verdict:
    stage = CHECKS[check].stage
    mode = Mode.ISOLATED if Mode.ISOLATED in CHECKS[check].modes else Mode.ACCUMULATED
    return Verdict(check, stage, case, mode, status, "it holds", traits=traits)


def named(verdicts: list[Verdict]) -> list[str]:
    return [suspect.fault.id for suspect in suspects(verdicts, KNOWN)]


def resemblances(verdicts: list[Verdict]) -> dict[str, float]:
    return {suspect.fault.id: suspect.resemblance for suspect in suspects(verdicts, KNOWN)}


# --- traits -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("actual", "spread", "first"),
    [
        (torch.ones(2, 4) * 2, (1.0, 1.0), (0, 0)),
        (torch.tensor([[1.0, 1, 1, 1], [1, 1, 3, 1]]), (0.5, 0.25), (1, 2)),
        (torch.tensor([[1.0, 1.001, 1, 1], [1, 1, 3, 1]]), (0.5, 0.25), (1, 2)),
    ],
)
def test_traits_say_where_something_notable_differs(actual: Tensor, spread: tuple[float, ...], first: object) -> None:
    found = traits_of(compare("prefill/logits", torch.ones(2, 4), actual))
    assert found.spread == spread
    assert found.first == first
    assert found.size == float((actual - 1).abs().max())


@pytest.mark.parametrize("actual", [torch.ones(3), torch.tensor([1.0, math.nan])])
def test_another_shape_and_nan_are_infinitely_large(actual: Tensor) -> None:
    assert traits_of(compare("prefill/logits", torch.ones(2), actual)).size == math.inf


def test_traits_say_how_many_of_the_tensors_are_wrong(image: Recorded) -> None:
    altered = {f"prefill/layer/{i}/hidden": image.observation.isolated[f"prefill/layer/{i}/hidden"] * 2 for i in (1, 2)}
    observation = replace(image.observation, isolated={**image.observation.isolated, **altered})
    verdicts = judge(image.case, image.reference, observation, image.bench)
    found = next(v.traits for v in verdicts if v.check == "G4-PREFILL-03" and v.mode is Mode.ISOLATED)
    assert found is not None
    assert found.tensor == "prefill/layer/1/hidden"
    assert found.share == pytest.approx(2 / len(image.bench.facts.layer_types))
    assert found.gain == pytest.approx(2.0)


# --- fingerprints -----------------------------------------------------------------------------------------------------


def test_a_fingerprint_holds_what_is_wrong_by_itself() -> None:
    found = fingerprint_of(
        [
            verdict("G4-PREFILL-03", HIDDEN),
            verdict("G4-PREFILL-04", LOGITS, status=Status.INHERITED),
            replace(verdict("G4-PREFILL-02", HIDDEN), mode=Mode.ACCUMULATED),
            verdict("G4-PREFILL-01", None, status=Status.PASS),
            verdict("G4-DECODE-09", None, status=Status.ERROR),
            verdict("G4-GEN-04", LOGITS),
        ]
    )
    assert found["text-only"].keys() == {"G4-PREFILL-03", "G4-DECODE-09", "G4-GEN-04"}
    assert found["text-only"]["G4-DECODE-09"].tensor == "an exception"


def test_fingerprints_survive_a_round_trip(tmp_path: Path) -> None:
    known = {**KNOWN, "one-more": {"window": {"G4-MASK-01": Traits("mask/full_attention", math.inf)}}}
    save(known, tmp_path / "fingerprints.json")
    assert load(tmp_path / "fingerprints.json") == known
    assert (tmp_path / "fingerprints.json").read_text().count("\n") == len(known) + 2, "one line a fault"


def test_every_fault_has_a_recorded_fingerprint_with_its_check() -> None:
    """But for those of quantized runtimes, whose checks name graph and module themselves."""
    in_float = {id: fault for id, fault in FAULTS.items() if fault.needs is not Subject.QUANTIZED}
    assert load().keys() == in_float.keys(), "record them again: g4conformance faults --record"
    for id, fault in in_float.items():
        assert fault.check in load()[id][fault.case], f"{id} was recorded by other checks"


# --- suspects ---------------------------------------------------------------------------------------------------------


def test_nothing_is_suspected_where_nothing_is_wrong() -> None:
    assert named([verdict("G4-PREFILL-03", None, status=Status.PASS)]) == []
    assert likely([verdict("G4-PREFILL-03", None, status=Status.PASS)]) == []


def test_the_most_similar_fault_is_named_first() -> None:
    assert named([verdict("G4-PREFILL-03", HIDDEN), verdict("G4-PREFILL-04", LOGITS)])[0] == "layer-scalar-dropped"
    small = replace(HIDDEN, size=2e-4, gain=0.99)
    passed = verdict("G4-PREFILL-04", None, status=Status.PASS)
    assert named([verdict("G4-PREFILL-03", small), passed])[0] == "gelu-exact"


def test_a_green_case_speaks_against_a_fault_that_shows_there() -> None:
    red = verdict("G4-PREFILL-04", LOGITS)
    both = [red, verdict("G4-PREFILL-04", LOGITS, case="window")]
    one = [red, verdict("G4-PREFILL-04", None, case="window", status=Status.PASS)]
    assert resemblances(both)["final-softcap-missing"] == pytest.approx(1.0)
    assert resemblances(one)["final-softcap-missing"] == pytest.approx(0.5)


def test_what_a_runtime_does_not_expose_speaks_neither_for_nor_against() -> None:
    hidden = verdict("G4-PREFILL-03", None, status=Status.NOT_OBSERVED)
    found = suspects([verdict("G4-PREFILL-04", LOGITS), hidden], KNOWN)
    assert found[0].resemblance == pytest.approx(1.0)
    assert {suspect.fault.id for suspect in found[:2]} == {"layer-scalar-dropped", "final-softcap-missing"}


def test_a_case_of_the_users_own_is_compared_with_the_recorded_one_most_like_it() -> None:
    own = [verdict("G4-PREFILL-03", HIDDEN, case="own"), verdict("G4-PREFILL-04", LOGITS, case="own")]
    found = suspects(own, KNOWN)
    assert found[0].fault.id == "layer-scalar-dropped"
    assert found[0].resemblance == pytest.approx(1.0)


def test_a_green_case_of_the_users_own_says_nothing() -> None:
    wrong = [verdict("G4-PREFILL-03", HIDDEN), verdict("G4-PREFILL-04", LOGITS)]
    green = verdict("G4-PREFILL-04", None, case="own", status=Status.PASS)
    assert resemblances([*wrong, green]) == resemblances(wrong)


def test_suspects_are_told_with_mechanism_and_link() -> None:
    found = suspects([verdict("G4-PREFILL-03", HIDDEN), verdict("G4-PREFILL-04", LOGITS)], KNOWN)[:1]
    assert suspect_lines(found) == [
        "  100% layer-scalar-dropped: A layer's output is not multiplied by its `layer_scalar`. "
        "https://github.com/cloudrift-ai/emmy/pull/371"
    ]
    assert suspect_data(found)[0]["links"] == ["https://github.com/cloudrift-ai/emmy/pull/371"]


def test_every_stage_can_be_diagnosed() -> None:
    stages = {FAULTS[id].stage for id in load()}
    assert stages >= set(list(Stage)[:8])
