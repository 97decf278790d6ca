"""The engine's one thread: steps while there is work, runs jobs between two steps, parks when idle."""

import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Final, Generic, TypeVar

import torch

from slackwater.engine.torch.core import Core
from slackwater.engine.torch.sequence import Event
from slackwater.errors import SlackwaterError, UnavailableError

_log = logging.getLogger(__name__)
_Value = TypeVar("_Value")


class _Job(Generic[_Value]):
    """Something to do between two steps, and the future of its outcome."""

    def __init__(self, work: Callable[[], _Value]) -> None:
        self._work: Final = work
        self.outcome: Final[Future[_Value]] = Future()

    def run(self) -> None:
        """Do it, unless its caller gave up waiting. What isn't one of our errors ends the loop."""
        if not self.outcome.set_running_or_notify_cancel():
            return
        try:
            value = self._work()
        except SlackwaterError as error:
            self.outcome.set_exception(error)
        else:
            self.outcome.set_result(value)
        finally:
            if not self.outcome.done():
                self.outcome.set_exception(UnavailableError("the engine's loop died while it did this"))

    def refuse(self, error: SlackwaterError) -> None:
        """Fail it without doing it."""
        if self.outcome.set_running_or_notify_cancel():
            self.outcome.set_exception(error)


class StepLoop:
    """Owns a core: nobody else touches it once ``start`` was called, except through ``between_steps``.

    Args:
        core: What to step.
        threads: Of torch, for each step.
        deliver: Called in the loop's thread with each step's events.
        died: Called in the loop's thread, as the last thing, if anything unforeseen ended it.
    """

    def __init__(
        self,
        core: Core,
        *,
        threads: int,
        deliver: Callable[[list[Event]], None],
        died: Callable[[Exception], None],
    ) -> None:
        self._core: Final = core
        self._threads: Final = threads
        self._deliver: Final = deliver
        self._died: Final = died
        self._jobs: Final[queue.SimpleQueue[_Job[object]]] = queue.SimpleQueue()
        self._stopping = False
        # A daemon: a program that forgets to close the engine can still end.
        self._thread: Final = threading.Thread(target=self._run, name="slackwater-engine", daemon=True)

    def start(self) -> None:
        """Start the thread. Once."""
        self._thread.start()

    def between_steps(self, work: Callable[[], _Value]) -> Future[_Value]:
        """Have ``work`` done in the loop's thread, between two steps, in the order of the calls."""
        job = _Job(work)
        self._jobs.put(job)  # pyright: ignore[reportArgumentType] - the queue doesn't read outcomes
        return job.outcome

    def stop(self) -> None:
        """Have the loop end before its next step; jobs asked for before are done."""
        self.between_steps(self._stop)

    def join(self) -> None:
        """Wait until the thread has ended."""
        self._thread.join()

    def refuse_rest(self, error: SlackwaterError) -> None:
        """Fail what was asked for too late; the thread has ended or is about to."""
        while True:
            try:
                self._jobs.get_nowait().refuse(error)
            except queue.Empty:
                return

    def _stop(self) -> None:
        self._stopping = True

    def _run(self) -> None:
        torch.set_num_threads(self._threads)
        try:
            while not self._stopping:
                self._run_jobs(wait=not self._core.busy)
                if self._core.busy and not self._stopping:
                    self._deliver(self._core.step())
        except Exception as error:  # noqa: BLE001 - the thread's outermost loop: whatever it was, answers must learn
            _log.exception("the engine's loop died")
            self._died(error)

    def _run_jobs(self, *, wait: bool) -> None:
        try:
            self._jobs.get(block=wait).run()
            while True:
                self._jobs.get_nowait().run()
        except queue.Empty:
            return
