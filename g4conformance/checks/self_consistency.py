"""The ninth group: a runtime against itself, by what the probes recorded of it. No reference has a say in it."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor

from g4conformance.checks.compare import Comparison, compare, holds, nothing
from g4conformance.checks.registry import Needs, check
from g4conformance.checks.run import CaseRun, Mode
from g4conformance.expected import STOP_REASONS
from g4conformance.probe_requests import (
    begins_with_text,
    cache_names,
    decode_steps,
    ends_in_text,
    generated_lengths,
    hidden_name,
    layers_of_reach,
    logits_names,
    other_layouts,
    row_names,
)
from g4conformance.runtime.contract import StopReason
from g4conformance.runtime.masks import SLIDING
from g4conformance.stages import Stage

_check = partial(check, stage=Stage.SELF_CONSISTENCY, needs=Needs.PROBES, modes=(Mode.ACCUMULATED,))
_NO_PADDING = "the prompt fills the buffers"
_NO_DECODE = "the prompt leaves no room to decode"
_NO_LAST_TOKEN = "the prompt's last token is an image's, or the only one"


# --- one computation in two ways --------------------------------------------------------------------------------------


@_check("G4-SELF-01", budget="rounding")
def prefill_equals_prefill_and_decode(run: CaseRun) -> Comparison:
    """Prefill of n + 1 tokens gives the logits that prefill of n and decoding the last one give: [B, vocab]."""
    if not ends_in_text(run.layout, run.valid_length):
        return nothing("self/shortened/decode/0/logits", _NO_LAST_TOKEN)
    prefilled, decoded = _of(run, "base", "prefill/logits"), _of(run, "shortened", "decode/0/logits")
    return compare("self/shortened/decode/0/logits", prefilled, decoded)


@_check("G4-SELF-02", budget="rounding")
def prefill_does_not_depend_on_max_seq(run: CaseRun) -> list[Comparison]:
    """The logits after prefill are the same in larger buffers, and in buffers with no more rows than are needed."""
    return _in_other_layouts(run, ["prefill/logits"])


@_check("G4-SELF-03", budget="rounding")
def decode_does_not_depend_on_max_seq(run: CaseRun) -> list[Comparison]:
    """The logits of decode steps are the same in larger buffers, and in buffers with no more rows than are needed."""
    return _in_other_layouts(run, _decode_names(run)) or [nothing("self/larger/decode/0/logits", _NO_DECODE)]


# --- what must not matter ---------------------------------------------------------------------------------------------


@_check("G4-SELF-04", budget="exact")
def logits_with_nan_in_padding(run: CaseRun) -> list[Comparison]:
    """Embeddings that are not a number in padding rows do not change the logits after prefill."""
    return _with_padding(run, ["nan_padding"], ["prefill/logits"])


@_check("G4-SELF-05", budget="exact")
def logits_with_words_in_padding(run: CaseRun) -> list[Comparison]:
    """Other ids in padding rows do not change the logits after prefill."""
    return _with_padding(run, ["other_padding"], ["prefill/logits"])


@_check("G4-SELF-06", budget="exact")
def rows_with_anything_in_padding(run: CaseRun) -> list[Comparison]:
    """Neither NaN nor other ids in padding rows change a row of the prompt: every layer's output, K and V."""
    return _with_padding(run, ["nan_padding", "other_padding"], row_names(run.facts))


@_check("G4-SELF-07", budget="exact")
def later_token(run: CaseRun) -> list[Comparison]:
    """Another last token changes no row before it: in every layer's output, and in K and V of storing layers."""
    if not ends_in_text(run.layout, run.valid_length):
        return [nothing("self/last_exchanged/prefill/logits", _NO_LAST_TOKEN)]
    names, last = row_names(run.facts), run.valid_length - 1
    changed = _differs(run, "last_exchanged", "prefill/logits", "another last token leaves the logits as they were")
    return [changed, *_same(run, "last_exchanged", names, rows=last)]


@_check("G4-SELF-08", budget="exact")
def reach(run: CaseRun) -> list[Comparison]:
    """Another first token changes the rows that it reaches, and no other: in each layer's output, up to a full layer's.

    After l sliding layers it can reach the first l * (W - 1) + 1 rows. In the first of them it does change the first
    row and row W - 1, and on a full layer the last row, if it changes all rows before: where scores are so large that
    softmax leaves keys out altogether, who is reached depends on them.
    """
    if not begins_with_text(run.layout):
        return [nothing("self/first_exchanged/prefill/logits", "the prompt's first token is an image's")]
    last, window = run.valid_length - 1, run.facts.sliding_window
    found = [_differs(run, "first_exchanged", "prefill/logits", "another first token leaves the logits as they were")]
    for layer in layers_of_reach(run.facts):
        if run.facts.layer_types[layer] != SLIDING:
            found += _reached(run, layer, last, surely=[last])
        else:
            surely = [row for row in (0, window - 1) if layer == 0 and row <= last]
            found += _reached(run, layer, min(last, (layer + 1) * (window - 1)), surely)
    return found


