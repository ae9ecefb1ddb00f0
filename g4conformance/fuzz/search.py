"""Tries random examples until a budget is used up or one does not conform, and shrinks that one."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random

from hypothesis import Phase, Verbosity, find, settings
from hypothesis.errors import NoSuchExample

from g4conformance.fuzz.conformance import Outcome, Plant, examine
from g4conformance.fuzz.example import FuzzExample
from g4conformance.fuzz.strategies import fuzz_examples

# A search is a row of batches, because hypothesis must be told how many examples to draw. They are small, because in a
# large one it varies what it has drawn: of 1,000 examples, 420 had a config of their own in batches of 100, and all in
# batches of 3. Each begins with the smallest example, and what is drawn after a budget is used up is not examined.
_BATCH = settings(
    max_examples=3,
    phases=(Phase.generate, Phase.shrink),
    database=None,
    deadline=None,
    derandomize=False,  # a profile's would win over the seed
    verbosity=Verbosity.quiet,
)


@dataclass(frozen=True)
class Budget:
    """When to stop: after so many minutes or examples, whichever is first.

    Attributes:
        shrink_seconds: how long candidates are tried once an example is found; hypothesis itself gives up after 300.
    """

    minutes: float = math.inf
    examples: float = math.inf
    shrink_seconds: float = 120.0


@dataclass
class Tally:
    """What a search has done so far.

    Attributes:
        judged, unsound: examples by dtype; those with an unsound reference were not judged.
        candidates: smaller examples tried after one was found; they count as neither.
    """

    judged: Counter[str] = field(default_factory=Counter)
    unsound: Counter[str] = field(default_factory=Counter)
    candidates: int = 0

    @property
    def tried(self) -> int:
        return self.judged.total() + self.unsound.total()


@dataclass(frozen=True)
class Found:
    """The smallest example that was found not to conform, and how it does not."""

    example: FuzzExample
    outcome: Outcome


OnStep = Callable[[Tally], None]


def search(
    budget: Budget, seed: int, *, plant: Plant | None = None, on_step: OnStep = lambda tally: None
) -> tuple[Tally, Found | None]:
    """Examines random examples, each once; the same seed gives the same ones in the same order.

    Args:
        plant: puts a fault into every runtime.
        on_step: called after every example and every candidate, with the tally so far.
    """
    condition = _Condition(budget, plant, on_step)
    random = Random(seed)
    while not condition.is_over():
        with suppress(NoSuchExample):
            smallest = find(fuzz_examples(), condition, settings=_BATCH, random=random)
            return condition.tally, Found(smallest, condition.outcomes[smallest])
    return condition.tally, None


class _Condition:
    """Whether an example is what a search looks for. Once the search is over, no new example is.

    What it looks for is any alarm at first, and then smaller examples with the same one: among enough candidates there
    is always one that is barely beyond some other budget.
    """

    def __init__(self, budget: Budget, plant: Plant | None, on_step: OnStep) -> None:
        self.budget, self.plant, self.on_step = budget, plant, on_step
        self.tally = Tally()
        self.outcomes: dict[FuzzExample, Outcome] = {}
        self.deadline = time.monotonic() + 60 * budget.minutes
        self.sought = ""

    def __call__(self, example: FuzzExample) -> bool:
        """Hypothesis comes back to examples, to the smallest at the end, and must be told the same again."""
        if example not in self.outcomes:
            if self.is_over():
                return False
            self.outcomes[example] = self._examine(example)
            self.on_step(self.tally)
        alarm = self.outcomes[example].alarm
        return bool(alarm) and alarm == self.sought

    def is_over(self) -> bool:
        enough = not self.sought and self.tally.tried >= self.budget.examples
        return enough or time.monotonic() >= self.deadline

    def _examine(self, example: FuzzExample) -> Outcome:
        outcome = examine(example, self.plant)
        if self.sought:
            self.tally.candidates += 1
            return outcome
        (self.tally.unsound if outcome.unsound else self.tally.judged)[example.dtype] += 1
        if outcome.alarm:
            self.sought = outcome.alarm
            self.deadline = time.monotonic() + self.budget.shrink_seconds
        return outcome
