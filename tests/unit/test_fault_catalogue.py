"""The list of faults as such: nothing of the public catalogue is forgotten, and each says what it must."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn

from g4conformance.checks import CHECKS
from g4conformance.faults import FAULTS, Fault
from g4conformance.faults.absent import ABSENT
from g4conformance.faults.matrix import select_faults
from g4conformance.faults.patching import Patch
from g4conformance.faults.registry import DERIVED, At, fault
from g4conformance.session import RunOptions
from g4conformance.stages import Stage

pytestmark = pytest.mark.unit

PUBLIC_CATALOGUE = """
bos-missing bos-double image-id-not-padded-in-llm-ids image-token-id-from-text-config soft-token-count-hardcoded
resize-does-not-fill-budget resize-filter-mismatch patch-flatten-chw channel-order-bgr position-ids-row-col-swapped
pad-position-zero stale-static-profile left-pad-positions special-tokens-as-text embed-scale-missing-or-twice
embedding-table-repacked embed-scale-not-rounded clip-bounds-dropped clip-one-side-only vision-padding-not-masked
pool-kernel-from-valid-count pool-raster-instead-of-2d pool-grid-transposed negative-pad-coords-sort-first
grid-stride-from-batch-max vision-pos-table-axis-swap vision-rope-1d-pairing vision-rope-axis-swap
vision-rope-theta-10000 vision-attn-scaled vision-v-norm-missing pixel-rescale-missing pixel-rescale-twice
vision-fp16-pooler-overflow standardize-omitted pool-sqrt-hidden-omitted vision-scaled-by-embed-scale
fusion-slot-shifted fusion-zero-length-slice soft-token-suffix-not-stripped media-order-vs-placeholder-order
vision-features-dropped sliding-mask-ignored sliding-window-off-by-one window-default-wrong
masks-swapped-by-layer-type mask-sized-for-window-cache bidirectional-on-e2b bidirectional-missing-on-large
bidirectional-on-full-layers bidirectional-crosses-window audio-treated-as-vision-block rope-theta-not-per-layer-type
prop-rope-full-rotary prop-rope-compact-pairing rope-interleaved-layout rope-inv-freq-zeroed rope-inv-freq-bf16
positions-constant-offset pad-keys-not-masked mask-fill-value mask-buffer-stale padding-mask-replaces-causal
ple-missing ple-table-scale-missing ple-rsqrt2-missing ple-projection-scale-missing ple-projection-norm-missing
ple-indexed-wrong-axis ple-packed-layout-transposed ple-image-rows-zeroed ple-context-from-text-embeds
ple-not-sliced-per-chunk ple-table-4bit shared-layers-recompute-kv shared-donor-wrong shared-layer-overwrites-donor
cache-single-head-dim kv-heads-not-per-layer gqa-head-mapping layer-scalar-dropped layer-scalar-on-delta
double-wide-mlp-ignored rmsnorm-one-plus-weight text-attn-scaled text-v-norm-missing qk-norm-missing
attn-softcap-added gelu-exact rmsnorm-low-precision k-eq-v-projection-handling moe-path-dropped
moe-per-expert-scale-twice final-softcap-missing final-softcap-formula logits-row-wrong cache-keeps-padding-kv
k-cache-used-as-v ple-skipped-in-decode layer-scalar-skipped-in-decode ple-stale-in-decode shared-kv-not-extended
shared-kv-from-own-empty-cache decode-position-off-by-one decode-position-frozen past-len-is-max-seq
cache-delta-not-written decode-mask-excludes-current decode-window-ignored ring-cache-duplicate-slots
evicted-index-not-position donor-read-before-commit eos-list-truncated eos-sources-replaced-not-unioned
returned-ids-lose-image-tokens placeholder-tokens-not-suppressed
""".split()


def test_every_fault_of_the_public_catalogue_is_here_or_cannot_be() -> None:
    assert len(PUBLIC_CATALOGUE) == 116
    assert set(PUBLIC_CATALOGUE) <= {*FAULTS, *ABSENT}
    assert not ABSENT.keys() & FAULTS.keys()
    assert ABSENT.keys() <= set(PUBLIC_CATALOGUE)


def test_every_stage_has_several_faults_of_its_own() -> None:
    counts = Counter(fault.stage for fault in FAULTS.values())
    assert len(FAULTS) >= 100
    assert all(counts[stage] >= 7 for stage in list(Stage)[:8])


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_fault_says_what_it_is(fault: Fault) -> None:
    assert fault.mechanism.endswith(".")
    assert fault.sources
    assert all(source == DERIVED or source.count("/") >= 3 for source in fault.sources)
    assert CHECKS[fault.check].stage is fault.stage
    assert fault.case in {case.name for case in RunOptions().all_cases()}


def test_every_part_of_a_runtime_has_faults() -> None:
    assert {fault.at for fault in FAULTS.values()} == set(At)


def test_every_stage_has_faults_at_the_contracts_boundary() -> None:
    boundary = {fault.stage for fault in FAULTS.values() if fault.boundary}
    assert boundary >= set(list(Stage)[:8])


def test_faults_are_selected_by_id_and_stage() -> None:
    assert [fault.id for fault in select_faults(["bos-missing", "gelu-exact"])] == ["bos-missing", "gelu-exact"]
    assert {fault.stage for fault in select_faults(stages=[Stage.DECODE])} == {Stage.DECODE}
    assert len(select_faults()) == len(FAULTS)


def test_an_id_is_taken_once() -> None:
    declare = fault("bos-missing", stage=Stage.DECODE, at=At.GRAPH, check="G4-DECODE-01")
    with pytest.raises(ValueError, match="two faults are called bos-missing"):
        declare(lambda runtime, patch: None)


# --- patches ----------------------------------------------------------------------------------------------------------


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.scale = nn.Buffer(torch.tensor(3.0))
        self.inner = nn.Linear(2, 2)
        self.eps = 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("weight", torch.zeros(2)),
        ("scale", torch.tensor(1.0)),
        ("inner", torch.zeros_like),
        ("eps", 1.0),
        ("forward", torch.zeros_like),
    ],
)
def test_a_patch_holds_inside_its_context_only(name: str, value: object) -> None:
    part = Part()
    before, names = getattr(part, name), sorted([*vars(part), *part.state_dict()])
    with Patch() as patch:
        patch(part, name, value)
        assert getattr(part, name) is value
    assert getattr(part, name) == before if name == "forward" else getattr(part, name) is before
    assert sorted([*vars(part), *part.state_dict()]) == names


def test_patches_are_undone_in_reverse_order_and_after_an_exception() -> None:
    part = Part()
    with pytest.raises(RuntimeError), Patch() as patch:
        patch(part, "eps", 1.0)
        patch(part, "eps", 2.0)
        raise RuntimeError
    assert part.eps == 1e-6


def test_a_part_that_is_not_there_cannot_be_patched() -> None:
    with Patch() as patch, pytest.raises(AttributeError, match="Part has no norm to replace"):
        patch(Part(), "norm", None)
