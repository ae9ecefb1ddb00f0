"""Products of bfloat16 matrices by way of float32, for processors that have no bfloat16 units.

There torch falls back to plain loops: 6 GFLOP/s on one core with AVX2, where float32 makes 36. Weights are widened
piece by piece, so that no second copy of them ever exists. Every product is rounded to bfloat16 as it would be there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

_PIECE = 1 << 22  # elements of a weight that are float32 at a time
_FEW_ROWS = 8  # below, widening the weight costs more than the loops

aten = torch.ops.aten


def processor_has_bfloat16() -> bool:
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


class Float32Products(TorchDispatchMode):
    """Inside this context, products of bfloat16 matrices and attention go by way of float32, in modules and graphs."""

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is aten.mm.default and _is_wide(args[0]):
            return _product(*args)
        if func is aten.addmm.default and _is_wide(args[1]) and not kwargs:
            bias, left, right = args
            return _product(left, right, bias)
        if func is aten.bmm.default and _is_wide(args[0]):
            return torch.bmm(*map(_widened, args)).bfloat16()
        if func is aten._scaled_dot_product_flash_attention_for_cpu.default and _is_wide(args[0]):
            widened = {name: _widened(value) for name, value in kwargs.items()}
            attended, *others = func(*map(_widened, args), **widened)
            return attended.bfloat16(), *others
        return func(*args, **kwargs)


def as_it_is() -> AbstractContextManager[Any]:
    """Products as torch makes them: what is exported must be the model's own graph."""
    return _disable_current_modes()


def _is_wide(left: Tensor) -> bool:
    return left.dtype == torch.bfloat16 and left.shape[-2] >= _FEW_ROWS


def _widened(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.is_floating_point() else value


def _product(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    """[M, K], [K, N] -> [M, N]; some columns of `right` at a time."""
    wide = left.float()
    product = torch.empty(left.shape[0], right.shape[1], dtype=left.dtype)
    pieces = range(0, right.shape[1], max(1, _PIECE // right.shape[0]))
    for start in pieces:
        part = slice(start, start + pieces.step)
        columns = wide @ right[:, part].float()
        product[:, part] = columns if bias is None else columns + bias[..., part].float()
    return product
