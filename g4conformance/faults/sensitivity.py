"""Sensitivity: how small a wrong value each check must still see, tensor by tensor.

A fault usually alters many tensors, so that a check which was loosened or lost one of them may go on killing it. Here a
single tensor of the clean runtime's trace is altered by as little as the check must see: by one unit in the last place
where it is exact; else by a fixed multiple of the noise, which does not grow with the budget.
"""

from __future__ import annotations

import fnmatch
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

import torch
from torch import Tensor

from g4conformance.checks import CHECKS
from g4conformance.checks.run import Mode
from g4conformance.faults.trial import QUICK, Prepared, Workbench
from g4conformance.judging.judge import verdict_of
from g4conformance.judging.observation import Observation
from g4conformance.judging.verdict import Status
from g4conformance.metrics import difference
from g4conformance.reference.noise import Noise

# In units of the noise; the budgets' factors in float32 are 2 and 8, and half as much again for gains.
_WRONG, _WRONG_GAIN = 12.0, 18.0


class Place(StrEnum):
    """Which value of a tensor is altered."""

    FIRST = "first"
    MIDDLE = "middle"
    LAST = "last of the prompt"
    SLOT = "first row of the image"
    BEYOND = "first row behind the prompt"
    END = "last of the buffer"
    ALL = "all, by a little"
    GAIN = "all, by a factor"


@dataclass(frozen=True)
class Probe:
    """One alteration that one check must turn red at."""

    check: str
    mode: Mode
    tensor: str
    place: Place


@dataclass(frozen=True)
class Finding:
    """Whether the check turned red at the probe."""

    probe: Probe
    red: bool


Patterns = tuple[tuple[str, tuple[Place, ...]], ...]

_ENDS = (Place.FIRST, Place.MIDDLE, Place.LAST)
_ROUNDING = (*_ENDS, Place.ALL, Place.GAIN)

_LONGEST = f"self/generate/{QUICK.gen_steps}"

