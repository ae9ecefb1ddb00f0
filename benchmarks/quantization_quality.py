"""What each scheme loses on the calibration cases, and how far its runtime is from its reference on the judged ones.

    python benchmarks/quantization_quality.py [--scheme w8a8] [--dtype float32]

The evidence for the limits in `g4conformance/budgets.toml`: the losses of the fake-quantized reference against the
float model, worst over the calibration cases; and, over all bundled cases, the worst measured value of every check that
only a quantized runtime has.
"""

from __future__ import annotations

import argparse
from collections import defaultdict

from g4conformance.budgets import quality_tie
from g4conformance.checkpoints.checkpoint import Checkpoint, LoadOptions, load_checkpoint
from g4conformance.checks import CHECKS
from g4conformance.checks.registry import BudgetKind
from g4conformance.checks.run import CaseRun, Mode
from g4conformance.expected import greedy_tokens
from g4conformance.fixtures import bundled_checkpoint
from g4conformance.judging.observation import record_generation
from g4conformance.options import DTYPES, SCHEMES
from g4conformance.prompts import ResolvedCase
from g4conformance.quantization.calibration import calibration_cases
from g4conformance.quantization.judging import QuantizedJudging
from g4conformance.runtime.contract import Generation, StopReason
from g4conformance.session import ConformanceSession, RunOptions
from g4conformance.shipped import shipped_runtime
from g4conformance.trace import Recorder

_LOSSES = [f"G4-QUANT-{number:02}" for number in range(5, 12)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scheme", choices=[name for name in SCHEMES if name != "none"], action="append")
    parser.add_argument("--calibration-only", action="store_true", help="leave out the bundled cases")
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    args = parser.parse_args()
    checkpoint = load_checkpoint(bundled_checkpoint(), LoadOptions(dtype=args.dtype))
    for scheme in args.scheme or SCHEMES[:-1]:
        print_losses(checkpoint, scheme, not args.calibration_only)


def print_losses(checkpoint: Checkpoint, scheme: str, on_bundled: bool) -> None:
    runtime = shipped_runtime(checkpoint, checkpoint.facts.default_max_seq, scheme)
    judging = QuantizedJudging.of_runtime(checkpoint, runtime)
    assert judging is not None
    lost: dict[str, float] = defaultdict(float)
    for case in calibration_cases(checkpoint):
        for check, loss in losses(case, judging, checkpoint).items():
            lost[check] = max(lost[check], loss)
    print(f"\n{scheme}, {checkpoint.options.dtype}: worst loss on the calibration cases")
    for check, loss in lost.items():
        print(f"  {check}  {loss:.3g}", flush=True)
    if not on_bundled:
        return
    print("  worst on the bundled cases")
    for check, (value, case_name) in worst_measured(checkpoint, runtime, scheme).items():
        print(f"  {check}  {value:.3g}  {case_name}", flush=True)


def losses(case: ResolvedCase, judging: QuantizedJudging, checkpoint: Checkpoint) -> dict[str, float]:
    """What the fake-quantized reference loses on one calibration case, the scheme's near ties excused."""
    trace = judging.record(case)
    own = Recorder()
    new = greedy_tokens(trace)[: case.decode_steps + 1]
    tokens = (*trace["input_ids"][0].tolist(), *new)
    record_generation(own, "generation/", Generation(tokens, StopReason.MAX_NEW_TOKENS))
    run = CaseRun(
        case=case.case.name,
        layout=case.request.layout,
        facts=checkpoint.facts,
        mode=Mode.ACCUMULATED,
        reference=trace,
        runtime={**trace, **own.tensors},
        decode_steps=case.decode_steps,
        gen_steps=case.gen_steps,
        near_tie=lambda name: 0.0,
        quality_tie=quality_tie(judging.scheme.name),
    )
    found = {check: CHECKS[check](run)[0].difference for check in _LOSSES}
    return {check: 0.0 if difference is None else difference.max_abs for check, difference in found.items()}


def worst_measured(checkpoint: Checkpoint, runtime: object, scheme: str) -> dict[str, tuple[float, str]]:
    """Of every check that only a quantized runtime has: quality as measured, steps in units of what is allowed."""
    session = ConformanceSession(checkpoint, runtime, RunOptions(quant=scheme))  # type: ignore[arg-type]
    worst: dict[str, tuple[float, str]] = {}
    for case in session.cases:
        for verdict in session.verdicts(case):
            kind, found = CHECKS[verdict.check].budget, verdict.measurement
            if found is None or kind not in (BudgetKind.STEP, BudgetKind.QUALITY):
                continue
            value = found.ratio if kind is BudgetKind.STEP else found.max_abs
            if value >= worst.get(verdict.check, (0.0, ""))[0]:
                worst[verdict.check] = value, case
    return dict(sorted(worst.items()))


if __name__ == "__main__":
    main()
