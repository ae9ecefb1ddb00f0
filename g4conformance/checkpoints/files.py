"""A checkpoint as files: where it is, whether it can be one of ours, and its digest. Nothing here loads a model."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)
from safetensors import SafetensorError, safe_open

from g4conformance.errors import CheckpointError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model"]
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


def checkpoint_folder(name: str) -> Path:
    """The local folder of `name`: itself if it is one, else a snapshot of the Hub repository of that id.

    Raises:
        CheckpointError: no such folder or repository, no access, or no network.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists() or name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise CheckpointError(
            "a folder with a Gemma 4 checkpoint, or a Hub id such as google/gemma-4-e2b-it",
            f"{name!r}, which is neither" if not folder.exists() else f"{name!r}, which is a file",
            "Check the path given to --model.",
        )
    return _download(name)


def _download(name: str) -> Path:
    expected = f"the Hub repository {name!r}"
    try:
        return Path(snapshot_download(name, allow_patterns=_HUB_FILES))
    except GatedRepoError:
        found, remedy = "a gated repository", "Accept its terms on the Hub and log in with `hf auth login`."
    except RepositoryNotFoundError:
        found, remedy = "no such repository, or no access", "Check the id, or log in with `hf auth login`."
    except (LocalEntryNotFoundError, OfflineModeIsEnabled):
        found, remedy = "no network and no cached copy", "Go online once, or give --model a local folder."
    except HFValidationError as error:
        found, remedy = str(error).splitlines()[0], "Check the id given to --model."
    except (HfHubHTTPError, OSError) as error:
        found, remedy = f"{type(error).__name__} while downloading", "Try again; finished files are kept."
    raise CheckpointError(expected, found, remedy)


def require_supported(folder: Path) -> None:
    """Checks configs and weight files without reading any weight.

    Raises:
        CheckpointError: no config, another architecture, mixture of experts, no safetensors, or a damaged file.
    """
    config = _read_config(folder)
    _require_architecture(folder, config)
    weights = weight_files(folder)
    if not weights:
        pickles = sorted(p.name for pattern in _PICKLES for p in folder.glob(pattern))
        found = f"only pickled weights ({pickles[0]}), which can run code" if pickles else "no weights"
        raise CheckpointError(f"*.safetensors in {folder}", found, "Save the model with safetensors.")
    for path in weights:
        try:
            with safe_open(path, framework="pt"):
                pass
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"a whole safetensors file at {path}", str(error).splitlines()[0], "Download or copy it again."
            ) from None


def weight_files(folder: Path) -> list[Path]:
    """The checkpoint's safetensors files, in order of name."""
    return sorted(folder.glob("*.safetensors"))


def parameter_bytes(folder: Path, dtype: str) -> int:
    """Bytes that the checkpoint's parameters take in memory in `dtype`, read from the files' headers."""
    size = torch.empty(0, dtype=DTYPES[dtype]).element_size()
    count = 0
    for path in weight_files(folder):
        with safe_open(path, framework="pt") as file:
            count += sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
    return count * size


def checkpoint_digest(folder: Path) -> str:
    """SHA-256 over names and contents of configs, tokenizer and weights.

    Files of the Hub's cache are links to blobs named by their content; those names stand for the contents.
    """
    digest = hashlib.sha256()
    for path in sorted([*folder.glob("*.json"), *folder.glob("*.jinja"), *weight_files(folder)]):
        digest.update(path.name.encode())
        digest.update(_content_name(path).encode())
    return digest.hexdigest()


def _content_name(path: Path) -> str:
    resolved = path.resolve()
    if path.is_symlink() and resolved.parent.name == "blobs":
        return resolved.name
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text())
    except OSError:
        raise CheckpointError(f"config.json in {folder}", "none", "Give --model a checkpoint's folder.") from None
    except ValueError as error:
        raise CheckpointError(f"JSON in {path}", str(error), "Download or save the checkpoint again.") from None
    if not isinstance(config, dict):
        raise CheckpointError(f"a JSON object in {path}", type(config).__name__, "Save the checkpoint again.")
    return config


def _require_architecture(folder: Path, config: dict[str, Any]) -> None:
    if (model_type := config.get("model_type")) != "gemma4":
        raise CheckpointError(
            "model_type 'gemma4' (a multimodal Gemma 4)", f"{model_type!r} in {folder}", "Choose a Gemma 4 checkpoint."
        )
    text = config.get("text_config") or {}
    if isinstance(text, dict) and text.get("enable_moe_block"):
        raise CheckpointError(
            "a dense Gemma 4", "a mixture of experts (enable_moe_block)", "It is not supported yet: choose a dense one."
        )
    if isinstance(text, dict) and text.get("use_bidirectional_attention") == "all":
        raise CheckpointError(
            "a causal Gemma 4", "use_bidirectional_attention='all' (an encoder)", "Choose a generative checkpoint."
        )
    if not isinstance(text, dict) or config.get("image_token_id") is None or text.get("pad_token_id", 0) is None:
        raise CheckpointError(
            f"text_config, image_token_id and pad_token_id in {folder / 'config.json'}",
            "one of them missing",
            "Save the checkpoint again.",
        )
    if config.get("vision_config") is None:
        raise CheckpointError("a Gemma 4 with a vision tower", "vision_config null", "Choose a multimodal checkpoint.")
