"""Loads a Gemma 4 checkpoint: from a folder or the Hub, safetensors only, never remote code."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn
from transformers import AutoImageProcessor, AutoProcessor, Gemma4ForConditionalGeneration
from transformers.utils import logging as transformers_logging

from g4conformance.checkpoints.facts import ModelFacts, model_facts
from g4conformance.checkpoints.files import DTYPES, checkpoint_digest, checkpoint_folder, require_supported
from g4conformance.errors import CaseError, CheckpointError, ConformanceError


@dataclass(frozen=True)
class LoadOptions:
    """How to load a checkpoint; all of it is recorded in a trace's provenance."""

    dtype: str = "float32"
    device: str = "cpu"
    attn_implementation: str = "eager"
    image_backend: str = "torchvision"


@dataclass(frozen=True)
class Checkpoint:
    """A loaded checkpoint: model, processor, facts and digest.

    Attributes:
        on_key_value: rounds what a storing layer's number and new K/V [B, KV, n, head_dim] put into the cache, where
            the model stands for one whose cache is quantized.
        other_ways: models that compute the same with other rounding errors, by what they do otherwise.
    """

    model: Gemma4ForConditionalGeneration
    processor: Any
    facts: ModelFacts
    digest: str
    options: LoadOptions
    name: str
    on_key_value: Callable[[int, tuple[Tensor, Tensor]], tuple[Tensor, Tensor]] | None = None
    other_ways: Mapping[str, Gemma4ForConditionalGeneration] = field(default_factory=dict)

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.options.dtype]

    @property
    def device(self) -> torch.device:
        return torch.device(self.options.device)

    @cached_property
    def text_config(self) -> Any:
        return self.model.config.text_config

    def process(self, prompt: str, images: Sequence[Image.Image]) -> Mapping[str, Any]:
        """The processor's output for one prompt: ids [1, n] and, with images, patches and their positions.

        Raises:
            CaseError: placeholders and images do not pair up, the prompt is empty, or an image cannot be resized.
        """
        placeholders = prompt.count(self.processor.image_token)
        if placeholders != len(images):
            raise CaseError(
                f"as many images as placeholders {self.processor.image_token!r} in the prompt",
                f"{len(images)} images and {placeholders} placeholders",
                "Give each placeholder its image.",
            )
        try:
            output = self.processor(text=prompt, images=list(images) or None, return_tensors="pt")
        except ValueError as error:
            raise CaseError(
                "a prompt that the processor takes", str(error), "Change the prompt or the image."
            ) from None
        if output["input_ids"].numel() == 0:
            raise CaseError("a prompt of at least one token", "an empty one", "Give a prompt.")
        if images and not bool(torch.isfinite(output["pixel_values"]).all()):
            raise CaseError("finite pixel values", "NaN or Inf in an image", "Save the image again as 8-bit RGB.")
        return {k: v.to(self.device) if isinstance(v, Tensor) else v for k, v in output.items()}


def load_checkpoint(name: str | Path, options: LoadOptions | None = None) -> Checkpoint:
    """Loads the checkpoint `name`, a folder or a Hub id.

    Raises:
        CheckpointError: it is missing, gated, unreachable, pickled, truncated, incomplete, of another architecture, of
            an unsupported kind (mixture of experts), or holds values that are not finite.
    """
    options = options or LoadOptions()
    _require_device(options.device)
    folder = checkpoint_folder(str(name))
    require_supported(folder)
    with _quiet_transformers():
        model = _load_model(folder, options)
        processor = _load_processor(folder, options, model.config.image_token_id)
    facts = model_facts(model.config, model.generation_config, processor)
    return Checkpoint(model, processor, facts, checkpoint_digest(folder), options, str(name))


def _load_model(folder: Path, options: LoadOptions) -> Gemma4ForConditionalGeneration:
    try:
        model, info = Gemma4ForConditionalGeneration.from_pretrained(
            folder,
            dtype=DTYPES[options.dtype],
            attn_implementation=attention_of_towers(options.attn_implementation),
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # they are named in the loading info, which is looked at
            output_loading_info=True,
            local_files_only=True,
        )
    except Exception as error:  # transformers raises whatever a damaged config or file makes it stumble over
        raise CheckpointError(
            f"weights that fit {folder / 'config.json'}", _first_line(error), "Download or save the checkpoint again."
        ) from None
    _require_complete(folder, info)
    model = model.to(options.device).eval().requires_grad_(False)
    _require_finite(folder, model)
    return model


def attention_of_towers(name: str) -> dict[str, str]:
    """`name` for everything that runs; the audio tower keeps its own, because transformers knows no sdpa for it."""
    return {"": name, "text_config": name, "vision_config": name}


def _require_device(name: str) -> None:
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        raise ConformanceError(
            f"a device that torch can use here, not {name!r}", _first_line(error), "Check --device."
        ) from None


def _require_complete(folder: Path, info: Mapping[str, Any]) -> None:
    for problem in ("missing_keys", "mismatched_keys"):
        if keys := sorted(str(key) for key in info[problem]):
            raise CheckpointError(
                f"a weight for every parameter of {folder / 'config.json'}",
                f"{len(keys)} {problem.replace('_keys', '')}, the first {keys[0]}",
                "Save or download the checkpoint again; weights and config may be of different models.",
            )


def _require_finite(folder: Path, model: nn.Module) -> None:
    """Parameters must be finite; of buffers, open clip bounds may be infinite, but none may be NaN."""
    for name, parameter in model.named_parameters():
        low, high = parameter.aminmax()
        _require(bool(torch.isfinite(low) & torch.isfinite(high)), name, folder)
    for name, buffer in model.named_buffers():
        _require(not bool(buffer.isnan().any()), name, folder)


def _require(finite: bool, name: str, folder: Path) -> None:
    if not finite:
        raise CheckpointError(
            "finite weights", f"NaN or Inf in {name} of {folder}", "Convert the checkpoint again; nothing was run."
        )


def _load_processor(folder: Path, options: LoadOptions, image_token_id: int) -> Any:
    try:
        processor = AutoProcessor.from_pretrained(folder, local_files_only=True)
        processor.image_processor = AutoImageProcessor.from_pretrained(
            folder, backend=options.image_backend, local_files_only=True
        )
    except Exception as error:  # as above
        raise CheckpointError(
            f"a Gemma 4 processor in {folder}", _first_line(error), "Copy the processor's and tokenizer's files there."
        ) from None
    _require_tokenizer(folder, processor, image_token_id)
    return processor


def _require_tokenizer(folder: Path, processor: Any, image_token_id: int) -> None:
    """Without its file, transformers makes an empty tokenizer, to which every word is unknown."""
    if processor.image_token_id != image_token_id:
        raise CheckpointError(
            f"a Gemma 4 processor in {folder} whose image placeholder has the config's id {image_token_id}",
            f"id {processor.image_token_id}",
            "Copy the processor's and tokenizer's files there.",
        )


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no message'}"


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Silences transformers' advice and progress bars while loading."""
    verbosity, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()
