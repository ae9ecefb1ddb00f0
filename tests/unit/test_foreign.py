"""The foreign side's module: it imports nothing heavy, and what it writes is what was asked."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from g4conformance import foreign
from g4conformance.expected import STOP_REASONS

pytestmark = pytest.mark.unit

REPOSITORY = Path(__file__).parents[2]

# Runs a foreign side that cannot import what a device without torch does not have.
WITHOUT_TORCH = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"torch", "transformers", "torchvision", "torchao", "pytest", "PIL", "yaml"}:
            raise ImportError(f"{name} is not here")

sys.meta_path.insert(0, Refuse())
from g4conformance.foreign import serve
serve(lambda request: {"valid_length": request.inputs["valid_length"], "prefill/logits": [[0.0, float("nan")]]})
print(sorted(name for name in sys.modules if name.startswith("g4conformance")))
"""


def write_request(folder: Path, version: int = foreign.VERSION, case: str = "text-only") -> Path:
    """By hand, from what the documentation says."""
    folder.mkdir(parents=True)
    manifest = {
        "format": foreign.FORMAT,
        "version": version,
        "case": {"name": case, "digest": "c" * 64},
        "checkpoint_digest": "d" * 64,
        "request": {"prompt": "<bos>Hi", "images": ["image-0.png"], "layout": {"max_seq": 8}, "gen_steps": 3},
        "facts": {"pad_token_id": 0},
    }
    (folder / foreign.MANIFEST).write_text(json.dumps(manifest))
    inputs = {"valid_length": np.array([5]), "decode_tokens": np.array([3, 4])}
    safetensors.numpy.save_file(inputs, folder / foreign.INPUTS)
    return folder


def test_a_process_without_torch_answers_a_request(tmp_path: Path) -> None:
    folder = write_request(tmp_path / "request")
    command = [sys.executable, "-c", WITHOUT_TORCH, str(folder)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "['g4conformance', 'g4conformance.foreign', 'g4conformance.quiet']"
    assert safetensors.numpy.load_file(folder / foreign.TRACE)["valid_length"].tolist() == [5]


def test_a_request_says_what_is_asked(tmp_path: Path) -> None:
    request = foreign.read_request(write_request(tmp_path / "request"))
    assert (request.case, request.prompt, request.images) == (
        "text-only",
        "<bos>Hi",
        [tmp_path / "request" / "image-0.png"],
    )
    assert (request.valid_length, request.max_seq, request.gen_steps) == (5, 8, 3)
    assert (request.decode_tokens, request.facts["pad_token_id"]) == ([3, 4], 0)


def test_another_version_is_not_read(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is g4conformance-vectors 2, this module reads g4conformance-vectors 1"):
        foreign.read_request(write_request(tmp_path / "request", version=2))


def test_a_trace_is_written_whole_in_numpys_dtypes(tmp_path: Path) -> None:
    request = foreign.read_request(write_request(tmp_path / "request"))
    transposed = np.arange(6, dtype=np.int64).reshape(2, 3).T
    tensors = {
        "text_embeds": np.ones(3, ml_dtypes.bfloat16),
        "input_ids": transposed,
        "attention_mask": np.array([True, False]),
        "generation/stop_reason": np.array(1),
    }
    path = foreign.write_trace(request, tensors)
    assert [file.name for file in tmp_path.rglob("trace*")] == [foreign.TRACE]
    read = safetensors.numpy.load_file(path)
    assert read["text_embeds"].dtype == np.float32
    assert read["input_ids"].tolist() == transposed.tolist()
    assert read["attention_mask"].tolist() == [True, False]
    assert read["generation/stop_reason"].shape == ()


def test_all_cases_of_vectors_are_answered(tmp_path: Path) -> None:
    for name in ("a", "b c"):
        write_request(tmp_path / "vectors" / name, case=name)
    cases = {name: {"folder": name} for name in ("b c", "a")}
    (tmp_path / "vectors" / foreign.INDEX).write_text(json.dumps({"cases": cases}))
    asked = []
    foreign.serve(
        lambda request: asked.append(request.case) or {"valid_length": np.array([1])},  # type: ignore[func-returns-value]
        [str(tmp_path / "vectors"), str(tmp_path / "mine")],
    )
    assert asked == ["b c", "a"]
    assert sorted(path.parent.name for path in (tmp_path / "mine").rglob(foreign.TRACE)) == ["a", "b c"]


@pytest.mark.parametrize("arguments", [[], ["a", "b", "c"]])
def test_other_arguments_are_told(arguments: list[str]) -> None:
    with pytest.raises(SystemExit, match="expected the folder of a request"):
        foreign.serve(lambda request: {}, arguments)


def test_stop_reasons_have_one_order() -> None:
    assert tuple(map(str, STOP_REASONS)) == foreign.STOP_REASONS
