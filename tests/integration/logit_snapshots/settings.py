"""The settings that have snapshots. Adding one is one line here, and one in `tolerance.py` with what was measured."""

from __future__ import annotations

from dataclasses import dataclass

from g4conformance.checkpoints.checkpoint import LoadOptions, load_checkpoint
from g4conformance.fixtures import bundled_checkpoint
from g4conformance.runtime.layout import StaticLayout
from g4conformance.runtime.static import StaticGemma4Runtime


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
)


def build_runtime(setting: Setting, attn_implementation: str = "eager") -> StaticGemma4Runtime:
    """The shipped runtime of a setting, on the bundled checkpoint."""
    options = LoadOptions(dtype=setting.dtype, attn_implementation=attn_implementation)
    checkpoint = load_checkpoint(bundled_checkpoint(), options)
    return StaticGemma4Runtime(checkpoint, StaticLayout(checkpoint.facts.default_max_seq))
