"""Which tensors hold the rows that there are and no padding, as those of a runtime without static buffers do."""

from __future__ import annotations

import re

from torch import Tensor

# Trace names of tensors whose padding is judged, and the axis of their rows; group 1 is the decode step.
_BUFFERS = (
    (re.compile(r"(?:decode/(\d+)/)?mask(?:_bias)?/"), -1),
    (re.compile(r"(?:prefill|decode/(\d+))/cache/"), -2),
    (re.compile(r"()(?:text_embeds|fused_embeds|llm_input_ids|input_ids|attention_mask)$"), 1),
)


def lacks_padding(name: str, tensor: Tensor, length: int, max_seq: int) -> bool:
    """Whether the tensor of this trace name has exactly as many rows as were known then, and the buffer has more.

    Args:
        length: the prompt's rows; a decode step knows one more, and one more for each step before it.
    """
    for pattern, axis in _BUFFERS:
        if match := pattern.match(name):
            rows = length + int(match[1]) + 1 if match[1] else length
            return tensor.ndim > 1 and tensor.shape[axis] == rows != max_seq
    return False
