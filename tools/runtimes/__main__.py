"""Judges a real runtime and tries what makes its disagreements vanish, or writes the page about all of them.

    python -m tools.runtimes run --runtime codex --out codex.json
    python -m tools.runtimes page codex.json claude.json tico.json --out docs/runtimes.md

`run` needs the runtime's extra and takes minutes; `page` needs nothing but what `run` wrote.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from tools.runtimes.page import page
from tools.runtimes.run import RUNTIMES, judged


def main() -> int:
    options = _options()
    if options.command == "run":
        found = judged(options.runtime, tuple(options.case))
        options.out.write_text(json.dumps(found, indent=1))
    else:
        options.out.write_text(page([json.loads(path.read_text()) for path in options.files]))
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.runtimes", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="judge a runtime and try interventions; writes JSON")
    run.add_argument("--runtime", choices=RUNTIMES, required=True)
    run.add_argument("--case", action="append", default=[], metavar="NAME", help="only this case; may be repeated")
    run.add_argument("--out", type=Path, required=True, metavar="FILE.json")
    write = commands.add_parser("page", help="write Markdown from what runs wrote")
    write.add_argument("files", type=Path, nargs="+", metavar="FILE.json")
    write.add_argument("--out", type=Path, required=True, metavar="FILE.md")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
