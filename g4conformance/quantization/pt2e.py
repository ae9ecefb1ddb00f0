"""What this package uses of torchao's PT2E, imported without the messages that it logs meanwhile.

torchao 0.18 registers its enums in a way that torch 2.14 calls deprecated, at every import.
"""

from __future__ import annotations

import logging

_logger = logging.getLogger("torch.utils._pytree")
_level = _logger.level
_logger.setLevel(logging.ERROR)
try:
    from torchao.quantization.pt2e import MinMaxObserver, PerChannelMinMaxObserver
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
    from torchao.quantization.pt2e.quantizer import QuantizationAnnotation, QuantizationSpec, Quantizer
finally:
    _logger.setLevel(_level)

__all__ = [
    "MinMaxObserver",
    "PerChannelMinMaxObserver",
    "QuantizationAnnotation",
    "QuantizationSpec",
    "Quantizer",
    "convert_pt2e",
    "prepare_pt2e",
]
