"""What a run was asked to do, and whether it can be done here."""

from __future__ import annotations

from pathlib import Path

import pytest

from g4conformance.checkpoints.checkpoint import Checkpoint, LoadOptions
from g4conformance.checkpoints.files import parameter_bytes
from g4conformance.errors import CaseError, ConformanceError
from g4conformance.fixtures import bundled_checkpoint
from g4conformance.session import RunOptions, require_enough_memory

from .asserting import told

pytestmark = pytest.mark.unit


def test_without_a_model_the_bundled_one_is_taken() -> None:
    assert RunOptions().checkpoint == str(bundled_checkpoint())
    assert RunOptions(model="google/gemma-4-e2b-it").checkpoint == "google/gemma-4-e2b-it"


def test_cases_are_the_bundled_ones_a_files_or_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "cases.yaml"
    path.write_text("cases: [{name: mine, exercises: x, prompt: Hello}]")
    assert [case.name for case in RunOptions(cases_file=str(path)).selected_cases()] == ["mine"]
    assert [case.name for case in RunOptions(case_names=("window",)).selected_cases()] == ["window"]
    assert [case.prompt for case in RunOptions(prompt="Hi", images=("p.png",)).selected_cases()] == ["{image}Hi"]
    assert len(RunOptions().selected_cases()) == len(RunOptions().all_cases())


@pytest.mark.parametrize(
    "options", [RunOptions(prompt="Hi", case_names=("a",)), RunOptions(images=("p",), cases_file="f")]
)
def test_ones_own_prompt_and_cases_exclude_each_other(options: RunOptions) -> None:
    with told(
        CaseError, expected="either --prompt and --image, or --case and --cases", found="both", remedy="Leave one"
    ):
        options.selected_cases()


@pytest.mark.parametrize(("dtype", "size"), [("float32", 4), ("bfloat16", 2)])
def test_parameters_are_counted_without_loading_them(
    tiny_checkpoint: Checkpoint, bundled_folder: Path, dtype: str, size: int
) -> None:
    model = tiny_checkpoint.model
    count = sum(tensor.numel() for tensor in model.state_dict().values()) - model.lm_head.weight.numel()  # tied
    assert parameter_bytes(bundled_folder, dtype) == size * count


def test_workers_whose_models_do_not_fit_are_refused(bundled_folder: Path) -> None:
    options = RunOptions(load=LoadOptions(dtype="bfloat16"))
    needed = 3 * parameter_bytes(bundled_folder, "bfloat16")
    require_enough_memory(options, workers=3, available=needed)
    with told(
        ConformanceError,
        expected="3 workers, each with its own copy of the model, in bfloat16",
        found="GiB",
        remedy="Use fewer workers",
    ):
        require_enough_memory(options, workers=3, available=needed - 1)
