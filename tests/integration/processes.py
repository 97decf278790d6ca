"""Real processes of the command line: started, watched, and ended with the test that owns them."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from slackwater.cli.keys import CONTROL_KEY, INFERENCE_KEY

T = TypeVar("T")

INFERENCE = "inference-key"
CONTROL = "control-key"
SOURCE = Path(__file__).parents[2] / "src"
WITHIN_S = 120.0
"""Longest wait for anything: several starts side by side take their time on a small machine."""


def environment(changes: Mapping[str, str] | None = None) -> dict[str, str]:
    """What every process gets: the source tree, both keys, one thread, no network, no rich colours."""
    own = {
        "PYTHONPATH": str(SOURCE),
        INFERENCE_KEY: INFERENCE,
        CONTROL_KEY: CONTROL,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TERM": "dumb",
        "COLUMNS": "120",
    }
    return {**os.environ, **own, **(changes or {})}


def until(look: Callable[[], T | None], what: str, within_s: float = WITHIN_S) -> T:
    """Look until there is something to see: other processes tell of their progress in no other way."""
    deadline = time.monotonic() + within_s
    while True:
        found = look()
        if found:
            return found
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {within_s:.0f} s: {what}")
        time.sleep(0.02)


@dataclass(frozen=True)
class Ended:
    """A process that has ended."""

    status: int
    stdout: str
    stderr: str


class Process:
    """One ``slackwater`` command, in a process group of its own; its standard input stays open until `hang_up`."""

    def __init__(self, logs: Path, *arguments: str, changes: Mapping[str, str] | None = None) -> None:
        logs.mkdir(parents=True, exist_ok=True)
        # A folder of its own: two that start side by side must not write into one file.
        self._out = Path(tempfile.mkdtemp(prefix=f"{arguments[0]}-", dir=logs)) / f"{arguments[0]}.out"
        self._err = self._out.with_suffix(".err")
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self._child = subprocess.Popen(
                [sys.executable, "-m", "slackwater.cli.main", *arguments],
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=err,
                env=environment(changes),
                start_new_session=True,
            )
        self.pid = self._child.pid

    @property
    def stderr(self) -> str:
        """What it wrote so far."""
        return self._err.read_text("utf-8", "replace")

    @property
    def url(self) -> str:
        """Its base URL, once it has printed it."""
        return until(self._ready, f"{self._out.stem} is ready")

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal."""
        self._child.send_signal(number)

    def kill(self) -> None:
        """End it as a crash does."""
        self._child.kill()
        self._child.wait(10)
        self.hang_up()

    def hang_up(self) -> None:
        """Close its standard input, as its parent's death does."""
        if self._child.stdin is not None:
            self._child.stdin.close()

    def ended(self, within_s: float = WITHIN_S) -> Ended:
        """Wait for its end, and for that of everyone in its group."""
        status = self._child.wait(within_s)
        self.hang_up()
        until(lambda: not _group_lives(self.pid), "every child has ended", 2)
        return Ended(status, self._out.read_text("utf-8", "replace"), self.stderr)

    def imports_torch(self) -> bool:
        """Whether it is in the middle of its imports, or past them."""
        return "libtorch" in Path(f"/proc/{self.pid}/maps").read_text("utf-8", "replace")

    def _ready(self) -> str | None:
        line, newline, _ = self._out.read_text("utf-8", "replace").partition("\n")
        if newline:
            return str(json.loads(line)["ready"])
        if self._child.poll() is not None:
            raise ChildProcessError(f"{self._out.stem} ended with {self._child.returncode}:\n{self.stderr[-4000:]}")
        return None


def _group_lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


@contextmanager
def ending_all(processes: Sequence[Process]) -> Generator[None]:
    """Whatever happens inside, none of these is left behind."""
    try:
        yield
    finally:
        for process in processes:
            process.signal(signal.SIGTERM)
        for process in processes:
            try:
                process.ended(10)
            except subprocess.TimeoutExpired:
                process.kill()


def run(logs: Path, *arguments: str, changes: Mapping[str, str] | None = None) -> Ended:
    """Run a command to its end."""
    return Process(logs, *arguments, changes=changes).ended()


@dataclass(frozen=True)
class Reply:
    """A whole HTTP answer."""

    status: int
    json: Any


def call(url: str, *, key: str = CONTROL, body: object = None) -> Reply:
    """Ask one URL: GET, or POST where there is a body."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=30) as reply:
            return Reply(reply.status, json.load(reply))
    except urllib.error.HTTPError as error:
        with error:
            return Reply(error.code, json.load(error))


def health(url: str) -> dict[str, Any]:
    """A server's own word on itself; ``away`` where it doesn't answer."""
    try:
        return dict(call(f"{url}/health").json)
    except OSError:
        return {"status": "away", "version": None, "in_flight": 0}


def await_version(url: str, version: int) -> None:
    """Wait until a replica serves a version."""

    def serves() -> bool:
        seen = health(url)
        return seen["status"] == "serving" and seen["version"] == version

    until(serves, f"{url} serves version {version}")


def free_port() -> int:
    """A port that nothing listened on a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
