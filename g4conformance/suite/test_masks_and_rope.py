"""Each layer type has its mask (causal, and within the window) and its rotary tables."""

import pytest

from g4conformance.suite.judged import Judged

pytestmark = pytest.mark.integration


@pytest.mark.stage("masks_and_rope")
def test_masks_and_rope(judged: Judged) -> None:
    judged.require()
