"""Declares damages, and the few strokes that they are made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from g4conformance.budgets import budget_of
from g4conformance.checks import CHECKS
from g4conformance.expected import padded_reference
from g4conformance.metrics import difference
from g4conformance.runtime.masks import mask_bias

from ..recording import Recorded

Tensors = dict[str, Tensor]
Apply = Callable[[Tensors, Recorded], None]


@dataclass(frozen=True)
class Damage:
    """One way of breaking a trace.

    Attributes:
        check: the check that must notice it.
        where: what its verdict must say.
        case: `text` or `image`.
        also: checks that see the same damage from elsewhere. No other check may fail.
    """

    check: str
    name: str
    apply: Apply
    where: str
    case: str
    also: frozenset[str]


DAMAGES: list[Damage] = []


def damage(check: str, where: str, case: str = "text", also: str = "") -> Callable[[Apply], Apply]:
    """Registers the decorated function; `also` names checks, separated by spaces."""

    def register(apply: Apply) -> Apply:
        DAMAGES.append(Damage(check, apply.__name__, apply, where, case, frozenset(also.split())))
        return apply

    return register


def nudge(tensor: Tensor, index: tuple[int, ...]) -> None:
    """Moves one element by the smallest step there is."""
    tensor[index] = torch.nextafter(tensor[index], torch.tensor(torch.inf))


def limit_of(check: str, recorded: Recorded, name: str) -> float:
    """The greatest |difference| that the check allows in the tensor of this name."""
    base = padded_reference(recorded.reference, recorded.case.request.layout, in_company(name))
    if name.startswith("vision/layer/"):  # padding patches are not compared
        base = base[(recorded.reference["image_position_ids"] != -1).any(dim=-1)]
    budget = budget_of(CHECKS[check], recorded.bench.dtype)
    return budget.limit(recorded.bench.noise, name, difference(base, base)).largest


def in_company(name: str) -> str:
    """What a piece alone must return is what it returns in company."""
    return name.replace("alone/", "")


def miss(
    check: str, tensors: Tensors, recorded: Recorded, name: str, index: tuple[int, ...], limits: float = 1.5
) -> None:
    """Puts one element `limits` times the limit beside the reference's; it must stay the greatest difference."""
    tensors[name][index] = recorded.reference[in_company(name)][index] + limits * limit_of(check, recorded, name)


def stray(
    check: str, tensors: Tensors, recorded: Recorded, base: str, name: str, index: tuple[int, ...], limits: float = 1.5
) -> None:
    """As `miss`, for a check that compares two of the runtime's own tensors: `name` strays from `base`."""
    budget = budget_of(CHECKS[check], recorded.bench.dtype)
    limit = budget.limit(recorded.bench.noise, base, difference(tensors[base], tensors[base])).largest
    tensors[name][index] = tensors[base][index] + limits * limit


def swap(tensor: Tensor, dim: int, first: int, second: int) -> None:
    """Exchanges two slices."""
    order = list(range(tensor.shape[dim]))
    order[first], order[second] = second, first
    tensor.copy_(tensor.index_select(dim, torch.tensor(order)))


def set_mask(tensors: Tensors, prefix: str, layer_type: str, change: Callable[[Tensor], object]) -> None:
    """Changes a boolean mask, and its additive form with it, as a runtime with that mistake would."""
    mask = tensors[f"{prefix}mask/{layer_type}"]
    change(mask)
    tensors[f"{prefix}mask_bias/{layer_type}"] = mask_bias(mask, torch.float32)
