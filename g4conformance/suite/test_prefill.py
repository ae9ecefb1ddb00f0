"""The prompt runs through the decoder: per-layer inputs, K/V, hidden states, cache, and the last row's logits."""

import pytest

from g4conformance.suite.judged import Judged

pytestmark = pytest.mark.integration


@pytest.mark.stage("prefill")
def test_prefill(judged: Judged) -> None:
    judged.require()
