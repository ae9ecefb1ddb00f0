"""A quantized runtime against the float model: first its integers and scales, then what it loses by them.

The first four are asked once a run and need no case. The others compare logits of the prompt's last row and of every
decode step that the runtime's own generation made. A loss is 0 at best.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import log_softmax

from g4conformance.checks.compare import Comparison, compare, holds
from g4conformance.checks.registry import Needs, check
from g4conformance.checks.run import CaseRun, Mode
from g4conformance.metrics import peir
from g4conformance.stages import Stage

_STAGE = Stage.QUANTIZATION
_once = partial(check, stage=_STAGE, needs=Needs.QUANTIZED_ONCE, modes=(Mode.ISOLATED,))
_loss_of = partial(check, stage=_STAGE, needs=Needs.QUANTIZED, modes=(Mode.ACCUMULATED,), budget="quality")
# Rounding to nearest moves a weight by half a step; the scale's own rounding in float32 adds a little.
_HALF_STEP = 0.5 + 1e-3
_TOP = 5


@_once("G4-QUANT-01", budget="exact")
def weights(run: CaseRun) -> list[Comparison]:
    """In every channel of every linear op, no dequantized weight is further than half a step from the float weight.

    RMSNorm cancels uniform errors of a scale, so logits cannot show them. The step is the float weight's own, largest
    |weight| of the channel / largest integer.
    """
    return [
        holds(name, run.observed(name) <= _HALF_STEP, "a channel is off by more than half a quantization step")
        for name in _expected(run, "quantization/weight_error/")
    ]


@_once("G4-QUANT-02", budget="quality")
def activation_grids(run: CaseRun) -> list[Comparison]:
    """Every activation's grid has the step, and begins where, the float model's range on the calibration cases says.

    Measured as fractions: how far the step is off, and how far, beyond the half step that rounding the zero point
    takes, the low end of the grid is off, in units of the range (zero included).
    """
    found = []
    for name in _expected(run, "quantization/grid/"):
        low, high, step = run.reference[name]
        own_low, _, own_step = run.observed(name)
        shift = ((own_low - low).abs() - step / 2).clamp(min=0.0)
        off = torch.stack([(own_step - step).abs() / step, shift / (high - low)])
        found.append(compare(name, torch.zeros_like(off), off))
    return found


@_once("G4-QUANT-03", budget="exact")
def dequantize_undoes_quantize(run: CaseRun) -> Comparison:
    """Every dequantize op has the scale, zero point and bounds of the quantize op that it follows: [graphs]."""
    name = "quantization/unequal_pairs"
    return compare(name, torch.zeros_like(run.observed(name)), run.observed(name))


@_once("G4-QUANT-04", budget="exact")
def integers(run: CaseRun) -> list[Comparison]:
    """Every linear op that the scheme covers has integer weights and activations of the scheme's bits."""
    return [compare(name, run.reference[name], run.observed(name)) for name in _expected(run, "quantization/bits/")]


@_loss_of("G4-QUANT-05")
def logits_peir(run: CaseRun) -> Comparison:
    """The greatest error of the logits is small against their interval (PEIR), over all compared positions."""
    floating, own = _logits(run)
    return _loss("PEIR", torch.tensor([peir(floating, own)]))


@_loss_of("G4-QUANT-06")
def mean_divergence(run: CaseRun) -> Comparison:
    """The mean Kullback-Leibler divergence of the next-token distributions is small, in nats."""
    return _loss("KL mean", _divergences(run).mean()[None])


@_loss_of("G4-QUANT-07")
def high_divergence(run: CaseRun) -> Comparison:
    """The 99 % quantile of the Kullback-Leibler divergences of the compared positions is small, in nats."""
    return _loss("KL q99", _divergences(run).quantile(0.99)[None])


@_loss_of("G4-QUANT-08")
def greatest_divergence(run: CaseRun) -> Comparison:
    """The greatest Kullback-Leibler divergence of the compared positions is small, in nats."""
    return _loss("KL max", _divergences(run).max()[None])


@_loss_of("G4-QUANT-09")
def top_1(run: CaseRun) -> Comparison:
    """The most likely token is the float model's, but for near ties: the fraction of positions where it is not."""
    return _loss("top-1", _losing(run, 1)[None])


@_loss_of("G4-QUANT-10")
def top_5(run: CaseRun) -> Comparison:
    """The five most likely tokens hold all that the float model has clearly among its five: the fraction missing."""
    return _loss("top-5", _losing(run, _TOP)[None])


@_loss_of("G4-QUANT-11")
def greedy_divergence(run: CaseRun) -> Comparison:
    """Greedy generation goes the float model's way to its end: the fraction of new tokens behind the first parting.

    Partings at near ties are excused.
    """
    new = run.observed("generation/token_ids")[run.valid_length :]
    floating, _ = _logits(run)
    chosen = floating[: len(new)]
    steps = torch.arange(len(chosen))
    lead = chosen.max(dim=-1).values - chosen[steps, new[: len(chosen)]]
    parted = (lead > _tie(run, chosen)).nonzero().flatten()
    behind = len(new) - int(parted[0]) if len(parted) else 0
    return _loss("tokens behind the parting", torch.tensor([behind / max(len(new), 1)], dtype=torch.float64))


def _expected(run: CaseRun, prefix: str) -> list[str]:
    return [name for name in run.reference if name.startswith(prefix)]


def _loss(name: str, value: Tensor) -> Comparison:
    return compare(name, torch.zeros_like(value), value)


def _logits(run: CaseRun) -> tuple[Tensor, Tensor]:
    """The float model's logits and the runtime's, float64 [positions, vocab]."""
    names = ["prefill/logits", *(prefix + "logits" for prefix in run.decode_prefixes)]
    floating = torch.cat([run.reference[f"float/{name}"] for name in names])
    return floating.double(), torch.cat([run.observed(name) for name in names]).double()


def _divergences(run: CaseRun) -> Tensor:
    """KL(float || quantized) of each position."""
    floating, own = (log_softmax(logits, dim=-1) for logits in _logits(run))
    return (floating.exp() * (floating - own)).sum(dim=-1)


def _tie(run: CaseRun, logits: Tensor) -> Tensor:
    """The gap of a near tie at each position of [positions, vocab]."""
    return run.quality_tie * (logits.amax(dim=-1) - logits.amin(dim=-1))


def _losing(run: CaseRun, count: int) -> Tensor:
    """The fraction of the float model's `count` most likely tokens, near ties left out, that the runtime lacks."""
    floating, own = _logits(run)
    best = floating.topk(count + 1, dim=-1)
    clear = best.values[:, :count] - best.values[:, count:] > _tie(run, floating)[:, None]
    kept = (best.indices[:, :count, None] == own.topk(count, dim=-1).indices[:, None]).any(dim=-1)
    return (clear & ~kept).sum() / clear.sum().clamp(min=1).double()
