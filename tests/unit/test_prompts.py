"""Cases become requests: rendered, measured, processed once, laid out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from g4conformance.cases import Case
from g4conformance.checkpoints.checkpoint import Checkpoint
from g4conformance.errors import CaseError
from g4conformance.prompts import ResolvedCase, resolve, vocabulary_ids

from .asserting import told

pytestmark = pytest.mark.unit

Resolve = Callable[..., ResolvedCase]


@pytest.fixture
def resolve_own(tiny_checkpoint: Checkpoint) -> Resolve:
    """Resolves a case made up in a test."""

    def resolve_case(case: Case, **options: Any) -> ResolvedCase:
        defaults: dict[str, Any] = {"max_seq": tiny_checkpoint.facts.default_max_seq, "decode_steps": 6, "gen_steps": 8}
        return resolve(case, tiny_checkpoint, **{**defaults, **options})

    return resolve_case


def length_of(case: ResolvedCase) -> int:
    return int(case.request.inputs["input_ids"].shape[1])


@pytest.mark.parametrize(
    ("name", "length"),
    [
        ("window-1", lambda window, max_seq: window - 1),
        ("window", lambda window, max_seq: window),
        ("window+1", lambda window, max_seq: window + 1),
        ("window-twice", lambda window, max_seq: 2 * window),
        ("fills-max-seq", lambda window, max_seq: max_seq),
        ("fills-while-decoding", lambda window, max_seq: max_seq - 2),
    ],
)
def test_lengths_hold_exactly(
    tiny_checkpoint: Checkpoint, resolved: Callable[[str], ResolvedCase], name: str, length: Callable[[int, int], int]
) -> None:
    facts = tiny_checkpoint.facts
    assert length_of(resolved(name)) == length(facts.sliding_window, facts.default_max_seq)


def test_every_bundled_case_fits_its_layout(
    tiny_checkpoint: Checkpoint, bundled_cases: tuple[Case, ...], resolved: Callable[[str], ResolvedCase]
) -> None:
    image_id = tiny_checkpoint.facts.image_token_id
    for case in bundled_cases:
        request = resolved(case.name).request
        ids = request.inputs["input_ids"][0]
        slot = ids[request.layout.visual_start_idx : request.layout.visual_end_idx]
        assert bool((slot == image_id).all()), case.name
        assert int((ids == image_id).sum()) == request.layout.num_visual_tokens
        assert (request.layout.patch_grid is not None) == bool(case.images)


def test_bundled_images_have_different_grids(
    bundled_cases: tuple[Case, ...], resolved: Callable[[str], ResolvedCase]
) -> None:
    grids = {resolved(case.name).request.layout.patch_grid for case in bundled_cases if case.images}
    assert len(grids) >= 3


def test_the_beginning_of_sequence_comes_once(resolve_own: Resolve, tiny_checkpoint: Checkpoint) -> None:
    bos = tiny_checkpoint.processor.tokenizer.bos_token
    plain = resolve_own(Case("a", "x", prompt="Hello"))
    marked = resolve_own(Case("a", "x", prompt=bos + "Hello"))
    assert plain.request.prompt == marked.request.prompt == bos + "Hello"
    assert plain.request.inputs["input_ids"][0].tolist().count(tiny_checkpoint.facts.bos_token_id) == 1


def test_messages_are_rendered_with_the_chat_template(resolve_own: Resolve, tiny_checkpoint: Checkpoint) -> None:
    messages = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"})
    rendered = resolve_own(Case("a", "x", messages=messages)).request.prompt
    assert rendered.startswith(tiny_checkpoint.processor.tokenizer.bos_token)
    assert rendered.index("Be brief.") < rendered.index("Hello") < rendered.rindex("model")


def test_without_a_chat_template_the_messages_are_plain_text(
    resolve_own: Resolve, tiny_checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiny_checkpoint.processor, "chat_template", None)
    messages = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"})
    rendered = resolve_own(Case("a", "x", messages=messages)).request.prompt
    assert rendered == tiny_checkpoint.processor.tokenizer.bos_token + "Be brief.\nHello"


def test_what_surrounds_the_fill_counts(resolve_own: Resolve) -> None:
    case = Case("a", "x", prompt="Before {fill} after", fill="One: A red circle.", length="W+1")
    resolved = resolve_own(case)
    assert resolved.request.inputs["input_ids"].shape[1] == 33
    assert resolved.request.prompt.endswith(" after")


def test_a_length_beyond_the_buffers_is_refused(resolve_own: Resolve) -> None:
    case = Case("a", "x", prompt="{fill}", fill="One: A red circle.", length="max_seq+1")
    with told(CaseError, expected="a length of at most max_seq=134 in case 'a'", found="135", remedy="Raise --max-seq"):
        resolve_own(case)


def test_steps_end_where_the_buffer_ends(resolved: Callable[[str], ResolvedCase]) -> None:
    assert (resolved("fills-max-seq").decode_steps, resolved("fills-max-seq").reference_steps) == (0, 0)
    assert (resolved("fills-while-decoding").decode_steps, resolved("fills-while-decoding").reference_steps) == (2, 2)


@pytest.mark.parametrize(
    ("decode_steps", "gen_steps", "reference_steps"), [(6, 8, 7), (6, 3, 6), (0, 1, 0), (2, 1, 2), (200, 300, 130)]
)
def test_the_reference_runs_as_long_as_the_longer_need(
    resolve_own: Resolve, decode_steps: int, gen_steps: int, reference_steps: int
) -> None:
    case = Case("a", "x", prompt="{fill}", fill="One: A red circle.", length="max_seq - 130")
    assert resolve_own(case, decode_steps=decode_steps, gen_steps=gen_steps).reference_steps == reference_steps


def test_a_cases_own_steps_win(resolve_own: Resolve) -> None:
    case = resolve_own(Case("a", "x", prompt="Hello", decode_steps=1, gen_steps=2))
    assert (case.decode_steps, case.gen_steps) == (1, 2)


def test_an_interrupted_case_serves_itself_and_the_others_first(
    resolved: Callable[[str], ResolvedCase], resolve_own: Resolve
) -> None:
    case = resolved("a-b-a")
    assert [request.prompt for request in case.before] == [case.request.prompt, resolved("window-twice").request.prompt]
    with told(CaseError, expected="a known case to interrupt 'a'", found="'b'", remedy="Mend interrupted_by"):
        resolve_own(Case("a", "x", prompt="Hello", interrupted_by=("b",)))


def test_a_prompt_that_does_not_fit_is_refused(resolve_own: Resolve) -> None:
    with told(CaseError, expected="at most max_seq=4 tokens in case 'a'", found="tokens", remedy="--max-seq"):
        resolve_own(Case("a", "x", prompt="One two three four five six"), max_seq=4)


def test_digests_tell_requests_apart(resolved: Callable[[str], ResolvedCase], image_case: ResolvedCase) -> None:
    digests = {resolved(name).digest for name in ("window", "window+1", "image-middle", "image-first")}
    assert len(digests) == 4
    other_picture = replace(image_case.case, images=("images/small.png",))
    assert other_picture.digest(image_case.request.prompt) != image_case.digest


# --- ids in place of a prompt -----------------------------------------------------------------------------------------


def test_all_shares_together_hold_every_id_once(tiny_checkpoint: Checkpoint) -> None:
    facts = tiny_checkpoint.facts
    shares = [vocabulary_ids(tiny_checkpoint, part, 4, rows=132)[0].tolist() for part in (1, 2, 3, 4)]
    assert sorted(id for share in shares for id in share) == sorted(
        set(range(facts.vocab_size)) - facts.placeholder_ids
    )
    assert all(len(share) <= 132 for share in shares)


def test_of_a_larger_vocabulary_ids_are_spread_from_the_first_to_the_last(tiny_checkpoint: Checkpoint) -> None:
    ids = vocabulary_ids(tiny_checkpoint, 1, 1, rows=10)[0]
    steps = ids.diff()
    assert ids[0] == 0
    assert ids[-1] == max(set(range(tiny_checkpoint.facts.vocab_size)) - tiny_checkpoint.facts.placeholder_ids)
    assert int(steps.max()) - int(steps.min()) <= 2, "evenly, but for rounding and the placeholders at the end"


def test_a_case_of_ids_has_no_prompt_and_leaves_room_to_decode(resolve_own: Resolve) -> None:
    resolved = resolve_own(Case("ids", "x", vocabulary=(1, 1)), max_seq=12)
    assert resolved.request.prompt is None
    assert resolved.request.layout.num_visual_tokens == 0
    assert (length_of(resolved), resolved.decode_steps) == (10, 2)
