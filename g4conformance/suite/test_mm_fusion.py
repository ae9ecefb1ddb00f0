"""Soft tokens take the image's slot among the text embeddings; nothing else moves."""

import pytest

from g4conformance.suite.judged import Judged

pytestmark = pytest.mark.integration


@pytest.mark.stage("mm_fusion")
def test_mm_fusion(judged: Judged) -> None:
    judged.require()
