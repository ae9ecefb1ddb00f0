"""Starts the foreign side: `PYTHON .../g4conformance/runtimes/llama [options] text.gguf FOLDER`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from g4conformance.foreign import Request
    from g4conformance.runtimes.llama.names import Trace


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
    from g4conformance.runtimes.llama.instead import INSTEAD
    from g4conformance.runtimes.llama.pictures import PictureRuntime
    from g4conformance.runtimes.llama.text import TextRuntime

    parser = argparse.ArgumentParser(prog="llama", description="llama.cpp as a runtime under test")
    parser.add_argument("--mmproj", help="the GGUF file of the vision tower; without it, prompts with pictures raise")
    parser.add_argument("--instead", action="append", default=[], choices=INSTEAD, help="an intervention")
    parser.add_argument("model", metavar="text.gguf")
    parser.add_argument("folders", nargs="+", help="a request's folder; or recorded vectors, and where to answer them")
    options = parser.parse_args()

    def run(request: Request) -> Trace:
        if not request.images:
            return TextRuntime(options.model, request.max_seq, options.instead).answer(request)
        if options.mmproj is None:
            raise NotImplementedError("a prompt with a picture needs --mmproj")
        runtime = PictureRuntime(options.model, options.mmproj, request.max_seq, options.instead)
        return runtime.answer_picture(request)

    serve(run, options.folders)


if __name__ == "__main__":
    main()
