"""True-size checkpoints, at a small size: what is built, and that a run makes nothing of vocabulary times sequence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from g4conformance.checkpoints.checkpoint import Checkpoint, LoadOptions, load_checkpoint
from g4conformance.checkpoints.seeded import SeededSpec, VisionSpec, seeded_checkpoint
from g4conformance.checkpoints.true_size import Geometry, e2b, tiled_checkpoint
from g4conformance.judging.verdict import Status, Verdict
from g4conformance.reference import record
from g4conformance.runtime.layout import StaticLayout
from g4conformance.runtime.static import StaticGemma4Runtime
from g4conformance.session import ConformanceSession, RunOptions
from g4conformance.stages import Stage

CASE = "image-middle"
VOCABULARY = 40_000  # large, so that its product with any prompt's length is larger than every tensor of the run
SMALL = Geometry(
    spec=SeededSpec(
        layer_types=e2b(10).spec.layer_types,
        num_kv_shared_layers=5,
        hidden_size=64,
        intermediate_size=96,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=16,
        global_head_dim=32,
        sliding_window=16,
        vision=VisionSpec(num_attention_heads=2, num_key_value_heads=2),
    ),
    vocab_size=VOCABULARY,
    position_embedding_size=300,
    audio={
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "subsampling_conv_channels": [8, 4],
        "output_proj_dims": 48,
    },
)


@pytest.fixture(scope="module")
def small() -> Checkpoint:
    return tiled_checkpoint(SMALL)


class LargestResult(TorchDispatchMode):
    """Remembers the greatest number of elements that any operation's result had; views count as what they show."""

    def __init__(self) -> None:
        super().__init__()
        self.elements, self.operation = 0, ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.numel() > self.elements and not _shows_a_parameter(func):
                self.elements, self.operation = tensor.numel(), str(func)
        return result


def _shows_a_parameter(func: Any) -> bool:
    return func in (torch.ops.aten.t.default, torch.ops.aten.detach.default, torch.ops.aten.view.default)


@dataclass(frozen=True)
class Judged:
    """A whole run of one image case, and the most elements that any result in it had."""

    session: ConformanceSession
    verdicts: list[Verdict]
    largest: LargestResult

    @property
    def fewest_rows(self) -> int:
        """Of the judged prompt and of those that noise was calibrated on."""
        cases = [*self.session.cases.values(), *self.session._calibration_cases()]
        return min(case.request.inputs["input_ids"].shape[1] for case in cases)


@pytest.fixture(scope="module")
def judged(small: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Judged:
    """As in benchmarks/true_size.py: noise calibrated, eight stages judged, no probes of self-consistency."""
    options = RunOptions(load=small.options, case_names=(CASE,), decode_steps=3, gen_steps=4)
    runtime = StaticGemma4Runtime(small, StaticLayout(small.facts.default_max_seq))
    with pytest.MonkeyPatch.context() as patch, LargestResult() as largest:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("noise")))
        session = ConformanceSession(small, runtime, options)
        case = session.cases[CASE]
        session.cases[CASE] = replace(case, case=replace(case.case, self_consistency=False))
        return Judged(session, session.verdicts(CASE), largest)


def wrong(verdicts: list[Verdict]) -> list[str]:
    return [f"{v.check} {v.mode}: {v.where}" for v in verdicts if v.status not in (Status.PASS, Status.NOT_APPLICABLE)]


def test_all_eight_stages_pass(judged: Judged) -> None:
    assert wrong(judged.verdicts) == []
    passed = {verdict.stage for verdict in judged.verdicts if verdict.status is Status.PASS}
    assert len(passed - {Stage.SELF_CONSISTENCY}) == 8


def test_nothing_of_vocabulary_times_sequence_is_built(judged: Judged) -> None:
    assert judged.largest.elements < VOCABULARY * judged.fewest_rows, judged.largest.operation


@pytest.mark.parametrize("logits_to_keep", [0, 10_000])
def test_logits_of_all_rows_would_be_noticed(
    judged: Judged, monkeypatch: pytest.MonkeyPatch, logits_to_keep: int
) -> None:
    """0 is what transformers takes where nothing is asked for; an integer beyond the prompt keeps all rows too."""
    monkeypatch.setattr(record, "_last_row", lambda checkpoint, length: logits_to_keep)
    with LargestResult() as largest:
        judged.session.reference(CASE)
    assert largest.elements >= VOCABULARY * judged.fewest_rows


