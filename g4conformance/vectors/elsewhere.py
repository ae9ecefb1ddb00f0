"""A runtime in another process: its request is written into a folder, a command runs, its trace is read."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from g4conformance.checkpoints.checkpoint import Checkpoint
from g4conformance.errors import ConformanceError, VectorsError
from g4conformance.foreign import TRACE, identity
from g4conformance.judging.observation import Observation
from g4conformance.judging.whole_trace import failed, observation_of
from g4conformance.prompts import ResolvedCase
from g4conformance.vectors.answers import read_answer
from g4conformance.vectors.request import seal, write_entering


@dataclass(frozen=True)
class Elsewhere:
    """A runtime outside of this process. It is no `Runtime`: all that is known of it is the trace that it writes.

    What it computes with is not this process's torch, so that noise must count other ways of computing.
    """

    name: str


@dataclass(frozen=True)
class CommandRuntime(Elsewhere):
    """One that a command starts, anew for each case.

    Attributes:
        name: the command, as a shell would split it; the request's folder is appended.
        timeout: seconds that one case may take, start included.
    """

    timeout: float

    def run(self, folder: Path, logs: Path) -> None:
        """Has the command answer the request in `folder`; what it prints goes to files in `logs`.

        Neither it nor what it has started is alive afterwards.

        Raises:
            CommandFailed: it cannot be started, does not end in time, or ends with another status than 0.
        """
        with (logs / "stdout").open("wb") as out, (logs / "stderr").open("wb") as err:
            try:
                process = subprocess.Popen(
                    [*shlex.split(self.name), str(folder)],
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=err,
                    start_new_session=True,
                )
            except OSError as error:
                raise CommandFailed(f"{type(error).__name__}: {error}") from None
            try:
                status = process.wait(self.timeout)
            except subprocess.TimeoutExpired:
                told = f"a timeout: no answer within {self.timeout:g} s, so its process group was killed"
                raise CommandFailed(told + _last_words(logs / "stderr")) from None
            finally:
                _end_group(process)
        if status:
            how = f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
            raise CommandFailed(how + _last_words(logs / "stderr"))


class CommandFailed(Exception):  # noqa: N818 - a finding about the runtime under test, not an error of ours
    """The command gave no answer, and why."""


def require_command(command: str) -> None:
    """Raises ConformanceError unless `command` names a program that can be started."""
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise ConformanceError("--runtime-command as a shell reads it", f"{command!r} ({error})", "Mend it.") from None
    if not words or shutil.which(words[0]) is None:
        found = f"{words[0]!r}, which is none" if words else "nothing"
        raise ConformanceError("a program to start with --runtime-command", found, "Check it, or give its full path.")


def observe_command(
    runtime: CommandRuntime, case: ResolvedCase, reference: Mapping[str, Tensor], checkpoint: Checkpoint
) -> Observation:
    """What the command yields for `case`; whatever goes wrong in it is noted, and never ends the run."""
    with tempfile.TemporaryDirectory(prefix="g4conformance-", ignore_cleanup_errors=True) as temporary:
        folder = Path(temporary) / "request"
        manifest = write_entering(folder, case, reference, checkpoint)
        seal(folder, manifest)
        try:
            runtime.run(folder, logs=Path(temporary))
            if not (folder / TRACE).is_file():
                return failed(f"nothing, but left no {TRACE} in the request's folder either")
            trace = read_answer(folder, identity(manifest))
        except CommandFailed as failure:
            return failed(str(failure))
        except VectorsError as error:
            return failed(f"nothing, but wrote what cannot be judged: expected {error.expected}, found {error.found}")
    return observation_of(trace, case, reference, checkpoint.facts)


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """Kills what is left of the session that `process` began, and waits for it."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _last_words(stderr: Path) -> str:
    lines = stderr.read_bytes().decode(errors="replace").strip().splitlines()
    return f"; its last words: {lines[-1].strip()}" if lines else ""