# What each check must see, on a text and on a picture: trace names and places. Not derived from the checks.
SENSITIVE: dict[str, Patterns] = {
    "G4-INPUTS-01": (
        ("input_ids", (*_ENDS, Place.END)),
        ("attention_mask", (*_ENDS, Place.END)),
        ("valid_length", (Place.FIRST,)),
    ),
    "G4-INPUTS-02": (("llm_input_ids", (*_ENDS, Place.END)),),
    "G4-INPUTS-03": (("input_ids", (Place.FIRST,)),),
    "G4-INPUTS-04": (("input_ids", (Place.SLOT,)),),
    "G4-INPUTS-05": (("pixel_values", _ENDS),),
    "G4-INPUTS-06": (("image_position_ids", _ENDS),),
    "G4-EMBED-01": (("text_embeds", _ENDS),),
    "G4-EMBED-02": (("text_embeds", (Place.FIRST, Place.END)),),
    "G4-VISION-01": (("vision/patch_embeds", _ROUNDING),),
    "G4-VISION-02": (("vision/layer/*/hidden", (Place.FIRST, Place.MIDDLE, Place.ALL, Place.GAIN)),),
    "G4-VISION-03": (("vision/soft_tokens", _ROUNDING),),
    "G4-VISION-04": (("visual_embeds", _ROUNDING),),
    "G4-FUSION-01": (("fused_embeds", (Place.SLOT,)),),
    "G4-FUSION-02": (("fused_embeds", (Place.FIRST, Place.END)),),
    "G4-FUSION-03": (("fused_embeds", (Place.FIRST, Place.SLOT, Place.END)),),
    "G4-MASK-01": (("mask/*", _ENDS),),
    "G4-MASK-02": (("mask/*", (Place.BEYOND,)),),
    "G4-MASK-03": (("mask_bias/*", _ENDS),),
    "G4-ROPE-01": (("rope/*/*", _ENDS),),
    "G4-PREFILL-01": (("per_layer_inputs", _ROUNDING),),
    "G4-PREFILL-02": (("prefill/layer/*/key", _ROUNDING), ("prefill/layer/*/value", _ROUNDING)),
    "G4-PREFILL-03": (("prefill/layer/*/hidden", _ROUNDING),),
    "G4-PREFILL-04": (("prefill/logits", _ROUNDING),),
    "G4-PREFILL-05": (("prefill/cache/*", _ENDS),),
    "G4-PREFILL-06": (("prefill/cache/*", (Place.BEYOND, Place.END)),),
    "G4-PREFILL-09": (
        ("prefill/alone/layer/*/hidden", _ROUNDING),
        ("prefill/alone/layer/*/key", _ROUNDING),
        ("prefill/alone/layer/*/value", _ROUNDING),
    ),
    "G4-DECODE-01": (("decode/*/token", (Place.FIRST,)), ("decode/*/position", (Place.FIRST,))),
    "G4-DECODE-02": (("decode/*/text_embeds", _ENDS),),
    "G4-DECODE-03": (("decode/*/mask/*", (*_ENDS, Place.END)),),
    "G4-DECODE-04": (("decode/*/mask_bias/*", (Place.LAST,)),),
    "G4-DECODE-05": (("decode/*/rope/*/*", _ENDS),),
    "G4-DECODE-06": (("decode/*/per_layer_inputs", _ROUNDING),),
    "G4-DECODE-07": (("decode/*/layer/*/key", _ROUNDING), ("decode/*/layer/*/value", _ROUNDING)),
    "G4-DECODE-08": (("decode/*/layer/*/hidden", _ROUNDING),),
    "G4-DECODE-09": (("decode/*/logits", _ROUNDING),),
    "G4-DECODE-13": (("decode/*/alone/layer/*/*", _ROUNDING),),
    "G4-DECODE-10": (("decode/*/cache/*", (*_ENDS, Place.END)),),
    "G4-GEN-01": (("generation/select/token_ids", (Place.FIRST, Place.END)),),
    "G4-GEN-02": (("generation/select/stops", (Place.FIRST, Place.END)),),
    "G4-GEN-03": (("generation/token_ids", (Place.FIRST,)),),
    "G4-GEN-04": (("generation/token_ids", (Place.END,)),),
    "G4-GEN-05": (("generation/stop_reason", (Place.FIRST,)),),
    "G4-SELF-01": (("self/shortened/decode/0/logits", _ROUNDING),),
    "G4-SELF-02": (("self/larger/prefill/logits", _ROUNDING), ("self/smaller/prefill/logits", _ROUNDING)),
    "G4-SELF-03": (("self/larger/decode/*/logits", _ROUNDING), ("self/smaller/decode/*/logits", _ROUNDING)),
    "G4-SELF-04": (("self/nan_padding/prefill/logits", _ENDS),),
    "G4-SELF-05": (("self/other_padding/prefill/logits", _ENDS),),
    "G4-SELF-06": (("self/*_padding/prefill/layer/*", _ENDS),),
    "G4-SELF-07": (("self/last_exchanged/prefill/layer/*", (Place.FIRST, Place.MIDDLE)),),
    "G4-SELF-08": (("self/first_exchanged/prefill/layer/[01]/hidden", (Place.LAST,)),),
    "G4-SELF-09": (("self/again/prefill/logits", _ENDS),),
    "G4-SELF-10": (("self/again/decode/*/logits", _ENDS),),
    "G4-SELF-11": (
        (f"{_LONGEST}/token_ids", (Place.FIRST, Place.END)),
        (f"{_LONGEST}/stop_reason", (Place.FIRST,)),
    ),
    "G4-SELF-12": (("self/after_longer/prefill/logits", _ENDS),),
    "G4-SELF-13": (("self/after_longer/decode/*/logits", _ENDS),),
    "G4-SELF-14": (("self/after_longer/prefill/cache/*", (*_ENDS, Place.END)),),
    "G4-SELF-15": (("self/loaded/decode/*/logits", _ENDS),),
    "G4-SELF-16": (("self/reset_after_longer/decode/0/logits", _ENDS), ("self/after_reset/*/logits", _ENDS)),
    "G4-SELF-17": (
        ("self/reset_after_longer/decode/0/cache/*", (Place.FIRST, Place.END)),
        ("self/after_reset/prefill/cache/*", (*_ENDS, Place.END)),
    ),
    "G4-SELF-18": (
        ("self/select/token_ids", (Place.FIRST, Place.END)),
        ("self/select/stops", (Place.FIRST, Place.END)),
    ),
    "G4-SELF-19": (("self/generate/*/stop_reason", (Place.FIRST,)),),
    "G4-SELF-20": (("self/generate/[12]/token_ids", (Place.FIRST, Place.END)),),
    "G4-SELF-21": (("self/refused/*", (Place.FIRST,)),),
}
_CASES = ("window-twice", "image-middle")
_WITH_THE_FIRST_CASE = frozenset(("G4-SELF-21",))

