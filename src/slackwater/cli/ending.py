"""How a process of the command line ends when it is told to: at once, or in order where it serves."""

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Generator
from typing import Final, Self

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)
_STDIN: Final = 0
_STDERR: Final = 2


class Ending:
    """Ends this process on SIGINT and SIGTERM, with the status that shells give to such an end: 130 and 143.

    A thread waits for the signals, for Python's own handlers run only between two steps of the main thread: not while
    it imports, and not while a store leaves its call without an answer. Nothing is half-done after such an end, since
    whatever others can see becomes visible in one step.

    Args:
        grace_s: Seconds that an end in order may take.
    """

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._ask: Callable[[], None] | None = None

    @classmethod
    def watch(cls, *, supervised: bool = False, grace_s: float = 8.0) -> Self:
        """Begin; on the main thread, before there are other threads: they inherit that the signals are blocked.

        Args:
            supervised: Also take the end of standard input, which a parent holds open, for SIGTERM: so no child
                outlives its parent, however that one ends.
            grace_s: See the class.
        """
        ending = cls(grace_s)
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        threading.Thread(target=ending._wait, name="ending", daemon=True).start()
        if supervised:
            threading.Thread(target=_wait_for_end_of_input, name="parent-watch", daemon=True).start()
        return ending

    @contextlib.contextmanager
    def in_order(self, ask: Callable[[], None]) -> Generator[None]:
        """Within the block the first signal calls ``ask``, from another thread, and the process goes on to its end.

        It is ended where that takes longer than ``grace_s``, and by a later SIGINT. Another SIGTERM is no news: some
        supervisors send it to a process and to its group.
        """
        self._ask = ask
        try:
            yield
        finally:
            self._ask = None

    def _wait(self) -> None:
        asked = False
        while True:
            number = signal.Signals(signal.sigwait(_SIGNALS))
            ask = self._ask
            if ask is not None and not asked:
                asked = True
                ask()
                self._end_later(number)
            elif not asked or number is signal.SIGINT:
                _end(number)

    def _end_later(self, number: signal.Signals) -> None:
        late = threading.Timer(self._grace_s, _end, (number,))
        late.daemon = True
        late.start()


def _end(number: signal.Signals) -> None:
    with contextlib.suppress(OSError):
        os.write(_STDERR, f"slackwater: ended by {number.name}\n".encode())  # sys.stderr may be locked just now
    os._exit(128 + number)  # threads of torch and of transfers are not worth waiting for


def _wait_for_end_of_input() -> None:
    with contextlib.suppress(OSError):  # closed from the start: nobody holds it
        while os.read(_STDIN, 4096):  # not sys.stdin, whose lock the interpreter needs at its end
            pass
    os.kill(os.getpid(), signal.SIGTERM)
