"""What may be done instead of what mlx-vlm does, to see whether a disagreement vanishes with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from PIL import Image

from g4conformance.foreign import Request

GIVEN_PIXELS, PAD_AT_PICTURES = "given-pixels", "pad-at-pictures"


def as_opened(path: Path) -> Image.Image:
    """The picture as its file has it; of a path, mlx-vlm turns the picture as its EXIF tag says."""
    return Image.open(path)


def over_white(path: Path) -> Image.Image:
    """What is transparent shows white; mlx-vlm drops the opacity, and shows the colour behind it."""
    image = Image.open(path).convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")


# How a picture is handed over.
PICTURES: dict[str, Callable[[Path], Any]] = {"as-opened": as_opened, "over-white": over_white}
INSTEAD = (GIVEN_PIXELS, PAD_AT_PICTURES, *PICTURES)


def given_pixels(request: Request) -> dict[str, Any]:
    """The reference's patches and their positions, which its vision tower takes in place of a whole picture."""
    names = ("pixel_values", "image_position_ids")
    return {name: mx.array(request.inputs[name]) for name in names if name in request.inputs}


@contextmanager
def pad_looked_up_at_pictures(model: Any, pad: int) -> Iterator[None]:
    """Embeddings of the pad id stand where a picture goes, until its soft tokens take the place."""

    class PadAtPictures(nn.Embedding):  # type: ignore[misc]
        def __call__(self, ids: Any) -> Any:
            return super().__call__(mx.where(ids == model.config.image_token_id, pad, ids))

    table = model.language_model.model.embed_tokens
    table.__class__ = PadAtPictures
    yield
    table.__class__ = nn.Embedding
