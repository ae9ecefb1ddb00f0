"""The comparison of logit snapshots: what is within, what is beyond, and how it reads."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from integration.logit_snapshots.comparison import Beyond, compare, table
from integration.logit_snapshots.extension import LogitSnapshotExtension, differences
from integration.logit_snapshots.files import orphans
from integration.logit_snapshots.record import LogitRecord, from_text, to_text
from integration.logit_snapshots.settings import SETTINGS
from integration.logit_snapshots.tolerance import KINDS, WORST, allowed_in

from g4conformance.statistics import logit_statistics

pytestmark = pytest.mark.unit

ALLOWED_HERE = {"mean": 0.25, "std": 0.25, "order": 0.25, "margin": 0.25, "entropy": 0.25}
LOGITS = torch.tensor([9.0, 7.0, 6.875, 5.0, 4.0, 3.0, -1.0, -2.0])  # ids 1 and 2 are nearly tied


def record(logits: torch.Tensor = LOGITS, **changes: Any) -> LogitRecord:
    whole = LogitRecord("none", "float32", "window", (3, 4), {"prefill": logit_statistics(logits)})
    return replace(whole, **changes)


def with_number(name: str, value: float) -> LogitRecord:
    statistics = record().positions["prefill"]
    return record(positions={"prefill": replace(statistics, numbers={**statistics.numbers, name: value})})


def with_ids(*ids: int) -> LogitRecord:
    return record(positions={"prefill": replace(record().positions["prefill"], top_ids=ids)})


def beyond(was: LogitRecord, now: LogitRecord) -> list[str]:
    return [f"{one.position} {one.statistic}".strip() for one in compare(was, now, ALLOWED_HERE)]


def test_a_record_is_its_own_text() -> None:
    assert to_text(from_text(to_text(record()))) == to_text(record())
    assert beyond(record(), from_text(to_text(record()))) == []


def test_one_line_a_statistic_one_column_a_position() -> None:
    positions = {name: logit_statistics(LOGITS) for name in ("prefill", "decode/0")}
    lines = to_text(record(positions=positions)).splitlines()
    assert '  "max":      [         9.0,          9.0],' in lines
    assert '  "top 2":    [           1,            1],' in lines


@pytest.mark.parametrize("name", ["mean", "std", "min", "q01", "median", "max", "entropy"])
@pytest.mark.parametrize("sign", [-1, 1])
def test_just_inside_passes_and_just_beyond_fails(name: str, sign: int) -> None:
    value = 2.0
    was = with_number(name, value)
    assert beyond(was, with_number(name, value + sign * 0.25)) == []
    assert beyond(was, with_number(name, value + sign * 0.250001)) == [f"prefill {name}"]


def test_each_kind_has_a_tolerance_of_its_own() -> None:
    moved = with_number("mean", 100.0)
    assert compare(record(), moved, {**ALLOWED_HERE, "mean": 200.0}) == []
    assert compare(record(), moved, {**dict.fromkeys(ALLOWED_HERE, 200.0), "mean": 0.0})


def test_a_margin_is_a_number_too() -> None:
    statistics = record().positions["prefill"]
    moved = replace(statistics, margins=(statistics.margins[0] + 0.3, *statistics.margins[1:]))
    assert beyond(record(), record(positions={"prefill": moved})) == ["prefill margin 1"]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_is_beyond_on_either_side_and_on_both(value: float) -> None:
    broken = with_number("mean", value)
    assert beyond(record(), broken) == beyond(broken, record()) == beyond(broken, broken) == ["prefill mean"]


def test_what_is_not_finite_is_never_written() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        to_text(with_number("mean", math.nan))


def test_nearly_tied_ids_may_swap() -> None:
    assert beyond(record(), with_ids(0, 2, 1, 3, 4)) == []


def test_other_ids_may_not_swap() -> None:
    assert beyond(record(), with_ids(1, 0, 2, 3, 4)) == ["prefill top 1", "prefill top 2"]
    assert beyond(record(), with_ids(0, 1, 2, 4, 3)) == ["prefill top 4", "prefill top 5"]


def test_a_chain_of_near_ties_is_no_licence_for_its_ends() -> None:
    chain = record(torch.tensor([9.0, 8.8, 8.6, 8.4, 1.0, 0.0]))
    first_two, ends = ((1, 0, 2, 3, 4), (3, 1, 2, 0, 4))
    swapped = [replace(chain.positions["prefill"], top_ids=ids) for ids in (first_two, ends)]
    assert beyond(chain, record(positions={"prefill": swapped[0]})) == []
    assert beyond(chain, record(positions={"prefill": swapped[1]})) == ["prefill top 1", "prefill top 4"]


def test_an_id_that_was_not_among_the_five_may_only_enter_over_a_near_tie() -> None:
    assert beyond(record(), with_ids(0, 1, 2, 3, 5)) == ["prefill top 5"]
    close = record(torch.tensor([9.0, 7.0, 6.0, 5.0, 4.0, 3.8, -1.0]))
    entered = replace(close.positions["prefill"], top_ids=(0, 1, 2, 3, 5))
    assert beyond(close, record(positions={"prefill": entered})) == []


def test_positions_that_only_one_side_has_are_named() -> None:
    both = record(positions={name: logit_statistics(LOGITS) for name in ("prefill", "decode/0")})
    assert beyond(both, record()) == beyond(record(), both) == ["position decode/0"]


def test_statistics_that_only_one_side_has_are_named() -> None:
    assert beyond(with_number("skew", 1.0), record()) == ["prefill skew"]
    assert beyond(record(), with_number("skew", 1.0)) == ["prefill skew"]


@pytest.mark.parametrize("change", [{"case": "window+1"}, {"scheme": "w8"}, {"dtype": "float16"}, {"fed": (3, 5)}])
def test_another_request_is_no_match(change: dict[str, Any]) -> None:
    assert beyond(record(), record(**change)) == list(change)


def test_the_table_shows_what_was_what_is_and_what_is_allowed() -> None:
    moved = with_number("mean", 2.5)
    moved = record(positions={"prefill": replace(moved.positions["prefill"], top_ids=(1, 0, 2, 3, 4))})
    assert table(compare(with_number("mean", 2.0), moved, ALLOWED_HERE)) == [
        "position  statistic  was  is   allowed",
        "prefill   mean       2    2.5  ± 0.25",
        "prefill   top 1      0    1    an id at most 0.25 from it, not 2",
        "prefill   top 2      1    0    an id at most 0.25 from it, not 2",
    ]


def test_a_long_table_is_cut_and_says_so() -> None:
    lines = table([Beyond("prefill", "mean", "1", "2", "± 0.1")] * 30)
    assert len(lines) == 27
    assert lines[-1] == "and 5 more"


@pytest.mark.parametrize("text", ["", "<<<<<<< ours", "{}", "[]", '{"scheme": "none"}'])
def test_a_damaged_file_differs_and_can_be_updated(text: str) -> None:
    assert [one.statistic for one in differences(text, to_text(record()))] == ["the file"]


def test_the_extension_matches_within_and_shows_only_what_is_beyond() -> None:
    extension = LogitSnapshotExtension()
    was, now = to_text(record()), to_text(with_number("mean", 99.0))
    assert extension.matches(serialized_data=was, snapshot_data=was)
    assert not extension.matches(serialized_data=now, snapshot_data=was)
    assert [line.split()[:2] for line in extension.diff_lines(now, was)][:-1] == [
        ["position", "statistic"],
        ["prefill", "mean"],
    ]


def test_a_missing_snapshot_says_how_to_make_it() -> None:
    assert "--snapshot-update" in "".join(LogitSnapshotExtension().diff_lines(to_text(record()), ""))


def test_each_setting_has_a_measured_tolerance_of_each_kind() -> None:
    assert set(WORST) == {setting.name for setting in SETTINGS}
    assert all(set(allowed_in(setting.name)) == set(KINDS) for setting in SETTINGS)


def test_a_setting_without_tolerance_says_how_to_measure() -> None:
    with pytest.raises(KeyError, match="noise"):
        allowed_in("w3-float32")


def test_orphans_are_all_other_files(tmp_path: Path) -> None:
    for name in ("a.json", "b.json", "deep/c.json", "d.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert orphans(tmp_path, [tmp_path / "a.json", tmp_path / "gone.json"]) == [
        tmp_path / "b.json",
        tmp_path / "d.txt",
        tmp_path / "deep" / "c.json",
    ]
