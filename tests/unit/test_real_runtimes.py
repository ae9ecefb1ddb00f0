"""The adapters of real runtimes without those runtimes: spies, views, what they have in common, and the page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

from g4conformance import runtimes
from g4conformance.cases import load_cases
from g4conformance.checkpoints.checkpoint import Checkpoint
from g4conformance.checks import CHECKS
from g4conformance.checks.run import Mode
from g4conformance.errors import ConformanceError, LayoutError
from g4conformance.fixtures import fixtures_folder
from g4conformance.judging.verdict import Measurement, Status, Verdict
from g4conformance.runtime.contract import KeyValue, StopReason
from g4conformance.runtime.layout import StaticLayout
from g4conformance.runtimes.spying import Spies, imported, spies
from g4conformance.runtimes.tico import by_position, turned
from g4conformance.runtimes.unpadded import OwnInputs, UnpaddedRuntime
from g4conformance.stages import Stage
from g4conformance.trace import Recorder
from tools.runtimes.commands import BEHIND, command
from tools.runtimes.findings import Finding, load_findings
from tools.runtimes.interventions import INTERVENTIONS
from tools.runtimes.page import page
from tools.runtimes.run import CASES, RUNTIMES

pytestmark = pytest.mark.unit


# --- spies ------------------------------------------------------------------------------------------------------------


def test_spies_see_calls_and_leave_nothing_behind() -> None:
    linear, seen = torch.nn.Linear(2, 2), []
    before = dict(vars(linear))
    with spies() as spy:
        spy.before(linear, "forward", lambda x: seen.append(("in", x.sum().item())))
        spy.after(linear, "forward", lambda y, x: seen.append(("out", torch.equal(y, linear.weight @ x + linear.bias))))
        linear(torch.ones(2))
    linear(torch.ones(2))
    assert seen == [("in", 2.0), ("out", True)]
    assert vars(linear) == before


def test_functions_of_a_module_are_looked_at_where_they_are_called_from() -> None:
    namespace, seen = SimpleNamespace(double=lambda x: 2 * x), []
    with spies() as spy:
        spy.after(namespace, "double", lambda result, x: seen.append((x, result)))
        assert namespace.double(3) == 6
    assert seen == [(3, 6)]


def test_a_runtime_that_is_not_installed_is_told_with_its_extra() -> None:
    with pytest.raises(ConformanceError, match=r"pip install 'g4conformance\[codex\]'"):
        imported("a_package_that_nobody_has.model", "codex")


# --- TICO's views -----------------------------------------------------------------------------------------------------


def test_sines_turned_twice_are_what_they_were() -> None:
    sin = torch.tensor([1.0, 2.0, 3.0, 4.0])
    assert turned(sin).tolist() == [-1.0, -2.0, 3.0, 4.0]
    assert torch.equal(turned(turned(sin)), sin)


@pytest.mark.parametrize("past_len", [2, 3])
def test_the_current_token_s_slot_moves_to_its_position(past_len: int) -> None:
    bias = torch.full((1, 1, 5), -120.0)
    bias[..., :past_len] = bias[..., -1] = 0.0
    visible = (by_position(bias, past_len) == 0).flatten().tolist()
    assert visible == [i <= past_len for i in range(5)]


def test_in_the_last_row_it_is_there_already() -> None:
    bias = torch.zeros(1, 1, 5)
    assert torch.equal(by_position(bias, 4), bias)


# --- runtimes without static buffers ----------------------------------------------------------------------------------


class Echo(UnpaddedRuntime):
    """Embeds an id as itself; sees one soft token; says the last id plus one; stops at 9."""

    placeholder, stop_tokens = -2, frozenset({9})

    def _preprocess(self, prompt: str, images: Sequence[Image.Image]) -> OwnInputs:
        return OwnInputs(torch.tensor([[int(c) if c != "i" else self.placeholder for c in prompt]]))

    def _embed(self, ids: Tensor) -> Tensor:
        return ids[..., None].float()

    def _see(self, pixel_values: Tensor, positions: Tensor) -> Tensor:
        return torch.full((1, 1), 7.0)

    def _fuse(self, embeds: Tensor, visual: Tensor, slot: Tensor) -> Tensor:
        fused = embeds.clone()
        fused[slot] = visual
        return fused

    def _prefill(self, own: OwnInputs, embeds: Tensor | None) -> Tensor:
        self._begin_pass(own.ids)
        self._report_embeds("text_embeds", self._embed(own.ids))
        n = own.ids.shape[1]
        self._report_mask(0, torch.ones(1, n, n, dtype=torch.bool).tril())
        self.cache = int(own.ids[0, -1])
        return self._next(self.cache)

    def _decode(self, token: int) -> Tensor:
        self._begin_pass(torch.tensor([[token]]))
        return self._next(token)

    def _next(self, token: int) -> Tensor:
        return torch.nn.functional.one_hot(torch.tensor([token + 1]), 32).float()

    def _load(self, key_values: Mapping[int, KeyValue], past_len: int) -> Any:
        return past_len

    def _sample(self, logits: Tensor) -> int:
        return int(logits.argmax())

    def _generate(self, own: OwnInputs, max_new_tokens: int) -> Tensor:
        ids = own.ids
        for _ in range(max_new_tokens):
            ids = torch.cat([ids, ids[:, -1:] + 1], dim=1)
            if int(ids[0, -1]) in self.stop_tokens:
                break
        return ids

    def _watch(self, spy: Spies) -> None:
        pass


@pytest.fixture
def echo(tiny_checkpoint: Checkpoint) -> UnpaddedRuntime:
    return Echo(tiny_checkpoint.facts).for_layout(StaticLayout(6, visual_start_idx=1, num_visual_tokens=1))


def test_own_placeholders_are_shown_as_the_suite_s(echo: UnpaddedRuntime) -> None:
    inputs = echo.build_static_inputs("2i4", [])
    assert inputs.input_ids.tolist() == [[2, echo.facts.image_token_id, 4, 0, 0, 0]]
    assert inputs.llm_input_ids.tolist() == [[2, 0, 4, 0, 0, 0]]
    assert inputs.attention_mask.tolist() == [[True, True, True, False, False, False]]
    assert inputs.valid_length == 3


def test_a_prompt_longer_than_the_buffers_is_refused(echo: UnpaddedRuntime) -> None:
    with pytest.raises(LayoutError, match="at most max_seq=6 tokens, found 7 tokens"):
        echo.build_static_inputs("2345678", [])


def test_rows_that_are_not_there_are_padding(echo: UnpaddedRuntime) -> None:
    echo.on_tensor = record = Recorder()
    echo.prefill(echo.build_static_inputs("234", []))
    assert record.tensors["text_embeds"].flatten().tolist() == [2.0, 3.0, 4.0, 0.0, 0.0, 0.0]
    mask = record.tensors[f"mask/{echo.facts.layer_types[0]}"]
    assert mask.shape == (1, 6, 6)
    assert torch.equal(mask[0, :3, :3], torch.ones(3, 3, dtype=torch.bool).tril())
    assert not mask[0, 3:].any()
    assert not mask[0, :, 3:].any()


def test_passes_after_the_first_are_steps(echo: UnpaddedRuntime) -> None:
    echo.on_tensor = record = Recorder()
    echo.prefill(echo.build_static_inputs("234", []))
    echo.decode_one(5)
    echo.decode_one(6)
    assert [int(record.tensors[f"decode/{step}/token"]) for step in range(2)] == [5, 6]


def test_a_loaded_state_and_a_reset_begin_with_a_step(echo: UnpaddedRuntime) -> None:
    for begin in (lambda: echo.load_state({}, 3), echo.reset):
        begin()
        echo.on_tensor = record = Recorder()
        echo.decode_one(5)
        assert list(record.tensors) == ["decode/0/token"]


def test_the_slot_is_the_layout_s(echo: UnpaddedRuntime) -> None:
    fused = echo.mm_fusion(torch.zeros(1, 6, 1), torch.full((1, 1), 7.0))
    assert fused.flatten().tolist() == [0.0, 7.0, 0.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("prompt", "asked", "new", "reason"),
    [
        ("23", 2, [4, 5], StopReason.MAX_NEW_TOKENS),
        ("28", 3, [9], StopReason.STOP_TOKEN),
        ("2234", 8, [5, 6, 7], StopReason.MAX_SEQ),
        ("2i3", 1, [4], StopReason.MAX_NEW_TOKENS),
    ],
)
def test_generation_ends_with_a_reason(
    echo: UnpaddedRuntime, prompt: str, asked: int, new: list[int], reason: StopReason
) -> None:
    inputs = echo.build_static_inputs(prompt, [])
    generation = echo.generate(inputs, asked)
    assert list(generation.token_ids) == inputs.input_ids[0, : inputs.valid_length].tolist() + new
    assert generation.stop_reason is reason


def test_select_knows_the_stop_tokens(echo: UnpaddedRuntime) -> None:
    logits = torch.eye(32)
    assert echo.select(logits[9:10]) == (9, StopReason.STOP_TOKEN)
    assert echo.select(logits[8:9]) == (8, None)


def test_layouts_share_what_is_loaded_and_nothing_else(echo: UnpaddedRuntime) -> None:
    echo.on_tensor = Recorder()
    echo.prefill(echo.build_static_inputs("234", []))
    other = echo.for_layout(StaticLayout(8))
    assert other.cache is other.on_tensor is None
    assert other.facts is echo.facts
    assert echo.for_layout(StaticLayout(8)) is other


# --- findings and their page ------------------------------------------------------------------------------------------


def test_findings_speak_of_what_there_is() -> None:
    known = {case.name for case in load_cases(fixtures_folder() / "cases.yaml")}
    for finding in load_findings():
        assert finding.runtime in RUNTIMES
        assert {finding.check, *finding.also} <= CHECKS.keys()
        assert finding.mode in CHECKS[finding.check].modes
        assert finding.case in known
    assert set(CASES) <= known


def test_interventions_are_told_in_words_and_words_are_done() -> None:
    findings = load_findings()
    assert {f.id for f in findings if f.intervention} == INTERVENTIONS.keys() | {f.id for f in findings if f.instead}
    assert all(finding.runtime in BEHIND for finding in findings if finding.instead)


@pytest.mark.parametrize("finding", [f for f in load_findings() if f.instead], ids=lambda finding: finding.id)
def test_interventions_of_a_foreign_side_are_options_of_it(finding: Finding) -> None:
    side = Path(__file__).parents[2] / "g4conformance" / "runtimes" / finding.runtime / "instead.py"
    assert all(f'"{name}"' in side.read_text() for name in finding.instead)


def verdict(status: Status, ratio: float = 0.5, check: str = "G4-ROPE-01", case: str = "a") -> Verdict:
    measured = Measurement("rope", 0.25, 0.1, 0.0, True, 0.5, 0.5, 1.0, 1.0, ratio)
    return Verdict(check, Stage.MASKS_AND_ROPE, case, Mode.ISOLATED, status, "", measured, count=4)


def a_run(verdicts: Sequence[Verdict], findings: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
    setting = {"dtype": "float32", "torch": "2", "transformers": "5"}
    plain = [v.as_dict() for v in verdicts]
    names = {"runtime": "echo", "package": "echo 1.0", "cases": ["a"]}
    return {**names, "setting": setting, "verdicts": plain, "findings": list(findings)}


def row(text: str, stage: str = "masks_and_rope") -> str:
    return next(line for line in text.splitlines() if line.startswith(f"| {stage} |"))


def test_the_table_has_the_worst_of_what_passed() -> None:
    text = page([a_run([verdict(Status.PASS, 0.25), verdict(Status.PASS, 0.75, case="b")])])
    assert row(text) == "| masks_and_rope | pass, worst 0.75 (G4-ROPE-01, b) |"
    assert row(text, "decode") == "| decode | nothing to judge |"


def test_failures_stand_first_and_what_was_not_seen_is_no_pass() -> None:
    found = [
        verdict(Status.FAIL, 3.0),
        verdict(Status.INHERITED, check="G4-MASK-01"),
        verdict(Status.NOT_OBSERVED, check="G4-MASK-03"),
    ]
    expected = "**G4-ROPE-01 3 x allowed (a)**; inherited: G4-MASK-01; not observed: G4-MASK-03"
    assert row(page([a_run(found)])) == f"| masks_and_rope | {expected} |"


def test_a_failure_that_no_finding_argues_is_told() -> None:
    text = page([a_run([verdict(Status.FAIL, 3.0)])])
    assert "### Not argued yet" in text
    assert "- G4-ROPE-01 (masks_and_rope, isolated) on `a`: max |diff| 0.25 in `rope`, where 0.5 is allowed" in text


@pytest.mark.parametrize(("after", "ending"), [(Status.PASS, "Then the check passes"), (Status.FAIL, "Then it is")])
def test_a_finding_shows_the_check_before_and_after(after: Status, ending: str) -> None:
    finding = next(finding for finding in load_findings() if finding.intervention)
    before = verdict(Status.FAIL, 3.0, finding.check)
    tried = {
        "id": finding.id,
        "before": before.as_dict(),
        "after": verdict(after, check=finding.check).as_dict(),
        "also_cured": [finding.check, "G4-MASK-01"],
    }
    text = page([a_run([before, verdict(Status.FAIL, 3.0, "G4-MASK-01")], [tried])])
    flowing = " ".join(text.split())
    assert f"### {finding.says.rstrip('.')}\n" in text
    assert f"Intervention: {finding.intervention}. {ending}" in flowing
    assert "With it pass G4-MASK-01." in flowing
    assert "Not argued yet" not in text


def test_a_finding_is_told_with_what_the_model_s_authors_do() -> None:
    finding = next(finding for finding in load_findings() if finding.authors and finding.intervention)
    failed = verdict(Status.FAIL, 3.0, finding.check)
    text = page([a_run([failed], [{"id": finding.id, "before": failed.as_dict()}])])
    assert f"The model's authors: {finding.authors}" in " ".join(text.split())


def test_a_runtime_behind_a_command_is_told_with_how_to_start_it() -> None:
    text = page([a_run([verdict(Status.PASS)]) | {"runtime": name} for name in BEHIND])
    assert all(f"$SIDES/{name} " in text for name in BEHIND)


def test_an_interpreter_that_nobody_has_named_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for behind in BEHIND.values():
        monkeypatch.delenv(behind.variable, raising=False)
        with pytest.raises(ConformanceError, match=behind.variable):
            behind.interpreter()


def test_a_command_starts_the_side_s_folder_with_its_environment_s_interpreter(
    monkeypatch: pytest.MonkeyPatch, tiny_checkpoint: Checkpoint
) -> None:
    monkeypatch.setenv("G4_LLAMA_PYTHON", "llama/bin/python")
    monkeypatch.setenv("G4_LLAMA_MODEL", "--mmproj mmproj.gguf text.gguf")
    side = Path(runtimes.__path__[0]) / "llama"
    told = f"llama/bin/python {side} --instead kv-f32 --mmproj mmproj.gguf text.gguf"
    assert command("llama", tiny_checkpoint, ["kv-f32"]).name == told


def test_the_page_in_docs_is_of_every_runtime() -> None:
    text = (Path(__file__).parents[2] / "docs" / "runtimes.md").read_text()
    assert all(f"{package} " in text for package in RUNTIMES.values())