# What may be off by rounding; everything else must be right to the last bit.
_ROUNDED = {
    *("G4-VISION-01", "G4-VISION-02", "G4-VISION-03", "G4-VISION-04", "G4-FUSION-03"),
    *("G4-PREFILL-01", "G4-PREFILL-02", "G4-PREFILL-03", "G4-PREFILL-04"),
    *("G4-DECODE-06", "G4-DECODE-07", "G4-DECODE-08", "G4-DECODE-09", "G4-PREFILL-09", "G4-DECODE-13"),
    *("G4-SELF-01", "G4-SELF-02", "G4-SELF-03"),
}
_ISOLATED_ONLY = {"G4-GEN-01", "G4-GEN-02", "G4-PREFILL-09", "G4-DECODE-13"}
_ACCUMULATED_ONLY = {"G4-GEN-03", "G4-GEN-04", "G4-GEN-05"}


def findings(bench: Workbench, checks: Collection[str] = tuple(SENSITIVE)) -> Iterator[Finding]:
    """Tries every probe of these checks on a text and on a picture; needs no further run of the runtime.

    A check that is not there, or for which the runtime reports no tensor of a name, is not red.
    """
    wanted = {check: SENSITIVE[check] for check in checks}
    met: set[tuple[str, str]] = set()
    first = next(iter(bench.session.cases))
    for name in dict.fromkeys((*_CASES, first)):
        prepared = bench.prepared(name, probes=True)
        asked = wanted if name in _CASES else {c: wanted[c] for c in wanted.keys() & _WITH_THE_FIRST_CASE}
        for check, pattern, probe in _probes(prepared, asked):
            met.add((check, pattern))
            yield Finding(probe, _is_red(probe, prepared, bench))
    for check, patterns in wanted.items():
        for pattern, _ in patterns:
            if (check, pattern) not in met:
                yield Finding(Probe(check, _modes(check)[0], pattern, Place.FIRST), red=False)


def _probes(prepared: Prepared, wanted: Mapping[str, Patterns]) -> Iterator[tuple[str, str, Probe]]:
    """Each probe of a case, with the check and the pattern that it is there for."""
    for check, patterns in wanted.items():
        first, *others = _modes(check)
        for pattern, places in patterns:
            for name in _matching(_tensors(prepared.clean, first), pattern):
                for place in (place for place in places if _exists(place, prepared)):
                    yield check, pattern, Probe(check, first, name, place)
                for mode in others:  # the same function: one place shows that it is asked there too
                    if _exists(places[0], prepared):
                        yield check, pattern, Probe(check, mode, name, places[0])


def _matching(names: Iterable[str], pattern: str) -> list[str]:
    """Tensors of layers alone have checks of their own, and patterns that say so; a star spans their names too."""
    return [name for name in fnmatch.filter(names, pattern) if ("/alone/" in name) == ("/alone/" in pattern)]


def _modes(check: str) -> tuple[Mode, ...]:
    if check in _ISOLATED_ONLY:
        return (Mode.ISOLATED,)
    if check in _ACCUMULATED_ONLY or check.startswith("G4-SELF-"):
        return (Mode.ACCUMULATED,)
    return (Mode.ISOLATED, Mode.ACCUMULATED)


def _exists(place: Place, prepared: Prepared) -> bool:
    layout = prepared.case.request.layout
    if place is Place.SLOT:
        return layout.num_visual_tokens > 0
    return place is not Place.BEYOND or int(prepared.reference["valid_length"]) < layout.max_seq


def _tensors(observation: Observation, mode: Mode) -> Mapping[str, Tensor]:
    return observation.isolated if mode is Mode.ISOLATED else observation.accumulated


