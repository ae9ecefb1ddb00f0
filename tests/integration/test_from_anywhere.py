"""The suite as its users run it: from the wheel, from an empty folder, with pytest and without."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from g4conformance.fixtures import bundled_checkpoint

pytestmark = pytest.mark.selftest

REPOSITORY = Path(__file__).parents[2]


def run(*command: str, cwd: Path, path: Path | str | None = None) -> subprocess.CompletedProcess[str]:
    """Runs `python -m command` in `cwd`, importing from `path` first, without the options of the pytest around it."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "COV_"))}
    environment |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    if path is not None:
        environment["PYTHONPATH"] = str(path)
    return subprocess.run(
        [sys.executable, "-m", *command], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )


def unpacked(project: Path, folder: Path) -> Path:
    """The wheel of `project`, built and unpacked below `folder`."""
    built = run("hatchling", "build", "-t", "wheel", "-d", str(folder), cwd=project)
    assert built.returncode == 0, built.stderr
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "unpacked")
    return folder / "unpacked"


@pytest.fixture(scope="module")
def unpacked_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout, built and unpacked."""
    return unpacked(REPOSITORY, tmp_path_factory.mktemp("wheel"))


@pytest.mark.xdist_group("wheel")
def test_wheel_verifies_from_an_empty_folder(unpacked_wheel: Path, tmp_path: Path) -> None:
    done = run("g4conformance.cli", "verify", "--case", "text-only", cwd=tmp_path, path=unpacked_wheel)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "conforms" in done.stdout
    assert str(unpacked_wheel / "g4conformance" / "_fixtures") in done.stdout


@pytest.mark.xdist_group("wheel")
def test_wheel_brings_suite_and_plugin(unpacked_wheel: Path, tmp_path: Path) -> None:
    pytest_run = ("pytest", "--pyargs", "g4conformance.suite", "--collect-only", "-q", "--strict-markers")
    done = run(*pytest_run, "--case", "image-first", cwd=tmp_path, path=unpacked_wheel)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "test_decode[decode-image-first-G4-DECODE-09]" in done.stdout


@pytest.mark.xdist_group("wheel")
def test_the_example_of_an_adopters_repository_conforms(unpacked_wheel: Path, tmp_path: Path) -> None:
    """Both wheels, ours and the example's, and of the example's repository only what an installation leaves behind."""
    example = REPOSITORY / "examples" / "out_of_tree"
    installed = unpacked(example, tmp_path / "example")
    for name in ("tests", "pyproject.toml", "conformance.toml"):
        copy = shutil.copytree if (example / name).is_dir() else shutil.copy
        copy(example / name, tmp_path / name)
    cases = ("--case", "fills-while-decoding", "--case", "image-first", "--decode-steps", "2")
    path = os.pathsep.join(map(str, (unpacked_wheel, installed)))
    done = run("pytest", "--strict-markers", *cases, cwd=tmp_path, path=path)
    assert done.returncode == pytest.ExitCode.OK, done.stdout + done.stderr
    assert "PlainGemma4 against the Hugging Face reference" in done.stdout
    assert f"model {unpacked_wheel}" in done.stdout, "the wheel's, not the checkout's"
    assert "conforms but for 2 known failures" in done.stdout


ADOPTER_CONFTEST = """
import pytest
from g4conformance.runtime.layout import StaticLayout
from g4conformance.runtime.static import StaticGemma4Runtime

class Doubled(StaticGemma4Runtime):
    def decode_one(self, token):
        return super().decode_one(token) * 2

@pytest.fixture(scope="session")
def runtime(checkpoint):
    return Doubled(checkpoint, StaticLayout(checkpoint.facts.default_max_seq))
"""


@pytest.fixture
def adopter(tmp_path: Path) -> Path:
    (tmp_path / "conftest.py").write_text(ADOPTER_CONFTEST)
    (tmp_path / "test_conformance.py").write_text("from g4conformance.suite import *\n")
    return tmp_path


@pytest.mark.parametrize("joined", [True, False], ids=["--model=PATH", "--model PATH"])
def test_an_adopters_runtime_is_judged_with_any_spelling_of_the_option(adopter: Path, joined: bool) -> None:
    model = str(bundled_checkpoint())
    option = [f"--model={model}"] if joined else ["--model", model]
    done = run("pytest", *option, "--case", "text-only", "-k", "G4-DECODE-09 or G4-PREFILL-04", cwd=adopter)
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout + done.stderr
    assert "1 failed, 1 passed" in done.stdout
    assert "Doubled against the Hugging Face reference" in done.stdout
    assert "wrong first at decode (G4-DECODE-09, case text-only)" in done.stdout


def test_workers_share_out_cases_and_agree(adopter: Path) -> None:
    done = run("pytest", "--case", "text-only", "--case", "window", "-n", "2", "-k", "G4-DECODE-09", cwd=adopter)
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout + done.stderr
    assert "2 failed" in done.stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--executor", "export"], "expected the runtime of the fixture `runtime`, found --executor too."),
        (["--runtime", "conftest:Doubled"], "expected the runtime of the fixture `runtime`, found --runtime too."),
        (["--quant", "w8"], "expected a runtime of scheme w8, by --quant, found one of none."),
    ],
)
def test_options_that_a_fixture_of_ones_own_would_ignore_are_refused(
    adopter: Path, options: list[str], message: str
) -> None:
    done = run("pytest", "--case", "text-only", "-k", "G4-PREFILL-04", *options, cwd=adopter)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR, done.stdout + done.stderr
    assert (done.stdout + done.stderr).count(message) == 1
    assert "Traceback" not in done.stdout + done.stderr


BAD_OPTIONS = {
    "unknown case": (["--case", "nonsense"], "expected a known case, found 'nonsense'"),
    "missing model": (["--model", "./nowhere"], "found './nowhere', which is neither"),
    "missing image": (["--prompt", "hello", "--image", "nowhere.png"], "no such file"),
    "prompt too long": (["--prompt", "word " * 500], "expected a prompt of at most max_seq="),
    "zero rows": (["--max-seq", "0"], "must be at least 1, got 0"),
}


@pytest.mark.parametrize("kind", BAD_OPTIONS)
def test_a_bad_option_is_one_clear_line(tmp_path: Path, kind: str) -> None:
    options, message = BAD_OPTIONS[kind]
    done = run("g4conformance.cli", "verify", *options, cwd=tmp_path)
    output = done.stdout + done.stderr
    assert done.returncode in (pytest.ExitCode.USAGE_ERROR, 2), output
    assert message in output
    assert "Traceback" not in output
    assert output.count(message) == 1
