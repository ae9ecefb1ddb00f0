"""One conformance run: a checkpoint, a runtime, and the verdicts of each case, made once when first asked for."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import platformdirs
import torch
import transformers
from torch import Tensor

from g4conformance.cases import Case, load_cases, own_case, select_cases
from g4conformance.checkpoints.checkpoint import Checkpoint, LoadOptions
from g4conformance.checkpoints.files import checkpoint_folder, parameter_bytes
from g4conformance.errors import CaseError, ConformanceError
from g4conformance.fixtures import bundled_checkpoint, fixtures_folder
from g4conformance.judging.judge import Bench, judge
from g4conformance.judging.observation import Observation
from g4conformance.judging.observe import observe
from g4conformance.judging.verdict import Verdict
from g4conformance.prompts import ResolvedCase, resolve
from g4conformance.quantization.judging import QuantizedJudging
from g4conformance.quantization.schemes import DEFAULT
from g4conformance.reference.noise import Noise
from g4conformance.reference.otherwise import with_other_way
from g4conformance.reference.record import record_reference
from g4conformance.reference.selfcheck import calibrated_noise, measure_noise, require_sound
from g4conformance.runtime.contract import Runtime
from g4conformance.runtime.static import StaticGemma4Runtime
from g4conformance.trace import Trace

# Noise is calibrated on one text that leaves the sliding window and one picture.
CALIBRATION_CASES = ("window-twice", "image-middle")
CALIBRATION_STEPS = 12


@dataclass(frozen=True)
class RunOptions:
    """What a run was asked to do; every field has the meaning of the command-line option of its name."""

    model: str | None = None
    load: LoadOptions = field(default_factory=LoadOptions)
    quant: str = DEFAULT
    executor: str = "eager"
    max_seq: int | None = None
    cases_file: str | None = None
    case_names: tuple[str, ...] = ()
    prompt: str | None = None
    images: tuple[str, ...] = ()
    decode_steps: int = 6
    gen_steps: int = 8

    @property
    def checkpoint(self) -> str:
        return self.model or str(bundled_checkpoint())

    def selected_cases(self) -> tuple[Case, ...]:
        """The cases to judge.

        Raises:
            CaseError: unreadable cases file, or unknown case.
        """
        if self.prompt is not None or self.images:
            if self.case_names or self.cases_file:
                raise CaseError("either --prompt and --image, or --case and --cases", "both", "Leave one out.")
            return (own_case(self.prompt or "", self.images),)
        return select_cases(self.all_cases(), self.case_names)

    def all_cases(self) -> tuple[Case, ...]:
        """Every case that another may name: those of the cases file, or the bundled ones."""
        return load_cases(Path(self.cases_file) if self.cases_file else fixtures_folder() / "cases.yaml")


class ConformanceSession:
    """Judges cases one by one. Traces are dropped once a case is judged; its verdicts stay.

    Raises:
        CaseError: a case does not fit the checkpoint or the layout; nothing was run then.
        UnsoundReferenceError: the reference disagrees with itself; no runtime was judged then.
    """

    def __init__(self, checkpoint: Checkpoint, runtime: Runtime, options: RunOptions) -> None:
        self.checkpoint, self.runtime, self.options = checkpoint, runtime, options
        self.max_seq = options.max_seq or checkpoint.facts.default_max_seq
        known = options.all_cases()
        self.cases = {case.name: self._resolve(case, known) for case in options.selected_cases()}
        first = next(iter(self.cases))
        self.cases[first] = replace(self.cases[first], first=True)
        noise = calibrated_noise(self._noisy(checkpoint), self._calibration_cases(), cache_folder())
        require_sound(noise)
        self.quantized = QuantizedJudging.of_runtime(checkpoint, runtime)
        self.bench = self._bench(noise)
        self._verdicts: dict[str, list[Verdict]] = {}

    def _noisy(self, checkpoint: Checkpoint) -> Checkpoint:
        """With another way of computing, where the runtime does not run the reference's modules by torch as it does."""
        if self.options.executor == "eager" and not self.foreign:
            return checkpoint
        return with_other_way(checkpoint, self.foreign)

    @property
    def foreign(self) -> bool:
        """Whether the runtime's code is its own; the shipped one's graphs are made of the reference's modules."""
        return not isinstance(self.runtime, StaticGemma4Runtime)

    def _bench(self, float_noise: Noise) -> Bench:
        facts, dtype = self.checkpoint.facts, self.checkpoint.options.dtype
        if self.quantized is None:
            return Bench(facts, float_noise, dtype, foreign=self.foreign)
        noise = calibrated_noise(self.quantized.reference, self._calibration_cases(), cache_folder())
        return Bench(facts, noise, dtype, self.quantized.scheme.name, float_noise, self.quantized.steps)

    def _resolve(self, case: Case, known: Sequence[Case]) -> ResolvedCase:
        options = self.options
        return resolve(
            case,
            self.checkpoint,
            max_seq=self.max_seq,
            decode_steps=options.decode_steps,
            gen_steps=options.gen_steps,
            all_cases=known,
        )

    def _calibration_cases(self) -> list[ResolvedCase]:
        """Always the same two bundled cases at their own lengths, whatever the run judges."""
        bundled = load_cases(fixtures_folder() / "cases.yaml")
        max_seq = self.checkpoint.facts.default_max_seq
        return [
            resolve(case, self.checkpoint, max_seq=max_seq, decode_steps=CALIBRATION_STEPS, gen_steps=1)
            for case in select_cases(bundled, CALIBRATION_CASES)
        ]

    def verdicts(self, case: str) -> list[Verdict]:
        """The verdicts of a case, in the order of the stages; runs reference and runtime the first time."""
        if case not in self._verdicts:
            self._verdicts[case] = self.judged(self.runtime, case, self.reference(case))
        return self._verdicts[case]

    def reference(self, case: str) -> Trace:
        """The reference's trace of a case, recorded at every call."""
        resolved = self.cases[case]
        if self.quantized is not None:
            return self.quantized.record(resolved)
        inputs = resolved.request.inputs
        return record_reference(self.checkpoint, inputs, resolved.reference_steps, case, resolved.digest)

    def judged(self, runtime: Runtime, case: str, reference: Mapping[str, Tensor]) -> list[Verdict]:
        """The verdicts of any runtime on a case whose reference was recorded before; nothing of them is kept."""
        resolved = self.cases[case]
        observation = self.observed(runtime, resolved, reference)
        return judge(resolved, reference, observation, self.bench, lambda: self.own_noise(resolved))

    def observed(self, runtime: Runtime, case: ResolvedCase, reference: Mapping[str, Tensor]) -> Observation:
        """What the runtime yields for a case; of the run's first one, a quantized runtime's scales and integers too."""
        observation = observe(runtime, case, reference, self.checkpoint.facts)
        if self.quantized is not None and case.first:
            observation.isolated |= self.quantized.observed(runtime)
        return observation

    def own_noise(self, case: ResolvedCase) -> Noise:
        """The noise, on this very case, of the reference that judges."""
        return measure_noise(
            self._noisy(self.checkpoint) if self.quantized is None else self.quantized.reference, [case]
        )

    def requantized(self) -> ConformanceSession:
        """This session with a reference for the scales and integers that its runtime has now; noise stays."""
        session = copy.copy(self)
        assert self.quantized is not None
        session.quantized = self.quantized.of(self.runtime)
        return session

    @property
    def setting(self) -> dict[str, Any]:
        """What the report says about the run as a whole."""
        load, noise = self.checkpoint.options, self.bench.noise
        return {
            "model": self.checkpoint.name,
            "runtime": type(self.runtime).__name__,
            "checkpoint_digest": self.checkpoint.digest,
            "dtype": load.dtype,
            "device": load.device,
            "attn": load.attn_implementation,
            "image_backend": load.image_backend,
            "quant": self.bench.scheme,
            "executor": self.options.executor,
            "max_seq": self.max_seq,
            "threads": torch.get_num_threads(),
            "torch": str(torch.__version__),
            "transformers": transformers.__version__,
            "reference_peir": dict(noise.worst_peir),
        }


def cache_folder() -> Path:
    """Where calibrated noise is kept between runs; the variable XDG_CACHE_HOME moves it."""
    return Path(platformdirs.user_cache_dir("g4conformance"))


def require_enough_memory(options: RunOptions, workers: int, available: int) -> None:
    """Refuses a run whose models do not fit into memory; every worker loads its own.

    Args:
        available: free memory in bytes.

    Raises:
        ConformanceError: the checkpoint, in the dtype asked for, does not fit `workers` times.
    """
    needed = parameter_bytes(checkpoint_folder(options.checkpoint), options.load.dtype) * workers
    if needed > available:
        holders = f"{workers} workers, each with its own copy of the model" if workers > 1 else "the model"
        raise ConformanceError(
            f"{needed / 2**30:.1f} GiB of free memory for {holders}, in {options.load.dtype}",
            f"{available / 2**30:.1f} GiB",
            "Use fewer workers (-n), or --dtype bfloat16.",
        )
