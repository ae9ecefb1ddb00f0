"""The one error that users see: what was expected, what was found, what to do."""

from __future__ import annotations


class ConformanceError(Exception):
    """A problem with an input that its owner can mend, told in one paragraph.

    Args:
        expected: what the suite needs, as a clause without a full stop.
        found: what it met instead.
        remedy: what the user can do about it.
    """

    def __init__(self, expected: str, found: str, remedy: str) -> None:
        super().__init__(expected, found, remedy)
        self.expected, self.found, self.remedy = expected, found, remedy

    def __str__(self) -> str:
        return f"expected {self.expected}, found {self.found}. {self.remedy}"


class CheckpointError(ConformanceError):
    """The checkpoint is missing, damaged, of another architecture, or of a kind that is not supported."""


class CaseError(ConformanceError):
    """A case is unknown, malformed, or does not fit the layout."""


class VectorsError(ConformanceError):
    """Vectors or a trace on disk are damaged, incomplete, or of another checkpoint, case or format version."""


class LayoutError(ConformanceError):
    """An input does not fit the static layout, or the layout itself is impossible."""


class UnsoundReferenceError(ConformanceError):
    """The Hugging Face reference disagrees with itself, or produced values that are not finite."""


class LoweringError(ConformanceError):
    """An executor cannot lower a graph.

    Args:
        graph: the graph's name.
        executor: the executor's name.
        op: the op that it stumbled over, where that can be known.
        cause: the first line of what it said.
    """

    def __init__(self, graph: str, executor: str, op: str | None, cause: str) -> None:
        at = "" if op is None else f" at op {op}"
        super().__init__(
            f"graph `{graph}` to be lowered by executor {executor}",
            f"a failure{at}: {cause}",
            "Choose another executor, or declare this a known failure with a link to its report.",
        )
        self.args = (graph, executor, op, cause)  # what pickle makes it of again
        self.graph, self.executor, self.op, self.cause = graph, executor, op, cause
