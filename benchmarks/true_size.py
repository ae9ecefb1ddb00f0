"""What a run at Gemma 4 E2B's true size costs: `python benchmarks/true_size.py [--layers N] [--quant none]`.

Builds a random checkpoint of E2B's geometry, runs the eight stages of one image case on it, and prints the verdicts by
stage, the peak memory of the process as a multiple of the checkpoint's bytes, and the CPU time of the run as a multiple
of its own forward passes, called bare. The probes of self-consistency are left out.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from float32_products import Float32Products, as_it_is, processor_has_bfloat16
from forwards import ForwardLog, LoggingRuntime, cpu_seconds
from torch.fx import GraphModule

from g4conformance.checkpoints.checkpoint import Checkpoint, LoadOptions
from g4conformance.checkpoints.true_size import e2b, tiled_checkpoint
from g4conformance.judging.judge import Bench
from g4conformance.judging.verdict import Verdict
from g4conformance.prompts import ResolvedCase, resolve
from g4conformance.quantization.calibration import calibrate, record_calibration
from g4conformance.quantization.graphs import QuantizedGraph, QuantizedGraphs
from g4conformance.quantization.schemes import NONE, SCHEMES, scheme_of
from g4conformance.reference.noise import Noise
from g4conformance.runtime.layout import StaticLayout
from g4conformance.session import ConformanceSession, RunOptions


class TrueSizeSession(ConformanceSession):
    """A session that logs every reference's forwards, and whose noise may be calibrated on the judged case only."""

    calibrate_on_case = False
    logs: list[ForwardLog] = []

    def _calibration_cases(self) -> list[ResolvedCase]:
        return list(self.cases.values()) if self.calibrate_on_case else super()._calibration_cases()

    def _bench(self, float_noise: Noise) -> Bench:
        if self.quantized is not None:
            reference = self.quantized.reference
            self.logs.append(ForwardLog(reference, "quantized reference"))
            for way, model in reference.other_ways.items():
                self.logs.append(ForwardLog(replace(reference, model=model), f"quantized reference, {way}"))
        return super()._bench(float_noise)


def memory(what: str) -> int:
    """Bytes of this process: `VmRSS` now, `VmHWM` at most so far."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(what))


def products(way: str) -> AbstractContextManager[Any]:
    return Float32Products() if way == "float32" else nullcontext()


class ExportingGraphs(QuantizedGraphs):
    """Quantized graphs that are exported as the model is, whatever way products go."""

    def _export(self, graph: QuantizedGraph, inputs: tuple[Any, ...]) -> GraphModule:
        with as_it_is():
            return super()._export(graph, inputs)


def made_runtime(checkpoint: Checkpoint, options: RunOptions) -> LoggingRuntime:
    """The shipped runtime, logging; a quantized one is calibrated on the judged case, at the run's lengths."""
    layout = StaticLayout(options.max_seq or checkpoint.facts.default_max_seq)
    if options.quant == NONE:
        return LoggingRuntime(checkpoint, layout)
    graphs = ExportingGraphs(scheme_of(options.quant))
    runtime = LoggingRuntime(checkpoint, layout, graphs)
    (case,) = options.selected_cases()
    resolved = resolve(case, checkpoint, max_seq=layout.max_seq, decode_steps=options.decode_steps, gen_steps=1)
    calibration = record_calibration(checkpoint, [resolved])
    calibrate(runtime, calibration)
    graphs.convert(calibration)
    LoggingRuntime.log.clear()
    LoggingRuntime.counts.clear()
    return runtime


