"""A checkpoint that cannot be used says so in one clear error: what was expected, what was found, what to do."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest
import torch
from huggingface_hub import constants
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)
from safetensors.torch import load_file, save_file
from torch import Tensor

from g4conformance.checkpoints import files
from g4conformance.checkpoints.checkpoint import LoadOptions, load_checkpoint
from g4conformance.checkpoints.files import checkpoint_digest, checkpoint_folder, require_supported
from g4conformance.errors import CheckpointError, ConformanceError

from .asserting import told

pytestmark = pytest.mark.unit


@pytest.fixture
def copy(bundled_folder: Path, tmp_path: Path) -> Path:
    """A copy of the bundled checkpoint, to be damaged."""
    return Path(shutil.copytree(bundled_folder, tmp_path / "checkpoint"))


# --- a checkpoint that is not there ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["/no/such/folder", "./no-such-folder", "~/no-such-folder", "no-such-folder", "a/b/c"])
def test_a_path_that_does_not_exist(name: str) -> None:
    with told(
        CheckpointError,
        expected="a Hub id such as",
        found=f"{name!r}, which is neither",
        remedy="the path given to --model",
    ):
        checkpoint_folder(name)


def test_a_file_instead_of_a_folder(copy: Path) -> None:
    path = copy / "model.safetensors"
    with told(CheckpointError, expected="a folder", found=f"{str(path)!r}, which is a file", remedy="--model"):
        load_checkpoint(path)


def test_a_folder_is_taken_as_it_is(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "snapshot_download", None)
    assert checkpoint_folder(str(copy)) == copy
    monkeypatch.chdir(copy.parent)
    assert checkpoint_folder("checkpoint") == Path("checkpoint")


def hub_error(kind: type[HfHubHTTPError], status: int) -> HfHubHTTPError:
    request = httpx2.Request("GET", "https://huggingface.co/api/models/google/gemma-4-e2b-it")
    return kind("told by the Hub", response=httpx2.Response(status, request=request))


HUB_ERRORS = [
    pytest.param(hub_error(GatedRepoError, 403), "a gated repository", "hf auth login", id="gated"),
    pytest.param(
        hub_error(RepositoryNotFoundError, 404), "no such repository, or no access", "Check the id", id="unknown"
    ),
    pytest.param(LocalEntryNotFoundError("offline"), "no network and no cached copy", "Go online", id="no network"),
    pytest.param(OfflineModeIsEnabled("offline"), "no network and no cached copy", "Go online", id="offline"),
    pytest.param(hub_error(HfHubHTTPError, 503), "HfHubHTTPError while downloading", "Try again", id="server error"),
    pytest.param(ConnectionError("reset"), "ConnectionError while downloading", "Try again", id="connection lost"),
    pytest.param(OSError(28, "No space left on device"), "while downloading", "Try again", id="disk full"),
]


@pytest.mark.parametrize(("error", "found", "remedy"), HUB_ERRORS)
def test_a_hub_that_does_not_deliver(
    monkeypatch: pytest.MonkeyPatch, error: Exception, found: str, remedy: str
) -> None:
    def snapshot_download(name: str, **options: Any) -> str:
        assert name == "google/gemma-4-e2b-it"
        raise error

    monkeypatch.setattr(files, "snapshot_download", snapshot_download)
    with told(CheckpointError, expected="the Hub repository 'google/gemma-4-e2b-it'", found=found, remedy=remedy):
        checkpoint_folder("google/gemma-4-e2b-it")


def test_offline_without_a_cached_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real client, with HF_HUB_OFFLINE as it stands after import."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with told(
        CheckpointError, expected="the Hub repository", found="no network and no cached copy", remedy="Go online"
    ):
        checkpoint_folder("g4conformance-tests/not-a-model")


@pytest.mark.parametrize("name", ["google/gemma 4", "google/-gemma", "-x/y"])
def test_an_id_that_cannot_be_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with told(
        CheckpointError, expected=f"the Hub repository {name!r}", found="", remedy="Check the id given to --model"
    ):
        checkpoint_folder(name)


def test_no_code_is_ever_downloaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: dict[str, Any] = {}

    def snapshot_download(name: str, **options: Any) -> str:
        asked.update(options)
        return str(tmp_path)

    monkeypatch.setattr(files, "snapshot_download", snapshot_download)
    assert checkpoint_folder("google/gemma-4-e2b-it") == tmp_path
    patterns = asked["allow_patterns"]
    assert patterns
    assert not [p for p in patterns if p.endswith((".py", ".bin", ".pt", "*"))]


# --- a checkpoint of another kind -----------------------------------------------------------------------------------

Edit = Callable[[dict[str, Any]], object]


def edit_config(folder: Path, edit: Edit) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    edit(config)
    path.write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("edit", "expected", "found"),
    [
        pytest.param(lambda c: c.update(model_type="llama"), "model_type 'gemma4'", "'llama'", id="other architecture"),
        pytest.param(lambda c: c.update(model_type="gemma4_text"), "multimodal", "'gemma4_text'", id="text model"),
        pytest.param(lambda c: c.pop("model_type"), "model_type 'gemma4'", "None", id="no model type"),
        pytest.param(lambda c: c["text_config"].update(enable_moe_block=True, num_experts=4, top_k_experts=2,
                                                       moe_intermediate_size=8),
                     "a dense Gemma 4", "a mixture of experts", id="mixture of experts"),
        pytest.param(lambda c: c["text_config"].update(use_bidirectional_attention="all"),
                     "a causal Gemma 4", "an encoder", id="encoder"),
        pytest.param(lambda c: c.update(vision_config=None), "a vision tower", "vision_config null", id="no vision"),
        pytest.param(lambda c: c.pop("vision_config"), "a vision tower", "vision_config null", id="vision not named"),
    ],
)  # fmt: skip
def test_another_kind_of_model(copy: Path, edit: Edit, expected: str, found: str) -> None:
    edit_config(copy, edit)
    with told(CheckpointError, expected=expected, found=found, remedy="hoose"):
        load_checkpoint(copy)


def test_a_folder_without_a_config(tmp_path: Path) -> None:
    with told(CheckpointError, expected=f"config.json in {tmp_path}", found="none", remedy="checkpoint's folder"):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize(("content", "expected"), [("{", "JSON in"), ("", "JSON in"), ("[1]", "a JSON object in")])
def test_a_config_that_is_none(copy: Path, content: str, expected: str) -> None:
    (copy / "config.json").write_text(content)
    with told(CheckpointError, expected=expected, found="", remedy="again"):
        load_checkpoint(copy)


def test_a_config_that_is_not_text(copy: Path) -> None:
    (copy / "config.json").write_bytes(b"\xff\xfe\x00")
    with told(CheckpointError, expected="JSON in", found="", remedy="again"):
        load_checkpoint(copy)


@pytest.mark.parametrize("edit", [lambda c: c.update(text_config=3), lambda c: c.pop("image_token_id")])
def test_a_config_that_lacks_what_is_needed(copy: Path, edit: Edit) -> None:
    edit_config(copy, edit)
    with told(CheckpointError, expected="text_config, image_token_id and pad_token_id", found="", remedy=""):
        load_checkpoint(copy)


@pytest.mark.parametrize("device", ["no-such-device", "cuda:99", "meta:x"])
def test_a_device_that_is_not_there(bundled_folder: Path, device: str) -> None:
    with told(
        ConformanceError, expected=f"a device that torch can use here, not {device!r}", found="", remedy="--device"
    ):
        load_checkpoint(bundled_folder, LoadOptions(device=device))


# --- weights --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "weights.ckpt"])
def test_pickled_weights_are_not_even_opened(copy: Path, name: str) -> None:
    """The pickle would leave a trace if it were loaded."""

    class Bomb:
        def __reduce__(self) -> tuple[Any, tuple[str]]:
            return os.mkdir, (str(copy / "exploded"),)

    (copy / "model.safetensors").unlink()
    torch.save(Bomb(), copy / name)
    with told(
        CheckpointError,
        expected=f"*.safetensors in {copy}",
        found=f"only pickled weights ({name})",
        remedy="safetensors",
    ):
        load_checkpoint(copy)
    assert not (copy / "exploded").exists()


def test_no_weights_at_all(copy: Path) -> None:
    (copy / "model.safetensors").unlink()
    with told(CheckpointError, expected=f"*.safetensors in {copy}", found="no weights", remedy="safetensors"):
        load_checkpoint(copy)


@pytest.mark.parametrize("keep", [0, 5, 200, 0.5, -1])
def test_truncated_weights(copy: Path, keep: float) -> None:
    path = copy / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[: int(keep * len(content)) if isinstance(keep, float) else keep])
    with told(CheckpointError, expected=f"a whole safetensors file at {path}", found="", remedy="again"):
        load_checkpoint(copy)


Weights = dict[str, Tensor]
NORM = "model.language_model.layers.3.input_layernorm.weight"


def edit_weights(folder: Path, edit: Callable[[Weights], object]) -> None:
    path = folder / "model.safetensors"
    weights = load_file(path)
    edit(weights)
    save_file(weights, path, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("edit", "found"),
    [
        pytest.param(lambda w: w.pop(NORM), f"1 missing, the first {NORM}", id="one missing"),
        pytest.param(lambda w: w.update({NORM: w[NORM][:-1].clone()}), NORM, id="another size"),
        pytest.param(lambda w: w.update({"renamed": w.pop(NORM)}), f"1 missing, the first {NORM}", id="renamed"),
        pytest.param(lambda w: w.clear() or w.update({"other": torch.ones(3)}), "missing, the first", id="swapped"),
    ],
)  # fmt: skip
def test_weights_of_another_model(copy: Path, edit: Callable[[Weights], object], found: str) -> None:
    edit_weights(copy, edit)
    with told(
        CheckpointError,
        expected=f"a weight for every parameter of {copy / 'config.json'}",
        found=found,
        remedy="different models",
    ):
        load_checkpoint(copy)


@pytest.mark.parametrize(
    ("name", "poison"),
    [(NORM, float("nan")), ("model.vision_tower.patch_embedder.position_embedding_table", float("-inf"))],
)
def test_weights_that_are_not_finite(copy: Path, name: str, poison: float) -> None:
    def edit(weights: Weights) -> None:
        weights[name].flatten()[5] = poison

    edit_weights(copy, edit)
    with told(
        CheckpointError, expected="finite weights", found=f"NaN or Inf in {name} of {copy}", remedy="nothing was run"
    ):
        load_checkpoint(copy)


@pytest.mark.parametrize("name", ["layer_scalar", "input_min"])
def test_buffers_that_are_not_numbers(copy: Path, name: str) -> None:
    """Layer scalars and clip bounds are no parameters, but weights all the same."""

    def edit(weights: Weights) -> None:
        next(weights[key] for key in sorted(weights) if key.endswith(name)).fill_(torch.nan)

    edit_weights(copy, edit)
    with told(CheckpointError, expected="finite weights", found=name, remedy="nothing was run"):
        load_checkpoint(copy)


# --- processor ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("missing", ["tokenizer.json", "processor_config.json", "*.json"])
def test_missing_processor_files(copy: Path, missing: str) -> None:
    for path in copy.glob(missing):
        if path.name not in ("config.json", "generation_config.json"):
            path.unlink()
    with told(CheckpointError, expected=f"a Gemma 4 processor in {copy}", found="", remedy="tokenizer's files"):
        load_checkpoint(copy)


def test_a_damaged_tokenizer(copy: Path) -> None:
    (copy / "tokenizer.json").write_text("{}")
    with told(CheckpointError, expected=f"a Gemma 4 processor in {copy}", found="", remedy="tokenizer's files"):
        load_checkpoint(copy)


# --- the digest notices ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors", "chat_template.jinja"])
def test_a_changed_file_changes_the_digest(copy: Path, name: str) -> None:
    before = checkpoint_digest(copy)
    (copy / "README.md").write_text("of no influence")
    assert checkpoint_digest(copy) == before
    with (copy / name).open("ab") as file:
        file.write(b" ")
    assert checkpoint_digest(copy) != before


def test_a_hub_caches_links_are_named_by_their_blobs(copy: Path, tmp_path: Path) -> None:
    blob = tmp_path / "blobs" / "0123abcd"
    blob.parent.mkdir()
    path = copy / "model.safetensors"
    path.rename(blob)
    path.symlink_to(blob)
    linked = checkpoint_digest(copy)
    require_supported(copy)
    blob.write_bytes(b"another content under the same name is never written there")
    assert checkpoint_digest(copy) == linked
    path.unlink()
    path.symlink_to(blob.rename(blob.with_name("4567ef")))
    assert checkpoint_digest(copy) != linked
