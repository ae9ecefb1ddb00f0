"""What a user can get wrong in prompts and images is told in one clear error: expected, found, remedy.

Errors of checkpoints are in test_bad_checkpoints.py, of cases files in test_cases.py, of traces in test_trace.py, of
the reference in test_reference.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

from g4conformance.cases import Case
from g4conformance.checkpoints.checkpoint import Checkpoint
from g4conformance.errors import CaseError, LayoutError
from g4conformance.prompts import resolve

from .asserting import told

pytestmark = pytest.mark.unit


@dataclass(frozen=True)
class Resolving:
    """Resolves made-up cases whose pictures lie in `folder`."""

    checkpoint: Checkpoint
    folder: Path

    def __call__(self, prompt: str, *images: str, max_seq: int = 134) -> None:
        case = Case("a", "x", prompt=prompt, images=images, folder=self.folder)
        resolve(case, self.checkpoint, max_seq=max_seq, decode_steps=0, gen_steps=1)


@pytest.fixture
def resolving(tiny_checkpoint: Checkpoint, tmp_path: Path) -> Resolving:
    return Resolving(tiny_checkpoint, tmp_path)


def noise_picture(path: Path, size: tuple[int, int] = (90, 60)) -> bytes:
    Image.effect_noise(size, 80).convert("RGB").save(path)
    return path.read_bytes()


def test_a_missing_image(resolving: Resolving) -> None:
    path = resolving.folder / "p.png"
    with told(CaseError, expected=f"an image at {path}", found="no such file", remedy="Check the path"):
        resolving("{image}What?", "p.png")


@pytest.mark.parametrize("keep", [0, 20, 0.5])
@pytest.mark.parametrize("suffix", ["png", "jpg"])
def test_a_truncated_image(resolving: Resolving, suffix: str, keep: float) -> None:
    path = resolving.folder / f"p.{suffix}"
    content = noise_picture(path)
    path.write_bytes(content[: int(keep * len(content)) if isinstance(keep, float) else keep])
    with told(CaseError, expected=f"an image at {path}", found="an unreadable one (", remedy="save the image again"):
        resolving("{image}What?", path.name)


@pytest.mark.parametrize("content", [b"this is text", b"\x00" * 100, b"<svg xmlns='http://www.w3.org/2000/svg'/>"])
def test_what_is_no_image(resolving: Resolving, content: bytes) -> None:
    path = resolving.folder / "p.png"
    path.write_bytes(content)
    with told(CaseError, expected=f"an image at {path}", found="an unreadable one (", remedy="save the image again"):
        resolving("{image}What?", "p.png")


def test_a_folder_is_no_image(resolving: Resolving) -> None:
    (resolving.folder / "p.png").mkdir()
    with told(CaseError, expected="an image at", found="an unreadable one (", remedy="Check the path"):
        resolving("{image}What?", "p.png")


@pytest.mark.parametrize(
    ("prompt", "images", "found"),
    [
        ("{image}What?", 0, "0 images and 1 placeholders"),
        ("What?", 1, "1 images and 0 placeholders"),
        ("{image}{image}", 1, "1 images and 2 placeholders"),
        ("{image}", 2, "2 images and 1 placeholders"),
    ],
)
def test_images_and_placeholders_pair_up(resolving: Resolving, prompt: str, images: int, found: str) -> None:
    noise_picture(resolving.folder / "p.png")
    with told(CaseError, expected="as many images as placeholders", found=found, remedy="its image"):
        resolving(prompt, *["p.png"] * images)


@dataclass(frozen=True)
class StubProcessor:
    """Stands in for a processor that raises, or that yields what no 8-bit picture can."""

    output: dict[str, Tensor] | Exception
    image_token: str = "<image>"

    def __call__(self, **request: Any) -> dict[str, Tensor]:
        if isinstance(self.output, Exception):
            raise self.output
        return self.output


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_an_image_that_is_not_finite(tiny_checkpoint: Checkpoint, value: float) -> None:
    pixels = torch.zeros(1, 9, 192)
    pixels[0, 3, 5] = value
    processor = StubProcessor({"input_ids": torch.tensor([[2, 5]]), "pixel_values": pixels})
    with told(CaseError, expected="finite pixel values", found="NaN or Inf in an image", remedy="8-bit RGB"):
        replace(tiny_checkpoint, processor=processor).process("<image>", [Image.new("RGB", (9, 9))])


def test_a_prompt_that_the_processor_refuses(tiny_checkpoint: Checkpoint) -> None:
    processor = StubProcessor(ValueError("cannot resize to 0 x 3"))
    with told(CaseError, expected="a prompt that the processor takes", found="cannot resize", remedy="the image"):
        replace(tiny_checkpoint, processor=processor).process("<image>", [Image.new("RGB", (9, 9))])


@pytest.mark.parametrize(("prompt", "images", "found"), [("word " * 40, 0, "tokens"), ("{image}What?", 1, "tokens")])
def test_a_prompt_longer_than_the_buffers(resolving: Resolving, prompt: str, images: int, found: str) -> None:
    noise_picture(resolving.folder / "p.png")
    with told(CaseError, expected="at most max_seq=20 tokens in case 'a'", found=found, remedy="--max-seq"):
        resolving(prompt, *["p.png"] * images, max_seq=20)


def test_two_images_do_not_fit_a_static_layout(resolving: Resolving) -> None:
    noise_picture(resolving.folder / "p.png")
    with told(LayoutError, expected="one contiguous run", found="placeholders spread", remedy="one image per prompt"):
        resolving("{image}and{image}", "p.png", "p.png", max_seq=300)


def test_an_empty_prompt(tiny_checkpoint: Checkpoint) -> None:
    with told(CaseError, expected="at least one token", found="an empty one", remedy="Give a prompt"):
        tiny_checkpoint.process("", [])