def _is_red(probe: Probe, prepared: Prepared, bench: Workbench) -> bool:
    check = CHECKS.get(probe.check)
    if check is None or probe.mode not in check.modes:
        return False
    tensors = dict(_tensors(prepared.clean, probe.mode))
    tensors[probe.tensor] = _altered(probe, prepared, bench.session.bench.noise, tensors[probe.tensor])
    observation = replace(prepared.clean, isolated=tensors, accumulated=tensors)
    verdict = verdict_of(check, prepared.case, prepared.reference, observation, bench.session.bench, probe.mode)
    return verdict.status is Status.FAIL


def _altered(probe: Probe, prepared: Prepared, noise: Noise, tensor: Tensor) -> Tensor:
    if probe.place in (Place.ALL, Place.GAIN):
        return _drifted(probe, prepared, noise, tensor)
    altered = tensor.clone()
    index = _index(probe, prepared, tensor)
    if probe.check not in _ROUNDED:
        altered[index] = _next(tensor[index])
        return altered
    base = _base(probe, prepared, tensor)
    altered[index] += _WRONG * noise.allowed_largest(probe.tensor, float(base.abs().max()))
    return altered


def _base(probe: Probe, prepared: Prepared, tensor: Tensor) -> Tensor:
    """What the tensor is compared with: of a piece alone, what the reference has in company."""
    return prepared.reference.get(probe.tensor.replace("alone/", ""), tensor)


def _drifted(probe: Probe, prepared: Prepared, noise: Noise, tensor: Tensor) -> Tensor:
    """Every value a little further from zero or nearer to it, in turns so that no gain shows; or all by one factor."""
    base = _base(probe, prepared, tensor)
    if probe.place is Place.GAIN:
        smallest = 2 * noise.eps  # a factor nearer to 1 rounds to 1
        return tensor * (1.0 + max(_WRONG_GAIN * noise.allowed_gain(probe.tensor, base.numel()), smallest))
    size = _WRONG * noise.allowed_mean(probe.tensor, difference(base, base).base_mean_abs)
    signs = torch.where(torch.arange(tensor.numel()) % 2 == 0, 1.0, -1.0).reshape(tensor.shape)
    return tensor + signs * size


def _index(probe: Probe, prepared: Prepared, tensor: Tensor) -> tuple[int, ...]:
    """The altered value's index; the prompt's own rows are those that the reference has."""
    own = _own_shape(probe.tensor, prepared.reference, tensor)
    valid_length = int(prepared.reference["valid_length"])
    if probe.place is Place.FIRST:
        return (0,) * tensor.ndim
    if probe.place is Place.MIDDLE:
        return tuple(size // 2 for size in own)
    if probe.place is Place.LAST:
        return tuple(size - 1 for size in own)
    if probe.place is Place.END:
        return tuple(size - 1 for size in tensor.shape)
    if probe.place is Place.SLOT:
        return (0, prepared.case.request.layout.visual_start_idx, *(0,) * (tensor.ndim - 2))
    row_axis = tensor.ndim - 2 if "cache/" in probe.tensor else tensor.ndim - 1  # keys are the last axis of a mask
    return tuple(valid_length if axis == row_axis else 0 for axis in range(tensor.ndim))


def _own_shape(name: str, reference: Mapping[str, Tensor], tensor: Tensor) -> torch.Size:
    """The shape without padding: the reference's, of which a cache's is that of the K/V it holds."""
    # A probe's tensor has the shape of that of the prompt itself, a piece's alone that of its in company.
    name = re.sub(r"^self/\w+/", "", name).replace("alone/", "")
    if "mask_bias/" in name:  # [B, 1, Q, K]
        own = reference[name.replace("mask_bias/", "mask/")].shape
        return torch.Size((own[0], 1, *own[1:]))
    if name.startswith("prefill/cache/"):
        return reference[name.replace("/cache/", "/layer/")].shape
    return reference[name].shape if name in reference else tensor.shape


def _next(value: Tensor) -> Tensor:
    """The smallest other value: the next float, the next integer, the other boolean."""
    if value.dtype == torch.bool:
        return ~value
    if not value.is_floating_point():
        return value + 1
    return torch.nextafter(value, torch.full_like(value, math.inf))
