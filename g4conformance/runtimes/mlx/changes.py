"""What may be done otherwise, to see whether a disagreement vanishes with it."""

from __future__ import annotations

CHANGES: dict[str, str] = {}
