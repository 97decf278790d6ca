"""Child processes of the demo: started side by side, watched, ended in order, never left behind."""

import asyncio
import contextlib
import os
import socket
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from slackwater.errors import UnavailableError

_GRACE_S = 8.0


@dataclass(kw_only=True, slots=True)
class Child:
    """One process. It ends when this process does: it watches the pipe that is its standard input."""

    name: str
    arguments: Sequence[str]
    """Of the ``slackwater`` command."""
    environment: Mapping[str, str]
    log: Path
    """Standard error goes there, appended."""
    process: asyncio.subprocess.Process | None = field(default=None, repr=False)
    starts: int = 0

    async def start(self) -> None:
        """Start it, in a session of its own so that Ctrl-C reaches the parent alone."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "slackwater.cli.main",
                *self.arguments,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env={**os.environ, **self.environment},
                start_new_session=True,
                limit=64 * 1024 * 1024,
            )
        self.starts += 1

    @property
    def running(self) -> asyncio.subprocess.Process:
        """The process.

        Raises:
            UnavailableError: It was never started.
        """
        if self.process is None:
            raise UnavailableError(f"{self.name} was not started")
        return self.process

    async def lines(self) -> AsyncIterator[str]:
        """Its standard output, line by line, until it ends."""
        stream = self.running.stdout
        while stream is not None and (line := await stream.readline()):
            yield line.decode("utf-8", "replace").rstrip()

    async def stop(self) -> None:
        """Ask it to end, then kill it. Idempotent."""
        process = self.process
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            await asyncio.wait_for(process.wait(), _GRACE_S)
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    def last_words(self) -> str:
        """The last line of its log, for an error's message."""
        lines = self.log.read_text("utf-8", "replace").strip().splitlines() if self.log.is_file() else []
        return lines[-1][-400:] if lines else "it wrote nothing"


async def keep_running(child: Child, *, most_starts: int = 5) -> None:
    """Start a child again whenever it ends, until cancelled.

    Raises:
        UnavailableError: It ended ``most_starts`` times.
    """
    while True:
        async for _line in child.lines():
            pass  # only its end is of interest here
        code = await child.running.wait()
        if child.starts >= most_starts:
            raise UnavailableError(
                f"{child.name} ended {child.starts} times, last with status {code}: {child.last_words()}",
                hint=f"read {child.log}",
            )
        await child.start()


async def stop_all(children: Sequence[Child]) -> None:
    """End children side by side; returns when none is left."""
    await asyncio.gather(*(child.stop() for child in children))


def free_port() -> int:
    """A port that nothing listened on a moment ago, on loopback."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
