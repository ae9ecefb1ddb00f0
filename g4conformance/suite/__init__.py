"""The conformance suite as pytest tests: `from g4conformance.suite import *`, or `pytest --pyargs g4conformance.suite`.

One test function a stage; the plugin makes one test of it for each case and check, called `stage-case-check`. A guard
comes with them, which fails where a module has dropped or replaced one.
"""

import pytest

from g4conformance.suite.guard import test_suite_is_whole
from g4conformance.suite.test_build_static_inputs import test_build_static_inputs
from g4conformance.suite.test_decode import test_decode
from g4conformance.suite.test_generation import test_generation
from g4conformance.suite.test_masks_and_rope import test_masks_and_rope
from g4conformance.suite.test_mm_fusion import test_mm_fusion
from g4conformance.suite.test_prefill import test_prefill
from g4conformance.suite.test_quantization import test_quantization
from g4conformance.suite.test_self_consistency import test_self_consistency
from g4conformance.suite.test_token_embedding import test_token_embedding
from g4conformance.suite.test_vision_prefill import test_vision_prefill

pytestmark = pytest.mark.integration  # travels with `import *`, so that `-m integration` finds the tests

__all__ = [
    "pytestmark",
    "test_suite_is_whole",
    "test_build_static_inputs",
    "test_token_embedding",
    "test_vision_prefill",
    "test_mm_fusion",
    "test_masks_and_rope",
    "test_prefill",
    "test_decode",
    "test_generation",
    "test_self_consistency",
    "test_quantization",
]
