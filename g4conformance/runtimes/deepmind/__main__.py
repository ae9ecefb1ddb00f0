"""The foreign side of google-deepmind's gemma: `python THIS_FOLDER CHECKPOINT REQUEST`.

The interpreter is one that has gemma, and no g4conformance. CHECKPOINT is a folder in the published layout.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType


def _find_g4conformance() -> None:
    """Makes its modules known by their names, without its own `__init__`, or anything else that lies beside it."""
    package = ModuleType("g4conformance")
    package.__path__ = [str(Path(__file__).resolve().parents[2])]
    sys.modules["g4conformance"] = package


def main() -> None:
    _find_g4conformance()
    from g4conformance.foreign import serve
    from g4conformance.runtimes.deepmind.answering import answer

    checkpoint = Path(sys.argv[1])
    serve(lambda request: answer(request, checkpoint), sys.argv[2:])


if __name__ == "__main__":
    main()
