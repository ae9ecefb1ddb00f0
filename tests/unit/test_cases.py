"""Cases files: what may stand in them, and what is said about what may not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from g4conformance.cases import IMAGE_MARK, Case, load_cases, own_case, select_cases
from g4conformance.errors import CaseError

from .asserting import told

pytestmark = pytest.mark.unit

GOOD = {"name": "a", "exercises": "something", "prompt": "Hello"}


def write(folder: Path, document: Any) -> Path:
    path = folder / "cases.yaml"
    path.write_text(document if isinstance(document, str) else yaml.safe_dump(document))
    return path


# --- reading --------------------------------------------------------------------------------------------------------


def test_every_key_arrives(tmp_path: Path) -> None:
    filled = {"prompt": "Hello {fill}", "fill": "there", "length": 12}
    entry = {
        **GOOD,
        **filled,
        "decode_steps": 3,
        "gen_steps": 4,
        "interrupted_by": ["b", "c"],
        "self_consistency": True,
    }
    talk = {"name": "b", "exercises": "x", "messages": [{"role": "user", "content": "Hi"}], "images": ["p.png"]}
    first, second = load_cases(write(tmp_path, {"cases": [entry, talk]}))
    text = {"prompt": "Hello {fill}", "fill": "there", "length": "12"}
    assert first == Case(
        "a", "something", **text, decode_steps=3, gen_steps=4, interrupted_by=("b", "c"), self_consistency=True
    )
    assert second == Case("b", "x", messages=({"role": "user", "content": "Hi"},), images=("p.png",))
    assert first.folder == second.folder == tmp_path


def test_the_bundled_cases_keep_their_promises(bundled_cases: tuple[Case, ...]) -> None:
    names = [case.name for case in bundled_cases]
    assert len(set(names)) == len(names) >= 12
    for case in bundled_cases:
        assert case.exercises
        marks = (case.prompt or "").count(IMAGE_MARK) + sum(m["content"].count(IMAGE_MARK) for m in case.messages)
        assert marks == len(case.images)
        assert set(case.interrupted_by) <= set(names)


def test_a_text_beyond_the_window_and_a_picture_are_probed(bundled_cases: tuple[Case, ...]) -> None:
    probed = [case for case in bundled_cases if case.self_consistency]
    assert any(case.length == "2*W" for case in probed)
    assert any(case.images for case in probed)


def test_no_bundled_picture_is_square(bundled_cases: tuple[Case, ...]) -> None:
    pictures = [picture for case in bundled_cases for picture in case.load_images()]
    assert pictures
    assert all(picture.width != picture.height for picture in pictures)


# --- what may not stand in a cases file -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("document", "expected", "found"),
    [
        ("cases: [", "a YAML file at", "flow"),
        ("cases: []", "a list `cases`", "none"),
        ("cases: text", "a list `cases`", "none"),
        ("- name: a", "a list `cases`", "none"),
        ("", "a list `cases`", "none"),
        ({"cases": [GOOD, GOOD]}, "unique", "'a' twice"),
        ({"cases": ["a"]}, "name, exercises and any of", "str"),
        ({"cases": [{"name": "a", "prompt": "x"}]}, "name, exercises and any of", "['name', 'prompt']"),
        ({"cases": [{**GOOD, "promt": "x"}]}, "decode_steps", "'promt'"),
        ({"cases": [{**GOOD, "folder": "/"}]}, "name, exercises and any of", "'folder'"),
    ],
)
def test_a_malformed_file_is_explained(tmp_path: Path, document: Any, expected: str, found: str) -> None:
    path = write(tmp_path, document)
    with told(CaseError, expected=expected, found=found, remedy=""):
        load_cases(path)


@pytest.mark.parametrize(
    "wrong",
    [
        {"images": "picture.png"},
        {"interrupted_by": "other"},
        {"prompt": 3},
        {"name": 3},
        {"decode_steps": "two"},
        {"decode_steps": -1},
        {"gen_steps": True},
        {"gen_steps": 0},
        {"self_consistency": 1},
        {"prompt": None, "messages": "Hello"},
        {"prompt": None, "messages": [{"role": "user"}]},
        {"prompt": None, "messages": [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]},
    ],
)
def test_a_value_of_the_wrong_type_is_explained(tmp_path: Path, wrong: dict[str, Any]) -> None:
    with told(CaseError, expected="", found=str(next(iter(wrong.values()))), remedy=""):
        load_cases(write(tmp_path, {"cases": [{**GOOD, **wrong}]}))


@pytest.mark.parametrize("content", [None, b"\xff\xfe\x00cases"])
def test_an_unreadable_file_is_named(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "cases.yaml"
    if content is not None:
        path.write_bytes(content)
    with told(CaseError, expected=f"a YAML file at {path}", found="", remedy="--cases"):
        load_cases(path)


@pytest.mark.parametrize(
    "text",
    [
        {},
        {"prompt": "x", "messages": ({"role": "user", "content": "x"},)},
        {"prompt": "x", "vocabulary": (1, 2)},
    ],
)
def test_a_case_has_one_of_prompt_messages_and_vocabulary(text: dict[str, Any]) -> None:
    wanted = "one of prompt, messages and vocabulary in case 'a'"
    with told(CaseError, expected=wanted, found="none or several", remedy="Mend"):
        Case("a", "x", **text)


@pytest.mark.parametrize(
    "text",
    [{"prompt": "x", "fill": "y"}, {"prompt": "{fill}"}, {"messages": ({"role": "user", "content": "{fill}"},)}],
)
def test_a_length_needs_a_place_and_a_text_to_fill(text: dict[str, Any]) -> None:
    with told(CaseError, expected="{fill} in the prompt and a text to fill it", found="no such", remedy="Mend"):
        Case("a", "x", length="W", **text)


# --- choosing -------------------------------------------------------------------------------------------------------

CASES = tuple(Case(name, "x", prompt="x") for name in "abc")


@pytest.mark.parametrize(("names", "chosen"), [([], "abc"), (["c", "a"], "ac"), (["b", "b"], "b")])
def test_cases_are_chosen_by_name_in_file_order(names: list[str], chosen: str) -> None:
    assert "".join(case.name for case in select_cases(CASES, names)) == chosen


def test_an_unknown_case_is_answered_with_the_known_ones() -> None:
    with told(CaseError, expected="a known case", found="'d'", remedy="Known cases: a, b, c."):
        select_cases(CASES, ["a", "d"])


@pytest.mark.parametrize(
    ("prompt", "images", "expected"),
    [
        ("Hi", [], "Hi"),
        ("Hi", ["p.png"], "{image}Hi"),
        ("See {image} there", ["p.png"], "See {image} there"),
        ("See {image} there", ["p.png", "q.png"], "{image}See {image} there"),
    ],
)
def test_ones_own_pictures_come_first_unless_marked(prompt: str, images: list[str], expected: str) -> None:
    case = own_case(prompt, images)
    assert case.prompt == expected
    assert case.images == tuple(str(Path(image).absolute()) for image in images)
    assert case.self_consistency


# --- digests --------------------------------------------------------------------------------------------------------


def test_the_digest_covers_prompt_and_pictures(tmp_path: Path) -> None:
    (tmp_path / "p.png").write_bytes(b"one")
    case = Case("a", "x", prompt="{image}", images=("p.png",), folder=tmp_path)
    digest = case.digest("rendered")
    assert case.digest("rendered") == digest
    assert case.digest("rendered.") != digest
    (tmp_path / "p.png").write_bytes(b"two")
    assert case.digest("rendered") != digest


# --- ids in place of a prompt -----------------------------------------------------------------------------------------


def test_a_share_of_the_vocabulary_is_read(tmp_path: Path) -> None:
    (case,) = load_cases(write(tmp_path, {"cases": [{"name": "a", "exercises": "x", "vocabulary": "2/4"}]}))
    assert case.vocabulary == (2, 4)


@pytest.mark.parametrize("share", ["5/4", "0/4", "half", 2, "1/2/3"])
def test_a_share_that_is_none_is_told(tmp_path: Path, share: object) -> None:
    entry = {"name": "a", "exercises": "x", "vocabulary": share}
    with told(CaseError, expected="well-formed values", found="vocabulary", remedy="Mend"):
        load_cases(write(tmp_path, {"cases": [entry]}))


def test_ids_come_without_pictures_and_interruptions() -> None:
    with told(CaseError, expected="no images and no interruption in case 'a'", found="some", remedy="Mend"):
        Case("a", "x", vocabulary=(1, 2), images=("p.png",))
