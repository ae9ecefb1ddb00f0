"""docs/runtimes.md: what runs have found, as a table of runtimes and stages and an argument for each disagreement."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from g4conformance.judging.verdict import Status, Verdict
from g4conformance.stages import Stage
from tools.runtimes.findings import Finding, load_findings

_HEAD = """# Real runtimes under test

This page is made by `python -m tools.runtimes` from runs on the bundled checkpoint, in {dtype}, with eager attention,
torch {torch} and transformers {transformers}. Each runtime is driven as its users drive it, through the adapter of its
name in `g4conformance/runtimes/`, and judged at every stage that it exposes. One command runs one of them:

    pip install 'g4conformance[{first}]'
    g4conformance verify --runtime g4conformance.runtimes.{first}:make

Some runtimes live in an environment of their own, behind a command. A folder of `g4conformance/runtimes/` is the
foreign side of each, which its interpreter starts; below, `$SIDES` is

    SIDES=$(python -c 'import g4conformance.runtimes as runtimes; print(runtimes.__path__[0])')

Runtimes that read the published layout only get a copy in it, made once. `g4conformance checkpoint --layout legacy
--out FOLDER` writes one for others.

In the table, *worst* is the greatest measured difference in units of what is allowed, over all cases and both modes; a
stage that is wrong only because an earlier one is wrong has inherited that. What a runtime does not expose was not
observed: that is no pass.
"""

# How to start what is behind a command, and what its adapter has to tell it.
_BEHIND = {
    "deepmind": """\
The code of the model's authors, in JAX, behind a command. It wants Python 3.12 and an environment of its own:

    uv venv --python 3.12 deepmind
    uv pip install --python deepmind/bin/python 'gemma==4.0.1' 'sentencepiece<0.2.2' safetensors
    g4conformance checkpoint --layout legacy --out published
    g4conformance verify --runtime-command "deepmind/bin/python $SIDES/deepmind published"

The folder of the last command may be copied with `foreign.py` two levels above it; nothing else of g4conformance is
needed there. `Gemma4Sampler.sample` is called with the rendered prompt but for its `<bos>`, which the sampler adds, and
with buffers and padded prompts of `max_seq` rows. It runs compiled, and what its modules take and return comes out by
callbacks. Sizes, ids of special tokens and the vocabulary are told to it; it knows the published ones only. Two things
of the bundled checkpoint it cannot express: vision heads of another size than `d_model // num_heads`, which the adapter
overrides, and separate output bounds of K and V, and of gate and up, of which the wider are taken.

Sampler and vision tower are both told the checkpoint's `max_soft_tokens`. Left alone they do not agree: the samplers
say 1,120 and the towers 280, which then pool 6 by 6 patches where 3 by 3 are counted. Of the 1,064 soft tokens of a
picture of 1,200 by 900 pixels, 798 are copies of the first.
""",
    "llama": """llama.cpp on a CPU, behind a command. llama-cpp-python is built from source, in tens of minutes on two
cores. The converter is in the same source; it wants torch and transformers, and takes a checkpoint as it is:

    pip download --no-deps --no-binary llama-cpp-python llama-cpp-python==0.3.36
    tar xf llama_cpp_python-0.3.36.tar.gz
    python -m venv llama
    llama/bin/pip install ./llama_cpp_python-0.3.36 safetensors
    CONVERT=llama_cpp_python-0.3.36/vendor/llama.cpp/convert_hf_to_gguf.py
    python $CONVERT CHECKPOINT --outtype f32 --outfile text.gguf
    python $CONVERT CHECKPOINT --outtype f32 --outfile mmproj.gguf --mmproj
    g4conformance verify \\
      --runtime-command "llama/bin/python $SIDES/llama --mmproj mmproj.gguf text.gguf"

