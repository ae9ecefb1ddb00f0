"""Measures how far statistics move between sound ways to compute the same, the evidence for `tolerance.py`.

    PYTHONPATH=.:tests python -m integration.logit_snapshots.noise [SETTING ...]

Each way is a process of its own, because thread counts and vector widths are fixed when torch is loaded. They differ as
machines do: in the order of sums and in the kernels. All are fed the same tokens.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from .comparison import numbers_of
from .record import LogitRecord
from .run import bundled_cases, greedy_tokens, record_case, resolved_case
from .settings import SETTINGS, Setting, build_runtime
from .tolerance import KINDS, kind_of

PRODUCTS = (functional.linear, torch.matmul, Tensor.matmul, Tensor.__matmul__)


@dataclass(frozen=True)
class Way:
    """One way of computing: variables of its process, attention implementation, kernels."""

    name: str
    variables: dict[str, str] = field(default_factory=dict)
    attn: str = "eager"
    sum_in_float32: bool = False
    mkldnn: bool = True


BASE = Way("one thread, eager")
WAYS = (
    Way("two threads", {"OMP_NUM_THREADS": "2"}),
    Way("sdpa", attn="sdpa"),
    Way("no vector kernels in torch", {"ATEN_CPU_CAPABILITY": "default"}),
    Way("AVX2 kernels in torch", {"ATEN_CPU_CAPABILITY": "avx2"}),
    Way("oneDNN off", mkldnn=False),
    Way("oneDNN with SSE4.1", {"ONEDNN_MAX_CPU_ISA": "SSE41"}),
    Way("MKL's compatible kernels", {"MKL_CBWR": "COMPATIBLE"}),
    Way("16-bit products summed in float32", sum_in_float32=True),
)


class SumInFloat32(TorchFunctionMode):
    """Matrix products as processors with 16-bit dot products make them: summed in float32 and rounded once."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        dtype = getattr(args[0], "dtype", None) if args else None
        if func not in PRODUCTS or dtype not in (torch.bfloat16, torch.float16):
            return func(*args, **(kwargs or {}))
        wide = tree_map_only(Tensor, Tensor.float, (args, kwargs or {}))
        return func(*wide[0], **wide[1]).to(dtype)


def main(arguments: Sequence[str]) -> None:
    settings = [s for s in SETTINGS if not arguments or s.name in arguments]
    with tempfile.TemporaryDirectory() as folder:
        fed = {name: greedy_tokens(name) for name in bundled_cases()}
        base = _measured(BASE, settings, fed, Path(folder))
        for way in WAYS:
            for line in _worst(way, base, _measured(way, settings, fed, Path(folder))):
                sys.stdout.write(line + "\n")
            sys.stdout.flush()


def _measured(
    way: Way, settings: Sequence[Setting], fed: dict[str, tuple[int, ...]], folder: Path
) -> list[LogitRecord]:
    """Runs this module in the process of `way`."""
    task, result = folder / "task", folder / "result"
    torch.save((way, settings, fed), task)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **way.variables}
    subprocess.run([sys.executable, "-m", __spec__.name, "--way", task, result], env=environment, check=True)
    found: list[LogitRecord] = torch.load(result, weights_only=False)
    return found


def _records(way: Way, settings: Sequence[Setting], fed: dict[str, tuple[int, ...]]) -> Iterator[LogitRecord]:
    torch.backends.mkldnn.enabled = way.mkldnn
    for setting in settings:
        runtime = build_runtime(setting, way.attn)
        for name, tokens in fed.items():
            with SumInFloat32() if way.sum_in_float32 else nullcontext():
                yield record_case(runtime, resolved_case(runtime, name), setting, tokens)


def _worst(way: Way, base: list[LogitRecord], other: list[LogitRecord]) -> Iterator[str]:
    """One line a setting: the greatest movement of each kind of statistic, and how often top ids changed."""
    for setting in dict.fromkeys((record.scheme, record.dtype) for record in base):
        worst = dict.fromkeys(KINDS, 0.0)
        changed = 0
        for was, now in zip(base, other, strict=True):
            if (was.scheme, was.dtype) == setting:
                for kind, movement in _movements(was, now):
                    worst[kind] = max(worst[kind], movement)
                changed += sum(was.positions[p].top_ids != now.positions[p].top_ids for p in was.positions)
        numbers = "  ".join(f"{kind} {value:.2e}" for kind, value in worst.items())
        yield f"{way.name:32}{'-'.join(setting):16}{numbers}  other top ids {changed}"


def _movements(was: LogitRecord, now: LogitRecord) -> Iterator[tuple[str, float]]:
    """Kind and size of each difference."""
    for position, before in was.positions.items():
        after = numbers_of(now.positions[position])
        for name, value in numbers_of(before).items():
            yield kind_of(name), abs(after[name] - value)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--way"]:
        torch.save(list(_records(*torch.load(sys.argv[2], weights_only=False))), sys.argv[3])
    else:
        main(sys.argv[1:])
