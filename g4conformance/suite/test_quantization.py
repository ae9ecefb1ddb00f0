"""A quantized runtime against the float model: its integers and scales, and what it loses by them."""

import pytest

from g4conformance.suite.judged import Judged

pytestmark = pytest.mark.integration


@pytest.mark.stage("quantization")
def test_quantization(judged: Judged) -> None:
    judged.require()
