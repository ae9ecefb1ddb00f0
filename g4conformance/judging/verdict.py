"""Verdict: what a check found out about one case in one mode."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from g4conformance.checks.run import Mode
from g4conformance.judging.traits import Traits
from g4conformance.stages import Stage


class Status(StrEnum):
    """How a check ended. `inherited` fails too, but is blamed on an earlier stage; `known` was declared to fail."""

    PASS = "pass"
    FAIL = "fail"
    INHERITED = "inherited"
    NOT_OBSERVED = "not_observed"
    ERROR = "error"
    KNOWN = "known"
    NOT_APPLICABLE = "not_applicable"


@dataclass(frozen=True)
class Measurement:
    """Statistics of the tensor that came closest to its limit, or went furthest beyond it.

    `ratio` is measured / allowed, infinite where nothing was allowed and something was measured.
    """

    tensor: str
    max_abs: float
    mean_abs: float
    peir: float | None
    argmax_equal: bool
    allowed_max: float
    allowed_mean: float
    gain: float
    allowed_gain: float
    ratio: float


@dataclass(frozen=True)
class Known:
    """What conformance.toml says of a failure; `inherited_from` is the check that it says it of, if it is another."""

    reason: str
    category: str
    link: str
    inherited_from: str = ""


@dataclass(frozen=True)
class Widened:
    """A budget that conformance.toml has widened, from `usual` to `allowed`, and that was needed."""

    usual: float
    allowed: float
    reason: str


@dataclass(frozen=True)
class Verdict:
    """One line of the report.

    Attributes:
        measurement: None if nothing could be compared.
        would_pass: the budget with which the check would have passed, as a number of `unit`; infinite if none would.
        count: number of values compared; mismatched: how many of them were beyond an exact budget.
        where: what differs and where, in words.
        traits: of the first tensor that failed.
        known: of a known failure, what was declared.
        widened: of a verdict that the budget as it was would have failed, how it was widened.
    """

    check: str
    stage: Stage
    case: str
    mode: Mode
    status: Status
    statement: str
    measurement: Measurement | None = None
    would_pass: float | None = None
    unit: str = ""
    count: int = 0
    mismatched: int = 0
    where: str = ""
    traits: Traits | None = None
    known: Known | None = None
    widened: Widened | None = None

    @property
    def failed(self) -> bool:
        return self.status in (Status.FAIL, Status.INHERITED, Status.ERROR)

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON and pytest's user_properties, which xdist sends between processes."""
        plain = asdict(self)
        return plain | {name: str(plain[name]) for name in ("stage", "mode", "status")}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Verdict:
        made = {"stage": Stage, "mode": Mode, "status": Status}
        parts = {"measurement": Measurement, "known": Known, "widened": Widened}
        return cls(
            **{
                **data,
                **{name: make(data[name]) for name, make in made.items()},
                **{name: None if data[name] is None else make(**data[name]) for name, make in parts.items()},
                "traits": None if data["traits"] is None else Traits.from_dict(data["traits"]),
            }
        )
