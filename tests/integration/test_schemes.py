"""Every quantization scheme on the bundled checkpoint: right as it is, and red when one scale is 10 % off."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from g4conformance.faults import FAULTS
from g4conformance.faults.matrix import shipped_workbench
from g4conformance.faults.subjects import Subject, subject_checkpoint
from g4conformance.faults.trial import Outcome, Workbench
from g4conformance.quantization.schemes import SCHEMES

pytestmark = pytest.mark.selftest


@cache
def workbench(scheme: str) -> Workbench:
    return shipped_workbench(subject_checkpoint(Subject.QUANTIZED), quant=scheme)


def each_scheme() -> list[Any]:
    """One worker has all tests of a scheme: its runtime is then calibrated once."""
    return [pytest.param(scheme, marks=pytest.mark.xdist_group(f"scheme {scheme}")) for scheme in SCHEMES]


@pytest.mark.parametrize("scheme", each_scheme())
@pytest.mark.parametrize("case", ["text-only", "image-first"])
def test_the_shipped_runtime_conforms(scheme: str, case: str) -> None:
    bench = workbench(scheme)
    prepared = bench.prepared(case)
    assert bench.session.bench.scheme == scheme
    assert not [(v.check, v.where) for v in bench.judged(prepared, prepared.clean) if v.failed]


@pytest.mark.parametrize("scheme", each_scheme())
@pytest.mark.parametrize("id", ["weight-scale-10-percent", "activation-scale-10-percent"])
def test_a_scale_that_is_10_percent_off_is_red(scheme: str, id: str) -> None:
    if id.startswith("activation") and SCHEMES[scheme].activation_bits is None:
        pytest.skip(f"{scheme} has no scales of activations")
    trial = workbench(scheme).run(FAULTS[id])
    assert trial.outcome is Outcome.KILLED, trial.detail
