"""What people read: a failure, the summary, the page; each names the known mistakes that it looks like."""

from __future__ import annotations

import json
from typing import Any

import pytest

from g4conformance.faults import FAULTS
from g4conformance.faults.fingerprints import load
from g4conformance.judging.verdict import Status, Verdict
from g4conformance.report.failure import failure_text
from g4conformance.report.files import as_html, as_json
from g4conformance.report.summary import summary_text

from .test_diagnosis import verdict

pytestmark = pytest.mark.unit

SETTING: dict[str, Any] = {
    "runtime": "Mine",
    "model": "tiny",
    "dtype": "float32",
    "attn": "eager",
    "image_backend": "torchvision",
    "quant": "none",
    "executor": "eager",
    "max_seq": 134,
    "torch": "2",
    "transformers": "5",
}
FAULT = FAULTS["decode-position-frozen"]


def as_recorded(fault_id: str, case: str) -> list[Verdict]:
    """The verdicts that a fault's fingerprint was made of."""
    return [verdict(check, traits, case=case) for check, traits in load()[fault_id][case].items()]


WRONG = as_recorded(FAULT.id, FAULT.case)


def test_a_failure_names_what_was_seen_before_and_how_to_repeat_it() -> None:
    text = failure_text(WRONG[:1], WRONG, "pytest -k this")
    seen = next(line for line in text.splitlines() if line.startswith("  seen before: "))
    assert seen.removeprefix("  seen before: ").split(", ")[0] == FAULT.id
    assert text.splitlines()[-1] == "  repeat: pytest -k this"


def test_the_summary_names_the_first_wrong_stage_and_the_likeliest_mistake() -> None:
    text = summary_text(WRONG, SETTING, failed_tests=len(WRONG))
    assert f"wrong first at decode ({WRONG[0].check}, case {FAULT.case})" in text
    told = text.partition("known mistakes that look like this:\n")[2]
    assert told.splitlines()[0].startswith("  100% decode-position-frozen: The position is not advanced")


def test_a_report_that_is_green_suspects_nobody() -> None:
    passed = [verdict("G4-PREFILL-03", None, status=Status.PASS)]
    assert "known mistakes" not in summary_text(passed, SETTING, failed_tests=0)
    assert "Known mistakes" not in as_html(passed, SETTING)
    assert json.loads(as_json(passed, SETTING))["suspects"] == []


def test_machines_and_pages_get_the_suspects_with_their_links() -> None:
    wrong = as_recorded("sliding-window-off-by-one", "window+1")
    first = json.loads(as_json(wrong, SETTING))["suspects"][0]
    assert first["fault"] == "sliding-window-off-by-one"
    assert first["links"] == list(FAULTS["sliding-window-off-by-one"].links)
    page = as_html(wrong, SETTING)
    assert f'<a href="{first["links"][0]}">' in page
    assert "<code>sliding-window-off-by-one</code> (100%)" in page
