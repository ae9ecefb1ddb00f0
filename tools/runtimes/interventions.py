"""What makes a disagreement vanish: each function changes one thing of a runtime, and nothing of the suite."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torchvision.transforms.v2 import functional

from g4conformance.checkpoints.checkpoint import Checkpoint
from g4conformance.faults.patching import Patch
from g4conformance.runtime.layout import StaticLayout
from g4conformance.runtimes import tico
from g4conformance.runtimes.spying import imported

Intervene = Callable[[Any, Checkpoint, Patch], None]


def fold_in_float32(runtime: Any, checkpoint: Checkpoint, patch: Patch) -> None:
    text = checkpoint.model.model.language_model
    weight = text.per_layer_model_projection.weight
    folded = torch.nn.Parameter(weight * text.config.hidden_size**-0.5, requires_grad=False)
    patch(runtime.model.text.per_layer_model_projection, "weight", folded)


def no_newlines(runtime: Any, checkpoint: Checkpoint, patch: Patch) -> None:
    build = runtime.model.build_processor

    def build_processor(tokenizer: Any) -> Any:
        processor = build(tokenizer)
        processor.wrap_image_placeholders = False
        return processor

    patch(runtime.model, "build_processor", build_processor)


def pad_at_pictures(runtime: Any, checkpoint: Checkpoint, patch: Patch) -> None:
    no_newlines(runtime, checkpoint, patch)
    pad = checkpoint.facts.pad_token_id
    patch(runtime.model.text, "_embedding_token_ids", lambda ids: ids.masked_fill(ids < 0, pad))


def clamp_pixels(runtime: Any, checkpoint: Checkpoint, patch: Patch) -> None:
    resize = runtime.model.vision.encoder.image_processor.aspect_ratio_preserving_resize
    processor = runtime.model.vision.encoder.image_processor
    patch(processor, "aspect_ratio_preserving_resize", lambda image: resize(image).clamp(0.0, 1.0))


def resize_as_bytes(runtime: Any, checkpoint: Checkpoint, patch: Patch) -> None:
    """codex: what is resized is the picture's bytes, and the result is bytes."""
    processor = runtime.model.vision.encoder.image_processor

    def resized(image: Tensor) -> Tensor:
        return _resized(image, processor.get_target_dimensions(*image.shape[-2:]))

    patch(processor, "aspect_ratio_preserving_resize", resized)


def resize_as_bytes_too(runtime: Any, checkpoint: Checkpoint, patch: Patch) -> None:
    """claude: as above, where it calls torch's interpolation."""
    images = imported("gemma4_pt_claude.image_processing", "claude")
    functions = {
        "interpolate": staticmethod(lambda image, size, **_: _resized(image, size)),
        "pad": staticmethod(images.F.pad),
    }
    patch(images, "F", type("Functions", (), functions))


def _resized(image: Tensor, size: Sequence[int]) -> Tensor:
    """As the reference's processor resizes: bytes into bytes, then to [0, 1]."""
    data = (image * 255).round().to(torch.uint8)
    bicubic = functional.InterpolationMode.BICUBIC
    found: Tensor = functional.resize(data, list(size), interpolation=bicubic, antialias=True)
    return found / 255


def stop_at_all(runtime: Any, checkpoint: Checkpoint, patch: Patch) -> None:
    patch(runtime, "stop_tokens", checkpoint.facts.stop_token_ids)


def fill_with_minimum(runtime: Any, checkpoint: Checkpoint, patch: Patch) -> None:
    build = tico.static_runtime

    def built(of: Checkpoint, layout: StaticLayout) -> Any:
        own = build(of, layout)
        own.attention_mask_fill_value = torch.finfo(of.dtype).min
        return own

    patch(tico, "static_runtime", built)


# By the id of the finding in findings.toml.
INTERVENTIONS: dict[str, Intervene] = {
    "codex-ple-fold": fold_in_float32,
    "codex-newlines": no_newlines,
    "codex-normalise-by-guess": clamp_pixels,
    "codex-resize": resize_as_bytes,
    "codex-embeds-placeholder": pad_at_pictures,
    "codex-stops": stop_at_all,
    "claude-resize": resize_as_bytes_too,
    "claude-stops": stop_at_all,
    "tico-mask-fill": fill_with_minimum,
}
