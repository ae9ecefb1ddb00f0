"""docs/adopting.md by itself is enough: its files, in an empty folder, are a conforming runtime."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from g4conformance.adopting import views
from g4conformance.adopting.capabilities import NAMES, definition
from g4conformance.runtime.contract import Runtime

from .test_from_anywhere import REPOSITORY, run

pytestmark = pytest.mark.selftest

PAGE = (REPOSITORY / "docs" / "adopting.md").read_text()
FILES = re.compile(r"```python\n# (\S+\.py)\n(.*?)```", re.DOTALL)


@pytest.fixture
def adopter(tmp_path: Path) -> Path:
    """An empty folder with the page's files in it."""
    for name, text in FILES.findall(PAGE):
        (tmp_path / name).write_text(text)
    return tmp_path


def test_the_first_example_conforms(adopter: Path) -> None:
    done = run("pytest", "--strict-markers", "--case", "text-only", "--case", "image-middle", cwd=adopter)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "MyRuntime against the Hugging Face reference" in done.stdout
    assert "called prefill and decode_one in turn and chose the most likely token" in done.stdout
    assert "declared unsupported: images" in done.stdout
    assert "conforms" in done.stdout


def test_a_mistake_in_it_is_found_at_its_stage(adopter: Path) -> None:
    source = adopter / "my_runtime.py"
    right = "self.step = 0 if self.step is None else self.step + 1"
    wrong = source.read_text().replace(right, f"{right}\n        self.cache.layers[3].values.mul_(0.5)")
    source.write_text(wrong)
    done = run("pytest", "--case", "text-only", "-k", "PREFILL or DECODE", cwd=adopter)
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout + done.stderr
    assert "wrong first at decode" in done.stdout


def test_a_picture_that_is_taken_all_the_same_is_found(adopter: Path) -> None:
    source = adopter / "my_runtime.py"
    source.write_text(source.read_text().replace("if inputs.pixel_values is not None:", "if False:"))
    done = run("pytest", "--case", "text-only", "--case", "image-middle", "-k", "G4-SELF-21", cwd=adopter)
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout + done.stderr
    assert "it declares no images (A prompt may hold a picture)" in done.stdout


def test_the_page_names_all_that_there_is() -> None:
    methods = [name for name in vars(Runtime) if not name.startswith("_")]
    own_views = [
        name
        for name, view in vars(views).items()
        if getattr(view, "__module__", "") == views.__name__ and name[0] != "_"
    ]
    for name in [*methods, *own_views]:
        assert name == "viewed" or f"`{name}" in PAGE or f"{name}(" in PAGE, f"docs/adopting.md does not name {name}"
    for name in NAMES:
        assert f"| `{name}` | {definition(name)} |" in PAGE
