"""conformance.toml as an adopter meets it: exit status, terminal and report of runs on a runtime with mistakes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from .test_from_anywhere import run

pytestmark = [pytest.mark.selftest, pytest.mark.xdist_group("known failures")]

OWN_RUNTIME = '''
"""Too warm while decoding, and a little off after prefill; nothing else is seen of it."""
from g4conformance.runtime.layout import StaticLayout
from g4conformance.runtime.static import StaticGemma4Runtime


class Warm:
    def __init__(self, checkpoint):
        self.inner = StaticGemma4Runtime(checkpoint, StaticLayout(checkpoint.facts.default_max_seq))
        self.on_tensor = None

    def prefill(self, *inputs):
        return self.inner.prefill(*inputs) * (1 + 1e-3)

    def load_state(self, *state):
        self.inner.load_state(*state)

    def decode_one(self, token):
        return self.inner.decode_one(token) * 2
'''
WARM = """
[[known]]
check = "G4-DECODE-09"
case = ["text-only", "window"]
category = "bug"
reason = "logits are scaled twice"
link = "https://example.org/issues/7"
"""
OFF = """
[[budget]]
check = "G4-PREFILL-04"
factor = 1e5
reason = "another order of sums"
"""
UNSEEN = """
[[known]]
check = "G4-GEN-05"
case = "*"
category = "unsupported"
reason = "it does not generate"
link = "https://example.org/issues/8"
"""
SETTING = ("--runtime", "own_runtime:Warm", "--case", "text-only", "--decode-steps", "1", "--gen-steps", "1")
SUITE = ("pytest", "--strict-markers", *SETTING)


@pytest.fixture
def adopter(tmp_path: Path) -> Path:
    (tmp_path / "own_runtime.py").write_text(OWN_RUNTIME)
    (tmp_path / "test_conformance.py").write_text("from g4conformance.suite import *\n")
    return tmp_path


def test_what_is_known_is_told_and_fails_nothing(adopter: Path) -> None:
    (adopter / "conformance.toml").write_text(WARM + OFF)
    done = run(*SUITE, "--report", "verdicts.json", cwd=adopter)
    assert done.returncode == pytest.ExitCode.OK, done.stdout + done.stderr
    assert "Warm against the Hugging Face reference" in done.stdout
    assert "quantization none, graphs run by the runtime itself" in done.stdout
    assert "G4-DECODE-09 on text-only: bug: logits are scaled twice (https://example.org/issues/7)" in done.stdout
    assert "G4-PREFILL-04 on text-only, isolated: budget widened from 8 to 100000 x" in done.stdout
    assert "conforms but for 1 known failure" in done.stdout
    assert "1 xfailed" in done.stdout
    assert "quantized" not in done.stdout, "nothing is said of quantization"
    report = json.loads((adopter / "verdicts.json").read_text())
    assert "quantization" not in report["stages"]
    assert report["known"]["problems"] == []
    (known,) = [v for v in report["verdicts"] if v["status"] == "known"]
    assert (known["check"], known["known"]["category"]) == ("G4-DECODE-09", "bug")
    widened = [v for v in report["verdicts"] if v["widened"]]
    assert {(v["check"], v["widened"]["reason"]) for v in widened} == {("G4-PREFILL-04", "another order of sums")}


def test_what_is_not_true_fails_the_run_whoever_ran_it(adopter: Path) -> None:
    """One entry passes, which its own test tells; one matches nothing, which only the controller can know."""
    (adopter / "only.yaml").write_text("cases: [{name: text-only, exercises: x, prompt: Hello}]")
    right = WARM.replace('"text-only", "window"', '"text-only"') + OFF + UNSEEN
    (adopter / "known.toml").write_text(right)
    options = ("--cases", "only.yaml", "--known", "known.toml", "-n", "2")
    done = run(*SUITE, *options, cwd=adopter)
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout + done.stderr
    assert " failed" not in done.stdout
    assert "not as declared in known.toml:" in done.stdout
    assert "[[known]] entry 2 (G4-GEN-05): matches nothing that was judged; remove the entry" in done.stdout


def test_a_known_failure_that_passes_fails_its_test(adopter: Path) -> None:
    (adopter / "conformance.toml").write_text(WARM + WARM.replace("DECODE-09", "PREFILL-04") + OFF)
    done = run(*SUITE, "-k", "G4-PREFILL-04", cwd=adopter)
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout + done.stderr
    assert "conformance.toml, [[known]] entry 2 (G4-PREFILL-04): on text-only it passes" in done.stdout
    assert "not judged here: [[known]] entry 1 (G4-DECODE-09)" in done.stdout


BAD_RUNS = {
    "unknown key": (WARM + "mode = 1\n", [], "[[known]] entry 1 (G4-DECODE-09), found 'mode'"),
    "impossible case": (WARM.replace("window", "widnow"), [], "found 'widnow'"),
    "a scheme of the shipped runtime": (
        WARM,
        ["--quant", "w8"],
        "expected either --runtime, or the shipped runtime's --quant",
    ),
    "no such factory": (WARM, ["--runtime", "own_runtime:Cold"], "has no attribute 'Cold'"),
    "a budget that is not wider": (OFF.replace("1e5", "8"), [], "Budgets can only be widened; remove the entry."),
}


@pytest.mark.parametrize("kind", BAD_RUNS)
def test_a_bad_declaration_or_option_is_one_clear_line(adopter: Path, kind: str) -> None:
    declared, options, message = BAD_RUNS[kind]
    (adopter / "conformance.toml").write_text(declared)
    done = run("g4conformance.cli", "verify", *SETTING, *options, cwd=adopter)
    output = done.stdout + done.stderr
    assert done.returncode == pytest.ExitCode.USAGE_ERROR, output
    assert output.count(message) == 1, output
    assert "Traceback" not in output


def test_a_bad_file_that_was_found_is_told_in_one_line_by_pytest_too(adopter: Path) -> None:
    """Nothing in the call speaks of the suite: it is looked at only when the suite's tests are collected."""
    (adopter / "conformance.toml").write_text(WARM + "mode = 1\n")
    done = run("pytest", cwd=adopter)
    output = done.stdout + done.stderr
    assert done.returncode == pytest.ExitCode.USAGE_ERROR, output
    assert output.count("[[known]] entry 1 (G4-DECODE-09), found 'mode'") == 1, output
    assert "Traceback" not in output


MODULES = {
    "test_whole.py": "from g4conformance.suite import *\n",
    "test_overridden.py": "from g4conformance.suite import *\n\ndef test_prefill():\n    pass\n",
    "test_partial.py": "from g4conformance.suite import test_decode\n",
    "test_unjudged.py": (
        "import pytest\nfrom g4conformance.suite import *\n\n"
        "@pytest.fixture\ndef judged(request):\n    return request\n"
    ),
}


def test_a_module_that_drops_or_replaces_a_standard_test_fails(tmp_path: Path) -> None:
    for name, text in MODULES.items():
        (tmp_path / name).write_text(text)
    done = run("pytest", "--strict-markers", "-k", "test_suite_is_whole", "-v", cwd=tmp_path)
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout + done.stderr
    assert "test_prefill is overridden" in done.stdout
    # a set, because under CI=true pytest repeats whole messages in its summary
    assert len(set(re.findall(r"test_\w+ is missing", done.stdout))) == 9
    assert "the fixture judged is overridden" in done.stdout
    assert "3 failed, 1 passed" in done.stdout
