"""Statistics of one row of logits, small enough to be kept in version control: a pure function."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

QUANTILES = {"q01": 0.01, "q25": 0.25, "median": 0.5, "q75": 0.75, "q99": 0.99}
RANKS = 5


@dataclass(frozen=True)
class LogitStatistics:
    """What a row of logits looks like.

    Attributes:
        numbers: mean, std (of the population), min, max, quantiles (interpolated linearly) and entropy (in nats).
        top_ids: the ids of the largest logits, the largest first; which of two equal ones comes first is open.
        margins: how far each of them lies above the next one, so the last tells how far the next id is from entering.
    """

    numbers: dict[str, float]
    top_ids: tuple[int, ...]
    margins: tuple[float, ...]


def logit_statistics(logits: Tensor) -> LogitStatistics:
    """Statistics, in float64, of `logits` [vocab] or [1, vocab].

    Raises:
        ValueError: more than one row, not more ids than ranks, or a logit that is not finite.
    """
    row = logits.detach().cpu().double()
    row = row[0] if row.ndim == 2 and row.shape[0] == 1 else row
    if row.ndim != 1 or row.numel() <= RANKS:
        raise ValueError(f"one row of more than {RANKS} logits expected, got shape {tuple(logits.shape)}")
    if not bool(torch.isfinite(row).all()):
        raise ValueError(f"{int((~torch.isfinite(row)).sum())} of {row.numel()} logits are not finite")
    top = row.topk(RANKS + 1)
    return LogitStatistics(
        numbers=_numbers(row),
        top_ids=tuple(top.indices[:RANKS].tolist()),
        margins=tuple((top.values[:-1] - top.values[1:]).tolist()),
    )


def _numbers(row: Tensor) -> dict[str, float]:
    quantiles = torch.quantile(row, torch.tensor(list(QUANTILES.values()), dtype=row.dtype)).tolist()
    log_p = row.log_softmax(-1)
    return {
        "mean": float(row.mean()),
        "std": float(row.std(correction=0)),
        "min": float(row.min()),
        **dict(zip(QUANTILES, quantiles, strict=True)),
        "max": float(row.max()),
        "entropy": float(-(log_p.exp() * log_p).sum()),
    }
