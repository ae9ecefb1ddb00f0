"""Where mutants are judged: checkpoints with their cases, whose references are recorded once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from g4conformance.checkpoints.checkpoint import Checkpoint, LoadOptions, load_checkpoint
from g4conformance.checkpoints.seeded import SeededSpec, VisionSpec, seeded_checkpoint
from g4conformance.fixtures import bundled_checkpoint
from g4conformance.judging.verdict import Verdict
from g4conformance.prompts import ResolvedCase
from g4conformance.runtime.contract import Runtime
from g4conformance.runtime.layout import StaticLayout
from g4conformance.runtime.static import StaticGemma4Runtime
from g4conformance.session import ConformanceSession, RunOptions

MakeRuntime = Callable[[Checkpoint, StaticLayout], Runtime]

# Those that kill most come first; the others follow in the order of the cases file, and last those with probes of
# self-consistency, which cost as much as several others.
FIRST = ("image-first", "decode-crosses-window", "window+1", "fills-max-seq", "a-b-a")
# Of the other checkpoints, only what has both a picture and decoding, what leaves the window, and another grid.
FEW = ("image-first", "decode-crosses-window", "image-tall")

# What the bundled checkpoint does not have: pictures that see themselves both ways, keys that are values, a tower that
# standardizes and does not clip; and none of what E2B has and larger models have not.
OTHER_FEATURES = SeededSpec(
    sliding_window=24,
    num_kv_shared_layers=0,
    num_global_key_value_heads=3,
    hidden_size_per_layer_input=0,
    final_logit_softcapping=None,
    attention_k_eq_v=True,
    attention_bias=True,
    use_bidirectional_attention="vision",
    use_double_wide_mlp=False,
    vision=VisionSpec(pooling_kernel_size=2, use_clipped_linears=False),
)
# E2B's features with pictures that see themselves both ways, in another dtype. Untrained weights amplify rounding, of
# which the shipped runtime has none that the reference has not with `eager`.
BIDIRECTIONAL_E2B = SeededSpec(sliding_window=30, use_bidirectional_attention="vision")
BFLOAT16 = LoadOptions(dtype="bfloat16", attn_implementation="eager")


@dataclass(frozen=True)
class Ground:
    """A checkpoint and the references of its cases, in the order in which they are judged."""

    name: str
    session: ConformanceSession
    references: Mapping[str, Mapping[str, Tensor]]

    def verdicts(self, make: MakeRuntime) -> Iterator[tuple[str, list[Verdict]]]:
        """Each case with the verdicts on it, all of one runtime that is made for the first."""
        session = self.session
        runtime = make(session.checkpoint, StaticLayout(session.max_seq))
        for case, reference in self.references.items():
            yield case, session.judged(runtime, case, reference)


def all_grounds() -> list[Ground]:
    """The bundled checkpoint with every case, then two that show mistakes which it cannot show, with a few."""
    return [
        _ground("bundled", load_checkpoint(bundled_checkpoint())),
        _ground("seeded, other features", seeded_checkpoint(OTHER_FEATURES, seed=1), FEW),
        _ground("seeded, bidirectional, bfloat16", seeded_checkpoint(BIDIRECTIONAL_E2B, 2, BFLOAT16), FEW),
    ]


def _ground(name: str, checkpoint: Checkpoint, cases: tuple[str, ...] = ()) -> Ground:
    shipped = StaticGemma4Runtime(checkpoint, StaticLayout(checkpoint.facts.default_max_seq))
    session = ConformanceSession(checkpoint, shipped, RunOptions(load=checkpoint.options, case_names=cases))
    order = sorted(session.cases.values(), key=_turn)
    return Ground(name, session, {one.case.name: session.reference(one.case.name) for one in order})


def _turn(resolved: ResolvedCase) -> int:
    case = resolved.case
    if case.self_consistency:
        return len(FIRST) + 1
    return FIRST.index(case.name) if case.name in FIRST else len(FIRST)
