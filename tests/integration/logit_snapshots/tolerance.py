"""How far each kind of statistic may move, by setting: `HEADROOM` times the worst that was measured.

`noise.py` computes every snapshot in other sound ways, which differ as machines do, and prints the worst.
"""

from __future__ import annotations

from collections.abc import Mapping

KINDS = ("mean", "std", "order", "margin", "entropy")

HEADROOM = 4.0

WORST: dict[str, dict[str, float]] = {
    "none-float32": {"mean": 3.9e-6, "std": 1.8e-6, "order": 5.3e-6, "margin": 6.7e-6, "entropy": 1.8e-6},
    "none-bfloat16": {"mean": 7.8e-2, "std": 3.5e-2, "order": 1.9e-1, "margin": 1.3e-1, "entropy": 5.7e-2},
    "none-float16": {"mean": 1.4e-2, "std": 5.2e-3, "order": 2.4e-2, "margin": 2.0e-2, "entropy": 5.3e-3},
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
