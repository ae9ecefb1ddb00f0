"""How a mutant ended."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from enum import StrEnum

from g4conformance.judging.verdict import Status, Verdict


class End(StrEnum):
    """What ended a mutant. One that merely crashes says little about the checks, and is counted for itself."""

    CHECK = "killed by a check"
    UNIT_TEST = "killed by unit tests"
    CRASH = "crashed"
    TIMEOUT = "timed out"
    SURVIVED = "survived"


@dataclass(frozen=True)
class Outcome:
    """How one mutant ended.

    Attributes:
        by: the check that was red, the test that failed, or the exception where there was no runtime to judge.
        stage, case, ground: where that was; empty where it does not apply.
    """

    end: End
    by: str = ""
    stage: str = ""
    case: str = ""
    ground: str = ""

    def to_json(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, data: bytes) -> Outcome:
        plain = json.loads(data)
        return cls(**{**plain, "end": End(plain["end"])})

    def __str__(self) -> str:
        return ", ".join(part for part in (f"{self.end}: {self.by}", self.stage, self.case, self.ground) if part)


SURVIVED = Outcome(End.SURVIVED)


def outcome_of(verdicts: list[Verdict], case: str, ground: str) -> Outcome:
    """What the verdicts on one case say of a shipped runtime: it may fail no check, and withhold nothing.

    A value that is wrong says more than an exception, and that more than a tensor which is not shown.
    """
    ends = {Status.FAIL: End.CHECK, Status.ERROR: End.CRASH, Status.NOT_OBSERVED: End.CHECK}
    for status, end in ends.items():
        if red := next((v for v in verdicts if v.status is status), None):
            return Outcome(end, red.check, red.stage, case, ground)
    return SURVIVED
