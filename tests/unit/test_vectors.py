"""Recorded vectors: the same bytes twice, resumed, moved, judged without a model, and refused if they are not whole."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch

from g4conformance.checkpoints.checkpoint import Checkpoint, LoadOptions, load_checkpoint
from g4conformance.checks import CHECKS
from g4conformance.checks.run import Mode
from g4conformance.errors import VectorsError
from g4conformance.fixtures import bundled_checkpoint
from g4conformance.foreign import INDEX, INPUTS, MANIFEST, TRACE, read_request, write_trace
from g4conformance.judging.verdict import Status
from g4conformance.runtime.static import StaticGemma4Runtime
from g4conformance.session import ConformanceSession
from g4conformance.stages import Stage
from g4conformance.vectors.compare import answers_in, conforms
from g4conformance.vectors.files import read_json, write_sealed
from g4conformance.vectors.reading import open_vectors
from g4conformance.vectors.record import JUDGED_LATER

from .asserting import told
from .vectors import CASES, OPTIONS, answer_all, answered, copied, judged, record

pytestmark = pytest.mark.unit


@pytest.fixture(scope="module")
def vectors(tiny_checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recorded") / "vectors"
    assert record(tiny_checkpoint, folder) == dict.fromkeys(CASES, False)
    return folder


@pytest.fixture(scope="module")
def mine(vectors: Path, shared_runtime: StaticGemma4Runtime, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("answers") / "mine"
    answer_all(shared_runtime, vectors, folder)
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def flip(path: Path, at: int) -> None:
    """Alters one bit."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def rewrite(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


# --- recording ------------------------------------------------------------------------------------------------------


def test_recording_twice_gives_the_same_bytes(tiny_checkpoint: Checkpoint, vectors: Path, tmp_path: Path) -> None:
    record(tiny_checkpoint, tmp_path / "again")
    assert contents(tmp_path / "again") == contents(vectors)
    assert not [name for name in contents(vectors) if "partial" in name]


def test_an_interrupted_recording_goes_on(tiny_checkpoint: Checkpoint, vectors: Path, tmp_path: Path) -> None:
    out = tmp_path / "vectors"
    recording = iter(record_vectors_one_by_one(tiny_checkpoint, out))
    assert next(recording) == ("text-only", False)
    recording.close()  # type: ignore[attr-defined]
    with told(VectorsError, expected="with an index.json", found="not recorded to the end", remedy="record"):
        open_vectors(out)
    before = (out / "text-only" / TRACE).stat().st_mtime_ns
    assert record(tiny_checkpoint, out) == {"text-only": True, "image-first": False}
    assert (out / "text-only" / TRACE).stat().st_mtime_ns == before, "what was whole is kept"
    assert contents(out) == contents(vectors)


def record_vectors_one_by_one(checkpoint: Checkpoint, out: Path) -> Any:
    from g4conformance.vectors.record import record_vectors

    return record_vectors(checkpoint, OPTIONS, out)


@pytest.mark.parametrize("damage", ["cut trace", "no manifest", "altered inputs", "partial trace only"])
def test_what_is_not_whole_is_recorded_again(
    tiny_checkpoint: Checkpoint, vectors: Path, tmp_path: Path, damage: str
) -> None:
    out = copied(vectors, tmp_path / "vectors")
    folder = out / "text-only"
    if damage == "cut trace":
        (folder / TRACE).write_bytes((folder / TRACE).read_bytes()[:-1])
    elif damage == "no manifest":
        (folder / MANIFEST).unlink()
    elif damage == "altered inputs":
        flip(folder / INPUTS, -1)
    else:
        (folder / TRACE).rename(folder / f"{TRACE}.partial")
    assert record(tiny_checkpoint, out) == {"text-only": False, "image-first": True}
    assert contents(out) == contents(vectors)


