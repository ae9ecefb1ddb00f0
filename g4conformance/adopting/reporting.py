"""Reporting: what a runtime's torch modules return, under the contract's trace names."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from g4conformance.errors import ConformanceError
from g4conformance.runtime.contract import OnTensor

# What of a module's output is reported; by default all of it, or the first of a tuple.
Pick = Callable[[Any], Tensor]
_ONCE = ("vision/", "visual_embeds", "fused_embeds", "prefill/")


class Reporting:
    """What an adapter needs to report tensors; to be inherited.

    Attributes:
        on_tensor: set by the suite while it listens.
        step: the decode step that is being computed; None while the prompt is.
    """

    on_tensor: OnTensor | None = None
    step: int | None = None

    def report(self, name: str, tensor: Any) -> None:
        """Reports a tensor under its name in prefill, or what that is called at the present decode step."""
        if self.on_tensor is not None:
            self.on_tensor(at_step(name, self.step), tensor)


def at_step(name: str, step: int | None) -> str:
    """What the tensor of this name in prefill is called at a decode step: `prefill/logits` is `decode/<step>/logits`,
    `text_embeds` is `decode/<step>/text_embeds`. Pictures are seen in prefill only, and keep their names.
    """
    if step is None or name.startswith(_ONCE[:-1]):
        return name
    return f"decode/{step}/{name.removeprefix(_ONCE[-1])}"


def report_outputs(
    model: nn.Module, names: Mapping[str, str | tuple[str, Pick]], report: Callable[[str, Tensor], object]
) -> list[RemovableHandle]:
    """Calls `report` with what modules return, each time they are called; the handles end that.

    Args:
        names: the trace name by module path. A `*` in a path is any one component, and takes the place of the `*` in
            the name: `{"model.layers.*": "prefill/layer/*/hidden"}`. With the name may come what to pick of the output.

    Raises:
        ConformanceError: no module has such a path.
    """
    return [
        module.register_forward_hook(_hook(name, pick, report))
        for pattern, wanted in names.items()
        for module, name, pick in _matching(model, pattern, wanted)
    ]


def _matching(model: nn.Module, pattern: str, wanted: str | tuple[str, Pick]) -> Iterator[tuple[nn.Module, str, Pick]]:
    name, pick = (wanted, _first) if isinstance(wanted, str) else wanted
    path = re.compile(re.escape(pattern).replace(r"\*", r"([^.]+)"))
    found = [(module, match.groups()) for at, module in model.named_modules() if (match := path.fullmatch(at))]
    if not found:
        some = ", ".join(at for at, _ in list(model.named_modules())[1:4])
        raise ConformanceError(f"a module at {pattern!r}", f"none among {some}, ...", "Mend the path.")
    for module, parts in found:
        yield module, _filled(name, parts), pick


def _filled(name: str, parts: tuple[str, ...]) -> str:
    for part in parts:
        name = name.replace("*", part, 1)
    return name


def _first(output: Any) -> Tensor:
    found: Tensor = output[0] if isinstance(output, tuple | list) else output
    return found


def _hook(name: str, pick: Pick, report: Callable[[str, Tensor], object]) -> Callable[..., None]:
    def hook(module: nn.Module, args: Any, output: Any) -> None:
        report(name, pick(output))

    return hook
