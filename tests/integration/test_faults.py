"""The gate on the suite itself: every fault is killed at its stage, and a check that is loosened or lost is noticed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from g4conformance import budgets
from g4conformance.checks import CHECKS, Check
from g4conformance.checks.registry import QUANTIZED
from g4conformance.checks.run import Mode
from g4conformance.faults import FAULTS, Fault
from g4conformance.faults.matrix import subject_workbench
from g4conformance.faults.sensitivity import SENSITIVE, findings
from g4conformance.faults.subjects import Subject
from g4conformance.faults.trial import Outcome, Workbench, first_difference
from g4conformance.judging.judge import Bench
from g4conformance.quantization.graphs import QuantizedGraphs
from g4conformance.runtime.static import StaticGemma4Runtime

pytestmark = pytest.mark.selftest

IN_FLOAT = [check.id for check in CHECKS.values() if check.needs not in QUANTIZED]


@cache
def workbench(subject: Subject) -> Workbench:
    return subject_workbench(subject)


def each_fault() -> list[Any]:
    """One worker tries all faults of a subject: reference and clean runtime then run once."""
    return [
        pytest.param(fault, id=fault.id, marks=pytest.mark.xdist_group(f"faults, {fault.needs.name}"))
        for fault in FAULTS.values()
    ]


@pytest.mark.parametrize("fault", each_fault())
def test_fault_is_killed_at_its_stage(fault: Fault) -> None:
    trial = workbench(fault.needs).run(fault)
    assert trial.outcome is Outcome.KILLED, f"{fault.mechanism} {trial.detail}"


@pytest.mark.parametrize("fault", each_fault())
def test_fault_leaves_nothing_behind(fault: Fault) -> None:
    bench = workbench(fault.needs)
    layout = bench.prepared_for(fault).case.request.layout
    runtime = bench.runtime.for_layout(layout)
    if fault.needs is not Subject.QUANTIZED:  # a runtime of its own, whose vision graphs are not there yet
        runtime = StaticGemma4Runtime(bench.checkpoint, layout)
    assert isinstance(runtime, StaticGemma4Runtime)
    before = parts(runtime)
    with fault.applied(runtime):
        pass
    assert parts(runtime) == before


@pytest.mark.xdist_group(f"faults, {Subject.BUNDLED.name}")
def test_the_clean_runtime_is_clean_after_all_faults() -> None:
    bench = workbench(Subject.BUNDLED)
    for fault in FAULTS.values():
        if fault.needs is Subject.BUNDLED and fault.case == "image-a-b-a":
            bench.run(fault)
    for name in ("text-only", "image-a-b-a"):
        prepared = bench.prepared(name)
        again = bench.session.observed(bench.runtime, prepared.case, prepared.reference)
        assert first_difference(prepared.clean, again) == ""


@pytest.mark.parametrize("subject", Subject)
def test_no_false_alarm_on_any_subject(subject: Subject) -> None:
    bench = workbench(subject)
    for name in {fault.case for fault in FAULTS.values() if fault.needs is subject}:
        prepared = bench.prepared(name)
        assert not [v for v in bench.judged(prepared, prepared.clean) if v.failed]


@pytest.mark.xdist_group(f"faults, {Subject.BUNDLED.name}")
def test_each_check_sees_the_smallest_wrong_value() -> None:
    found = list(findings(workbench(Subject.BUNDLED)))
    assert {finding.probe.check for finding in found} == set(IN_FLOAT) == set(SENSITIVE)
    assert not [finding.probe for finding in found if not finding.red]


@pytest.fixture
def whole_registry() -> Iterator[dict[str, Check]]:
    """The registry of checks, from which a test may take one; put back in its order afterwards."""
    whole = dict(CHECKS)
    yield CHECKS
    CHECKS.clear()
    CHECKS.update(whole)


# --- the gate itself can fail -----------------------------------------------------------------------------------------


@pytest.mark.xdist_group(f"faults, {Subject.BUNDLED.name}")
@pytest.mark.parametrize("check", IN_FLOAT)
def test_a_check_that_is_lost_is_noticed(check: str, whole_registry: dict[str, Check]) -> None:
    killed_by_it = [f for f in FAULTS.values() if f.check == check and f.needs is Subject.BUNDLED]
    del whole_registry[check]
    if killed_by_it:
        assert workbench(Subject.BUNDLED).run(killed_by_it[0]).outcome is Outcome.SURVIVED
    assert not all(finding.red for finding in findings(workbench(Subject.BUNDLED), [check]))


@pytest.mark.xdist_group(f"faults, {Subject.QUANTIZED.name}")
@pytest.mark.parametrize("check", [check for check in CHECKS if check not in IN_FLOAT])
def test_a_check_of_quantized_runtimes_that_is_lost_is_noticed(check: str, whole_registry: dict[str, Check]) -> None:
    killed_by_it = [fault for fault in FAULTS.values() if fault.check == check]
    del whole_registry[check]
    assert killed_by_it
    assert workbench(Subject.QUANTIZED).run(killed_by_it[0]).outcome is Outcome.SURVIVED


@pytest.mark.xdist_group(f"faults, {Subject.BUNDLED.name}")
def test_a_budget_that_is_loosened_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    loosened(monkeypatch, lambda budget: budget * 10)
    blind = {finding.probe.check for finding in findings(workbench(Subject.BUNDLED)) if not finding.red}
    assert blind == {check for check in IN_FLOAT if CHECKS[check].budget == "rounding"}


@pytest.mark.xdist_group(f"faults, {Subject.BUNDLED.name}")
@pytest.mark.parametrize("check", ["G4-EMBED-01", "G4-FUSION-02", "G4-ROPE-01", "G4-PREFILL-05", "G4-DECODE-10"])
def test_an_exact_check_that_forgives_rounding_is_noticed(check: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rounding = budgets.budget_of(CHECKS["G4-PREFILL-04"], "float32")
    monkeypatch.setattr(Bench, "budget", lambda self, other: rounding)
    assert not all(finding.red for finding in findings(workbench(Subject.BUNDLED), [check]))


@pytest.mark.xdist_group(f"faults, {Subject.BUNDLED.name}")
@pytest.mark.parametrize(
    ("check", "narrowed"),
    [
        ("G4-PREFILL-03", lambda found: found[-1:]),  # only the last layer
        ("G4-PREFILL-02", lambda found: [one for one in found if one.tensor.endswith("key")]),
        ("G4-DECODE-09", lambda found: found[:1]),  # only the first step
    ],
)
def test_a_check_that_looks_at_less_is_noticed(
    check: str, narrowed: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = CHECKS[check]
    monkeypatch.setitem(CHECKS, check, replace(whole, function=lambda run: narrowed(whole(run))))
    assert not all(finding.red for finding in findings(workbench(Subject.BUNDLED), [check]))


@pytest.mark.xdist_group(f"faults, {Subject.BUNDLED.name}")
def test_a_check_that_is_made_in_isolation_only_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    check = CHECKS["G4-ROPE-01"]
    monkeypatch.setitem(CHECKS, check.id, replace(check, modes=(Mode.ISOLATED,)))
    assert not all(finding.red for finding in findings(workbench(Subject.BUNDLED), [check.id]))


@pytest.mark.xdist_group(f"faults, {Subject.BUNDLED.name}")
@pytest.mark.parametrize("id", ["no-such-part", "nothing-done", "an-exception", "another-stage"])
def test_what_is_no_kill_is_told_apart(id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plants: dict[str, tuple[Callable[[Any, Any], None], Outcome]] = {
        "no-such-part": (lambda runtime, patch: patch(runtime, "no_such_part", 1), Outcome.NOT_APPLICABLE),
        "nothing-done": (lambda runtime, patch: None, Outcome.NOT_APPLIED),
        "an-exception": (lambda runtime, patch: patch(runtime, "head", None), Outcome.CRASHED),
        "another-stage": (
            lambda runtime, patch: patch(runtime, "embedding", lambda ids: torch.zeros(1, ids.shape[1], 96)),
            Outcome.MISPLACED,
        ),
    }
    model = FAULTS["final-softcap-missing"]
    plant, outcome = plants[id]
    fault = Fault(id, model.stage, model.at, model.check, model.case, model.needs, (), False, False, plant)
    assert workbench(Subject.BUNDLED).run(fault).outcome is outcome


def loosened(monkeypatch: pytest.MonkeyPatch, change: Callable[[float], float]) -> None:
    """Every rounding budget is changed."""
    factors = {
        check: {key: change(value) if isinstance(value, float) else value for key, value in entry.items()}
        for check, entry in budgets._entries()["none"].items()
    }
    changed = {**budgets._entries(), "none": factors}
    monkeypatch.setattr(budgets, "_entries", lambda: changed)


def parts(runtime: StaticGemma4Runtime) -> dict[str, int]:
    """Identity of every attribute of the runtime, its cache, and every module's parameters, buffers and submodules."""
    found = {f"runtime.{name}": id(value) for name, value in vars(runtime).items()}
    found |= {f"cache.{name}": id(value) for name, value in vars(runtime.cache).items()}
    for path, module in runtime.model.named_modules():
        for home in (vars(module), module._parameters, module._buffers, module._modules):
            found |= {f"{path}.{name}": id(value) for name, value in home.items()}
    if isinstance(runtime.lower, QuantizedGraphs):
        for name, quantized in runtime.lower.graphs.items():
            for home in (quantized.converted, quantized.executed):
                found |= {f"{name} {signature}": id(program) for signature, program in home.items()}
        return found
    for graph in (runtime.embedding, runtime.per_layer_inputs, runtime.head, runtime.fusion):
        assert graph is not None
        found |= {
            f"{type(graph).__name__}.{name}": id(value) for name, value in {**vars(graph), **graph._modules}.items()
        }
    return found
