"""Traces survive a round trip through a file, and a damaged file says so."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from g4conformance.errors import CaseError
from g4conformance.trace import FORMAT_VERSION, Provenance, Recorder, Trace

from .asserting import told
from .recording import Recorded

pytestmark = pytest.mark.unit

PROVENANCE = Provenance("window+1", "c0ffee", "decade", "bfloat16", "eager", "pil", "2.14.1", "5.24.0")
TENSORS = {
    "input_ids": torch.tensor([[2, 5, 7]]),
    "attention_mask": torch.tensor([[True, True, False]]),
    "valid_length": torch.tensor(2),
    "text_embeds": torch.randn(1, 3, 4).to(torch.bfloat16),
    "prefill/layer/0/key": torch.randn(1, 3, 2, 4).transpose(1, 2),  # not contiguous
    "prefill/logits": torch.tensor([[float("nan"), float("inf"), 1.0]]),
    "generation/token_ids": torch.empty(0, dtype=torch.long),
}


def test_round_trip(tmp_path: Path) -> None:
    Trace(TENSORS, PROVENANCE).save(tmp_path / "a.safetensors")
    loaded = Trace.load(tmp_path / "a.safetensors")
    assert loaded.provenance == PROVENANCE
    assert dict(loaded).keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name].nan_to_num(), tensor.nan_to_num()), name
    assert [path.name for path in tmp_path.iterdir()] == ["a.safetensors"], "no partial file stays"


def test_saving_replaces_an_older_trace(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    Trace({"valid_length": torch.tensor(1)}, PROVENANCE).save(path)
    Trace({"valid_length": torch.tensor(2)}, PROVENANCE).save(path)
    assert int(Trace.load(path)["valid_length"]) == 2


def test_a_recorded_reference_survives(text: Recorded, tmp_path: Path) -> None:
    text.reference.save(tmp_path / "a.safetensors")
    loaded = Trace.load(tmp_path / "a.safetensors")
    assert loaded.provenance == text.reference.provenance
    assert all(torch.equal(loaded[name], tensor) for name, tensor in text.reference.items())
    assert len(loaded) == len(text.reference)


def test_a_trace_is_a_mapping() -> None:
    trace = Trace(TENSORS, PROVENANCE)
    assert list(trace) == list(TENSORS)
    assert "input_ids" in trace
    assert "visual_embeds" not in trace
    with pytest.raises(KeyError, match="visual_embeds"):
        trace["visual_embeds"]


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def overwrite(path: Path) -> None:
    path.write_text("not a safetensors file at all, whatever its name says")


@pytest.mark.parametrize("damage", [truncate, overwrite, Path.unlink])
def test_a_damaged_file_is_named(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    path = tmp_path / "a.safetensors"
    Trace(TENSORS, PROVENANCE).save(path)
    damage(path)
    with told(CaseError, expected="a trace written by g4conformance", found=str(path), remedy="Record the trace again"):
        Trace.load(path)


@pytest.mark.parametrize("metadata", [None, {"provenance": "{"}, {"provenance": "{}"}, {"other": "1"}])
def test_a_file_without_provenance_is_refused(tmp_path: Path, metadata: dict[str, str] | None) -> None:
    path = tmp_path / "a.safetensors"
    save_file({"input_ids": torch.zeros(1)}, path, metadata=metadata)
    with told(CaseError, expected="a trace with provenance", found=str(path), remedy="Record the trace again"):
        Trace.load(path)


def test_another_format_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    older = {**asdict(PROVENANCE), "format_version": FORMAT_VERSION - 1}
    save_file({"input_ids": torch.zeros(1)}, path, metadata={"provenance": json.dumps(older)})
    with told(
        CaseError, expected=f"trace format {FORMAT_VERSION}", found=f"format {FORMAT_VERSION - 1}", remedy="again"
    ):
        Trace.load(path)


def test_a_recorder_copies_because_runtimes_reuse_buffers() -> None:
    record, buffer = Recorder(), torch.zeros(2, requires_grad=True)
    record("text_embeds", buffer)
    with torch.no_grad():
        buffer += 1
    assert record.tensors["text_embeds"].tolist() == [0.0, 0.0]
    assert not record.tensors["text_embeds"].requires_grad
