"""The suite's options: declared for pytest and the command line, read, and looked at before any model is loaded.

Nothing heavy is imported here before a run speaks of the suite.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from g4conformance.session import RunOptions

SCHEMES = ("w8a16", "w8a8", "w4a16", "w8", "none")
EXECUTORS = ("eager", "export", "onnxruntime", "executorch", "inductor")
DTYPES = ("float32", "bfloat16", "float16")
_PATH_OPTIONS = ("--model", "--cases", "--image", "--report", "--known")
_SUITE_OPTIONS = (*_PATH_OPTIONS, "--runtime", "--runtime-command", "--quant", "--executor", "--case", "--prompt")
_KNOWN = "conformance.toml"
_EARLY = pytest.StashKey["RunOptions"]()


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def non_negative(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"must not be negative, got {value}")
    return value


def positive_number(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a positive number, got {text}")
    return value


def add_options(add: Any) -> None:
    """Declares the suite's options with `add`, which takes what `argparse`'s add_argument takes."""
    add_reference_options(add)
    add("--quant", choices=SCHEMES, help=f"quantization scheme of the shipped runtime (default: {SCHEMES[0]})")
    add("--executor", choices=EXECUTORS, help=f"what runs the shipped runtime's graphs (default: {EXECUTORS[0]})")
    add("--runtime", metavar="MODULE:FACTORY", help="judge a runtime of yours: what factory(checkpoint) makes")
    add("--runtime-command", metavar="COMMAND", help="judge what this command answers to each case's folder")
    add(
        "--runtime-timeout",
        type=positive_number,
        metavar="SECONDS",
        default=600.0,
        help="how long the command may take for one case (default: 600)",
    )
    add("--known", metavar="FILE", help=f"known failures (default: {_KNOWN} where pytest is called, or in its rootdir)")
    add("--prompt", help="judge this prompt instead of the cases; {image} marks a picture's place")
    add("--image", action="append", default=[], metavar="FILE", help="a picture for --prompt; may be repeated")
    add_report_option(add)


def add_report_option(add: Any) -> None:
    add("--report", metavar="FILE", help="also write the verdicts to FILE, as JSON (.json) or a page (.html)")


def add_reference_options(add: Any) -> None:
    """Declares what the reference is, and which cases it runs."""
    add("--model", metavar="PATH_OR_ID", help="checkpoint folder or Hub id (default: the bundled tiny checkpoint)")
    add("--dtype", choices=DTYPES, default="float32", help="dtype of reference and runtime (default: float32)")
    add("--device", default="cpu", help="torch device of reference and runtime (default: cpu)")
    add("--attn", choices=("eager", "sdpa"), default="eager", help="attention implementation (default: eager)")
    add("--image-backend", choices=("torchvision", "pil"), default="torchvision", help="which image processor resizes")
    add("--max-seq", type=positive, help="rows of the static buffers (default: 2 windows + soft-token budget)")
    add("--case", action="append", default=[], metavar="NAME", help="judge only this case; may be repeated")
    add("--cases", metavar="FILE", help="a cases file of your own (YAML, see the bundled cases.yaml)")
    add("--decode-steps", type=non_negative, default=6, help="teacher-forced decode steps a case (default: 6)")
    add("--gen-steps", type=positive, default=8, help="new tokens to generate a case (default: 8)")


def join_path_options(args: list[str]) -> list[str]:
    """`--model PATH` as `--model=PATH`, and likewise the other options that take a path, where PATH exists."""
    joined: list[str] = []
    for arg in args:
        if joined and joined[-1] in _PATH_OPTIONS and Path(arg).expanduser().exists():
            joined[-1] += f"={arg}"
        else:
            joined.append(arg)
    return joined


def check_given_options(config: pytest.Config) -> None:
    """Checks early if the run speaks of the suite at all; a run of other tests imports nothing heavy for it."""
    if any(config.getoption(name) for name in _SUITE_OPTIONS):
        checked_early(config)


def checked_early(config: pytest.Config) -> RunOptions:
    """The run's options, after everything that can be known to be wrong without loading a model has been looked at.

    Raises:
        pytest.UsageError: one line, no traceback, as long as collection has not begun.
    """
    if _EARLY not in config.stash:
        config.stash[_EARLY] = _check_early(config)
    return config.stash[_EARLY]


def _check_early(config: pytest.Config) -> RunOptions:
    import psutil

    from g4conformance.checkpoints.files import checkpoint_folder, require_supported
    from g4conformance.errors import ConformanceError
    from g4conformance.executors.registry import require_expressible, require_installed
    from g4conformance.factory import load_factory
    from g4conformance.report.files import require_writable
    from g4conformance.session import require_enough_memory
    from g4conformance.vectors.elsewhere import require_command

    options = run_options(config)
    try:
        _require_one_runtime(config)
        if report := config.getoption("--report"):
            require_writable(Path(report))
        for case in options.selected_cases():
            case.load_images()
        if options.runtime_command is not None:
            require_command(options.runtime_command)
        require_expressible(options.executor, options.quant, options.load.dtype)
        require_installed(options.executor)
        if options.runtime is not None:
            load_factory(options.runtime)
        options.declared()
        require_supported(checkpoint_folder(options.checkpoint))
        workers = int(getattr(config.option, "numprocesses", None) or 1)
        require_enough_memory(options, workers, psutil.virtual_memory().available)
    except ConformanceError as error:
        raise pytest.UsageError(f"g4conformance: {error}") from None
    return options


def _require_one_runtime(config: pytest.Config) -> None:
    """Raises ConformanceError if several runtimes are asked for, or what only the shipped one can be told."""
    from g4conformance.errors import ConformanceError

    brought = [name for name in ("--runtime", "--runtime-command") if config.getoption(name)]
    shipped = [name for name in ("--quant", "--executor") if config.getoption(name)]
    if len(brought) > 1:
        raise ConformanceError(f"either {brought[0]} or {brought[1]}", "both", "Leave one out.")
    if brought and shipped:
        remedy = "A runtime of yours says itself whether it is quantized; leave one out."
        raise ConformanceError(f"either {brought[0]}, or the shipped runtime's {shipped[0]}", "both", remedy)


def run_options(config: pytest.Config) -> RunOptions:
    """The options of this pytest run."""
    from g4conformance.checkpoints.checkpoint import LoadOptions
    from g4conformance.session import RunOptions

    get = config.getoption
    command = get("--runtime-command")
    return RunOptions(
        model=get("--model"),
        load=LoadOptions(get("--dtype"), get("--device"), get("--attn"), get("--image-backend")),
        runtime=get("--runtime"),
        known=get("--known") or _known_nearby(config),
        quant=get("--quant") or ("none" if get("--runtime") or command else SCHEMES[0]),
        executor=get("--executor") or EXECUTORS[0],
        max_seq=get("--max-seq"),
        cases_file=get("--cases"),
        case_names=tuple(get("--case")),
        prompt=get("--prompt"),
        images=tuple(get("--image")),
        decode_steps=get("--decode-steps"),
        gen_steps=get("--gen-steps"),
        runtime_command=command,
        runtime_timeout=get("--runtime-timeout"),
    )


def _known_nearby(config: pytest.Config) -> str | None:
    """The file of known failures in the folder that pytest was called from, or in its rootdir."""
    folders = (config.invocation_params.dir, config.rootpath)
    return next((str(folder / _KNOWN) for folder in folders if (folder / _KNOWN).is_file()), None)
