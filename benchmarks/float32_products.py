"""Products of bfloat16 matrices by way of float32, for processors that have no bfloat16 units.

There torch falls back to plain loops: 6 GFLOP/s on one core with AVX2, where float32 makes 36. Weights are widened
piece by piece, so that no second copy of them ever exists. Every product is rounded to bfloat16 as it would be there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

_PIECE = 1 << 22  # elements of a weight that are float32 at a time
_FEW_ROWS = 8  # below, widening the weight costs more than the loops


def processor_has_bfloat16() -> bool:
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


class Float32Products(TorchFunctionMode):
    """Inside this context, linear layers, batched products and attention of bfloat16 go by way of float32.

    `paused` leaves everything as it is: what is exported meanwhile must be the model's own graph.
    """

    paused = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if Float32Products.paused:
            return func(*args, **kwargs)
        if func is functional.linear and _is_wide(args[0]):
            return _linear(*args, **kwargs)
        if func in (torch.matmul, Tensor.matmul, Tensor.__matmul__) and _is_wide(args[0]):
            return torch.matmul(args[0].float(), args[1].float()).bfloat16()
        if func is functional.scaled_dot_product_attention and _is_wide(args[0]):
            return _attention(func, args, kwargs)
        return func(*args, **kwargs)


def _is_wide(left: Tensor) -> bool:
    return left.dtype == torch.bfloat16 and left.ndim > 1 and left.shape[-2] >= _FEW_ROWS


def _linear(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    wide = rows.float()
    product = torch.empty(*rows.shape[:-1], weight.shape[0], dtype=rows.dtype)
    pieces = range(0, weight.shape[0], max(1, _PIECE // weight.shape[1]))
    for start in pieces:
        part = slice(start, start + pieces.step)
        product[..., part] = functional.linear(wide, weight[part].float(), None if bias is None else bias[part].float())
    return product


def _attention(func: Callable[..., Tensor], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    def widened(value: Any) -> Any:
        return value.float() if isinstance(value, Tensor) and value.is_floating_point() else value

    return func(*map(widened, args), **{name: widened(value) for name, value in kwargs.items()}).bfloat16()