def test_a_case_in_another_setting_is_not_kept(tiny_checkpoint: Checkpoint, vectors: Path, tmp_path: Path) -> None:
    out = copied(vectors, tmp_path / "vectors")
    options = replace(OPTIONS, case_names=("text-only",), decode_steps=1)
    assert record(tiny_checkpoint, out, options) == {"text-only": False}
    assert list(json.loads((out / INDEX).read_text())["cases"]) == list(CASES), "the other case is still one of them"


def test_vectors_of_another_setting_are_not_overwritten(
    tiny_checkpoint: Checkpoint, vectors: Path, tmp_path: Path
) -> None:
    out = copied(vectors, tmp_path / "vectors")
    with told(VectorsError, expected="vectors of the same checkpoint digest", found="others in", remedy="--out"):
        record(replace(tiny_checkpoint, digest="0" * 64), out)
    with told(VectorsError, expected="vectors of the same max seq", found="others in", remedy="--out"):
        record(tiny_checkpoint, out, replace(OPTIONS, max_seq=200))
    assert contents(out) == contents(vectors)


# --- what is said about tensors -------------------------------------------------------------------------------------


def test_each_tensor_is_described(vectors: Path) -> None:
    for case in open_vectors(vectors):
        for file in (INPUTS, TRACE):
            arrays = safetensors.numpy.load_file(case.folder / file)
            said = case.manifest["tensors"][file]
            assert said.keys() == arrays.keys()
            for name, array in arrays.items():
                assert (said[name]["shape"], said[name]["stored_as"]) == (list(array.shape), array.dtype.name)
                assert len(said[name]["axes"]) == array.ndim
                assert said[name]["what"]


def test_limits_are_those_of_the_checks(vectors: Path, mine: Path, tmp_path: Path) -> None:
    """A tensor that is off by a little less than its stated limit passes; a little more, and it is red."""
    folder = copied(mine, tmp_path / "mine")
    case = open_vectors(vectors)[0]
    name, check = "prefill/logits", "G4-PREFILL-04"
    (limit,) = case.manifest["tensors"][TRACE][name]["limits"]
    assert (limit["check"], limit["budget"]) == (check, "rounding")
    for factor, status in ((0.9, Status.PASS), (1.1, Status.FAIL)):
        tensors = dict(safetensors.numpy.load_file(mine / "text-only" / TRACE))
        tensors[name] = case.reference()[name].numpy().copy()
        tensors[name][0, 7] += np.float32(factor * limit["max_abs"])
        write_trace(read_request(case.folder), tensors, folder / "text-only")
        assert {v.status for v in judged(vectors, folder) if v.check == check and v.case == "text-only"} == {status}


def test_tables_of_another_make_may_differ_by_as_much_as_a_run_allows_them(
    vectors: Path, mine: Path, tmp_path: Path
) -> None:
    """Who answers vectors has kernels of its own: rotary tables are judged as `verify --runtime-command` does."""
    folder, name = copied(mine, tmp_path / "mine"), "rope/full_attention/cos"
    (limit,) = open_vectors(vectors)[0].manifest["tensors"][TRACE][name]["limits"]
    assert (limit["check"], limit["budget"]) == ("G4-ROPE-01", "rounding")
    for factor, status in ((0.9, Status.PASS), (1.5, Status.FAIL)):
        tensors = dict(safetensors.numpy.load_file(mine / "text-only" / TRACE))
        tensors[name] = tensors[name].copy()
        tensors[name][0, 3, 2] += np.float32(factor * limit["max_abs"])
        write_trace(read_request(vectors / "text-only"), tensors, folder / "text-only")
        assert {v.status for v in judged(vectors, folder) if v.check == "G4-ROPE-01"} == {status, Status.PASS}


