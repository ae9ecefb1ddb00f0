"""Observation: what a runtime yielded for a case, and the contexts in which it is listened to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from g4conformance.checks.run import NotObserved
from g4conformance.errors import ConformanceError
from g4conformance.expected import STOP_REASONS
from g4conformance.runtime.contract import Generation, OnTensor, Runtime
from g4conformance.stages import Stage

Tensors = dict[str, Tensor]
R = TypeVar("R", bound=OnTensor)


@dataclass
class Observation:
    """What a runtime yielded for a case.

    Attributes:
        accumulated: tensors of the run on its own, and of the probes of self-consistency.
        isolated: tensors of each stage when fed the reference's inputs.
        same: stages whose inputs were bit-equal, so that both runs are one.
        errors: what a stage raised in isolation, what its pieces raised alone (under `<stage>/alone`), what a probe
            raised (under `self/<probe>`), or (under None) what the run on its own raised.
        missing: what the runtime does not have that a stage or a probe needed, under the keys of `errors`.
        own_only: stages of which nothing is known but the run on its own; they are judged in accumulation only.
        teacher_forced: whether the run on its own was fed the reference's tokens at each decode step.
        unpadded: names of tensors that hold the prompt's rows only, of a runtime without static buffers.
        given: names of inputs that the runtime was given, because it makes none.
        driven: how the suite drove a runtime that does not generate by itself.
        made_itself: earlier stages that a stage went through again in isolation, where it does not take their results.
        unsupported: what the case needs and the runtime declares not to support; nothing was run then.
    """

    accumulated: Tensors = field(default_factory=dict)
    isolated: Tensors = field(default_factory=dict)
    same: set[Stage] = field(default_factory=set)
    errors: dict[str | None, str] = field(default_factory=dict)
    missing: dict[str | None, str] = field(default_factory=dict)
    own_only: set[Stage] = field(default_factory=set)
    teacher_forced: bool = False
    unpadded: frozenset[str] = frozenset()
    given: set[str] = field(default_factory=set)
    driven: str = ""
    made_itself: dict[Stage, frozenset[Stage]] = field(default_factory=dict)
    unsupported: str = ""


def method_of(runtime: Runtime, name: str) -> Callable[..., Any]:
    """The runtime's method of this name; only `prefill` is required of one.

    Raises:
        NotObserved: it has none.
    """
    method = getattr(runtime, name, None)
    if method is None:
        raise NotObserved(name)
    return method


def alone_key(stage: Stage) -> str:
    """Under which `errors` and `missing` say something of the stage's pieces alone."""
    return f"{stage}/alone"


def is_quantized(runtime: Runtime) -> bool:
    """Whether the runtime says that it is; one without the property is judged in floating point."""
    return getattr(runtime, "quantization", None) is not None


@contextmanager
def listening(runtime: Runtime, record: R) -> Iterator[R]:
    """`runtime` reports to `record` inside this context only."""
    runtime.on_tensor = record
    try:
        yield record
    finally:
        runtime.on_tensor = None


@contextmanager
def errors_of(observation: Observation, key: str | None) -> Iterator[None]:
    """Notes what the runtime raises or lacks; the first error of a stage or probe counts."""
    try:
        yield
    except NotObserved as missing:  # what the method would have yielded is missing, and told as such
        observation.missing.setdefault(key, str(missing))
    except ConformanceError as error:
        observation.errors.setdefault(key, str(error))
    except Exception as error:  # whatever a runtime under test raises is a finding, not the end of the run
        observation.errors.setdefault(key, f"{type(error).__name__}: {error}")


def record_selection(record: OnTensor, prefix: str, runtime: Runtime, rows: Tensor) -> None:
    """Asks `select` for the token of each row of logits [n, vocab], and whether it ends the generation."""
    selected = [method_of(runtime, "select")(row[None]) for row in rows]
    record(prefix + "token_ids", torch.tensor([token for token, _ in selected]))
    record(prefix + "stops", torch.tensor([reason is not None for _, reason in selected]))


def record_generation(record: OnTensor, prefix: str, generation: Generation) -> None:
    record(prefix + "token_ids", torch.as_tensor(generation.token_ids))
    record(prefix + "stop_reason", torch.tensor(STOP_REASONS.index(generation.stop_reason)))
