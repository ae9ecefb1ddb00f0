"""Everything that g4conformance has to say about this runtime."""

import pytest
from plain_gemma4.runtime import PlainGemma4

from g4conformance.suite import *  # noqa: F403


@pytest.fixture(scope="session")
def runtime(checkpoint):
    return PlainGemma4(checkpoint)
