"""The prompt and its pictures become one request: ids, mask and patches, padded to the static shape."""

import pytest

from g4conformance.suite.judged import Judged

pytestmark = pytest.mark.integration


@pytest.mark.stage("build_static_inputs")
def test_build_static_inputs(judged: Judged) -> None:
    judged.require()
