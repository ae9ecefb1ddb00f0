"""The settings that have snapshots. Adding one is one line here, and one in `tolerance.py` with what was measured."""

from __future__ import annotations

from dataclasses import dataclass

from g4conformance.checkpoints.checkpoint import LoadOptions, load_checkpoint
from g4conformance.fixtures import bundled_checkpoint
from g4conformance.runtime.static import StaticGemma4Runtime
from g4conformance.shipped import shipped_runtime


@dataclass(frozen=True)
class Setting:
    """A quantization scheme in a dtype."""

    scheme: str
    dtype: str

    @property
    def name(self) -> str:
        return f"{self.scheme}-{self.dtype}"


SETTINGS = (
    Setting("none", "float32"),
    Setting("none", "bfloat16"),
    Setting("none", "float16"),
    Setting("w8a16", "float32"),
    Setting("w8a8", "float32"),
    Setting("w4a16", "float32"),
    Setting("w8", "float32"),
)


def build_runtime(setting: Setting, attn_implementation: str = "eager") -> StaticGemma4Runtime:
    """The shipped runtime of a setting, on the bundled checkpoint."""
    options = LoadOptions(dtype=setting.dtype, attn_implementation=attn_implementation)
    checkpoint = load_checkpoint(bundled_checkpoint(), options)
    return shipped_runtime(checkpoint, checkpoint.facts.default_max_seq, setting.scheme)
