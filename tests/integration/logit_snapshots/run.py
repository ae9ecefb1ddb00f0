"""Runs a bundled case on a runtime and keeps statistics of a few of its logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

from g4conformance.cases import Case, load_cases
from g4conformance.fixtures import fixtures_folder
from g4conformance.judging.driving import given_inputs
from g4conformance.prompts import Request, ResolvedCase, resolve
from g4conformance.runtime.contract import StaticInputs
from g4conformance.runtime.static import StaticGemma4Runtime
from g4conformance.statistics import logit_statistics

from .record import LogitRecord
from .settings import SETTINGS, Setting, build_runtime

# Where a case does not say how many: enough for an error of one step to reach the next.
DECODE_STEPS = 3


@cache
def bundled_cases() -> dict[str, Case]:
    return {case.name: case for case in load_cases(fixtures_folder() / "cases.yaml")}


@cache
def runtime_of(setting: Setting) -> StaticGemma4Runtime:
    return build_runtime(setting)


def resolved_case(runtime: StaticGemma4Runtime, name: str) -> ResolvedCase:
    cases = bundled_cases()
    return resolve(
        cases[name],
        runtime.checkpoint,
        max_seq=runtime.layout.max_seq,
        decode_steps=DECODE_STEPS,
        gen_steps=1,
        all_cases=tuple(cases.values()),
    )


def record_case(runtime: StaticGemma4Runtime, case: ResolvedCase, setting: Setting, fed: Sequence[int]) -> LogitRecord:
    """Statistics of the logits after prefill, after the first token of `fed`, and after its last."""
    rows = all_logits(runtime, case, lambda step, _: fed[step])
    kept = sorted({0, min(1, len(fed)), len(fed)})
    return LogitRecord(
        scheme=setting.scheme,
        dtype=setting.dtype,
        case=case.case.name,
        fed=tuple(fed),
        positions={_position(index): logit_statistics(rows[index]) for index in kept},
    )


def greedy_tokens(name: str) -> tuple[int, ...]:
    """What float32 chooses after the case's prompt, one token for each decode step; stop tokens do not end it."""
    runtime = runtime_of(SETTINGS[0])
    rows = all_logits(runtime, resolved_case(runtime, name), lambda _, logits: int(logits.argmax()))
    return tuple(int(logits.argmax()) for logits in rows[:-1])


def all_logits(runtime: StaticGemma4Runtime, case: ResolvedCase, choose: Callable[[int, Tensor], int]) -> list[Tensor]:
    """Logits after prefill and after each decode step, which feeds what `choose(step, last logits)` says."""
    with torch.no_grad():
        for request in case.before:
            runtime.for_layout(request.layout).generate(_inputs(runtime, request), 2)
        runtime = runtime.for_layout(case.request.layout)
        rows = [runtime.prefill(_inputs(runtime, case.request))]
        for step in range(case.decode_steps):
            rows.append(runtime.decode_one(choose(step, rows[-1])))
    return rows


def _inputs(runtime: StaticGemma4Runtime, request: Request) -> StaticInputs:
    """From the ids and patches of the request, so that cases of ids, which have no prompt, are no exception."""
    return given_inputs(request, runtime.facts, runtime.checkpoint.dtype)


def _position(index: int) -> str:
    return f"decode/{index - 1}" if index else "prefill"
