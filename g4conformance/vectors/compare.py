"""Judges a folder of traces against recorded vectors, with the checks and budgets of a run; no model is loaded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from g4conformance.errors import VectorsError
from g4conformance.foreign import TRACE
from g4conformance.judging.judge import judge
from g4conformance.judging.verdict import Status, Verdict
from g4conformance.judging.whole_trace import observation_of
from g4conformance.report.failure import failure_text
from g4conformance.vectors.answers import read_answer
from g4conformance.vectors.files import folder_name
from g4conformance.vectors.reading import CaseVectors


def answers_in(mine: Path, vectors: Sequence[CaseVectors], known: Sequence[str]) -> dict[str, dict[str, Tensor]]:
    """By case, the tensors of each trace in `mine`; a case that it has none for is left out.

    Args:
        known: names of all cases of the vectors, whether they are judged or not.

    Raises:
        VectorsError: there is no trace at all, one of a case that the vectors do not have, or one that `read_answer`
            refuses.
    """
    theirs = {path.parent.name for path in mine.glob(f"*/{TRACE}")}
    if strange := sorted(theirs - {folder_name(name) for name in known}):
        raise VectorsError("traces of recorded cases", f"{strange[0]!r} in {mine}", f"They are {', '.join(known)}.")
    answers = {
        vector.manifest["case"]["name"]: read_answer(mine / vector.folder.name, vector.identity)
        for vector in vectors
        if vector.folder.name in theirs
    }
    if not any(answers.values()):
        wanted = f"at least one <case>/{TRACE} in {mine}, with a tensor in it"
        raise VectorsError(wanted, "none", "Write traces as docs/vectors.md says.")
    return answers


def judge_answers(
    vectors: Sequence[CaseVectors], answers: Mapping[str, Mapping[str, Tensor]]
) -> Iterator[list[Verdict]]:
    """The verdicts of each case in turn; what an answer lacks is not observed."""
    for vector in vectors:
        yield _judged(vector, answers.get(vector.case.case.name, {}))


def _judged(vector: CaseVectors, answer: Mapping[str, Tensor]) -> list[Verdict]:
    reference, bench = vector.reference(), vector.bench
    observation = observation_of(answer, vector.case, reference, bench.facts)
    return judge(vector.case, reference, observation, bench, lambda: vector.own_noise)


def setting_of_comparison(vectors: Sequence[CaseVectors], mine: Path) -> dict[str, Any]:
    """What the report says about the comparison as a whole; keys as in a run of the suite."""
    first = vectors[0].manifest
    told = dict(first["provenance"])
    return {
        "model": told.pop("model"),
        "runtime": mine.name or str(mine),
        "checkpoint_digest": first["checkpoint_digest"],
        "quant": told.pop("scheme"),
        "executor": "another program",
        "max_seq": first["request"]["layout"]["max_seq"],
        **told,
        "reference_peir": dict(vectors[0].noise.worst_peir),
    }


def failure_texts(verdicts: Sequence[Verdict], repeat: str) -> list[str]:
    """One text a failed check and case, in the order of cases and stages.

    Args:
        repeat: the command that made the verdicts; `--case` is added to it.
    """
    texts = []
    for case in dict.fromkeys(v.case for v in verdicts):
        of_case = [v for v in verdicts if v.case == case]
        for check in dict.fromkeys(v.check for v in of_case if v.failed):
            own = [v for v in of_case if v.check == check]
            texts.append(failure_text(own, of_case, f"{repeat} --case {case}"))
    return texts


def conforms(verdicts: Sequence[Verdict]) -> bool:
    """Whether something was judged, and nothing of it is wrong."""
    judged = [v for v in verdicts if v.status not in (Status.NOT_APPLICABLE, Status.NOT_OBSERVED)]
    return bool(judged) and not any(v.failed for v in judged)
