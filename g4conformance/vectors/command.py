"""What `g4conformance record` and `g4conformance compare` do: write vectors; judge traces against them."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

import psutil
from rich.console import Console

from g4conformance.checkpoints.checkpoint import LoadOptions, load_checkpoint
from g4conformance.checkpoints.files import checkpoint_digest, checkpoint_folder
from g4conformance.errors import ConformanceError
from g4conformance.foreign import INDEX
from g4conformance.quantization.schemes import NONE
from g4conformance.report.files import require_writable, write_report
from g4conformance.report.progress import progress_bar
from g4conformance.report.summary import summary_text
from g4conformance.session import RunOptions, require_enough_memory
from g4conformance.vectors.compare import answers_in, conforms, failure_texts, judge_answers, setting_of_comparison
from g4conformance.vectors.files import read_json
from g4conformance.vectors.reading import open_vectors
from g4conformance.vectors.record import record_vectors


def run_record(args: argparse.Namespace) -> tuple[int, str]:
    """Records vectors into `--out`; returns the exit status and what to print.

    Raises:
        ConformanceError: a checkpoint or case that cannot be used, or an unsuitable `--out`.
    """
    options = _options(args)
    out = Path(args.out)
    if out.exists() and not out.is_dir():
        raise ConformanceError("a folder to record into", f"{out}, which is a file", "Check --out.")
    options.selected_cases()
    require_enough_memory(options, 1, psutil.virtual_memory().available)
    checkpoint = load_checkpoint(options.checkpoint, options.load)
    kept = recorded = 0
    with progress_bar() as progress:
        task = progress.add_task("recording", total=len(options.selected_cases()))
        for name, was_whole in record_vectors(checkpoint, options, out):
            kept, recorded = kept + was_whole, recorded + (not was_whole)
            progress.update(task, advance=1, description=name)
    return 0, f"{out}: {recorded} cases recorded, {kept} kept"


def run_compare(args: argparse.Namespace, colour: bool) -> tuple[int, str]:
    """Judges `mine` against `vectors`; returns the exit status and what to print.

    Raises:
        ConformanceError: vectors or traces that are refused.
    """
    folder, mine = Path(args.vectors), Path(args.mine)
    if args.report is not None:
        require_writable(Path(args.report))
    model = None if args.model is None else checkpoint_digest(checkpoint_folder(args.model))
    vectors = open_vectors(folder, args.case, model)
    answers = answers_in(mine, vectors, list(read_json(folder / INDEX)["cases"]))
    verdicts = []
    with progress_bar() as progress:
        for of_case in progress.track(judge_answers(vectors, answers), total=len(vectors), description="judging"):
            verdicts += of_case
    setting = setting_of_comparison(vectors, mine)
    if args.report is not None:
        write_report(Path(args.report), verdicts, setting)
    repeat = f"g4conformance compare {shlex.quote(args.vectors)} {shlex.quote(args.mine)}"
    texts = failure_texts(verdicts, repeat)
    return 0 if conforms(verdicts) else 1, "\n".join([*texts, summary_text(verdicts, setting, len(texts), colour)])


def colour_wanted() -> bool:
    """Whether the terminal shows colours."""
    return Console().is_terminal


def _options(args: argparse.Namespace) -> RunOptions:
    if args.quant != NONE:
        raise ConformanceError(
            "--quant none: the reference of a quantized runtime has the scales of that very runtime",
            f"--quant {args.quant}",
            "Record without --quant; judge a quantized runtime with pytest or `g4conformance verify`.",
        )
    return RunOptions(
        model=args.model,
        load=LoadOptions(args.dtype, args.device, args.attn, args.image_backend),
        quant=NONE,
        max_seq=args.max_seq,
        cases_file=args.cases,
        case_names=tuple(args.case),
        decode_steps=args.decode_steps,
        gen_steps=args.gen_steps,
    )
