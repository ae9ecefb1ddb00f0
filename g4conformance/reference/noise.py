"""The reference's rounding noise: how far its own equally valid ways of computing one thing lie apart."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from g4conformance.metrics import Difference, difference

_PREFIX = re.compile(r"^(self/\w+/)?(prefill|decode/\d+)/")
FORMAT_VERSION = 4  # of the saved file; another version is measured again


def kind_of(trace_name: str) -> str:
    """The key under which noise is kept: the trace name without probe and without prefill or step: they compute one."""
    return _PREFIX.sub("", trace_name)


@dataclass(frozen=True)
class Noise:
    """Three measures of rounding noise by kind of tensor, each never below eps.

    Attributes:
        eps: the dtype's machine epsilon.
        largest: greatest |difference| / max|base| that calibration measured; kinds that it did not meet count as zero.
        mean: mean |difference| / mean|base|, likewise.
        gain: |gain - 1| times the root of the number of values, likewise: independent errors cancel in a gain the more,
            the more values there are.
        worst_peir: the largest PEIR of logits between two ways of computing them, by way.
    """

    eps: float
    largest: Mapping[str, float]
    mean: Mapping[str, float]
    gain: Mapping[str, float]
    worst_peir: Mapping[str, float]

    def allowed_largest(self, tensor: str, base_max_abs: float) -> float:
        return max(self.largest.get(kind_of(tensor), 0.0), self.eps) * base_max_abs

    def allowed_mean(self, tensor: str, base_mean_abs: float) -> float:
        return max(self.mean.get(kind_of(tensor), 0.0), self.eps) * base_mean_abs

    def allowed_gain(self, tensor: str, count: int) -> float:
        return max(self.gain.get(kind_of(tensor), 0.0), self.eps) / math.sqrt(count)

    def joined(self, other: Noise) -> Noise:
        """The larger of both noises, kind by kind."""
        return Noise(
            self.eps,
            _larger(self.largest, other.largest),
            _larger(self.mean, other.mean),
            _larger(self.gain, other.gain),
            _larger(self.worst_peir, other.worst_peir),
        )

    def save(self, path: Path) -> None:
        """Writes JSON, whole or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}.partial")
        partial.write_text(json.dumps(vars(self), indent=1))
        os.replace(partial, path)

    @classmethod
    def load(cls, path: Path) -> Noise | None:
        """What `save` wrote; None if there is nothing readable, so that it is measured again."""
        try:
            return cls(**json.loads(path.read_text()))
        except (OSError, ValueError, TypeError):
            return None


class NoiseMeter:
    """Collects differences between two recordings of the same thing."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.eps = float(torch.finfo(dtype).eps)
        self.largest: dict[str, float] = {}
        self.mean: dict[str, float] = {}
        self.gain: dict[str, float] = {}
        self.worst_peir: dict[str, float] = {}

    def add(self, way: str, base: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> None:
        """Compares every floating tensor that both have; `way` names the other way of computing."""
        for name, base_rows, other_rows in _common_floats(base, other):
            found = difference(base_rows, other_rows)
            self._note(name, found)
            if name.endswith("logits"):
                self.worst_peir[way] = max(self.worst_peir.get(way, 0.0), _peir(found))

    def _note(self, name: str, found: Difference) -> None:
        if found.base_max_abs == 0.0:
            return
        kind = kind_of(name)
        self.largest[kind] = max(self.largest.get(kind, 0.0), found.max_abs / found.base_max_abs)
        self.mean[kind] = max(self.mean.get(kind, 0.0), found.mean_abs / found.base_mean_abs)
        self.gain[kind] = max(self.gain.get(kind, 0.0), abs(found.gain - 1.0) * math.sqrt(found.count))

    def noise(self) -> Noise:
        return Noise(self.eps, self.largest, self.mean, self.gain, self.worst_peir)


def _larger(one: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
    return {kind: max(one.get(kind, 0.0), other.get(kind, 0.0)) for kind in one.keys() | other.keys()}


def _peir(found: Difference) -> float:
    return math.inf if found.peir is None else found.peir


def _common_floats(base: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor, Tensor]]:
    for name in base:
        if name in other and base[name].is_floating_point():
            yield name, base[name], other[name]
