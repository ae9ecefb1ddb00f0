"""What a runtime may say of itself, and what it is told where that is wrong."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from g4conformance.adopting.arrays import as_numpy, as_tensor
from g4conformance.adopting.boundary import at_boundary
from g4conformance.adopting.capabilities import NAMES, Capabilities, definition
from g4conformance.adopting.reporting import report_outputs
from g4conformance.adopting.views import unpacked_heads, without_batch
from g4conformance.errors import ConformanceError
from g4conformance.judging.driving import accepted
from g4conformance.runtime.contract import Runtime
from g4conformance.runtime.layout import StaticLayout

from .asserting import told

pytestmark = pytest.mark.unit


class Nothing:
    def prefill(self, inputs: Any) -> Tensor:
        return torch.zeros(1, 4)


class Everything(Nothing):
    def decode_one(self, token: int) -> Tensor:
        return torch.zeros(1, 4)

    def generate(self, inputs: Any, count: int) -> None: ...

    def load_state(self, key_values: Any, past_len: int) -> None: ...


class Inheriting(Runtime):
    """Takes the contract's empty methods for a base class's."""

    def prefill(self, *args: Any) -> Tensor:
        return torch.zeros(1, 4)


# --- capabilities ---------------------------------------------------------------------------------------------------


def test_every_capability_is_defined_in_a_sentence() -> None:
    assert all(definition(name).endswith(".") for name in NAMES)
    assert {"images", "beyond_window", "batches", "generation", "load_state"} <= set(NAMES)


@pytest.mark.parametrize(("kind", "has"), [(Nothing, False), (Everything, True), (Inheriting, False)])
def test_what_is_a_method_is_detected(kind: type, has: bool) -> None:
    found = Capabilities(kind())
    assert [found.decoding, found.generation, found.load_state] == [has] * 3
    assert [hasattr(at_boundary(kind()), name) for name in ("decode_one", "generate", "load_state")] == [has] * 3
    assert found.images
    assert found.refused == ()


def test_without_pictures_there_are_not_several() -> None:
    runtime = Nothing()
    runtime.capabilities = {"images": False}  # type: ignore[attr-defined]
    found = Capabilities(runtime)
    assert [found.images, found.several_images, found.bidirectional_vision] == [False] * 3
    assert found.refused == ("images",), "only what it says itself is asked for"


def test_a_method_that_is_declared_unsupported_is_hidden() -> None:
    runtime = Everything()
    runtime.capabilities = {"generation": False}  # type: ignore[attr-defined]
    assert not hasattr(at_boundary(runtime), "generate")
    assert Capabilities(runtime).refused == ("generation",)


@pytest.mark.parametrize(
    ("name", "value", "expected", "found"),
    [
        ("capabilities", {"pictures": False}, "capabilities among images", "'pictures'"),
        ("arrays", "jax", "'torch' or 'numpy'", "'jax'"),
    ],
)
def test_a_wrong_declaration_is_one_clear_line(name: str, value: object, expected: str, found: str) -> None:
    runtime = Nothing()
    setattr(runtime, name, value)
    with told(ConformanceError, expected=expected, found=found, remedy=""):
        at_boundary(runtime)


# --- the boundary ---------------------------------------------------------------------------------------------------


def test_what_is_reported_and_returned_is_seen_through_views() -> None:
    class Viewed(Nothing):
        on_tensor: Any = None
        views = {"*/key": unpacked_heads(2), "*logits": without_batch}

        def prefill(self, inputs: Any) -> Tensor:
            self.on_tensor("prefill/layer/0/key", np.zeros((1, 3, 8)))
            return torch.zeros(1, 1, 4)

    seen: dict[str, Tensor] = {}
    runtime: Any = at_boundary(Viewed())
    runtime.on_tensor = seen.__setitem__
    assert runtime.prefill(None).shape == (1, 4)
    assert seen["prefill/layer/0/key"].shape == (1, 2, 3, 4)


def test_a_view_that_does_not_fit_says_so() -> None:
    class Viewed(Nothing):
        views = {"*logits": unpacked_heads(3)}

    with told(
        ConformanceError, expected="a prefill/logits that the view of '*logits' takes", found="(1, 4)", remedy="views"
    ):
        at_boundary(Viewed()).prefill(None)  # type: ignore[arg-type]


def test_the_runtime_of_a_layout_is_at_the_boundary_too() -> None:
    class Laid(Nothing):
        arrays = "numpy"

        def for_layout(self, layout: StaticLayout) -> Laid:
            return self

        def prefill(self, inputs: Any) -> Any:
            assert isinstance(inputs, np.ndarray)
            return inputs

    runtime: Any = at_boundary(Laid()).for_layout(StaticLayout(4))
    assert isinstance(runtime.prefill(torch.zeros(1, 4)), Tensor)


@pytest.mark.parametrize(
    ("prefill", "count"),
    [
        (lambda inputs: None, 1),
        (lambda inputs, fused=None: None, 2),
        (lambda inputs, fused=None, positional=None: None, 3),
        (lambda *args: None, 3),
        (lambda inputs, *, keyword=None: None, 1),
        (lambda: None, 0),
    ],
)
def test_a_method_is_given_what_it_takes(prefill: Any, count: int) -> None:
    assert accepted(prefill, 3) == count
    assert accepted(at_boundary(SimpleNamespace(prefill=prefill)).prefill, 3) == count


# --- arrays ---------------------------------------------------------------------------------------------------------


def test_what_holds_no_numbers_is_refused() -> None:
    with told(ConformanceError, expected="a tensor or a numpy array", found="list of dtype", remedy="Return"):
        as_tensor(["a", "b"])


def test_bfloat16_without_ml_dtypes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    with told(ConformanceError, expected="ml_dtypes", found="none", remedy="--dtype"):
        as_numpy(torch.zeros(2, dtype=torch.bfloat16))


# --- hooks ----------------------------------------------------------------------------------------------------------


class Layer(nn.Module):
    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return hidden + 1, hidden * 2


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden, _ = layer(hidden)
        return hidden


def test_modules_report_under_the_names_of_their_paths_until_the_handles_are_removed() -> None:
    seen: dict[str, Tensor] = {}
    model = Model()
    names: dict[str, Any] = {
        "layers.*": "prefill/layer/*/hidden",
        "layers.1": ("prefill/layer/1/value", lambda output: output[1]),
    }
    handles = report_outputs(model, names, seen.__setitem__)
    model(torch.zeros(1))
    assert {name: float(tensor) for name, tensor in seen.items()} == {
        "prefill/layer/0/hidden": 1.0,
        "prefill/layer/1/hidden": 2.0,
        "prefill/layer/1/value": 2.0,
    }
    seen.clear()
    for handle in handles:
        handle.remove()
    model(torch.zeros(1))
    assert seen == {}


def test_a_path_that_no_module_has_is_refused() -> None:
    with told(ConformanceError, expected="a module at 'blocks.*'", found="layers", remedy="path"):
        report_outputs(Model(), {"blocks.*": "prefill/layer/*/hidden"}, print)