`Llama` is used with its defaults and a context of `max_seq` rows: `tokenize`, `eval`, `create_completion` at
temperature 0, its greedy sampler, and `Gemma4ChatHandler` for a prompt with a picture. llama.cpp names every tensor of
its graphs to a callback, and those that the contract knows are copied: masks, the cache itself, logits. Of rotary
tables it has none; they are the angles by which it has turned queries. Without `--mmproj`, prompts with pictures raise
an error.

The bundled vision tower cannot be run (below). On a copy of the checkpoint whose vision heads are as wide as the hidden
size divided by their number, with random weights, case `image-middle` shows three things more. With K and V in float32:

- 80 soft tokens, not 63: a picture is resized if it is below 70 tokens or above 1,120, and not to the processor's
  `max_soft_tokens`. By design; mtmd has parameters for it, the chat handler has none (`--instead image-tokens`).
- Rows of a picture see each other both ways on sliding layers, unless the hidden size is 1,536 or 2,560, whatever
  `use_bidirectional_attention` says. A bug, which spares published checkpoints. Logits are off by 1.1, and by 0.0045
  without it (`--instead causal`).
- QuickGELU in the tower: the converter does not write which activation it has, and that is what clip takes then. A bug;
  the config says `gelu_pytorch_tanh`, and the model's authors' code has it. `visual_embeds` are off by 0.024, and by
  0.00032 with GELU in float32 (`--instead gelu`, which is in the decoder too: logits are then off by 2.1e-5).

Pixels of a picture that needs no resizing are equal.
""",
    "mlx": """mlx-vlm without a GPU, behind a command:

    python -m venv mlx
    mlx/bin/pip install mlx-vlm==0.7.10 mlx-lm==0.32.2 'mlx[cpu]'
    g4conformance checkpoint --layout legacy --out published
    g4conformance verify --runtime-command "mlx/bin/python $SIDES/mlx published"
""",
}

_STAGES = [stage for stage in Stage if stage is not Stage.QUANTIZATION]


def page(runs: Sequence[Mapping[str, Any]]) -> str:
    """Markdown of what `tools.runtimes.run.judged` returned for each runtime."""
    setting = runs[0]["setting"]
    parts = [_HEAD.format(first=runs[0]["runtime"], **{k: setting[k] for k in ("dtype", "torch", "transformers")})]
    parts.append(_table(runs))
    for run in runs:
        parts.append(_findings(run))
    return "\n".join(parts)


def _table(runs: Sequence[Mapping[str, Any]]) -> str:
    lines = ["| stage | " + " | ".join(str(run["package"]) for run in runs) + " |", "|---" * (len(runs) + 1) + "|"]
    verdicts = [[Verdict.from_dict(data) for data in run["verdicts"]] for run in runs]
    for stage in _STAGES:
        cells = [_cell([v for v in of_run if v.stage is stage]) for of_run in verdicts]
        lines.append(f"| {stage} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _cell(verdicts: Sequence[Verdict]) -> str:
    """The stage's own failures by check, or how close it came, and what was not observed."""
    own = [v for v in verdicts if v.status in (Status.FAIL, Status.ERROR)]
    passed = [v for v in verdicts if v.status is Status.PASS]
    inherited = {v.check for v in verdicts if v.status is Status.INHERITED} - {v.check for v in own}
    unseen = {v.check for v in verdicts if v.status is Status.NOT_OBSERVED} - {v.check for v in [*own, *passed]}
    told = [_own(own)] if own else []
    if passed:
        told.append(f"{'else ' if own else ''}pass, {_closest(passed)}")
    if inherited:
        told.append(f"inherited: {_ids(inherited)}")
    if unseen:
        told.append(f"not observed: {_ids(unseen)}")
    return "; ".join(told) or "nothing to judge"


def _own(wrong: Sequence[Verdict]) -> str:
    failed, raised = ([v for v in wrong if v.status is status] for status in (Status.FAIL, Status.ERROR))
    worst = {check: _worst([v for v in failed if v.check == check]) for check in dict.fromkeys(v.check for v in failed)}
    told = [f"{check} {_measured(v)} ({v.case})" for check, v in worst.items()]
    if raised:
        told.append(f"raises ({', '.join(dict.fromkeys(v.case for v in raised))})")
    return "**" + ", ".join(told) + "**"


