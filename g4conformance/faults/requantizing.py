"""Faults in a quantized runtime: it is made anew for each, because its graphs are exported with the fault in them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch.fx import GraphModule

from g4conformance.checkpoints.checkpoint import Checkpoint
from g4conformance.faults.registry import At, Fault
from g4conformance.faults.trial import QUICK, NotTriedError, Prepared, Workbench
from g4conformance.judging.observation import Observation
from g4conformance.judging.verdict import Verdict
from g4conformance.quantization.calibration import calibration_cases, record_calibration
from g4conformance.quantization.graphs import QuantizedGraph, QuantizedGraphs
from g4conformance.quantization.schemes import scheme_of
from g4conformance.runtime.lowering import Signature
from g4conformance.runtime.static import StaticGemma4Runtime
from g4conformance.shipped import quantize, shipped_runtime
from g4conformance.stages import Stage


class OwnPrograms(QuantizedGraphs):
    """Exports every graph by itself: a fault in one layer is none in the others of its kind."""

    def copy_for(self, graph: QuantizedGraph, signature: Signature, inputs: tuple[Any, ...]) -> GraphModule:
        self._templates.clear()
        return super().copy_for(graph, signature, inputs)


class RequantizingWorkbench(Workbench):
    """Tries faults on the shipped runtime in a quantization scheme.

    Scales are calibrated on the runtime with the fault, as a porter's would be, and the reference rounds with them. So
    a mistake in a weight is in the reference's integers too; the group `quantization`, which compares them with the
    float model, is then what must see it.

    Raises:
        ConformanceError: as `ConformanceSession`.
    """

    def __init__(self, checkpoint: Checkpoint, quant: str) -> None:
        self.calibration = record_calibration(checkpoint, calibration_cases(checkpoint))
        max_seq = checkpoint.facts.default_max_seq
        super().__init__(checkpoint, shipped_runtime(checkpoint, max_seq, quant, calibration=self.calibration), QUICK)
        self.quant = quant

    def prepared(self, name: str, probes: bool = False) -> Prepared:
        """As for other runtimes, but of every case it is asked whether scales and integers are what they should be."""
        if (name, probes) not in self._prepared:
            self.session.cases[name] = replace(self.session.cases[name], first=True)
        return super().prepared(name, probes)

    def observed(self, fault: Fault, prepared: Prepared) -> tuple[Prepared, Observation]:
        """The case on a runtime that was quantized with the fault in it, and the reference of its scales and integers.

        Raises:
            NotTriedError: it cannot be exported or calibrated, which nobody overlooks.
        """
        graphs = (OwnPrograms if fault.at is At.GRAPH else QuantizedGraphs)(scheme_of(self.quant))
        runtime = StaticGemma4Runtime(self.checkpoint, prepared.case.request.layout, graphs)
        with fault.applied(runtime):
            try:
                quantize(runtime, graphs, self.calibration)
            except Exception as error:
                raise NotTriedError(f"cannot be calibrated: {type(error).__name__}") from error
            session = self.session.requantized(runtime)
            prepared = replace(prepared, reference=session.reference(prepared.case.case.name))
            return prepared, session.observed(runtime, prepared.case, prepared.reference)

    def killers(self, fault: Fault, verdicts: Sequence[Verdict]) -> Mapping[str, float]:
        """Red checks of the fault's stage; of a mistake in weights, or else of the group `quantization`."""
        own = super().killers(fault, verdicts)
        if own or fault.at is not At.WEIGHTS:
            return own
        return super().killers(replace(fault, stage=Stage.QUANTIZATION), verdicts)

    def is_killed(self, fault: Fault, verdicts: Sequence[Verdict]) -> bool:
        """Whether its stage is red. Checks of single layers in floating point are those of single graphs here."""
        return bool(self.killers(fault, verdicts))

    def _missed_by(self, fault: Fault, prepared: Prepared, observation: Observation) -> Iterable[str]:
        """Not asked here: a short prompt would need programs of its own."""
        return ()