def test_parameters_of_the_runtime_are_the_reference_s(small: Checkpoint) -> None:
    runtime = StaticGemma4Runtime(small, StaticLayout(64))
    own = dict(runtime.model.named_parameters())
    assert all(own[name] is parameter for name, parameter in small.model.named_parameters())
    sibling = runtime.for_layout(StaticLayout(96))
    assert all(a is b for a, b in zip(sibling.model.parameters(), own.values(), strict=True))


def test_each_parameter_has_memory_of_its_own(small: Checkpoint) -> None:
    parameters = list(small.model.parameters())
    assert len({parameter.untyped_storage().data_ptr() for parameter in parameters}) == len(parameters)
    assert all(parameter.untyped_storage().nbytes() == parameter.nbytes for parameter in parameters)


def test_no_two_layers_are_equal(small: Checkpoint) -> None:
    layers = small.model.model.language_model.layers
    weights = [layer.mlp.gate_proj.weight[:8, :64] for layer in layers]
    assert all(not torch.equal(a, b) for i, a in enumerate(weights) for b in weights[:i])


def test_buffers_are_those_of_a_model_that_was_never_empty(small: Checkpoint) -> None:
    """Rotary frequencies and embedding scales, to the last bit; the scrambled ones are drawn anew.

    The audio tower's are left out: transformers rounds one of them differently when it loads than when it builds.
    """
    usual = seeded_checkpoint(small.model.config, 0, LoadOptions(dtype="bfloat16")).model
    expected, own = dict(usual.named_buffers()), dict(small.model.named_buffers())
    constant = [name for name in expected if name not in usual.state_dict() and "audio_tower" not in name]
    assert len(constant) == 8
    assert expected.keys() == own.keys()
    assert all(torch.equal(expected[name], own[name]) and expected[name].dtype == own[name].dtype for name in constant)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_an_audio_tower_does_not_keep_the_others_from_sdpa(tmp_path: Path, attention: str) -> None:
    """Transformers refuses sdpa for the audio tower, which is never run; a published E2B has one."""
    written = tiled_checkpoint(SMALL)
    written.model.save_pretrained(tmp_path)
    written.processor.save_pretrained(tmp_path)
    options = LoadOptions(dtype="bfloat16", attn_implementation=attention)
    for checkpoint in (tiled_checkpoint(SMALL, options=options), load_checkpoint(tmp_path, options)):
        config = checkpoint.model.config
        towers = config.text_config, config.vision_config
        assert [tower._attn_implementation for tower in towers] == [attention, attention]
        assert config.audio_config._attn_implementation == "eager"


def test_matrices_have_unit_gain_and_nothing_is_neutral(small: Checkpoint) -> None:
    text = small.model.model.language_model
    for linear in (m for m in text.layers.modules() if isinstance(m, nn.Linear)):
        assert float(linear.weight.float().std()) * linear.in_features**0.5 == pytest.approx(1.0, rel=0.2)
    assert float((text.norm.weight - 1).abs().max()) > 0.1
    assert text.embed_tokens.weight[small.facts.pad_token_id].any()


def test_the_digest_says_config_and_seed() -> None:
    digests = [tiled_checkpoint(geometry, seed).digest for geometry, seed in ((SMALL, 0), (SMALL, 0), (SMALL, 1))]
    assert digests[0] == digests[1] != digests[2]
    assert tiled_checkpoint(replace(SMALL, vocab_size=VOCABULARY + 1)).digest != digests[0]


@pytest.mark.parametrize(("layers", "shared"), [(5, 0), (10, 5), (15, 10), (20, 10), (25, 15), (30, 15), (35, 20)])
def test_k_and_v_are_shared_as_in_e2b(layers: int, shared: int) -> None:
    spec = e2b(layers).spec
    assert (len(spec.layer_types), spec.num_kv_shared_layers) == (layers, shared)
    assert spec.layer_types[-1] == "full_attention"


@pytest.mark.parametrize("layers", [0, -5, 4, 36])
def test_a_broken_pattern_of_layers_is_refused(layers: int) -> None:
    with pytest.raises(ValueError, match="groups of 5"):
        e2b(layers)
