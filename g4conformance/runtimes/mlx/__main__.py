"""Starts the foreign side: `PYTHON .../g4conformance/runtimes/mlx [options] CHECKPOINT FOLDER`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from types import ModuleType


def find_package() -> None:
    """Lets modules of `g4conformance` be imported by their names, without its own `__init__`.

    The folder that it lies in is kept off the path: packages of another environment lie there, too.
    """
    package = ModuleType("g4conformance")
    package.__path__ = [str(Path(__file__).resolve().parents[2])]
    sys.modules["g4conformance"] = package


def main() -> None:
    find_package()
    from g4conformance.foreign import serve
    from g4conformance.runtimes.mlx.instead import INSTEAD
    from g4conformance.runtimes.mlx.side import Side

    parser = argparse.ArgumentParser(prog="mlx", description="mlx-vlm as a runtime under test")
    parser.add_argument("checkpoint", type=Path, help="a checkpoint in the published layout")
    parser.add_argument("folders", nargs="+", help="a request's folder; or recorded vectors, and where to answer them")
    parser.add_argument("--instead", action="append", default=[], choices=INSTEAD, help="an intervention")
    options = parser.parse_args()
    serve(Side(options.checkpoint, frozenset(options.instead)), options.folders)


if __name__ == "__main__":
    main()
