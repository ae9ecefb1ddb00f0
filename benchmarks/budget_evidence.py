"""Measures what budgets.toml states: `python benchmarks/budget_evidence.py [--model PATH]`.

For each rounding check, the worst measured / noise of the shipped runtime over the cases, by dtype and attention
implementation. A factor in budgets.toml must lie above all of them.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterable

from g4conformance.checkpoints.checkpoint import LoadOptions, load_checkpoint
from g4conformance.checks import CHECKS
from g4conformance.checks.registry import BudgetKind
from g4conformance.judging.verdict import Verdict
from g4conformance.runtime.layout import StaticLayout
from g4conformance.runtime.static import StaticGemma4Runtime
from g4conformance.session import ConformanceSession, RunOptions


def worst_by_check(verdicts: Iterable[Verdict]) -> dict[str, float]:
    """The largest `would_pass` of each rounding check, in units of the reference's noise."""
    worst: dict[str, float] = defaultdict(float)
    for verdict in verdicts:
        if CHECKS[verdict.check].budget is BudgetKind.ROUNDING and verdict.would_pass is not None:
            worst[verdict.check] = max(worst[verdict.check], verdict.would_pass)
    return worst


def bundled(dtype: str, attn: str, model: str | None) -> dict[str, float]:
    options = RunOptions(model=model, load=LoadOptions(dtype=dtype, attn_implementation=attn))
    checkpoint = load_checkpoint(options.checkpoint, options.load)
    runtime = StaticGemma4Runtime(checkpoint, StaticLayout(checkpoint.facts.default_max_seq))
    session = ConformanceSession(checkpoint, runtime, options)
    return worst_by_check(verdict for case in session.cases for verdict in session.verdicts(case))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model")
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16", "float16"])
    parser.add_argument("--attn", nargs="+", default=["eager", "sdpa"])
    args = parser.parse_args()
    print(f"{'check':<16}" + "".join(f"{d + ' ' + a:>18}" for d in args.dtype for a in args.attn))
    columns = [bundled(dtype, attn, args.model) for dtype in args.dtype for attn in args.attn]
    for check in (check for check in CHECKS.values() if check.budget is BudgetKind.ROUNDING):
        print(f"{check.id:<16}" + "".join(f"{column.get(check.id, 0.0):>18.2f}" for column in columns))


if __name__ == "__main__":
    main()
