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

from g4conformance.adopting.boundary import at_boundary
from g4conformance.adopting.capabilities import Capabilities
from g4conformance.cases import Case, load_cases, own_case, select_cases
from g4conformance.checkpoints.checkpoint import Checkpoint, LoadOptions
from g4conformance.checkpoints.files import checkpoint_folder, parameter_bytes
from g4conformance.checks import CHECKS
from g4conformance.errors import CaseError, ConformanceError
from g4conformance.fixtures import bundled_checkpoint, fixtures_folder
from g4conformance.judging.driving import how_driven
from g4conformance.judging.judge import Bench, judge
from g4conformance.judging.observation import Observation
from g4conformance.judging.observe import observe
from g4conformance.judging.support import lacking, refusals
from g4conformance.judging.verdict import Verdict
from g4conformance.known.entries import NOTHING, Declared
from g4conformance.known.file import load_declared
from g4conformance.known.review import require_possible
from g4conformance.prompts import ResolvedCase, resolve
from g4conformance.quantization.judging import QuantizedJudging
from g4conformance.quantization.schemes import DEFAULT
from g4conformance.reference.noise import Noise
from g4conformance.reference.otherwise import with_other_way
from g4conformance.reference.record import record_reference
from g4conformance.reference.selfcheck import calibrated_noise, measure_noise, require_sound
from g4conformance.runtime.contract import Runtime
from g4conformance.runtime.static import is_shipped
from g4conformance.trace import Trace
from g4conformance.vectors.elsewhere import CommandRuntime, Elsewhere, observe_command

# Noise is calibrated on one text that leaves the sliding window and one picture.
CALIBRATION_CASES = ("window-twice", "image-middle")
CALIBRATION_STEPS = 12
_TORCH_KERNELS = ("eager", "export")  # executors that run graphs by the kernels that run the reference


@dataclass(frozen=True)
class RunOptions:
    """What a run was asked to do; every field has the meaning of the command-line option of its name."""

    model: str | None = None
    load: LoadOptions = field(default_factory=LoadOptions)
    runtime: str | None = None
    known: str | None = None
    quant: str = DEFAULT
    executor: str = "eager"
    max_seq: int | None = None
    cases_file: str | None = None
    case_names: tuple[str, ...] = ()
    prompt: str | None = None
    images: tuple[str, ...] = ()
    decode_steps: int = 6
    gen_steps: int = 8
    runtime_command: str | None = None
    runtime_timeout: float = 600.0

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

    def declared(self) -> Declared:
        """What is known about the runtime.

        Raises:
            ConformanceError: the file is malformed, or names a case that there is not, or that its check cannot judge.
        """
        if self.known is None:
            return NOTHING
        declared = load_declared(Path(self.known))
        require_possible(declared, [*bundled_cases(), *self.all_cases()])
        return declared

    def all_cases(self) -> tuple[Case, ...]:
        """Every case that another may name: those of the cases file, or the bundled ones."""
        return load_cases(Path(self.cases_file)) if self.cases_file else bundled_cases()


def bundled_cases() -> tuple[Case, ...]:
    """The cases that come with the package."""
    return load_cases(fixtures_folder() / "cases.yaml")


