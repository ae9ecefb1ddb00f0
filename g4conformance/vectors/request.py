"""A case as it is put into a folder for others to run: what enters, and what is said about it."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from g4conformance.checkpoints.checkpoint import Checkpoint
from g4conformance.checkpoints.facts import ModelFacts
from g4conformance.expected import scripted_logits, static_inputs_of
from g4conformance.fixtures import bundled_checkpoint
from g4conformance.foreign import FORMAT, INPUTS, MANIFEST, VERSION, identity
from g4conformance.prompts import ResolvedCase
from g4conformance.runtime.layout import StaticLayout
from g4conformance.stages import Stage, stage_of
from g4conformance.vectors.files import digest_of, dtype_name, stored_dtype, write_json, write_tensors
from g4conformance.vectors.statements import statement_of

Manifest = dict[str, Any]


def entering_tensors(case: ResolvedCase, reference: Mapping[str, Tensor], facts: ModelFacts) -> dict[str, Tensor]:
    """What enters the stages, in the shape of the static buffers; see `g4conformance.foreign.Request.inputs`."""
    inputs = static_inputs_of(reference, case.request.layout, facts)
    tokens = [reference[f"decode/{step}/token"].flatten() for step in range(case.decode_steps)]
    tensors = {
        "input_ids": inputs.input_ids,
        "llm_input_ids": inputs.llm_input_ids,
        "attention_mask": inputs.attention_mask,
        "valid_length": torch.tensor([inputs.valid_length]),
        "decode_tokens": torch.cat(tokens) if tokens else torch.zeros(0, dtype=torch.int64),
        "generation/select/logits": scripted_logits(reference, facts),
    }
    if inputs.pixel_values is not None and inputs.image_position_ids is not None:
        tensors |= {"pixel_values": inputs.pixel_values, "image_position_ids": inputs.image_position_ids}
    return tensors


def write_entering(
    folder: Path, case: ResolvedCase, reference: Mapping[str, Tensor], checkpoint: Checkpoint
) -> Manifest:
    """Writes all that enters into `folder`, and returns the manifest that is still to be written.

    Until it is, the folder is no request.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MANIFEST).unlink(missing_ok=True)
    request = request_of(case)
    for image, name in zip(case.case.images, request["images"], strict=True):
        shutil.copyfile(case.case.folder / image, folder / name)
    manifest: Manifest = {
        "format": FORMAT,
        "version": VERSION,
        **setting_of(case, checkpoint),
        "request": request,
        "facts": facts_as_data(checkpoint.facts),
    }
    entering = entering_tensors(case, reference, checkpoint.facts)
    write_tensors(folder / INPUTS, entering, identity(manifest))
    manifest["files"] = {name: digest_of(folder / name) for name in (INPUTS, *request["images"])}
    manifest["tensors"] = {INPUTS: {name: described(name, tensor) for name, tensor in entering.items()}}
    return manifest


def seal(folder: Path, manifest: Manifest) -> None:
    """Writes the manifest, the last file of a folder: from now on the folder is whole."""
    write_json(folder / MANIFEST, manifest)


def setting_of(case: ResolvedCase, checkpoint: Checkpoint) -> dict[str, Any]:
    """Which case of which checkpoint, and what its tensors depend on besides."""
    options = checkpoint.options
    return {
        "case": {"name": case.case.name, "digest": case.digest, "exercises": case.case.exercises},
        "checkpoint_digest": checkpoint.digest,
        "provenance": {
            "model": model_name(checkpoint.name),
            "scheme": "none",
            "dtype": options.dtype,
            "device": options.device,
            "attn": options.attn_implementation,
            "image_backend": options.image_backend,
            "threads": torch.get_num_threads(),
            "torch": str(torch.__version__),
            "transformers": transformers.__version__,
        },
    }


def request_of(case: ResolvedCase) -> dict[str, Any]:
    """What is asked: the prompt, its pictures' files, the static layout, and how far to go."""
    layout = asdict(case.request.layout)
    grid = layout["patch_grid"]
    return {
        "prompt": case.request.prompt,
        "images": [f"image-{i}{Path(image).suffix.lower()}" for i, image in enumerate(case.case.images)],
        "layout": {**layout, "patch_grid": None if grid is None else list(grid)},
        "decode_steps": case.decode_steps,
        "gen_steps": case.gen_steps,
        "self_consistency": case.case.self_consistency,
    }


def model_name(name: str) -> str:
    """A Hub id as it is; of a folder its own name only, because where it lies is nobody else's business."""
    if not Path(name).exists():
        return name
    return "the bundled checkpoint" if Path(name) == bundled_checkpoint() else Path(name).resolve().name


def described(name: str, tensor: Tensor) -> dict[str, Any]:
    """What a manifest says about one tensor."""
    statement = statement_of(name)
    if statement is None:
        raise KeyError(f"{name!r} is described nowhere; add it to vectors/statements.py")
    return {
        "what": statement.what,
        "kind": statement.kind,
        "stage": str(_stage_of(name)),
        "axes": list(statement.axes),
        "shape": list(tensor.shape),
        "dtype": dtype_name(tensor.dtype),
        "stored_as": dtype_name(stored_dtype(tensor.dtype)),
    }


def facts_as_data(facts: ModelFacts) -> dict[str, Any]:
    """The facts with sets and tuples as lists."""
    return {k: sorted(v) if isinstance(v, frozenset) else v for k, v in asdict(facts).items()}


def facts_from_data(data: Mapping[str, Any]) -> ModelFacts:
    """What `facts_as_data` was made of."""
    sets = {"placeholder_ids", "stop_token_ids"}

    def value(name: str) -> Any:
        found = data[name]
        return frozenset(found) if name in sets else tuple(found) if isinstance(found, list) else found

    return ModelFacts(**{field.name: value(field.name) for field in fields(ModelFacts)})


def layout_from_data(data: Mapping[str, Any]) -> StaticLayout:
    grid = data["patch_grid"]
    return StaticLayout(**{**data, "patch_grid": None if grid is None else tuple(grid)})


def _stage_of(name: str) -> Stage:
    return Stage.DECODE if name == "decode_tokens" else stage_of(name)
