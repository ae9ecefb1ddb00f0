"""Keeps the chatter of exporters and compilers out of a report, and gives it back where something goes wrong."""

from __future__ import annotations

import logging
import os
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet() -> Iterator[None]:
    """No warnings, no log records below ERROR, and nothing on the process's stderr unless the body raises.

    ExecuTorch's and XNNPACK's C++ writes to the file descriptor, past Python's `sys.stderr` and loggers.
    """
    disabled = logging.root.manager.disable
    with warnings.catch_warnings(), _held_stderr():
        warnings.simplefilter("ignore")
        logging.disable(max(disabled, logging.WARNING))
        try:
            yield
        finally:
            logging.disable(disabled)


@contextmanager
def _held_stderr() -> Iterator[None]:
    with tempfile.TemporaryFile() as held:
        original = os.dup(2)
        os.dup2(held.fileno(), 2)
        try:
            yield
        except BaseException:
            held.seek(0)
            os.write(original, held.read())
            raise
        finally:
            os.dup2(original, 2)
            os.close(original)
