"""Damaged traces: for every check, ways of breaking what a right runtime yielded that the check must notice.

A damage changes the tensors of one mode in place; they are copies. It is applied to both modes.
"""

from __future__ import annotations

from . import before_the_decoder, decoder_and_after, self_consistency
from .registry import DAMAGES, Damage

__all__ = ["DAMAGES", "Damage"]

del before_the_decoder, decoder_and_after, self_consistency
