"""One token at a time over fixed buffers, with everything that prefill is checked for, at every step."""

import pytest

from g4conformance.suite.judged import Judged

pytestmark = pytest.mark.integration


@pytest.mark.stage("decode")
def test_decode(judged: Judged) -> None:
    judged.require()
