"""Starts the foreign side: `PYTHON .../g4conformance/runtimes/mlx [options] CHECKPOINT FOLDER`."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path


def find_package() -> None:
    """Lets `g4conformance` be imported from where this file lies, where it is not installed.

    The folder above it is kept off the path: it may hold packages of another environment, which mlx-vlm would find.
    """
    if importlib.util.find_spec("g4conformance") is not None:
        return
    root = Path(__file__).resolve().parents[2]
    spec = importlib.util.spec_from_file_location(
        "g4conformance", root / "__init__.py", submodule_search_locations=[str(root)]
    )
    assert spec is not None
    assert spec.loader is not None
    sys.modules["g4conformance"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


def main() -> None:
    find_package()
    from g4conformance.foreign import serve
    from g4conformance.runtimes.mlx.changes import CHANGES
    from g4conformance.runtimes.mlx.side import Side

    parser = argparse.ArgumentParser(prog="mlx", description="mlx-vlm as a runtime under test")
    parser.add_argument("checkpoint", type=Path, help="a checkpoint in the published layout")
    parser.add_argument("folders", nargs="+", help="a request's folder; or recorded vectors, and where to answer them")
    parser.add_argument("--change", action="append", default=[], choices=CHANGES, help="what to do otherwise")
    options = parser.parse_args()
    serve(Side(options.checkpoint, frozenset(options.change)), options.folders)


if __name__ == "__main__":
    main()
