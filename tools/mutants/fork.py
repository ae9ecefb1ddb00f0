"""Runs something in a fork of this process: what it changes, breaks or leaves behind ends with the fork."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from typing import NoReturn

from tools.mutants.outcome import End, Outcome

# Against endless loops only: a mutant needs a few seconds. Processor time, so that other work on the machine does not
# turn a slow mutant into a dead one; the limit of the clock is for one that waits for nothing.
CPU_SECONDS = 60
CLOCK_SECONDS = 20 * CPU_SECONDS
_LIMITS = (signal.SIGPROF, signal.SIGALRM)


def in_fork(work: Callable[[], Outcome]) -> Outcome:
    """What `work` returns; a crash if it raises or kills its process, a timeout if it does not end."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        _work_and_exit(work, writing)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        told = pipe.read()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        name = signal.Signals(os.WTERMSIG(status)).name
        return Outcome(End.TIMEOUT if os.WTERMSIG(status) in _LIMITS else End.CRASH, name)
    return Outcome.from_json(told)


def in_parallel(work: Callable[[int], Outcome], count: int, jobs: int) -> Iterator[Outcome]:
    """`work` of 0 to `count` in order, `jobs` at a time; each job is a fork that has inherited what `work` needs."""
    _inherited.append(work)
    with get_context("fork").Pool(jobs) as pool:
        yield from pool.imap(_inherited_work, range(count))


_inherited: list[Callable[[int], Outcome]] = []


def _inherited_work(number: int) -> Outcome:
    return _inherited[-1](number)


def _work_and_exit(work: Callable[[], Outcome], writing: int) -> NoReturn:
    try:
        _silence()
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
        signal.alarm(CLOCK_SECONDS)
        try:
            outcome = work()
        except BaseException as error:  # a mutant may raise anything, SystemExit included
            outcome = Outcome(End.CRASH, type(error).__name__)
        os.write(writing, outcome.to_json())
    finally:
        os._exit(0)  # the parent's cleanup is the parent's


def _silence() -> None:
    """What a mutant, or a test of it, prints is nobody's concern."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nowhere, stream)
