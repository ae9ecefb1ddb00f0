"""Records the reference's trace of a case: one prefill and N teacher-forced decode steps, each once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import transformers
from torch import Tensor

from g4conformance.checkpoints.checkpoint import Checkpoint
from g4conformance.errors import UnsoundReferenceError
from g4conformance.reference.hooks import Listener
from g4conformance.trace import Provenance, Recorder, Trace


def record_reference(
    checkpoint: Checkpoint,
    inputs: Mapping[str, Any],
    steps: int,
    case: str = "",
    case_digest: str = "",
    tokens: Sequence[int] | None = None,
) -> Trace:
    """Runs prefill and `steps` greedy decode steps of `checkpoint` and returns all that its stages yield.

    The greedy continuation is the teacher-forcing sequence. It goes on past a stop token, so that decode is compared
    at every step that was asked for.

    Args:
        inputs: the processor's output for one prompt.
        steps: number of decode steps; step t feeds the token that step t - 1 (or prefill) chose.
        tokens: what to feed instead, at least `steps` tokens.

    Raises:
        UnsoundReferenceError: logits that are not finite.
    """
    record = Recorder()
    listener = Listener(checkpoint, record)
    _record_inputs(checkpoint, inputs, record)
    cache = listener.new_cache()
    length = inputs["input_ids"].shape[1]
    with torch.no_grad(), listener.listening():
        listener.begin("", "prefill/", past_len=0)
        given = model_inputs(inputs, checkpoint.dtype)
        logits = _forward(checkpoint, cache, **given, logits_to_keep=_last_row(checkpoint, length))
        record("prefill/logits", _finite(logits, case, "prefill"))
        for step in range(steps):
            prefix = f"decode/{step}/"
            chosen = int(logits[0].argmax()) if tokens is None else tokens[step]
            token = torch.tensor([[chosen]], device=checkpoint.device)
            record(prefix + "token", token)
            record(prefix + "position", torch.tensor([length + step]))
            listener.begin(prefix, prefix, past_len=length + step)
            logits = _forward(checkpoint, cache, input_ids=token)
            record(prefix + "logits", _finite(logits, case, f"decode step {step}"))
    return Trace(record.tensors, provenance(checkpoint, case, case_digest))


def model_inputs(inputs: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """What of the processor's output the model's forward takes.

    Pixel values enter in the model's `dtype`, as a runtime gets them: the patch embedder computes in what it is given.
    """
    names = ("input_ids", "attention_mask", "pixel_values", "image_position_ids", "mm_token_type_ids")
    given = {name: inputs[name] for name in names if inputs.get(name) is not None}
    return {name: v.to(dtype) if name == "pixel_values" else v for name, v in given.items()}


def provenance(checkpoint: Checkpoint, case: str, case_digest: str) -> Provenance:
    return Provenance(
        case=case,
        case_digest=case_digest,
        checkpoint_digest=checkpoint.digest,
        dtype=checkpoint.options.dtype,
        attn_implementation=checkpoint.options.attn_implementation,
        image_backend=checkpoint.options.image_backend,
        torch_version=str(torch.__version__),
        transformers_version=transformers.__version__,
    )


def _forward(checkpoint: Checkpoint, cache: Any, **inputs: Any) -> Tensor:
    """Logits [B, vocab] of the last row that the model kept."""
    logits: Tensor = checkpoint.model(**inputs, cache=cache, use_cache=True).logits
    return logits[:, -1]


def _last_row(checkpoint: Checkpoint, length: int) -> Tensor:
    """The last row as a tensor: an integer `logits_to_keep` would drop all other rows before the shared-KV layers."""
    return torch.tensor([length - 1], device=checkpoint.device)


def _record_inputs(checkpoint: Checkpoint, inputs: Mapping[str, Any], record: Recorder) -> None:
    input_ids = inputs["input_ids"]
    record("input_ids", input_ids)
    record("attention_mask", inputs["attention_mask"].bool())
    record("valid_length", torch.tensor([input_ids.shape[1]]))
    if inputs.get("pixel_values") is not None:
        record("pixel_values", inputs["pixel_values"].to(checkpoint.dtype))
        record("image_position_ids", inputs["image_position_ids"])
    embedding = checkpoint.model.get_input_embeddings()
    pad_id = torch.tensor([checkpoint.facts.pad_token_id], device=checkpoint.device)
    record("pad_embed", embedding(pad_id)[0])


def _finite(logits: Tensor, case: str, where: str) -> Tensor:
    if not bool(torch.isfinite(logits).all()):
        raise UnsoundReferenceError(
            "finite logits from the reference",
            f"NaN or Inf at {where} of case {case!r}",
            "Check the checkpoint, or choose another --dtype.",
        )
    return logits
