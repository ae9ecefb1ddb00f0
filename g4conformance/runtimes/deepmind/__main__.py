"""The foreign side of google-deepmind's gemma: `PYTHON THIS_FOLDER [--instead NAME] CHECKPOINT FOLDER`.

PYTHON is that of an environment with gemma; g4conformance need not be installed there. CHECKPOINT is in the published
layout.
"""

from __future__ import annotations

import argparse
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
    from g4conformance.runtimes.deepmind.answering import Side
    from g4conformance.runtimes.deepmind.instead import INSTEAD

    parser = argparse.ArgumentParser(prog="deepmind", description="google-deepmind's gemma as a runtime under test")
    parser.add_argument("--instead", choices=INSTEAD, action="append", default=[], help="an intervention")
    parser.add_argument("checkpoint", type=Path, help="a folder in the published layout")
    parser.add_argument("folders", nargs="+", help="a request's folder; or recorded vectors, and where to answer them")
    options = parser.parse_args()
    serve(Side(options.checkpoint, options.instead), options.folders)


if __name__ == "__main__":
    main()
