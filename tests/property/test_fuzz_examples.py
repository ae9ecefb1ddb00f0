"""Fuzz examples as JSON: nothing is lost, and nothing else is taken for one."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from g4conformance.errors import ConformanceError
from g4conformance.fuzz.example import FuzzExample
from g4conformance.fuzz.strategies import fuzz_examples

pytestmark = pytest.mark.property

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=4,
)


@given(fuzz_examples())
def test_an_example_survives_json(example: FuzzExample) -> None:
    again = FuzzExample.from_json(example.as_json())
    assert again == example
    assert again.as_json() == example.as_json()


@given(fuzz_examples(), json_values, st.data())
def test_a_changed_value_is_kept_or_refused(example: FuzzExample, value: Any, data: st.DataObject) -> None:
    document = json.loads(example.as_json())
    room = data.draw(st.sampled_from([document, document["spec"], document["spec"]["vision"], document["picture"]]))
    room[data.draw(st.sampled_from([*room, "unknown"]))] = value
    with suppress(ConformanceError):
        assert json.loads(FuzzExample.from_json(json.dumps(document)).as_json()) == document
