"""Judges a runtime on cases, and each of its findings once more with what is said to make it vanish."""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Sequence
from typing import Any

import torch

from g4conformance.checkpoints.checkpoint import Checkpoint, load_checkpoint
from g4conformance.checkpoints.published import published_folder
from g4conformance.faults.patching import Patch
from g4conformance.fixtures import bundled_checkpoint
from g4conformance.judging.verdict import Verdict
from g4conformance.runtime.contract import Runtime
from g4conformance.session import ConformanceSession, RunOptions, cache_folder
from g4conformance.vectors.elsewhere import CommandRuntime
from tools.runtimes.elsewhere import ENVIRONMENTS, INSTEAD, command, version
from tools.runtimes.findings import Finding, load_findings
from tools.runtimes.interventions import INTERVENTIONS

RUNTIMES = {"codex": "gemma4-pytorch-codex", "claude": "gemma4-pt-claude", "tico": "tico"}
# Every feature once; the others repeat it at other lengths.
CASES = (
    "text-only",
    "window-twice",
    "odd-text",
    "vocabulary-1",
    "image-first",
    "image-middle",
    "image-panorama",
    "image-tower",
    "system-turn",
    "fills-while-decoding",
)


def judged(name: str, cases: Sequence[str] = (), python: str = "") -> dict[str, Any]:
    """What the page needs of a runtime, as plain data: setting, verdicts, and findings before and after.

    Args:
        cases: if none, each feature once, and those on which something was found.
        python: the interpreter of a runtime's own environment.
    """
    torch.set_num_threads(1)
    checkpoint = load_checkpoint(bundled_checkpoint())
    told = [finding for finding in load_findings() if finding.runtime == name]
    session = _session(checkpoint, _made(name, checkpoint, python), cases or _all_cases(told))
    verdicts = [verdict for case in session.cases for verdict in session.verdicts(case)]
    mine = [finding for finding in told if finding.case in session.cases]
    return {
        "runtime": name,
        "package": _package(name, python),
        "setting": session.setting,
        "cases": list(session.cases),
        "verdicts": [verdict.as_dict() for verdict in verdicts],
        "findings": [_tried(finding, checkpoint, verdicts, python) for finding in mine],
    }


def _all_cases(told: Sequence[Finding]) -> tuple[str, ...]:
    return tuple(dict.fromkeys((*CASES, *(finding.case for finding in told))))


def _package(name: str, python: str) -> str:
    if name in ENVIRONMENTS:
        return f"{ENVIRONMENTS[name].package} {version(name, python)}"
    return f"{RUNTIMES[name]} {importlib.metadata.version(RUNTIMES[name])}"


def _made(name: str, checkpoint: Checkpoint, python: str, instead: str | None = None) -> Runtime | CommandRuntime:
    if name in ENVIRONMENTS:
        folder = published_folder(checkpoint.name, cache_folder())
        return CommandRuntime(command(name, python, folder, instead), timeout=600.0)
    runtime: Runtime = importlib.import_module(f"g4conformance.runtimes.{name}").make(checkpoint)
    return runtime


def _session(checkpoint: Checkpoint, runtime: Runtime | CommandRuntime, cases: Sequence[str]) -> ConformanceSession:
    return ConformanceSession(checkpoint, runtime, RunOptions(quant="none", case_names=tuple(cases)))


def _tried(finding: Finding, checkpoint: Checkpoint, verdicts: Sequence[Verdict], python: str) -> dict[str, Any]:
    tried: dict[str, Any] = {"id": finding.id, "before": _of(finding, verdicts).as_dict()}
    if finding.id in INTERVENTIONS or finding.id in INSTEAD:
        runtime = _made(finding.runtime, checkpoint, python, INSTEAD.get(finding.id))
        with Patch() as patch:
            if (intervene := INTERVENTIONS.get(finding.id)) is not None:
                intervene(runtime, checkpoint, patch)
            after = _session(checkpoint, runtime, [finding.case]).verdicts(finding.case)
        tried["after"] = _of(finding, after).as_dict()
        tried["also_cured"] = sorted(_failing(verdicts, finding.case) - _failing(after, finding.case))
    return tried


def _of(finding: Finding, verdicts: Sequence[Verdict]) -> Verdict:
    """The finding's verdict; a stage whose inputs were the reference's has one for both modes."""
    found = [v for v in verdicts if (v.check, v.case) == (finding.check, finding.case)]
    return next((v for v in found if v.mode is finding.mode), found[0])


def _failing(verdicts: Sequence[Verdict], case: str) -> set[str]:
    return {verdict.check for verdict in verdicts if verdict.case == case and verdict.failed}