def _worst(verdicts: Sequence[Verdict]) -> Verdict:
    return max(verdicts, key=lambda v: math.inf if v.measurement is None else v.measurement.ratio)


def _measured(verdict: Verdict) -> str:
    found = verdict.measurement
    if found is None:
        return "another shape"
    if math.isinf(found.ratio):
        return f"{verdict.mismatched} of {verdict.count} values" if verdict.mismatched else f"{found.max_abs:.2g}"
    return f"{found.ratio:.3g} x allowed"


def _closest(passed: Sequence[Verdict]) -> str:
    measured = [v for v in passed if v.measurement is not None and v.measurement.ratio > 0]
    if not measured:
        return "bit-equal"
    worst = _worst(measured)
    assert worst.measurement is not None
    return f"worst {worst.measurement.ratio:.2g} ({worst.check}, {worst.case})"


def _ids(checks: set[str]) -> str:
    return ", ".join(sorted(checks))


def _findings(run: Mapping[str, Any]) -> str:
    lines = [f"## {run['package']}", "", _filled(f"Cases: {', '.join(run['cases'])}."), ""]
    lines += [_BEHIND[run["runtime"]]] if run["runtime"] in _BEHIND else []
    prose = {finding.id: finding for finding in load_findings()}
    for tried in run["findings"]:
        lines += _argued(prose[tried["id"]], tried)
    return "\n".join(lines + _unexplained(run, [prose[tried["id"]] for tried in run["findings"]]))


def _argued(finding: Finding, tried: Mapping[str, Any]) -> list[str]:
    before = Verdict.from_dict(tried["before"])
    seen = f"{finding.check} ({before.stage}, {before.mode}) on case `{finding.case}`: {_told(before)}."
    lines = [f"### {finding.says.rstrip('.')}", "", _filled(f"{finding.owner.capitalize()}. Seen first by {seen}"), ""]
    lines += [_filled(finding.argument), ""]
    lines += [_filled(f"The model's authors: {finding.authors}"), ""] if finding.authors else []
    if "after" in tried:
        lines += [_filled(_cure(finding, Verdict.from_dict(tried["after"]), tried["also_cured"])), ""]
    return lines


def _filled(text: str) -> str:
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)


def _told(verdict: Verdict) -> str:
    found = verdict.measurement
    if found is None:
        return verdict.where.rstrip(".")
    allowed = "none is allowed" if found.allowed_max == 0 else f"{found.allowed_max:.3g} is allowed"
    return f"max |diff| {found.max_abs:.3g} in `{found.tensor}`, where {allowed}"


def _cure(finding: Finding, after: Verdict, cured: Sequence[str]) -> str:
    ending = f"the check passes ({_told(after)})" if after.status is Status.PASS else f"it is {_told(after)}"
    others = [check for check in cured if check != finding.check]
    more = f" With it pass {', '.join(others)}." if others else ""
    return f"Intervention: {finding.intervention}. Then {ending}.{more}"


def _unexplained(run: Mapping[str, Any], findings: Sequence[Finding]) -> list[str]:
    """Own failures in checks about which no finding says anything."""
    explained = {check for finding in findings for check in (finding.check, *finding.also)}
    explained |= {check for tried in run["findings"] for check in tried.get("also_cured", ())}
    own = [v for v in map(Verdict.from_dict, run["verdicts"]) if v.status in (Status.FAIL, Status.ERROR)]
    rest = [v for v in own if v.check not in explained]
    if not rest:
        return []
    lines = ["### Not argued yet", ""]
    for check in dict.fromkeys(v.check for v in rest):
        worst = _worst([v for v in rest if v.check == check])
        lines.append(f"- {check} ({worst.stage}, {worst.mode}) on `{worst.case}`: {_told(worst)}")
    return [*lines, ""]
