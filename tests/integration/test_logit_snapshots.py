"""Statistics of the shipped runtime's logits on the bundled checkpoint are what they were, in each case and setting."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from syrupy.assertion import SnapshotAssertion

from g4conformance.faults import FAULTS

from .logit_snapshots.extension import LogitSnapshotExtension, differences
from .logit_snapshots.files import SNAPSHOTS, fed_tokens, orphans, recorded_tokens, snapshot_file
from .logit_snapshots.record import from_text, to_text
from .logit_snapshots.run import bundled_cases, greedy_tokens, record_case, resolved_case, runtime_of
from .logit_snapshots.settings import SETTINGS, Setting, build_runtime

pytestmark = pytest.mark.selftest


def each_snapshot() -> list[Any]:
    """One worker runs all cases of a setting: its checkpoint is then loaded once."""
    return [
        pytest.param(
            setting, case, id=f"{setting.name}-{case}", marks=pytest.mark.xdist_group(f"logits, {setting.name}")
        )
        for setting in SETTINGS
        for case in bundled_cases()
    ]


@pytest.fixture
def snapshot(snapshot: SnapshotAssertion) -> SnapshotAssertion:
    return snapshot.use_extension(LogitSnapshotExtension)


@pytest.mark.parametrize(("setting", "case"), each_snapshot())
def test_logits(setting: Setting, case: str, snapshot: SnapshotAssertion) -> None:
    runtime = runtime_of(setting)
    resolved = resolved_case(runtime, case)
    fed = fed_tokens(setting, case, resolved.decode_steps)
    if fed is None:
        fed = greedy_tokens(case)
    same = snapshot == record_case(runtime, resolved, setting, fed)
    if not same:
        pytest.fail("\n".join(snapshot.get_assert_diff()), pytrace=False)


@pytest.mark.parametrize(
    ("setting", "factor"),
    [
        pytest.param(setting, 1.1 if setting.dtype == "float32" else -1.0, id=setting.name)
        for setting in SETTINGS
        if setting.scheme == "none"
    ],
)
def test_a_changed_weight_is_noticed(setting: Setting, factor: float) -> None:
    """Ten per cent of one gate projection move logits by less than 16-bit dtypes round; there, its sign is changed."""
    runtime = build_runtime(setting)
    runtime.model.model.language_model.layers[4].mlp.gate_proj.weight.mul_(factor)
    case = resolved_case(runtime, "text-only")
    snapshot = snapshot_file(setting, "text-only").read_text(encoding="utf-8")
    broken = record_case(runtime, case, setting, from_text(snapshot).fed)
    assert differences(snapshot, to_text(broken))


@pytest.mark.parametrize(
    "setting",
    [
        pytest.param(setting, id=setting.name, marks=pytest.mark.xdist_group(f"logits, {setting.name}"))
        for setting in SETTINGS
        if setting.scheme != "none"
    ],
)
def test_a_changed_program_is_noticed(setting: Setting) -> None:
    """One layer that adds its last residual twice; where activations have eight bits, only much more shows."""
    fault = "hidden-clipped" if setting.scheme == "w8a8" else "residual-lowered-twice"
    runtime = runtime_of(setting)
    case = resolved_case(runtime, "text-only")
    snapshot = snapshot_file(setting, "text-only").read_text(encoding="utf-8")
    with FAULTS[fault].applied(runtime):
        broken = record_case(runtime, case, setting, from_text(snapshot).fed)
    assert differences(snapshot, to_text(broken))


def test_every_snapshot_belongs_to_a_test(pytestconfig: pytest.Config) -> None:
    """syrupy says so too, but not where tests are deselected, as by `-m selftest`."""
    found = orphans(SNAPSHOTS, [snapshot_file(setting, case) for setting in SETTINGS for case in bundled_cases()])
    if pytestconfig.getoption("update_snapshots"):
        for path in found:
            path.unlink(missing_ok=True)
    elif found:
        pytest.fail(
            f"snapshots of no test: {_names(found)}. Delete them, or run with --snapshot-update.", pytrace=False
        )


def test_every_setting_is_fed_the_same() -> None:
    """Otherwise what a scheme does could not be read beside what float32 does."""
    for case in bundled_cases():
        recorded = {recorded_tokens(snapshot_file(setting, case)) for setting in SETTINGS}
        assert len(recorded - {None}) <= 1, case  # of missing ones, another test tells


def _names(paths: Sequence[Path]) -> str:
    return ", ".join(str(path.relative_to(SNAPSHOTS)) for path in paths)
