"""Each piece by itself, fed with what enters the reference's: what the stages that compute have alike."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from g4conformance.checks.compare import Comparison, compare, nothing
from g4conformance.checks.run import CaseRun
from g4conformance.reference.noise import kind_of


def of_layers(run: CaseRun, leaving: str, rows: int) -> list[Comparison]:
    """What each decoder layer of a runtime in floating point returned by itself, at the first `rows` rows.

    A layer alone rounds far less than all that came before it: its noise has names of its own.
    """
    return [
        compare(f"{leaving}alone/{name}", run.reference[leaving + name], observed)
        for name, observed in _layer_tensors(run, leaving, rows)
    ]


def of_layers_in_decode(run: CaseRun) -> list[Comparison]:
    """The same at the first and the last decode step."""
    return [comparison for prefix in _first_and_last(run) for comparison in of_layers(run, prefix, rows=1)]


def of_decoder(run: CaseRun, entering: str, leaving: str, rows: int) -> list[Comparison]:
    """What each decoder graph of a quantized runtime returned by itself, at the first `rows` rows.

    Args:
        entering, leaving: trace prefixes of what enters the decoder and of what comes out of it.
    """
    found = []
    if run.facts.has_per_layer_inputs:
        observed = run.observed(f"{leaving}alone/per_layer_inputs")[:, :rows]
        found.append(compare(f"{entering}per_layer_inputs", run.reference[f"{entering}per_layer_inputs"], observed))
    for name, observed in _layer_tensors(run, leaving, rows):
        found.append(compare(leaving + name, run.reference[leaving + name], observed))
    raw, cap = run.observed(f"{leaving}alone/raw_logits"), run.facts.final_logit_softcapping
    capped = raw if cap is None else torch.tanh(raw / cap) * cap
    return [*found, compare(f"{leaving}logits", run.reference[f"{leaving}logits"], capped)]


def _layer_tensors(run: CaseRun, leaving: str, rows: int) -> Iterator[tuple[str, Tensor]]:
    """What each layer returned by itself, under its name behind the prefix."""
    for i in range(len(run.facts.layer_types)):
        for part in ("key", "value", "hidden") if i in run.facts.storing_layers else ("hidden",):
            observed = run.observed(f"{leaving}alone/layer/{i}/{part}")
            yield f"layer/{i}/{part}", observed[:, :rows] if part == "hidden" else observed[:, :, :rows]


def _first_and_last(run: CaseRun) -> list[str]:
    return list(dict.fromkeys([*run.decode_prefixes[:1], *run.decode_prefixes[-1:]]))


def of_decode_steps(run: CaseRun) -> list[Comparison]:
    """The same at the first and the last decode step; those between run the same programs."""
    return [comparison for prefix in _first_and_last(run) for comparison in of_decoder(run, prefix, prefix, rows=1)]


def of_vision(run: CaseRun) -> list[Comparison]:
    """What each vision graph in front of and behind the pooler returned by itself against the reference."""
    layers = [f"vision/layer/{i}/hidden" for i in range(run.facts.vision_layers)]
    names = ["vision/patch_embeds", *layers, "visual_embeds"]
    return [
        compare(name, run.reference[name], run.observed(f"vision/alone/{name.removeprefix('vision/')}"))
        for name in names
    ]


def moved(run: CaseRun, found: Sequence[Comparison]) -> list[Comparison]:
    """Of each tensor that is on a grid, the fraction of elements that are another value of it; 0 at best.

    Logits count too, though the softcap has bent their grid: its slope is at most 1. A grid that is finer than the
    dtype, such as int16 in bfloat16, cannot be told, and its tensors are left out.
    """
    fractions = [
        _loss(c.tensor, ((c.actual - c.expected).abs() > step / 2).double().mean())
        for c in found
        if (step := run.steps.get(kind_of(c.tensor), 0.0)) >= _resolution(c.expected) and step and c.difference
    ]
    return fractions or [nothing("elements moved", "no graph of this scheme returns values on a grid that shows")]


def _resolution(values: Tensor) -> float:
    """The distance between neighbouring numbers of the dtype at the greatest value."""
    return float(values.abs().amax()) * torch.finfo(values.dtype).eps


def moved_on_average(run: CaseRun, found: Sequence[Comparison]) -> list[Comparison]:
    """The mean of these fractions: in the one row of a decode step, a bin that flips early moves a whole tensor."""
    fractions = moved(run, found)
    if fractions[0].detail:
        return fractions
    return [_loss("elements moved", torch.stack([c.actual[0] for c in fractions]).mean())]


def _loss(name: str, fraction: Tensor) -> Comparison:
    return compare(name, torch.zeros_like(fraction)[None], fraction[None])
