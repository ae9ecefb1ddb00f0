"""The published layout on disk: what it says, that transformers reads both layouts alike, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from g4conformance.checkpoints.checkpoint import Checkpoint, load_checkpoint
from g4conformance.checkpoints.large_scores import large_scores_checkpoint
from g4conformance.checkpoints.published import is_published, make_published, published_folder, write_published
from g4conformance.cli import main
from g4conformance.errors import CheckpointError

pytestmark = pytest.mark.unit


@pytest.fixture(scope="module")
def published(bundled_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("published") / "checkpoint"
    write_published(bundled_folder, target)
    return target


def test_the_config_has_the_published_names_only(published: Path) -> None:
    text = json.loads((published / "config.json").read_text())["text_config"]
    assert "per_layer_config" not in text
    assert (text["head_dim"], text["global_head_dim"]) == (20, 56)
    assert (text["num_key_value_heads"], text["num_global_key_value_heads"]) == (2, None)


def test_layers_that_reuse_key_and_value_have_weights_for_them(published: Path, bundled_folder: Path) -> None:
    added = load_file(published / "model.safetensors").keys() - load_file(bundled_folder / "model.safetensors").keys()
    prefix = "model.language_model.layers"
    parts = ("k_norm", "k_proj", "v_proj")
    assert added == {f"{prefix}.{i}.self_attn.{part}.weight" for i in (5, 6, 7, 8) for part in parts}


def test_they_have_the_dtype_of_the_others(published: Path) -> None:
    assert {tensor.dtype for tensor in load_file(published / "model.safetensors").values()} == {torch.bfloat16}


def test_transformers_reads_both_layouts_with_identical_logits(published: Path, tiny_checkpoint: Checkpoint) -> None:
    ids = torch.arange(40)[None] % 64
    read = load_checkpoint(published)
    with torch.no_grad():
        assert torch.equal(read.model(ids).logits, tiny_checkpoint.model(ids).logits)
    assert read.facts == tiny_checkpoint.facts


def test_everything_else_is_copied(published: Path, bundled_folder: Path) -> None:
    for name in ("tokenizer.json", "processor_config.json", "chat_template.jinja", "generation_config.json"):
        assert (published / name).read_bytes() == (bundled_folder / name).read_bytes()


def test_the_index_of_several_files_is_kept_true(bundled_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "sharded"
    write_published(bundled_folder, folder)  # for the files that are not weights
    (folder / "config.json").write_text((bundled_folder / "config.json").read_text())
    (folder / "model.safetensors").unlink()
    tensors = list(load_file(bundled_folder / "model.safetensors").items())
    shards = {"model-1.safetensors": dict(tensors[:9]), "model-2.safetensors": dict(tensors[9:])}
    for name, shard in shards.items():
        save_file(shard, folder / name, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": {key: name for name, shard in shards.items() for key in shard}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    make_published(folder)
    weight_map = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    assert weight_map == {key: name for name in shards for key in load_file(folder / name)}
    assert weight_map["model.language_model.layers.5.self_attn.k_proj.weight"] == "model-2.safetensors"


def test_a_published_checkpoint_is_used_where_it_lies(published: Path, tmp_path: Path) -> None:
    assert published_folder(str(published), tmp_path) == published
    assert list(tmp_path.iterdir()) == []


def test_another_is_copied_once(bundled_folder: Path, tmp_path: Path) -> None:
    copy = published_folder(str(bundled_folder), tmp_path)
    assert is_published(copy)
    written = (copy / "model.safetensors").stat().st_mtime_ns
    assert published_folder(str(bundled_folder), tmp_path) == copy
    assert (copy / "model.safetensors").stat().st_mtime_ns == written


def test_nothing_is_overwritten(bundled_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"expected no file or folder at .*found one"):
        write_published(bundled_folder, tmp_path)


def test_what_cannot_be_expressed_leaves_nothing_behind(bundled_folder: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    write_published(bundled_folder, source)
    config = json.loads((bundled_folder / "config.json").read_text())
    for sizes in config["text_config"]["per_layer_config"].values():
        sizes["num_key_value_heads"] = 3
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="other KV heads"):
        write_published(source, tmp_path / "target")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def test_the_command_tells_a_wrong_target_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "--layout", "legacy", "--out", str(tmp_path / "new")]) == 0
    assert is_published(tmp_path / "new")
    assert main(["checkpoint", "--layout", "legacy", "--out", str(tmp_path / "new")]) == 4
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("layout", ["legacy", "per_layer"])
def test_the_command_writes_a_checkpoint_of_large_scores(layout: str, tmp_path: Path) -> None:
    assert main(["checkpoint", "--large-scores", "--layout", layout, "--out", str(tmp_path / "large")]) == 0
    read = load_checkpoint(tmp_path / "large")
    ids = torch.arange(40)[None] % 64
    with torch.no_grad():
        assert torch.equal(read.model(ids).logits, large_scores_checkpoint().model(ids).logits)


def test_its_scores_are_large() -> None:
    model = large_scores_checkpoint().model
    greatest = []
    for layer in model.model.language_model.layers:
        attention = layer.self_attn
        attention.q_norm.register_forward_hook(lambda module, args, query: greatest.append(query.abs().amax().item()))
    with torch.no_grad():
        model(torch.arange(40)[None] % 64)
    assert min(greatest) > 40  # a query that is alike to a normalised key has at least this score


def test_the_command_refuses_to_write_what_is_there_already(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "--large-scores", "--out", str(tmp_path)]) == 4
    assert "no file or folder" in capsys.readouterr().err
    assert main(["checkpoint", "--layout", "per_layer", "--out", str(tmp_path / "new")]) == 4
    assert "expected --layout legacy" in capsys.readouterr().err
