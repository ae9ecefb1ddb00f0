"""The runtime that the package ships, as the options of a run ask for it: its scheme and its executor."""

from __future__ import annotations

from g4conformance.checkpoints.checkpoint import Checkpoint, LoadOptions, load_checkpoint
from g4conformance.executors import cached_lowering
from g4conformance.fixtures import bundled_checkpoint
from g4conformance.quantization.calibration import calibrate, calibration_cases, record_calibration
from g4conformance.quantization.conversion import run_by_torch
from g4conformance.quantization.graphs import QuantizedGraphs
from g4conformance.quantization.parameters import Calibration, Quantization
from g4conformance.quantization.schemes import NONE, scheme_of
from g4conformance.runtime.layout import StaticLayout
from g4conformance.runtime.lowering import Execute, executed_by, run_eagerly
from g4conformance.runtime.static import StaticGemma4Runtime
from g4conformance.session import cache_folder


def shipped_runtime(
    checkpoint: Checkpoint,
    max_seq: int,
    quant: str = NONE,
    execute: Execute = run_eagerly,
    calibration: Calibration | None = None,
) -> StaticGemma4Runtime:
    """The static runtime, quantized to the scheme `quant`, its graphs run by `execute`.

    Args:
        calibration: what `record_calibration` said of this checkpoint; recorded anew if not given.

    Raises:
        ConformanceError: there is no such scheme.
    """
    layout = StaticLayout(max_seq)
    if quant == NONE:
        if execute is run_eagerly:
            return StaticGemma4Runtime(checkpoint, layout)
        return StaticGemma4Runtime(checkpoint, layout, executed_by(execute))
    graphs = QuantizedGraphs(scheme_of(quant), run_by_torch if execute is run_eagerly else execute)
    runtime = StaticGemma4Runtime(checkpoint, layout, graphs)
    quantize(runtime, graphs, calibration or record_calibration(checkpoint, calibration_cases(checkpoint)))
    return runtime


def quantize(runtime: StaticGemma4Runtime, graphs: QuantizedGraphs, calibration: Calibration) -> None:
    """Exports and calibrates a runtime made with `graphs`, as it is now, and converts its graphs."""
    calibrate(runtime, calibration)
    graphs.convert(calibration)


def execute_with(executor: str) -> Execute:
    """Runs graphs with the executor of this name; what it makes of them is kept between runs.

    The callable raises a LoweringError, which names graph and op, for a graph that the executor cannot lower.
    """
    if executor == "eager":
        return run_eagerly
    return lambda name, program, inputs: cached_lowering(executor, name, program, inputs, cache_folder() / "lowered")


def load_quantization(model: str | None, quant: str) -> Quantization:
    """The scales and integers of the graphs of a checkpoint, the bundled one by default, in float32.

    Raises:
        CheckpointError: as `load_checkpoint`.
    """
    checkpoint = load_checkpoint(model or bundled_checkpoint(), LoadOptions())
    quantization = shipped_runtime(checkpoint, checkpoint.facts.default_max_seq, quant).quantization
    assert quantization is not None
    return quantization