def test_bfloat16_is_readable_with_numpy_and_comes_back(tmp_path: Path) -> None:
    checkpoint = load_checkpoint(bundled_checkpoint(), LoadOptions("bfloat16"))
    options = replace(OPTIONS, case_names=("text-only",), load=checkpoint.options)
    record(checkpoint, tmp_path, options)
    assert safetensors.numpy.load_file(tmp_path / "text-only" / TRACE)["text_embeds"].dtype == np.float32
    (case,) = open_vectors(tmp_path)
    recorded, fresh = case.reference(), ConformanceSession(checkpoint, JUDGED_LATER, options).reference("text-only")
    assert recorded.keys() == fresh.keys()
    assert all(recorded[name].dtype == fresh[name].dtype for name in fresh)
    assert all(torch.equal(recorded[name], fresh[name]) for name in fresh)


# --- comparing ------------------------------------------------------------------------------------------------------


def test_moved_vectors_and_the_shipped_runtimes_answers_conform(vectors: Path, mine: Path, tmp_path: Path) -> None:
    verdicts = judged(copied(vectors, tmp_path / "elsewhere"), copied(mine, tmp_path / "theirs"))
    alone = {v.check for v in verdicts if CHECKS[v.check].alone}  # a trace of a whole run has no layer by itself
    assert alone == {v.check for v in verdicts if v.status is Status.NOT_OBSERVED}
    assert {v.status for v in verdicts if v.check not in alone} == {Status.PASS}
    assert {verdict.stage for verdict in verdicts} == set(Stage) - {Stage.SELF_CONSISTENCY, Stage.QUANTIZATION}
    assert conforms(verdicts)


def test_the_reference_is_an_answer_that_lacks_padding(vectors: Path) -> None:
    verdicts = judged(vectors, vectors)
    assert {verdict.status for verdict in verdicts} == {Status.PASS, Status.NOT_OBSERVED}
    unobserved = {verdict.check: verdict.where for verdict in verdicts if verdict.status is Status.NOT_OBSERVED}
    assert unobserved["G4-EMBED-02"] == "the runtime does not expose rows of padding in text_embeds"
    passed = {verdict.check for verdict in verdicts if verdict.status is Status.PASS}
    assert {"G4-EMBED-01", "G4-MASK-01", "G4-DECODE-03", "G4-DECODE-09", "G4-PREFILL-03"} <= passed


def test_what_is_lacking_is_not_observed_and_counted(vectors: Path, mine: Path, tmp_path: Path) -> None:
    tensors = safetensors.numpy.load_file(mine / "text-only" / TRACE)
    write_trace(
        read_request(vectors / "text-only"), {"prefill/logits": tensors["prefill/logits"]}, tmp_path / "text-only"
    )
    verdicts = judged(vectors, tmp_path)
    assert [v.check for v in verdicts if v.status is Status.PASS] == ["G4-PREFILL-04"]
    assert {v.status for v in verdicts if v.check != "G4-PREFILL-04"} == {Status.NOT_OBSERVED}
    assert {v.case for v in verdicts} == set(CASES), "the case without an answer is counted too"


def test_not_a_number_is_a_failure(vectors: Path, mine: Path, tmp_path: Path) -> None:
    folder = copied(mine, tmp_path / "mine")
    tensors = dict(safetensors.numpy.load_file(folder / "text-only" / TRACE))
    tensors["prefill/logits"] = np.full_like(tensors["prefill/logits"], np.nan)
    write_trace(read_request(vectors / "text-only"), tensors, folder / "text-only")
    wrong = [v for v in judged(vectors, folder) if v.failed]
    assert {(v.check, v.status) for v in wrong} == {("G4-PREFILL-04", Status.FAIL)}


