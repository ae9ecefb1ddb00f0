"""Logits become tokens until a stop token, the number asked for, or full buffers."""

import pytest

from g4conformance.suite.judged import Judged

pytestmark = pytest.mark.integration


@pytest.mark.stage("generation")
def test_generation(judged: Judged) -> None:
    judged.require()
