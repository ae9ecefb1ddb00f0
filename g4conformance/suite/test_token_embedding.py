"""Ids become embeddings, times the root of the hidden size; padding and image rows hold the pad id's."""

import pytest

from g4conformance.suite.judged import Judged

pytestmark = pytest.mark.integration


@pytest.mark.stage("token_embedding")
def test_token_embedding(judged: Judged) -> None:
    judged.require()