# --- what must not remain ---------------------------------------------------------------------------------------------


@_check("G4-SELF-09", budget="exact")
def prefill_twice(run: CaseRun) -> list[Comparison]:
    """Two runs in a row give the same logits after prefill, to the last bit."""
    return _same(run, "again", ["prefill/logits"])


@_check("G4-SELF-10", budget="exact")
def decode_twice(run: CaseRun) -> list[Comparison]:
    """Two runs in a row give the same logits in decode steps, to the last bit."""
    return _same(run, "again", _decode_names(run)) or [nothing("self/again/decode/0/logits", _NO_DECODE)]


@_check("G4-SELF-11", budget="exact")
def generate_twice(run: CaseRun) -> list[Comparison]:
    """Two generations give the same ids, and end for the same reason."""
    first, second = "generation/", f"self/generate/{generated_lengths(run.gen_steps)[-1]}/"
    return [
        compare(second + part, run.observed(first + part), run.observed(second + part))
        for part in ("token_ids", "stop_reason")
    ]


@_check("G4-SELF-12", budget="exact")
def prefill_after_another_request(run: CaseRun) -> list[Comparison]:
    """After a longer request with other logits, a request's logits after prefill are as they were before it."""
    other = _differs(run, "longer", "prefill/logits", "the longer request has the same logits")
    return [other, *_same(run, "after_longer", ["prefill/logits"])]


@_check("G4-SELF-13", budget="exact")
def decode_after_another_request(run: CaseRun) -> list[Comparison]:
    """After a longer request, the logits of a request's decode steps are as they were before it."""
    return _same(run, "after_longer", _decode_names(run)) or [nothing("self/after_longer/decode/0/logits", _NO_DECODE)]


@_check("G4-SELF-14", budget="exact")
def cache_after_another_request(run: CaseRun) -> list[Comparison]:
    """After a longer request, prefill leaves the same cache as before it, beyond the prompt's rows too."""
    return _same(run, "after_longer", cache_names(run.facts, "prefill/"))


@_check("G4-SELF-15", budget="exact")
def loaded_state(run: CaseRun) -> list[Comparison]:
    """After another request, K and V that prefill gave before it are loaded, and decode steps follow as they did."""
    return _same(run, "loaded", _decode_names(run)) or [nothing("self/loaded/decode/0/logits", _NO_DECODE)]


@_check("G4-SELF-16", budget="exact")
def logits_after_reset(run: CaseRun) -> list[Comparison]:
    """After a reset, the logits of a first token and of a whole request are what they are after any other request."""
    first = _same(run, "reset_after_longer", ["decode/0/logits"], base="reset_after_prompt")
    return [*first, *_same(run, "after_reset", logits_names(len(_decode_names(run))))]


@_check("G4-SELF-17", budget="exact")
def cache_after_reset(run: CaseRun) -> list[Comparison]:
    """After a reset, neither a first token nor a prompt finds anything of an earlier request in the cache."""
    first = _same(run, "reset_after_longer", cache_names(run.facts, "decode/0/"), base="reset_after_prompt")
    return [*first, *_same(run, "after_reset", cache_names(run.facts, "prefill/"))]


# --- where generation stops -------------------------------------------------------------------------------------------


@_check("G4-SELF-18", budget="exact")
def each_stop_token_stops(run: CaseRun) -> list[Comparison]:
    """Logits that favour a single token select it; generation stops there if it is a stop token, and only then."""
    favoured = _of(run, "select", "favoured")
    stops = torch.isin(favoured, torch.tensor(sorted(run.facts.stop_token_ids), device=favoured.device))
    return [
        compare("self/select/token_ids", favoured, _of(run, "select", "token_ids")),
        compare("self/select/stops", stops, _of(run, "select", "stops")),
    ]


@_check("G4-SELF-19", budget="exact")
def reason_is_true(run: CaseRun) -> list[Comparison]:
    """Whatever number of tokens is asked for, a generation ends where its own sequence gives it the reason it tells."""
    return [_ends_truly(run, asked) for asked in generated_lengths(run.gen_steps)]


@_check("G4-SELF-20", budget="exact")
def shorter_generations_are_beginnings(run: CaseRun) -> list[Comparison]:
    """The ids of a generation of fewer tokens are the beginning of those of a longer one."""
    *shorter, longest = (f"self/generate/{asked}/token_ids" for asked in generated_lengths(run.gen_steps))
    if not shorter:
        return [nothing(longest, "a single token is asked for")]
    whole = run.observed(longest)
    return [compare(name, whole[: len(run.observed(name))], run.observed(name)) for name in shorter]


