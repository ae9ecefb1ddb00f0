"""How far each kind of statistic may move, by setting: `HEADROOM` times the worst that was measured.

`noise.py` computes every snapshot in other sound ways, which differ as machines do, and prints the worst.
"""

from __future__ import annotations

from collections.abc import Mapping

KINDS = ("mean", "std", "order", "margin", "entropy")

# A way left out of the measurement would have exceeded the worst of the others by up to 2.3 times (entropy in bfloat16;
# 1.3 times elsewhere). What a machine of another kind does was not measured, and may surprise as much as one of those.
HEADROOM = 4.0

# Measured on one machine (AVX2, no 16-bit dot products), all 67 positions a setting, November 2026, rounded up. Top ids
# changed at no position in float32, at up to 10 in bfloat16 and up to 2 in float16.
#   sdpa                               the worst, but for what follows
#   MKL's compatible kernels           the worst of order and entropy in float32
#   16-bit products summed in float32  the worst of mean and std in bfloat16
#   no vector kernels in torch         at most 5.8e-6, 1.3e-1 and 2.4e-2 (float32, bfloat16, float16)
#   two threads                        at most 3.9e-6 in float32, nothing in the others
#   oneDNN off or with SSE4.1, AVX2    nothing: that machine does not use oneDNN here, and AVX2 is its own
# Of quantized settings only sdpa and two threads were measured; sdpa is the worst, because it flips bins. Where
# activations have eight bits that moves much, and top ids changed at 28 positions.
WORST: dict[str, dict[str, float]] = {
    "none-float32": {"mean": 3.9e-6, "std": 1.8e-6, "order": 5.8e-6, "margin": 6.7e-6, "entropy": 2.0e-6},
    "none-bfloat16": {"mean": 1.0e-1, "std": 4.1e-2, "order": 1.9e-1, "margin": 1.3e-1, "entropy": 5.7e-2},
    "none-float16": {"mean": 1.4e-2, "std": 5.2e-3, "order": 2.4e-2, "margin": 2.0e-2, "entropy": 5.3e-3},
    "w8a16-float32": {"mean": 2.5e-03, "std": 7.2e-04, "order": 3.2e-03, "margin": 3.0e-03, "entropy": 7.0e-04},
    "w8a8-float32": {"mean": 3.1e-01, "std": 1.3e-01, "order": 3.9e-01, "margin": 4.2e-01, "entropy": 2.7e-01},
    "w8-float32": {"mean": 4.4e-06, "std": 1.7e-06, "order": 5.7e-06, "margin": 5.3e-06, "entropy": 5.8e-07},
    "w4a16-float32": {"mean": 1.8e-03, "std": 6.8e-04, "order": 2.6e-03, "margin": 4.1e-03, "entropy": 1.0e-03},
}


def kind_of(statistic: str) -> str:
    """Order statistics are min, max and the quantiles."""
    if statistic.startswith("margin"):
        return "margin"
    return statistic if statistic in KINDS else "order"


def allowed_in(setting: str) -> Mapping[str, float]:
    """Raises KeyError for a setting of which nothing was measured."""
    if setting not in WORST:
        raise KeyError(f"no tolerance for {setting}: measure it with python -m integration.logit_snapshots.noise")
    return {kind: HEADROOM * worst for kind, worst in WORST[setting].items()}
