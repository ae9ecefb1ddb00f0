"""Judges a runtime on cases, and each of its findings once more with what is said to make it vanish."""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Sequence
from typing import Any

import torch

from g4conformance.checkpoints.checkpoint import Checkpoint, load_checkpoint
from g4conformance.faults.patching import Patch
from g4conformance.fixtures import bundled_checkpoint
from g4conformance.judging.verdict import Verdict
from g4conformance.runtime.contract import Runtime
from g4conformance.session import ConformanceSession, RunOptions
from g4conformance.vectors.elsewhere import Elsewhere
from tools.runtimes.commands import BEHIND, command
from tools.runtimes.findings import Finding, load_findings
from tools.runtimes.interventions import INTERVENTIONS

IN_PROCESS = {"codex": "gemma4-pytorch-codex", "claude": "gemma4-pt-claude", "tico": "tico"}
RUNTIMES = IN_PROCESS | {name: behind.package for name, behind in BEHIND.items()}
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


def judged(name: str, cases: Sequence[str] = ()) -> dict[str, Any]:
    """What the page needs of a runtime, as plain data: setting, verdicts, and findings before and after.

    Without `cases`, it is judged on each feature once, and on what it is told of in findings.
    """
    torch.set_num_threads(1)
    checkpoint = load_checkpoint(bundled_checkpoint())
    told = [finding for finding in load_findings() if finding.runtime == name]
    asked = cases or tuple(dict.fromkeys((*CASES, *(finding.case for finding in told))))
    session = _session(checkpoint, _made(name, checkpoint), asked)
    verdicts = [verdict for case in session.cases for verdict in session.verdicts(case)]
    mine = [finding for finding in told if finding.case in session.cases]
    return {
        "runtime": name,
        "package": f"{RUNTIMES[name]} {_version(name)}",
        "setting": session.setting,
        "cases": list(session.cases),
        "verdicts": [verdict.as_dict() for verdict in verdicts],
        "findings": [_tried(finding, checkpoint, verdicts) for finding in mine],
    }


def _version(name: str) -> str:
    return BEHIND[name].version() if name in BEHIND else importlib.metadata.version(RUNTIMES[name])


def _made(name: str, checkpoint: Checkpoint, instead: Sequence[str] = ()) -> Runtime | Elsewhere:
    """`instead`: interventions of a runtime behind a command."""
    if name in BEHIND:
        return command(name, checkpoint, instead)
    runtime: Runtime = importlib.import_module(f"g4conformance.runtimes.{name}").make(checkpoint)
    return runtime


def _session(checkpoint: Checkpoint, runtime: Runtime | Elsewhere, cases: Sequence[str]) -> ConformanceSession:
    return ConformanceSession(checkpoint, runtime, RunOptions(quant="none", case_names=tuple(cases)))


def _tried(finding: Finding, checkpoint: Checkpoint, verdicts: Sequence[Verdict]) -> dict[str, Any]:
    tried: dict[str, Any] = {"id": finding.id, "before": _of(finding, verdicts).as_dict()}
    if finding.intervention:
        with Patch() as patch:
            runtime = _made(finding.runtime, checkpoint, finding.instead)
            if finding.id in INTERVENTIONS:
                INTERVENTIONS[finding.id](runtime, checkpoint, patch)
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
