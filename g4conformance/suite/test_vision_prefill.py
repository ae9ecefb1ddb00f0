"""Patches become soft tokens: embedded, encoded, pooled in a grid, projected into the language model's space."""

import pytest

from g4conformance.suite.judged import Judged

pytestmark = pytest.mark.integration


@pytest.mark.stage("vision_prefill")
def test_vision_prefill(judged: Judged) -> None:
    judged.require()
