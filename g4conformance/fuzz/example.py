"""FuzzExample: one random config with its two cases, as plain data that a JSON file can hold."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from PIL import Image

from g4conformance.checkpoints.checkpoint import Checkpoint, LoadOptions
from g4conformance.checkpoints.seeded import SeededSpec, seeded_checkpoint
from g4conformance.errors import ConformanceError
from g4conformance.fuzz.decode import decoded

Dtype = Literal["float32", "bfloat16", "float16"]
AttnImplementation = Literal["eager", "sdpa"]
DTYPES: tuple[Dtype, ...] = get_args(Dtype)
ATTN_IMPLEMENTATIONS: tuple[AttnImplementation, ...] = get_args(AttnImplementation)


@dataclass(frozen=True)
class Picture:
    """A picture of noise, so that no two patches are alike; `width` and `height` in pixels."""

    width: int
    height: int
    seed: int

    def image(self) -> Image.Image:
        """The picture as 8-bit RGB."""
        pixels = np.random.default_rng(self.seed).integers(0, 256, (self.height, self.width, 3), dtype=np.uint8)
        return Image.fromarray(pixels)


@dataclass(frozen=True)
class FuzzExample:
    """A checkpoint of the seeded family, and the text and the picture that a runtime is judged on.

    Attributes:
        seed: draws the checkpoint's parameters.
        text: prompt of the text case.
        image_prompt: prompt of the picture case, with one `{image}`.
        room: rows of the static buffers beyond the prompt; decoding takes at most six of them.
    """

    spec: SeededSpec
    seed: int
    dtype: Dtype
    attn_implementation: AttnImplementation
    text: str
    image_prompt: str
    picture: Picture
    room: int

    def checkpoint(self) -> Checkpoint:
        """The checkpoint, on the CPU.

        Raises:
            ValueError: the spec is not a legal dense Gemma 4 config.
        """
        options = LoadOptions(dtype=self.dtype, attn_implementation=self.attn_implementation)
        return seeded_checkpoint(self.spec, self.seed, options)

    def as_json(self) -> str:
        """What `from_json` makes an equal example of."""
        return json.dumps(asdict(self), indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str, where: str = "a reproducer") -> FuzzExample:
        """The example that `as_json` wrote.

        Args:
            where: what the text is, for the message.

        Raises:
            ConformanceError: no JSON, missing or unknown keys, or a value of another type.
        """
        try:
            return decoded(cls, json.loads(text))
        except (ValueError, TypeError) as error:
            raise ConformanceError(
                f"JSON as g4conformance fuzz writes it in {where}", str(error), "Mend the file, or find it again."
            ) from None

    def save(self, folder: Path) -> Path:
        """Writes the example into `folder`, whole or not at all, under a name that follows from what it holds."""
        text = self.as_json()
        path = folder / f"fuzz-{hashlib.sha256(text.encode()).hexdigest()[:12]}.json"
        partial = path.with_suffix(".partial")
        partial.write_text(text)
        os.replace(partial, path)
        return path

    @classmethod
    def load(cls, path: Path) -> FuzzExample:
        """The example saved at `path`.

        Raises:
            ConformanceError: the file cannot be read, or `from_json` does not take what it holds.
        """
        try:
            text = path.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise ConformanceError(f"a readable reproducer at {path}", str(error), "Check the path.") from None
        return cls.from_json(text, str(path))


def described(value: Any) -> str:
    """The fields of a plain dataclass on one line: `width 4, height 9, seed 0`."""
    return ", ".join(f"{name} {field!r}" for name, field in asdict(value).items() if not isinstance(field, dict))
