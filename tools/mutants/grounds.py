"""Where mutants are judged: checkpoints with their cases, whose references are recorded once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from g4conformance.checkpoints.checkpoint import Checkpoint, LoadOptions, load_checkpoint
from g4conformance.checkpoints.seeded import SeededSpec, VisionSpec, seeded_checkpoint
from g4conformance.fixtures import bundled_checkpoint
from g4conformance.judging.verdict import Verdict
from g4conformance.runtime.contract import Runtime
from g4conformance.runtime.layout import StaticLayout
from g4conformance.runtime.static import StaticGemma4Runtime
from g4conformance.session import ConformanceSession, RunOptions

MakeRuntime = Callable[[Checkpoint, StaticLayout], Runtime]

# Those that kill most come first; the others follow in the order of the cases file.
FIRST = ("image-middle", "decode-crosses-window", "window+1")
# Of the other checkpoints, only a case of each kind.
FEW = (*FIRST, "image-tall", "image-a-b-a", "fills-while-decoding")

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
BIDIRECTIONAL_E2B = SeededSpec(sliding_window=30, use_bidirectional_attention="vision")


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
    """The bundled checkpoint with every case, then what shows mistakes that it cannot show, with a few."""
    return [
        _ground("bundled", load_checkpoint(bundled_checkpoint())),
        _ground("seeded, other features", seeded_checkpoint(OTHER_FEATURES, seed=1), FEW),
        _ground("bundled, bfloat16", load_checkpoint(bundled_checkpoint(), _bfloat16("sdpa")), FEW),
        _ground("seeded, bidirectional, bfloat16", seeded_checkpoint(BIDIRECTIONAL_E2B, 2, _bfloat16("eager")), FEW),
    ]


def _bfloat16(attn_implementation: str) -> LoadOptions:
    """Untrained weights amplify rounding: with `eager` the shipped runtime has none that the reference has not."""
    return LoadOptions(dtype="bfloat16", attn_implementation=attn_implementation)


def _ground(name: str, checkpoint: Checkpoint, cases: tuple[str, ...] = ()) -> Ground:
    shipped = StaticGemma4Runtime(checkpoint, StaticLayout(checkpoint.facts.default_max_seq))
    session = ConformanceSession(checkpoint, shipped, RunOptions(load=checkpoint.options, case_names=cases))
    order = dict.fromkeys((*FIRST, *session.cases))
    return Ground(name, session, {case: session.reference(case) for case in order})
