"""The foreign side of the suite: reads a case's request and writes a trace.

It needs Python, numpy and safetensors, and nothing of g4conformance: the file may be copied to where that is not
installed. `docs/vectors.md` says what the files hold.

    from g4conformance.foreign import Request, serve

    def run(request: Request):
        logits = my_runtime(request.inputs["llm_input_ids"])
        return {"prefill/logits": logits}

    serve(run)
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

FORMAT = "g4conformance-vectors"
VERSION = 1
INDEX, MANIFEST, INPUTS, TRACE = "index.json", "manifest.json", "inputs.safetensors", "trace.safetensors"
METADATA = "g4conformance"  # the one key of a file's metadata; with several, safetensors may order them at will
STOP_REASONS = ("stop_token", "max_new_tokens", "max_seq")  # `generation/stop_reason` is an index of these

Arrays = Mapping[str, NDArray[Any]]


@dataclass(frozen=True)
class Request:
    """One case to run.

    Attributes:
        folder: where it lies.
        manifest: all that is said about it, as read from JSON.
        inputs: what enters the stages, in the shape of the static buffers (B = 1, S = max_seq rows): `input_ids` and
            `llm_input_ids` int64 [B,S], `attention_mask` bool [B,S], `valid_length` int64 [1], with an image
            `pixel_values` [1,N,3 * patch_size ** 2] and `image_position_ids` int64 [1,N,2], `decode_tokens` int64 [T],
            and `generation/select/logits` [n,vocab]. bfloat16 is stored as float32.
    """

    folder: Path
    manifest: Mapping[str, Any]
    inputs: Arrays

    @property
    def case(self) -> str:
        return str(self.manifest["case"]["name"])

    @property
    def prompt(self) -> str | None:
        """The rendered prompt, special tokens as text; None for a case of ids only."""
        prompt: str | None = self.manifest["request"]["prompt"]
        return prompt

    @property
    def images(self) -> list[Path]:
        """The prompt's pictures, as their files are."""
        return [self.folder / name for name in self.manifest["request"]["images"]]

    @property
    def valid_length(self) -> int:
        """Rows of the prompt; what follows up to `max_seq` is padding."""
        return int(self.inputs["valid_length"][0])

    @property
    def max_seq(self) -> int:
        return int(self.manifest["request"]["layout"]["max_seq"])

    @property
    def decode_tokens(self) -> list[int]:
        """What to feed after the prompt, one token a step, whatever the runtime would choose."""
        tokens: list[int] = self.inputs["decode_tokens"].tolist()
        return tokens

    @property
    def gen_steps(self) -> int:
        """How many new tokens to generate at most."""
        return int(self.manifest["request"]["gen_steps"])

    @property
    def facts(self) -> Mapping[str, Any]:
        """What the checkpoint's configs say: pad_token_id, stop_token_ids, sliding_window, layer_types and so on."""
        facts: Mapping[str, Any] = self.manifest["facts"]
        return facts


def read_request(folder: str | os.PathLike[str]) -> Request:
    """The request in `folder`: one that `--runtime-command` has written, or a case of recorded vectors.

    Raises:
        ValueError: it is of another format version.
    """
    path = Path(folder)
    manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    found = (manifest.get("format"), manifest.get("version"))
    if found != (FORMAT, VERSION):
        raise ValueError(f"{path / MANIFEST} is {found[0]} {found[1]}, this module reads {FORMAT} {VERSION}")
    return Request(path, manifest, load_file(path / INPUTS))


def requests_of(vectors: str | os.PathLike[str]) -> Iterator[Request]:
    """Every case of recorded vectors, in the order of their index."""
    path = Path(vectors)
    index = json.loads((path / INDEX).read_text(encoding="utf-8"))
    for entry in index["cases"].values():
        yield read_request(path / entry["folder"])


def write_trace(request: Request, tensors: Mapping[str, Any], folder: str | os.PathLike[str] | None = None) -> Path:
    """Writes what the runtime yielded for `request`, whole or not at all.

    Args:
        tensors: arrays under trace names. bfloat16 (of ml_dtypes) is stored as float32, which loses nothing.
        folder: where to; the request's own if not given.
    """
    path = Path(request.folder if folder is None else folder)
    path.mkdir(parents=True, exist_ok=True)
    partial = path / f"{TRACE}.partial"
    metadata = {METADATA: json.dumps(identity(request.manifest), sort_keys=True)}
    save_file({name: _plain(tensors[name]) for name in sorted(tensors)}, partial, metadata=metadata)
    os.replace(partial, path / TRACE)
    return path / TRACE


def identity(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """What a trace must agree in with the request that it answers."""
    case = manifest["case"]
    return {
        "format": FORMAT,
        "version": VERSION,
        "case": case["name"],
        "case_digest": case["digest"],
        "checkpoint_digest": manifest["checkpoint_digest"],
    }


def serve(run: Callable[[Request], Mapping[str, Any]], arguments: Sequence[str] | None = None) -> None:
    """The main function of a foreign side: answers one request, or all cases of recorded vectors.

    Args:
        run: makes the tensors of a request.
        arguments: `[folder]` of one request, or `[vectors, mine]`; the command line's last ones if not given.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    if len(arguments) not in (1, 2):
        raise SystemExit("expected the folder of a request, or one of vectors and one to write traces to")
    if len(arguments) == 1:
        request = read_request(arguments[0])
        write_trace(request, run(request))
        return
    for request in requests_of(arguments[0]):
        write_trace(request, run(request), Path(arguments[1]) / request.folder.name)


def _plain(value: Any) -> NDArray[Any]:
    """C-ordered, in a dtype that numpy itself has."""
    array: NDArray[Any] = np.asarray(value)
    return np.asarray(array, dtype=np.float32 if array.dtype.name == "bfloat16" else array.dtype, order="C")
