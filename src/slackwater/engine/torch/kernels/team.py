"""Threads that share one job after another: compiled blocks of work that whoever is free takes.

The first thread, the caller's, never waits for another one to wake up: it takes blocks itself until none is left, and
then only for those that another thread is at. So a busy machine costs what the others would have done, no more.
"""

import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, Final

import numpy as np

from slackwater.checkpoint.jit import kernel
from slackwater.engine.torch.kernels.atomics import add, breathe, call, let_others, read, write

_LEFT: Final = 0
_DONE: Final = 8
_STOP: Final = 16
_BLOCK: Final = 24
_JOB: Final = 25
_WORDS: Final = 64
"""A word is 8 bytes, a line of the cache 64: words that different threads write lie in different ones."""
_SPINS: Final = 512
"""Looks at the next job before a thread lets the system run others."""


@kernel
def _take(words: Any, thread: int) -> None:
    while read(words, _LEFT) > 0:
        left = add(words, _LEFT, -1)
        if left <= 0:
            return
        call(words[_BLOCK], words[_JOB], left - 1, thread)
        add(words, _DONE, 1)


@kernel
def _wait(spins: int) -> int:
    """Wait a little, the longer the more the system is asked to run others meanwhile; the next ``spins``."""
    breathe()
    if spins < _SPINS:
        return spins + 1
    let_others()
    return spins


@kernel
def _serve(words: Any, thread: int) -> None:
    spins = 0
    while read(words, _STOP) == 0:
        if read(words, _LEFT) > 0:
            _take(words, thread)
            spins = 0
        spins = _wait(spins)


@kernel
def share(words: Any, job: int, function: int, blocks: int) -> None:
    """Have ``blocks`` done by all threads; returns when they are.

    Args:
        words: Of the team.
        job: Address of what the function gets as its first argument.
        function: Address of ``function(job, block, thread)``.
        blocks: How many; they are numbered from 0.
    """
    write(words, _DONE, 0)
    words[_BLOCK], words[_JOB] = function, job
    write(words, _LEFT, blocks)
    _take(words, 0)
    spins = 0
    while read(words, _DONE) < blocks:
        spins = _wait(spins)


class Team:
    """Threads for the jobs of one caller; they spin while it is `awake` and sleep otherwise.

    Args:
        threads: The caller's counts.
    """

    def __init__(self, threads: int) -> None:
        self.threads: Final = threads
        self.words: Final = np.zeros(_WORDS, dtype=np.int64)
        self._wake: Final = [threading.Semaphore(0) for _ in range(threads - 1)]
        self._slept: Final = [threading.Semaphore(0) for _ in range(threads - 1)]
        self._closed = False
        for number, wake in enumerate(self._wake, 1):
            # Daemons: a program that forgets to close its engine can still end.
            threading.Thread(target=self._live, args=(number, wake), name=f"team-{number}", daemon=True).start()

    @contextmanager
    def awake(self) -> Generator[None]:
        """Between these, jobs are shared; outside, the caller would do them alone."""
        self.words[_STOP] = 0
        for wake in self._wake:
            wake.release()
        try:
            yield
        finally:
            self.words[_STOP] = 1
            for slept in self._slept:
                slept.acquire()

    def close(self) -> None:
        """End the threads. Not while awake."""
        self._closed = True
        for wake in self._wake:
            wake.release()

    def _live(self, number: int, wake: threading.Semaphore) -> None:
        while True:
            wake.acquire()
            if self._closed:
                return
            _serve(self.words, number)
            self._slept[number - 1].release()