# --- how probes are compared ------------------------------------------------------------------------------------------


def _of(run: CaseRun, probe: str, name: str) -> Tensor:
    return run.observed(f"self/{probe}/{name}")


def _decode_names(run: CaseRun) -> list[str]:
    return logits_names(decode_steps(run.layout, run.valid_length))[1:]


def _in_other_layouts(run: CaseRun, names: Iterable[str]) -> list[Comparison]:
    layouts = other_layouts(run.layout, run.valid_length, run.facts)
    found = []
    for name in names:
        for probe, layout in layouts.items():
            (comparison,) = _same(run, probe, [name])
            sizes = f"max_seq={layout.max_seq} against max_seq={run.layout.max_seq}"
            found.append(comparison.explained(f"{sizes}; {comparison.detail}" if comparison.detail else sizes))
    return found


def _with_padding(run: CaseRun, probes: Iterable[str], names: Iterable[str]) -> list[Comparison]:
    if run.valid_length == run.layout.max_seq:
        return [nothing("self/nan_padding/prefill/logits", _NO_PADDING)]
    names = list(names)
    return [found for probe in probes for found in _same(run, probe, names)]


def _same(
    run: CaseRun, probe: str, names: Iterable[str], *, base: str = "base", rows: int | None = None
) -> list[Comparison]:
    """Tensors of one probe against those of another; of those that have rows, the first `rows` or all of the prompt."""
    end = run.valid_length if rows is None else rows

    def judged(tensor: Tensor, name: str) -> Tensor:
        return tensor[..., :end, :] if "/layer/" in name else tensor

    return [
        compare(f"self/{probe}/{name}", judged(_of(run, base, name), name), judged(_of(run, probe, name), name))
        for name in names
    ]


def _differs(run: CaseRun, probe: str, name: str, otherwise: str) -> Comparison:
    """That a probe which asked for something else got something else; a probe that changed nothing shows nothing."""
    found = compare(f"self/{probe}/{name}", _of(run, "base", name), _of(run, probe, name))
    if found.difference is None:
        return found
    differs = not found.difference.equal and bool(torch.isfinite(_of(run, probe, name)).all())
    return holds(found.tensor, torch.tensor([differs]), otherwise)


def _reached(run: CaseRun, layer: int, last: int, surely: list[int]) -> list[Comparison]:
    """That a layer's output changed in no row after `last`, and in the rows `surely`."""
    name = hidden_name(layer)
    (found,) = _same(run, "first_exchanged", [name])
    if found.difference is None:
        return [found]
    before, after = (_of(run, probe, name)[0, : run.valid_length] for probe in ("base", "first_exchanged"))
    changed = (before != after).any(dim=-1)
    rows = torch.arange(len(changed), device=changed.device)
    may = rows <= last
    before_them = may & ~torch.isin(rows, torch.tensor(surely, device=rows.device))
    if not bool(changed[before_them].all()):
        surely = [row for row in surely if row == 0]  # it is its own key
    right = (may | ~changed) & torch.isfinite(after).all(dim=-1)
    return [
        holds(found.tensor, right, f"rows after {last} changed, which row 0 does not reach"),
        holds(found.tensor, changed[surely], f"of rows {surely}, which row 0 reaches, one did not change"),
    ]


def _ends_truly(run: CaseRun, asked: int) -> Comparison:
    prefix = f"self/generate/{asked}/"
    new = run.observed(prefix + "token_ids")[run.valid_length :].tolist()
    told = STOP_REASONS[int(run.observed(prefix + "stop_reason"))]
    early = any(token in run.facts.stop_token_ids for token in new[:-1])
    words = f"asked for {asked}, it ended by {told} after {len(new)} new tokens"
    words += ", one of them a stop token before the last" if early else ""
    true = told is _reason_of(run, new, asked) and not early
    return holds(prefix + "token_ids", torch.tensor([true]), words)


def _reason_of(run: CaseRun, new: list[int], asked: int) -> StopReason | None:
    """Why a generation of these new tokens has ended; None if it has no reason to, or had one before."""
    if new and new[-1] in run.facts.stop_token_ids and len(new) <= asked:
        return StopReason.STOP_TOKEN
    if len(new) == asked:
        return StopReason.MAX_NEW_TOKENS
    full = run.valid_length + len(new) - 1 == run.layout.max_seq  # the last token is chosen, but never fed
    return StopReason.MAX_SEQ if full and len(new) < asked else None
