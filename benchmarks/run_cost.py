"""What a conformance run costs: `python benchmarks/run_cost.py [--model PATH] [--stages-only]`.

Counts the forward passes of reference and runtime, and prints the run's time as a multiple of the forward passes that
the stages need, called bare: the reference without hooks, the runtime without anybody listening. Times are sums over
all cases in one process; the multiple is what to look at, with the probes of self-consistency and without.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from transformers import DynamicCache

from g4conformance.checkpoints.checkpoint import Checkpoint, LoadOptions, load_checkpoint
from g4conformance.expected import key_values_of, static_inputs_of
from g4conformance.prompts import ResolvedCase
from g4conformance.reference.record import model_inputs, record_reference
from g4conformance.runtime.layout import StaticLayout
from g4conformance.runtime.static import StaticGemma4Runtime
from g4conformance.session import ConformanceSession, RunOptions


class CountingRuntime(StaticGemma4Runtime):
    """The shipped runtime, counting its forward passes."""

    counts: Counter[str] = Counter()

    def prefill(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.counts["runtime prefill"] += 1
        return super().prefill(*args, **kwargs)

    def decode_one(self, token: int) -> torch.Tensor:
        self.counts["runtime decode"] += 1
        return super().decode_one(token)


def count_reference(checkpoint: Checkpoint) -> Counter[str]:
    counts: Counter[str] = Counter()

    def hook(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        counts["reference " + ("decode" if kwargs["input_ids"].shape[1] == 1 else "prefill")] += 1

    checkpoint.model.register_forward_hook(hook, with_kwargs=True)
    return counts


def timed(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


@torch.no_grad()
def bare_reference(checkpoint: Checkpoint, case: ResolvedCase) -> None:
    """One prefill and the case's decode steps, without a hook."""
    cache = DynamicCache(config=checkpoint.text_config)
    inputs = model_inputs(case.request.inputs, checkpoint.dtype)
    last = torch.tensor([inputs["input_ids"].shape[1] - 1])
    logits = checkpoint.model(**inputs, cache=cache, use_cache=True, logits_to_keep=last).logits
    for _ in range(case.reference_steps):
        token = logits[:, -1].argmax(-1, keepdim=True)
        logits = checkpoint.model(input_ids=token, cache=cache, use_cache=True).logits


@torch.no_grad()
def bare_runtime(runtime: StaticGemma4Runtime, case: ResolvedCase, reference: Any) -> None:
    """The requests before, one generation, and the isolated decode steps, with nobody listening."""
    for request in case.before:
        serving = runtime.for_layout(request.layout)
        serving.generate(serving.build_static_inputs(request.prompt or "", request.images), 2)
    serving = runtime.for_layout(case.request.layout)
    if case.request.prompt is None:
        inputs = static_inputs_of(reference, serving.layout, serving.facts)
    else:
        inputs = serving.build_static_inputs(case.request.prompt, case.request.images)
    serving.generate(inputs, case.gen_steps)
    serving.load_state(key_values_of(reference, serving.facts), int(reference["valid_length"]))
    for step in range(case.decode_steps):
        serving.decode_one(int(reference[f"decode/{step}/token"]))


def session_of(
    checkpoint: Checkpoint, runtime: StaticGemma4Runtime, options: RunOptions, stages_only: bool
) -> ConformanceSession:
    session = ConformanceSession(checkpoint, runtime, options)
    if stages_only:
        for name, case in session.cases.items():
            session.cases[name] = replace(case, case=replace(case.case, self_consistency=False))
    return session


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--stages-only", action="store_true", help="leave the probes of self-consistency out")
    args = parser.parse_args()
    options = RunOptions(model=args.model, load=LoadOptions(dtype=args.dtype))
    checkpoint = load_checkpoint(options.checkpoint, options.load)
    layout = StaticLayout(checkpoint.facts.default_max_seq)
    session = session_of(checkpoint, StaticGemma4Runtime(checkpoint, layout), options, args.stages_only)
    cases = session.cases.values()
    references = {c.case.name: record_reference(checkpoint, c.request.inputs, c.reference_steps) for c in cases}
    for case in cases:  # builds the graphs of every layout
        bare_runtime(session.runtime, case, references[case.case.name])  # type: ignore[arg-type]

    bare = sum(timed(lambda c=case: bare_reference(checkpoint, c)) for case in cases)  # type: ignore[misc]
    bare += sum(
        timed(lambda c=case: bare_runtime(session.runtime, c, references[c.case.name]))  # type: ignore[misc, arg-type]
        for case in cases
    )
    run = sum(timed(lambda c=case: session.verdicts(c.case.name)) for case in cases)  # type: ignore[misc]

    counts = count_reference(checkpoint)
    counted = session_of(checkpoint, CountingRuntime(checkpoint, layout), options, args.stages_only)
    for name in counted.cases:
        counted.verdicts(name)
    counts += CountingRuntime.counts
    for what, count in sorted(counts.items()):
        print(f"{what:<20} {count:4d} in {len(counted.cases)} cases")
    print(f"the run takes {run / bare:.2f} x the bare forwards")


if __name__ == "__main__":
    main()
