"""Cases: what goes in. A case is a prompt with its pictures, and the feature that it is there to exercise."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml
from PIL import Image, UnidentifiedImageError

from g4conformance.errors import CaseError

IMAGE_MARK = "{image}"
OWN_CASE = "own"  # the name of the case of --prompt and --image
FILL_MARK = "{fill}"


@dataclass(frozen=True)
class Case:
    """One input, as written in a cases file.

    Attributes:
        name: unique in its file, part of test ids.
        exercises: the feature that it is there for, one sentence.
        prompt: plain text; `{image}` marks a picture's place, and the beginning-of-sequence token is put in front.
        messages: a conversation instead of `prompt`, rendered with the checkpoint's chat template.
        vocabulary: instead of both, ids spread over the whole vocabulary: `2/4` is the second of four shares of them.
        images: picture files, relative to the cases file.
        length: exact number of the prompt's tokens, an expression such as `W+1`; needs `{fill}` in the prompt.
        fill: text that takes the place of `{fill}`, repeated and cut until the prompt has `length` tokens.
        decode_steps, gen_steps: as the options of these names; None takes the run's.
        interrupted_by: cases served between a first and a second, judged, run of this one on the same runtime.
        self_consistency: whether the runtime is also compared with itself here, which costs some more passes.
        folder: where `images` are looked for.
    """

    name: str
    exercises: str
    prompt: str | None = None
    messages: tuple[Mapping[str, str], ...] = ()
    vocabulary: tuple[int, int] | None = None
    images: tuple[str, ...] = ()
    length: str | None = None
    fill: str = ""
    decode_steps: int | None = None
    gen_steps: int | None = None
    interrupted_by: tuple[str, ...] = ()
    self_consistency: bool = False
    folder: Path = field(default=Path(), compare=False)

    def __post_init__(self) -> None:
        if sum((self.prompt is not None, bool(self.messages), self.vocabulary is not None)) != 1:
            wanted = f"one of prompt, messages and vocabulary in case {self.name!r}"
            raise CaseError(wanted, "none or several", "Mend the case.")
        if self.vocabulary is not None and (self.images or self.interrupted_by):
            raise CaseError(f"no images and no interruption in case {self.name!r}, which is of ids", "some", "Mend it.")
        fillable = self.prompt is not None and FILL_MARK in self.prompt and bool(self.fill.strip())
        if self.length is not None and not fillable:
            raise CaseError(
                f"{FILL_MARK} in the prompt and a text to fill it in case {self.name!r}, which has a length",
                "no such prompt",
                "Mend the case.",
            )

    def load_images(self) -> list[Image.Image]:
        """The pictures, fully read.

        Raises:
            CaseError: a file is missing, no image, or truncated.
        """
        return [_load_image(self.folder / image) for image in self.images]

    def digest(self, rendered_prompt: str) -> str:
        """SHA-256 of what this case feeds in: the rendered prompt and the pictures' bytes."""
        digest = hashlib.sha256(rendered_prompt.encode())
        for image in self.images:
            digest.update((self.folder / image).read_bytes())
        return digest.hexdigest()


def load_cases(path: Path) -> tuple[Case, ...]:
    """The cases of a YAML file whose top-level key `cases` holds a list.

    Raises:
        CaseError: unreadable file, unknown or missing keys, or two cases of one name.
    """
    try:
        document = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise CaseError(f"a YAML file at {path}", " ".join(str(error).split()), "Check --cases.") from None
    entries = document.get("cases") if isinstance(document, dict) else None
    if not isinstance(entries, list) or not entries:
        raise CaseError(f"a list `cases` in {path}", "none", "See the bundled cases.yaml.")
    cases = tuple(_case(entry, path) for entry in entries)
    names = [case.name for case in cases]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise CaseError(f"case names that are unique in {path}", f"{twice[0]!r} twice", "Rename one.")
    return cases


def own_case(prompt: str, images: Sequence[str]) -> Case:
    """The case of the options `--prompt` and `--image`: pictures without a mark in the prompt come first."""
    missing = len(images) - prompt.count(IMAGE_MARK)
    paths = tuple(str(Path(image).expanduser().absolute()) for image in images)
    return Case(
        OWN_CASE,
        "the prompt given on the command line",
        prompt=IMAGE_MARK * missing + prompt,
        images=paths,
        self_consistency=True,
    )


def select_cases(cases: Sequence[Case], names: Iterable[str]) -> tuple[Case, ...]:
    """The cases of these names, in file order; all of them if there are no names.

    Raises:
        CaseError: a name is unknown; the message lists the known ones.
    """
    wanted = set(names)
    if unknown := sorted(wanted - {case.name for case in cases}):
        raise CaseError("a known case", repr(unknown[0]), f"Known cases: {', '.join(case.name for case in cases)}.")
    return tuple(case for case in cases if not wanted or case.name in wanted)


def _case(entry: Any, path: Path) -> Case:
    allowed = {f.name for f in fields(Case)} - {"folder"}
    if not isinstance(entry, dict) or not {"name", "exercises"} <= entry.keys() <= allowed:
        found = sorted(map(str, entry)) if isinstance(entry, dict) else type(entry).__name__
        raise CaseError(
            f"cases in {path} with name, exercises and any of {', '.join(sorted(allowed))}", str(found), "Mend it."
        )
    try:
        return Case(**{key: _KINDS[key](value) for key, value in entry.items()}, folder=path.parent)
    except (TypeError, ValueError, KeyError) as error:
        raise CaseError(f"well-formed values in a case of {path}", f"{entry!r} ({error})", "Mend the case.") from None


def _string(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return value


def _number(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise TypeError(f"{value!r} is no number of steps")
    return value


def _positive(value: Any) -> int:
    if _number(value) < 1:
        raise ValueError("at least 1")
    return int(value)


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{value!r} is neither true nor false")
    return value


def _strings(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise TypeError(f"{value!r} is no list")
    return tuple(map(_string, value))


def _messages(value: Any) -> tuple[Mapping[str, str], ...]:
    if not isinstance(value, list):
        raise TypeError(f"{value!r} is no list")
    return tuple({"role": _string(message["role"]), "content": _string(message["content"])} for message in value)


def _share(value: Any) -> tuple[int, int]:
    part, parts = (int(number) for number in _string(value).split("/"))
    if not 1 <= part <= parts:
        raise ValueError("a share such as 2/4")
    return part, parts


_KINDS: dict[str, Callable[[Any], Any]] = {
    "name": _string,
    "exercises": _string,
    "prompt": _string,
    "fill": _string,
    "length": str,
    "messages": _messages,
    "vocabulary": _share,
    "images": _strings,
    "interrupted_by": _strings,
    "decode_steps": _number,
    "gen_steps": _positive,
    "self_consistency": _flag,
}


def _load_image(path: Path) -> Image.Image:
    try:
        with Image.open(path) as image:
            image.load()
            return image.copy()
    except FileNotFoundError:
        found = "no such file"
    except (UnidentifiedImageError, OSError, SyntaxError, Image.DecompressionBombError) as error:
        found = f"an unreadable one ({error})"
    raise CaseError(f"an image at {path}", found, "Check the path, or save the image again.")
