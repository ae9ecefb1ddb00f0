"""The two layouts of Gemma 4 checkpoints on disk: that of the published ones, and that which transformers writes.

transformers reads both with identical logits. Most other readers know the published one only.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Gemma4Config

from g4conformance.checkpoints.files import checkpoint_digest, checkpoint_folder, require_supported, weight_files
from g4conformance.errors import CheckpointError

_FULL, _SLIDING = "full_attention", "sliding_attention"
_INDEX = "model.safetensors.index.json"


class SavedLayout(StrEnum):
    """The two ways in which Gemma 4 checkpoints lie on disk.

    `PER_LAYER` is what transformers 5.24 writes: `per_layer_config` in config.json. `LEGACY` is how they were
    published: `global_head_dim` and `num_global_key_value_heads` in config.json, and key and value weights, which
    nothing reads, for layers that reuse another layer's K/V.
    """

    PER_LAYER = "per_layer"
    LEGACY = "legacy"


def is_published(folder: Path) -> bool:
    """Whether a checkpoint's config has the published names of the two layer types' sizes."""
    return "global_head_dim" in json.loads((folder / "config.json").read_text())["text_config"]


def write_published(source: Path, target: Path) -> None:
    """Copies the checkpoint in `source` to the new folder `target`, in the published layout.

    Raises:
        CheckpointError: `source` is no checkpoint, the layout cannot express it, or `target` exists.
    """
    require_supported(source)
    if target.exists():
        raise CheckpointError(f"no file or folder at {target}", "one", "Remove it, or choose another --out.")
    partial = target.with_name(target.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    shutil.copytree(source, partial)
    try:
        if not is_published(source):
            make_published(partial)
    except ValueError as error:
        shutil.rmtree(partial)
        raise CheckpointError(
            "a checkpoint that the published layout can express", str(error), "Choose another checkpoint."
        ) from None
    os.replace(partial, target)


def published_folder(name: str, cache: Path) -> Path:
    """The folder of checkpoint `name` if it is in the published layout, else of a copy, made once, in `cache`."""
    folder = checkpoint_folder(name)
    if is_published(folder):
        return folder
    copy = cache / "published" / checkpoint_digest(folder)[:16]
    if not copy.is_dir():
        copy.parent.mkdir(parents=True, exist_ok=True)
        write_published(folder, copy)
    return copy


def make_published(folder: Path, seed: int = 0) -> None:
    """Changes a checkpoint that transformers wrote into the published layout, in place.

    `seed` draws the weights that nothing reads.

    Raises:
        ValueError: the layout cannot express the config.
    """
    text_config: Any = Gemma4Config.from_pretrained(folder, local_files_only=True).text_config
    sizes = _published_sizes(text_config)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["text_config"].pop("per_layer_config", None)
    config["text_config"] |= sizes
    path.write_text(json.dumps(config, indent=2))
    _add_unused_weights(folder, text_config, seed)


def _published_sizes(text_config: Any) -> dict[str, int | None]:
    full = text_config.per_layer_config[_FULL]  # there always is such a layer: the last one
    sliding = text_config.per_layer_config[_SLIDING] if _SLIDING in text_config.layer_types else full
    if full.num_key_value_heads != sliding.num_key_value_heads and not text_config.attention_k_eq_v:
        raise ValueError("the legacy layout has other KV heads on full layers only with attention_k_eq_v")
    return {
        "head_dim": sliding.head_dim,
        "global_head_dim": full.head_dim,
        "num_key_value_heads": sliding.num_key_value_heads,
        "num_global_key_value_heads": full.num_key_value_heads if text_config.attention_k_eq_v else None,
    }


def _add_unused_weights(folder: Path, text_config: Any, seed: int) -> None:
    """Puts them into the last of the checkpoint's files, and into the index where there is one."""
    path = weight_files(folder)[-1]
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    tensors = load_file(path)
    dtype = next(iter(tensors.values())).dtype
    unused = {name: t.to(dtype) for name, t in _unused_weights(text_config, torch.Generator().manual_seed(seed))}
    path.unlink()  # it may be a link into a cache
    save_file(tensors | unused, path, metadata=metadata or {"format": "pt"})
    if (index := folder / _INDEX).is_file():
        content = json.loads(index.read_text())
        content["weight_map"] |= dict.fromkeys(unused, path.name)
        index.write_text(json.dumps(content, indent=2))


def _unused_weights(text_config: Any, generator: torch.Generator) -> Iterator[tuple[str, Tensor]]:
    """Key and value weights of layers that reuse K/V."""
    for i, mode in enumerate(text_config.kv_sharing_modes):
        if mode != "reuse":
            continue
        sizes = text_config.per_layer_config[i]
        prefix = f"model.language_model.layers.{i}.self_attn."
        rows = sizes.num_key_value_heads * sizes.head_dim
        for projection in ("k_proj", "v_proj"):
            yield f"{prefix}{projection}.weight", torch.randn(rows, text_config.hidden_size, generator=generator)
        yield f"{prefix}k_norm.weight", torch.rand(sizes.head_dim, generator=generator) + 0.5
