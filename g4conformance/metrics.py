"""How far two tensors are apart: pure functions, strict about NaN, shapes and constants."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


def peir(base: Tensor, target: Tensor) -> float:
    """Peak error to interval ratio, max|base - target| / (max(base) - min(base)); `base` is the reference.

    Raises:
        ValueError: shapes differ, or `base` is constant, so that there is no interval.
    """
    _require_same_shape(base, target)
    base, target = base.double(), target.double()
    interval = float(base.max() - base.min())
    if interval == 0.0:
        raise ValueError("PEIR needs a base that is not constant")
    return float((base - target).abs().max()) / interval


@dataclass(frozen=True)
class Difference:
    """Statistics of `target - base`, over all elements.

    `max_abs` and `mean_abs` are infinite when either side holds NaN or Inf at a place where the other differs.
    `gain` is the factor by which base must be multiplied to come closest to target in least squares, <base, target> /
    <base, base>; 1 where nothing differs or base is zero, NaN where a side is not finite. Rounding errors cancel in it,
    a systematic error adds up. `chance_gain` is how far from 1 it comes by chance, one standard deviation, if the
    differences are independent of base. `peir` is None where the base is constant or empty. `where` is the index of the
    greatest difference.
    """

    count: int
    mismatched: int
    max_abs: float
    mean_abs: float
    base_max_abs: float
    base_mean_abs: float
    gain: float
    chance_gain: float
    peir: float | None
    argmax_equal: bool
    where: tuple[int, ...]

    @property
    def equal(self) -> bool:
        return self.mismatched == 0


def difference(base: Tensor, target: Tensor) -> Difference:
    """Compares two tensors of one shape in float64 (bools and integers as numbers).

    Non-finite values on either side count as infinitely wrong, even where both sides agree: a reference that is not
    finite must never bless a runtime that is not finite either.

    Raises:
        ValueError: shapes differ.
    """
    _require_same_shape(base, target)
    if base.numel() == 0:
        return Difference(0, 0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0, None, True, ())
    target = target.to(base.device)
    if torch.equal(base, target) and bool(torch.isfinite(base).all()):
        return _no_difference(base)
    base64, target64 = base.double(), target.double()
    delta = (target64 - base64).abs()
    delta = torch.where(torch.isfinite(base64) & torch.isfinite(target64), delta, torch.inf)
    flat_where = int(delta.flatten().argmax())
    largest = float(base64.abs().max())
    interval = float(base64.max() - base64.min())
    return Difference(
        count=base.numel(),
        mismatched=int((delta > 0).sum()),
        max_abs=float(delta.max()),
        mean_abs=float(delta.mean()),
        base_max_abs=largest,
        base_mean_abs=float(base64.abs().mean()),
        gain=_gain(base64, target64),
        chance_gain=_chance_gain(base64, target64),
        peir=float(delta.max()) / interval if interval > 0 else None,
        argmax_equal=bool((base64.argmax(-1) == target64.argmax(-1)).all()) if base.ndim else True,
        where=tuple(int(i) for i in torch.unravel_index(torch.tensor(flat_where), base.shape)),
    )


def _no_difference(base: Tensor) -> Difference:
    """What `difference` finds between `base` and itself; most exact checks end here, so it skips the arithmetic."""
    numbers = base.to(torch.int8) if base.dtype == torch.bool else base
    low, high = (float(bound) for bound in numbers.aminmax())
    return Difference(
        count=base.numel(),
        mismatched=0,
        max_abs=0.0,
        mean_abs=0.0,
        base_max_abs=max(abs(low), abs(high)),
        base_mean_abs=float(base.double().abs().mean()),
        gain=1.0,
        chance_gain=0.0,
        peir=0.0 if high > low else None,
        argmax_equal=True,
        where=(0,) * base.ndim,
    )


def _gain(base: Tensor, target: Tensor) -> float:
    power = float(base.square().sum())
    return float((base * target).sum()) / power if power else 1.0


def _chance_gain(base: Tensor, target: Tensor) -> float:
    """The standard deviation of <base, e> / <base, base> over independent e as large as target - base."""
    power = float(base.square().sum())
    spread = float((target - base).square().sum()) / base.numel()
    return math.sqrt(spread / power) if power else 0.0


def top_two_gap(logits: Tensor) -> float:
    """The distance between the largest and the second largest of `logits` [..., vocab], the smallest over rows."""
    top = logits.double().topk(2, dim=-1).values
    return float((top[..., 0] - top[..., 1]).min())


def _require_same_shape(base: Tensor, target: Tensor) -> None:
    if base.shape != target.shape:
        raise ValueError(f"shapes differ: base {tuple(base.shape)}, target {tuple(target.shape)}")