FAULTS: dict[str, tuple[Callable[[dict[str, Any]], None], Stage]] = {
    "positions of the prompt begin at 1": (
        lambda t: t.update({n: np.roll(a, -1, axis=1) for n, a in t.items() if n.startswith("rope/")}),
        Stage.MASKS_AND_ROPE,
    ),
    "the position of a decode step stands still": (
        lambda t: t.update({"decode/1/position": t["decode/0/position"]}),
        Stage.DECODE,
    ),
    "the embedding is not scaled": (
        lambda t: t.update({"text_embeds": t["text_embeds"] / 96**0.5}),
        Stage.TOKEN_EMBEDDING,
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_blamed_on_its_stage(vectors: Path, mine: Path, tmp_path: Path, fault: str) -> None:
    break_it, stage = FAULTS[fault]
    folder = copied(mine, tmp_path / "mine")
    tensors = dict(safetensors.numpy.load_file(folder / "text-only" / TRACE))
    break_it(tensors)
    write_trace(read_request(vectors / "text-only"), tensors, folder / "text-only")
    wrong = [v for v in judged(vectors, folder) if v.failed]
    assert {v.stage for v in wrong} == {stage}
    assert {v.case for v in wrong} == {"text-only"}


def test_a_runtime_with_frozen_positions_is_wrong_first_at_decode(
    vectors: Path, shared_runtime: StaticGemma4Runtime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def frozen(runtime: StaticGemma4Runtime) -> torch.Tensor:
        return torch.tensor([runtime.valid_length])

    monkeypatch.setattr(StaticGemma4Runtime, "_decode_position", frozen)
    answer_all(shared_runtime, vectors, tmp_path)
    verdicts = judged(vectors, tmp_path)
    failed = [v for v in verdicts if v.status is Status.FAIL]
    assert failed[0].stage is Stage.DECODE
    assert "G4-DECODE-05" in {v.check for v in failed}, "rotary tables of the second step"
    assert {v.mode for v in failed if v.stage is Stage.DECODE} == {Mode.ACCUMULATED}


# --- refusing -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", [INDEX, f"text-only/{MANIFEST}", f"text-only/{TRACE}", f"text-only/{INPUTS}"])
@pytest.mark.parametrize("place", ["first", "middle", "last"])
def test_one_altered_byte_is_refused(vectors: Path, tmp_path: Path, file: str, place: str) -> None:
    out = copied(vectors, tmp_path / "vectors")
    size = (out / file).stat().st_size
    flip(out / file, {"first": 0, "middle": size // 2, "last": size - 1}[place])
    with pytest.raises(VectorsError):
        open_vectors(out)


def test_an_altered_picture_is_refused(vectors: Path, tmp_path: Path) -> None:
    out = copied(vectors, tmp_path / "vectors")
    flip(out / "image-first" / "image-0.png", 100)
    with told(VectorsError, expected="SHA-256", found="altered or cut", remedy="again"):
        open_vectors(out)


@pytest.mark.parametrize("file", [MANIFEST, TRACE, INPUTS])
def test_a_file_that_is_cut_or_missing_is_refused(vectors: Path, tmp_path: Path, file: str) -> None:
    out = copied(vectors, tmp_path / "vectors")
    path = out / "text-only" / file
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with told(VectorsError, expected="SHA-256", found="altered or cut", remedy="again"):
        open_vectors(out)
    path.unlink()
    with told(VectorsError, expected="a file at", found="No such file", remedy="again"):
        open_vectors(out)


def test_another_format_version_is_refused(vectors: Path, tmp_path: Path) -> None:
    out = copied(vectors, tmp_path / "vectors")
    rewrite(out / INDEX, lambda index: index.update(version=2))
    with told(VectorsError, expected="g4conformance-vectors 1", found="g4conformance-vectors 2", remedy="Record"):
        open_vectors(out)


def test_another_checkpoint_is_refused(vectors: Path, tiny_checkpoint: Checkpoint) -> None:
    assert len(open_vectors(vectors, checkpoint_digest=tiny_checkpoint.digest)) == len(CASES)
    with told(VectorsError, expected="checkpoint 000000000000", found=tiny_checkpoint.digest[:12], remedy="same"):
        open_vectors(vectors, checkpoint_digest="0" * 64)


def test_an_unknown_case_is_refused(vectors: Path) -> None:
    with told(VectorsError, expected="a recorded case", found="'window'", remedy="text-only, image-first"):
        open_vectors(vectors, ["window"])


def test_an_index_that_lacks_something_is_refused(vectors: Path, tmp_path: Path) -> None:
    out = copied(vectors, tmp_path / "vectors")
    rewrite(out / INDEX, lambda index: index["cases"].pop("text-only"))
    with told(VectorsError, expected="the digest that it states", found="it was altered", remedy="again"):
        open_vectors(out)
    document = read_json(vectors / INDEX)
    del document["digest"], document["cases"]
    write_sealed(out / INDEX, document)
    with told(VectorsError, expected="whole vectors", found="'cases'", remedy="again"):
        open_vectors(out)


OTHER_IDENTITIES = {
    "case": "another",
    "case_digest": "0" * 64,
    "checkpoint_digest": "0" * 64,
    "version": 2,
}


@pytest.mark.parametrize("key", OTHER_IDENTITIES)
def test_an_answer_to_another_request_is_refused(vectors: Path, tmp_path: Path, key: str) -> None:
    request = read_request(vectors / "text-only")
    claimed = {"case": "text-only", key: OTHER_IDENTITIES[key]}
    array = {"prefill/logits": np.zeros((1, 4), np.float32)}
    (tmp_path / "text-only").mkdir()
    safetensors.numpy.save_file(array, tmp_path / "text-only" / TRACE, {"g4conformance": json.dumps(claimed)})
    with told(VectorsError, expected=f"a trace of the {key.replace('_', ' ')}", found=f"{TRACE}", remedy="Answer"):
        answers_in(tmp_path, open_vectors(vectors), CASES)
    assert request.case == "text-only"


def test_an_answer_without_a_claim_is_taken(vectors: Path, tmp_path: Path) -> None:
    (tmp_path / "text-only").mkdir()
    safetensors.numpy.save_file({"valid_length": np.array([9])}, tmp_path / "text-only" / TRACE)
    assert set(answers_in(tmp_path, open_vectors(vectors), CASES)) == {"text-only"}


def test_answers_that_cannot_be_judged_are_refused(vectors: Path, mine: Path, tmp_path: Path) -> None:
    opened = open_vectors(vectors)
    with told(VectorsError, expected="at least one <case>/trace.safetensors", found="none", remedy="docs/vectors.md"):
        answers_in(tmp_path, opened, CASES)
    folder = copied(mine, tmp_path / "mine")
    (folder / "text-only").rename(folder / "text_only")
    with told(VectorsError, expected="traces of recorded cases", found="'text_only'", remedy="text-only, image-first"):
        answers_in(folder, opened, CASES)
    (folder / "text_only").rename(folder / "text-only")
    path = folder / "text-only" / TRACE
    path.write_bytes(path.read_bytes()[:-9])
    with told(VectorsError, expected="a whole safetensors file", found=TRACE, remedy="again"):
        answers_in(folder, opened, CASES)


def test_a_misspelt_name_is_refused(vectors: Path, tmp_path: Path) -> None:
    write_trace(read_request(vectors / "text-only"), {"prefil/logits": np.zeros(1)}, tmp_path / "text-only")
    with told(
        VectorsError, expected="trace names", found="'prefil/logits'", remedy="The nearest one is prefill/logits"
    ):
        answers_in(tmp_path, open_vectors(vectors), CASES)


def test_a_recorded_answer_is_verified_too(vectors: Path, tmp_path: Path) -> None:
    theirs = copied(vectors, tmp_path / "theirs")
    flip(theirs / "text-only" / TRACE, -1)
    with told(VectorsError, expected="SHA-256", found="altered or cut", remedy="again"):
        answers_in(theirs, open_vectors(vectors), CASES)


def test_the_shipped_runtimes_answer_names_only_known_tensors(
    vectors: Path, shared_runtime: StaticGemma4Runtime
) -> None:
    from g4conformance.vectors.statements import statement_of

    for name in answered(shared_runtime, read_request(vectors / "image-first")):
        assert statement_of(name) is not None, name
