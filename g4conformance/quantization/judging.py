"""What it takes to judge a quantized runtime: a reference that rounds as its graphs do, beside the float one."""

from __future__ import annotations

from functools import cached_property

from torch import Tensor

from g4conformance.checkpoints.checkpoint import Checkpoint
from g4conformance.expected import greedy_tokens, logits_names
from g4conformance.judging.quantization import expected_quantization, observed_quantization
from g4conformance.prompts import ResolvedCase
from g4conformance.quantization.calibration import calibration_cases, record_calibration
from g4conformance.quantization.parameters import Calibration, Quantization
from g4conformance.quantization.reference import fake_quantized
from g4conformance.quantization.schemes import Scheme
from g4conformance.reference.record import record_reference
from g4conformance.runtime.contract import Runtime
from g4conformance.trace import Trace


class Expected:
    """What the scales and integers of a runtime of this scheme should be, by the float model; measured when asked.

    `calibration` is the float model's record of the calibration cases; None has them recorded.
    """

    def __init__(self, checkpoint: Checkpoint, scheme: Scheme, calibration: Calibration | None) -> None:
        self.checkpoint, self.scheme, self.calibration = checkpoint, scheme, calibration

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        calibration = self.calibration or record_calibration(self.checkpoint, calibration_cases(self.checkpoint))
        return expected_quantization(self.scheme, self.checkpoint.model, calibration.ranges)


class QuantizedJudging:
    """Both references of a quantized runtime.

    Attributes:
        reference: the Hugging Face model, fake-quantized with the runtime's scales and integers; it judges the
            implementation.
        steps: the distance of two neighbouring values of what each graph returns, by kind of trace name.
    """

    def __init__(self, checkpoint: Checkpoint, quantization: Quantization, expected: Expected) -> None:
        self.checkpoint, self.scheme = checkpoint, quantization.scheme
        self.reference = fake_quantized(checkpoint, quantization)
        self.steps = {name: output.scale for name, output in quantization.outputs.items()}
        self.expected = expected

    @classmethod
    def of_runtime(cls, checkpoint: Checkpoint, runtime: Runtime) -> QuantizedJudging | None:
        """Of a runtime that says that it is quantized; None for any other."""
        quantization: Quantization | None = getattr(runtime, "quantization", None)
        if quantization is None:
            return None
        return cls(checkpoint, quantization, Expected(checkpoint, quantization.scheme, quantization.calibration))

    def of(self, runtime: Runtime) -> QuantizedJudging:
        """The same for the scales and integers that the runtime has now; what they should be stays."""
        quantization = runtime.quantization
        assert quantization is not None
        return QuantizedJudging(self.checkpoint, quantization, self.expected)

    def record(self, case: ResolvedCase) -> Trace:
        """The fake-quantized reference's trace, and the float model's logits behind the same tokens as `float/...`.

        On the case with which questions about the whole runtime are asked, also what its scales and integers should be.
        """
        inputs, steps, name = case.request.inputs, case.reference_steps, case.case.name
        trace = record_reference(self.reference, inputs, steps, name, case.digest)
        tokens = greedy_tokens(trace)[:steps]
        floating = record_reference(self.checkpoint, inputs, steps, name, case.digest, tokens)
        tensors: dict[str, Tensor] = dict(trace)
        tensors |= {f"float/{logits}": floating[logits] for logits in logits_names(floating)}
        return Trace(tensors | (self.expected.tensors if case.first else {}), trace.provenance)

    def observed(self, runtime: Runtime) -> dict[str, Tensor]:
        """What the runtime's scales and integers are now."""
        quantization = runtime.quantization
        return {} if quantization is None else observed_quantization(quantization, self.checkpoint.model)
