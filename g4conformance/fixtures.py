"""Finds the bundled fixtures, in a checkout and in an installed wheel alike."""

from __future__ import annotations

from pathlib import Path

from g4conformance.errors import CaseError

_PACKAGE = Path(__file__).parent


def fixtures_folder() -> Path:
    """The folder with `checkpoint/`, `images/` and `cases.yaml`.

    In a wheel it lies inside the package, in a checkout beside it.

    Raises:
        CaseError: it is in neither place, so the installation is incomplete.
    """
    for folder in (_PACKAGE / "_fixtures", _PACKAGE.parent / "fixtures"):
        if (folder / "cases.yaml").is_file():
            return folder
    raise CaseError(
        f"the bundled fixtures in {_PACKAGE / '_fixtures'}", "none", "Install g4conformance again from a wheel."
    )


def bundled_checkpoint() -> Path:
    return fixtures_folder() / "checkpoint"
