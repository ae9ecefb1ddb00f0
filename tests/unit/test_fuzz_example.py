"""What a fuzz example becomes on disk, and what is not taken for one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from g4conformance.checkpoints.seeded import SeededSpec
from g4conformance.errors import ConformanceError
from g4conformance.fuzz.example import FuzzExample, Picture

from .asserting import told

pytestmark = pytest.mark.unit

EXAMPLE = FuzzExample(
    SeededSpec(), 3, "bfloat16", "sdpa", "水 \n\x00", "a {image}", Picture(width=9, height=5, seed=2), room=4
)


def test_saved_examples_are_loaded_again(tmp_path: Path) -> None:
    assert FuzzExample.load(EXAMPLE.save(tmp_path)) == EXAMPLE


def test_an_examples_name_follows_from_what_it_holds(tmp_path: Path) -> None:
    assert EXAMPLE.save(tmp_path) == EXAMPLE.save(tmp_path)
    assert replace(EXAMPLE, seed=4).save(tmp_path) != EXAMPLE.save(tmp_path)
    assert {path.suffix for path in tmp_path.iterdir()} == {".json"}


def test_pictures_have_their_size_and_are_drawn_from_their_seed() -> None:
    image = EXAMPLE.picture.image()
    assert (image.size, image.mode) == ((9, 5), "RGB")
    assert image == EXAMPLE.picture.image()
    assert image != replace(EXAMPLE.picture, seed=3).image()


def test_checkpoints_have_the_examples_settings() -> None:
    options = EXAMPLE.checkpoint().options
    assert (options.dtype, options.attn_implementation) == ("bfloat16", "sdpa")


def changed(**values: Any) -> str:
    return json.dumps(json.loads(EXAMPLE.as_json()) | values)


MALFORMED = {
    "no JSON": ("{", "Expecting property name"),
    "no object": ("[]", "[] where the top level is an object"),
    "unknown key": (changed(sed=1), "where the top level has the keys spec, seed,"),
    "wrong type": (changed(seed="3"), "'3' where seed is of type int"),
    "true for a number": (changed(room=True), "True where room is of type int"),
    "unknown dtype": (changed(dtype="int8"), "'int8' where dtype is one of float32, bfloat16, float16"),
    "missing keys": (changed(picture={"width": 9}), "['width'] where picture has the keys width, height, seed"),
    "wrong item": (
        changed(spec={**json.loads(EXAMPLE.as_json())["spec"], "layer_types": ["full_attention", 1]}),
        "1 where spec.layer_types[1] is of type str",
    ),
}


@pytest.mark.parametrize("kind", MALFORMED)
def test_malformed_files_are_told_with_what_is_wrong(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "mine.json"
    path.write_text(MALFORMED[kind][0])
    with told(ConformanceError, expected=str(path), found=MALFORMED[kind][1], remedy="Mend the file"):
        FuzzExample.load(path)


@pytest.mark.parametrize("content", [None, b"\xff"], ids=["missing", "not text"])
def test_unreadable_files_are_told(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "mine.json"
    if content is not None:
        path.write_bytes(content)
    with told(ConformanceError, expected=f"a readable reproducer at {path}", found="", remedy="Check the path."):
        FuzzExample.load(path)
