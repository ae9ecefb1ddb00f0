"""The kill matrix as a page of the documentation, rendered from a run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from g4conformance.faults.absent import ABSENT
from g4conformance.faults.matrix import NAIVE, headline, margin_text
from g4conformance.faults.trial import Trial
from g4conformance.stages import Stage

_HEAD = """# The kill matrix

Rendered by `g4conformance faults --report docs/kill-matrix.md`; do not edit.

{headline}.

A fault is put into the shipped runtime and must turn *its* check of *its* stage red in isolation; later stages may
inherit it, an earlier or unrelated one may not turn red, and an exception is no kill. *Margin* is measured / allowed.
*Shown in* is the first tensor that the fault alters. The last column names what would not have noticed: the most likely
token after a short prompt, a PEIR of 1 % or a cosine of 0.999 of the last token's logits.
"""


def as_markdown(trials: Sequence[Trial]) -> str:
    return "\n".join([_HEAD.format(headline=headline(trials)), *_stages(trials), *_absent()]) + "\n"


def _stages(trials: Sequence[Trial]) -> Iterator[str]:
    for stage in Stage:
        own = [trial for trial in trials if trial.fault.stage is stage]
        if own:
            yield f"## {stage}\n"
            yield "| fault | mechanism | needs | check | margin | shown in | missed by |"
            yield "|---|---|---|---|---|---|---|"
            yield from map(_row, own)
            yield ""


def _row(trial: Trial) -> str:
    fault = trial.fault
    links = " ".join(f"[{number}]({link})" for number, link in enumerate(fault.links, start=1))
    needs = f"{fault.case}" + ("" if fault.needs.name == "BUNDLED" else f"; {fault.needs}")
    verdict = margin_text(trial) or f"**{trial.outcome}**"
    missed = ", ".join(name for name in NAIVE if name in trial.missed_by) or "none"
    boundary = " †" if fault.boundary else ""
    cells = (
        f"`{fault.id}`{boundary}",
        f"{fault.mechanism} {links}".strip(),
        needs,
        trial.killer,
        verdict,
        f"`{trial.shown_in}`",
        missed,
    )
    return f"| {' | '.join(cells)} |"


def _absent() -> Iterator[str]:
    yield "† Works at the contract's boundary: `g4conformance faults --runtime` puts it into any runtime.\n"
    yield "## Faults of the public catalogue that cannot exist here\n"
    yield "| fault | reason |"
    yield "|---|---|"
    yield from (f"| `{id}` | {reason} |" for id, reason in ABSENT.items())