def run(checkpoint: Checkpoint, runtime: LoggingRuntime, options: RunOptions, case: str) -> list[Verdict]:
    """The verdicts of one case's eight stages, noise calibrated anew."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        session = TrueSizeSession(checkpoint, runtime, options)
    judged = session.cases[case]
    session.cases[case] = replace(judged, case=replace(judged.case, self_consistency=False))
    return session.verdicts(case)


def by_stage(verdicts: Sequence[Verdict]) -> list[str]:
    stages = dict.fromkeys(verdict.stage for verdict in verdicts)
    counts = {stage: Counter(str(v.status) for v in verdicts if v.stage is stage) for stage in stages}
    return [f"{stage:<22}" + ", ".join(f"{n} {status}" for status, n in counts[stage].items()) for stage in stages]


def failures(verdicts: Sequence[Verdict]) -> list[str]:
    return [f"{v.check} {v.mode} {v.status}: {v.where}; would pass {v.would_pass}" for v in verdicts if v.failed]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=35, help="a multiple of 5")
    parser.add_argument("--quant", default=NONE, choices=[*SCHEMES, NONE])
    parser.add_argument("--case", default="image-middle")
    parser.add_argument("--attn", default="eager", choices=("eager", "sdpa"))
    parser.add_argument("--max-seq", type=int, help="rows of the static buffers, by default what the package takes")
    parser.add_argument("--decode-steps", type=int, default=RunOptions.decode_steps)
    parser.add_argument("--gen-steps", type=int, default=RunOptions.gen_steps)
    parser.add_argument("--calibrate", default="bundled", choices=("bundled", "case"), help="the cases of the noise")
    way = "native" if processor_has_bfloat16() else "float32"
    parser.add_argument("--products", default=way, choices=("native", "float32"), help=f"here: {way}")
    parser.add_argument("--no-bare", action="store_true", help="leave out the bare forwards, and the ratio of times")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    load = LoadOptions(dtype="bfloat16", attn_implementation=args.attn)
    options = RunOptions(
        load=load,
        quant=args.quant,
        max_seq=args.max_seq,
        case_names=(args.case,),
        decode_steps=args.decode_steps,
        gen_steps=args.gen_steps,
    )
    TrueSizeSession.calibrate_on_case = args.calibrate == "case"
    imported, start = memory("VmRSS"), time.perf_counter()
    checkpoint = tiled_checkpoint(e2b(args.layers), options=load)
    parameters = sum(parameter.numel() for parameter in checkpoint.model.parameters())
    size = sum(parameter.nbytes for parameter in checkpoint.model.parameters())
    print(f"{args.layers} layers, {parameters / 1e9:.3f} G parameters, {size / 1e9:.2f} GB", flush=True)
    print(f"built in {time.perf_counter() - start:.1f} s, {memory('VmHWM') / size:.3f} x memory so far", flush=True)
    print(f"{imported / 1e9:.2f} GB were taken before, by imports", flush=True)

    verdicts: list[Verdict] = []
    with products(args.products):
        start = time.perf_counter()
        runtime = made_runtime(checkpoint, options)
        print(f"runtime made in {time.perf_counter() - start:.0f} s, {memory('VmHWM') / size:.3f} x memory", flush=True)
        TrueSizeSession.logs.append(ForwardLog(checkpoint, "float reference"))
        start = time.perf_counter()
        spent = cpu_seconds(lambda: verdicts.extend(run(checkpoint, runtime, options, args.case)))
        peak = memory("VmHWM")
        print(f"\nran in {time.perf_counter() - start:.0f} s, {spent:.0f} s of CPU time, products {args.products}")
        print("\n".join([*by_stage(verdicts), *failures(verdicts)]))
        print(f"\npeak memory {peak / 1e9:.2f} GB, {peak / size:.3f} x the checkpoint", flush=True)
        logs = TrueSizeSession.logs
        for what, count in sorted(sum((log.counts() for log in logs), LoggingRuntime.counts).items()):
            print(f"{count:4d} {what}")
        if not args.no_bare:
            bare = sum(log.bare_seconds() for log in logs) + LoggingRuntime.bare_seconds()
            print(f"bare forwards {bare:.0f} s of CPU time; the run takes {spent / bare:.2f} x")


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
