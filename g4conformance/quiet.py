"""Keeps one message of torch out of every user's terminal.

transformers imports torchao where that is installed, and torchao 0.18 registers its enums in a way that torch 2.14
calls deprecated. Users can do nothing about it.
"""

from __future__ import annotations

import logging


def _is_of_interest(record: logging.LogRecord) -> bool:
    return "Calling register_constant() on Enum subclasses" not in record.getMessage()


def quieten() -> None:
    """Filters the message from now on; imports nothing heavy."""
    logging.getLogger("torch.utils._pytree").addFilter(_is_of_interest)
