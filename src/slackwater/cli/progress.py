"""How far a command is: a bar per stage, on a terminal alone and only where it takes longer than a second."""

import threading
from typing import Final, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from slackwater.clock import Clock, SystemClock

PATIENCE_S: Final = 1.0
"""Seconds without bars."""


class Bars:
    """Bars on standard error. Safe for threads; to be used as a context.

    Args:
        console: Where to; None takes standard error. Nothing is written where it is no terminal.
        clock: Tells when a second has passed.
    """

    def __init__(self, console: Console | None = None, clock: Clock | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._clock = clock or SystemClock()
        self._began = self._clock.monotonic()
        columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn()
        self._bars = Progress(*columns, console=self._console, transient=True)
        self._stages: dict[str, TaskID] = {}
        self._lock = threading.Lock()
        self._is_over = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def tell(self, stage: str, done: int, total: int) -> None:
        """Move a stage's bar; the first call makes it."""
        with self._lock:
            if self._is_over or not self._console.is_terminal:
                return
            if stage not in self._stages:
                self._stages[stage] = self._bars.add_task(stage, total=total)
            self._bars.update(self._stages[stage], completed=done, total=total)
            if not self._bars.live.is_started and self._clock.monotonic() - self._began >= PATIENCE_S:
                self._bars.start()

    def stop(self) -> None:
        """Take the bars away and give the terminal its cursor back."""
        with self._lock:
            self._is_over = True
            if self._bars.live.is_started:
                self._bars.stop()