class ConformanceSession:
    """Judges cases one by one. Traces are dropped once a case is judged; its verdicts stay.

    Raises:
        CaseError: a case does not fit the checkpoint or the layout; nothing was run then.
        ConformanceError: the runtime declares something that the contract does not know; nothing was run then.
        UnsoundReferenceError: the reference disagrees with itself; no runtime was judged then.
        ConformanceError: what is declared as known is malformed, or a declared budget is not wider than ours.
    """

    def __init__(self, checkpoint: Checkpoint, runtime: Runtime | Elsewhere, options: RunOptions) -> None:
        self.checkpoint, self.runtime, self.options = checkpoint, runtime, options
        if not isinstance(runtime, Elsewhere):
            at_boundary(runtime)  # a wrong declaration is found before anything is run
        self.max_seq = options.max_seq or checkpoint.facts.default_max_seq
        known = options.all_cases()
        self.cases = {case.name: self._resolve(case, known) for case in options.selected_cases()}
        first = next(iter(self.cases))
        self.cases[first] = replace(self.cases[first], first=True)
        noise = calibrated_noise(self._noisy(checkpoint), self._calibration_cases(), cache_folder())
        require_sound(noise)
        self.quantized = None if isinstance(runtime, Elsewhere) else QuantizedJudging.of_runtime(checkpoint, runtime)
        self.bench = self._with_declared(self._bench(noise))
        self._verdicts: dict[str, list[Verdict]] = {}

    def _noisy(self, checkpoint: Checkpoint) -> Checkpoint:
        """With another way of computing, where the runtime's graphs are not run by torch as the reference is."""
        own_kernels = self.options.executor in _TORCH_KERNELS and is_shipped(self.runtime)
        return checkpoint if own_kernels else with_other_way(checkpoint)

    def _bench(self, float_noise: Noise) -> Bench:
        facts, dtype = self.checkpoint.facts, self.checkpoint.options.dtype
        foreign = not is_shipped(self.runtime)
        if self.quantized is None:
            return Bench(facts, float_noise, dtype, foreign=foreign)
        noise = calibrated_noise(self.quantized.reference, self._calibration_cases(), cache_folder())
        scheme, steps = self.quantized.scheme.name, self.quantized.steps
        return Bench(facts, noise, dtype, scheme, float_noise, steps, foreign=foreign)

    def _with_declared(self, bench: Bench) -> Bench:
        """With what is known about the runtime in this setting."""
        declared = self.options.declared().within(bench.scheme, bench.dtype)
        for entry in declared.budgets:
            entry.applied(bench.budget(CHECKS[entry.scope.check]))  # refused now, whether or not a verdict needs it
        return replace(bench, declared=declared)

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
        max_seq = self.checkpoint.facts.default_max_seq
        return [
            resolve(case, self.checkpoint, max_seq=max_seq, decode_steps=CALIBRATION_STEPS, gen_steps=1)
            for case in select_cases(bundled_cases(), CALIBRATION_CASES)
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

    def judged(self, runtime: Runtime | Elsewhere, case: str, reference: Mapping[str, Tensor]) -> list[Verdict]:
        """The verdicts of any runtime on a case whose reference was recorded before; nothing of them is kept."""
        resolved = self.cases[case]
        observation = self.observed(runtime, resolved, reference)
        return judge(resolved, reference, observation, self.bench, lambda: self.own_noise(resolved))

    def observed(
        self, runtime: Runtime | Elsewhere, case: ResolvedCase, reference: Mapping[str, Tensor]
    ) -> Observation:
        """What the runtime yields for a case: nothing if it does not support what the case needs.

        Of the run's first case also what concerns the whole runtime: whether it refuses what it does not support, and a
        quantized one's scales and integers.
        """
        if isinstance(runtime, Elsewhere):
            assert isinstance(runtime, CommandRuntime), "a runtime that nobody can ask"
            return observe_command(runtime, case, reference, self.checkpoint)
        facts = self.checkpoint.facts
        if unsupported := lacking(runtime, case, facts):
            observation = Observation(unsupported=", ".join(unsupported))
        else:
            observation = observe(runtime, case, reference, facts)
        if case.first:
            observation.accumulated |= refusals(runtime, self.cases.values(), reference, facts)
            if self.quantized is not None:
                observation.isolated |= self.quantized.observed(runtime)
        return observation

    def own_noise(self, case: ResolvedCase) -> Noise:
        """The noise, on this very case, of the reference that judges."""
        return measure_noise(
            self._noisy(self.checkpoint) if self.quantized is None else self.quantized.reference, [case]
        )

    def requantized(self, runtime: Runtime) -> ConformanceSession:
        """This session with a reference for the scales and integers that `runtime` has now; noise stays."""
        session = copy.copy(self)
        assert self.quantized is not None
        session.quantized = self.quantized.of(runtime)
        return session

    @property
    def _runtime_setting(self) -> dict[str, Any]:
        """What the report says about the runtime: how it was driven, and what it declares not to support."""
        if isinstance(self.runtime, Elsewhere):
            return {"runtime": self.runtime.name, "driven": "", "unsupported": []}
        return {
            "runtime": type(self.runtime).__name__,
            "driven": how_driven(at_boundary(self.runtime)),
            "unsupported": list(Capabilities(self.runtime).refused),
        }

    @property
    def setting(self) -> dict[str, Any]:
        """What the report says about the run as a whole."""
        load, noise = self.checkpoint.options, self.bench.noise
        return {
            "model": self.checkpoint.name,
            **self._runtime_setting,
            "checkpoint_digest": self.checkpoint.digest,
            "dtype": load.dtype,
            "device": load.device,
            "attn": load.attn_implementation,
            "image_backend": load.image_backend,
            "quant": self.bench.scheme,
            "executor": self.options.executor if is_shipped(self.runtime) else "the runtime itself",
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
