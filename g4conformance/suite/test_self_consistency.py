"""A runtime against itself: what must not matter, what must not remain, and one computation in two ways."""

import pytest

from g4conformance.suite.judged import Judged

pytestmark = pytest.mark.integration


@pytest.mark.stage("self_consistency")
def test_self_consistency(judged: Judged) -> None:
    judged.require()
