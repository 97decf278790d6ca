"""Replicas and gateways as processes of their own, which can die by themselves at a chosen moment.

A nursery imports everything once and forks a command for each task: a dozen deaths take seconds. It runs no thread
while it forks. Every child writes down which objects it reads from its bucket, and ends with the nursery.
"""

import importlib
import json
import os
import resource
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, Self

import msgspec
import numpy as np
from processes import WITHIN_S, environment, until

from slackwater.bucket.local import LocalBucket
from slackwater.checkpoint.warm import warm_kernels
from slackwater.delivery.fetcher import Fetcher
from slackwater.engine.scatter import warm
from slackwater.replica.swap import Event, Swap

Moment = Literal[
    "half_file", "unnamed_folder",
    "begin", "half_pack", "unnamed_pack", "named_pack", "decode", "prepared", "commit", "written", "relabelled",
    "committed", "agreed",
]  # fmt: skip
"""``half_file``, ``half_pack``: the kernel kills it when half of the bytes are on the disk. ``unnamed_folder``: an
anchor's files are there and not yet its folder. ``unnamed_pack``, ``named_pack``: before and after a whole pack takes
its name in the cache. ``decode``: the bytes are at hand. ``written``: between the last write to the weights and their
new label; ``relabelled``: after it. The others are events of the swap machine.
"""

_IMPORTED: Final = (
    "slackwater.cli.main",
    "slackwater.cli.replica",
    "slackwater.cli.gateway",
    "transformers.models.llama.modeling_llama",
)


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """A command to fork."""

    arguments: tuple[str, ...]
    folder: str
    """For what it writes: ``out``, ``err`` and ``reads``."""
    moment: Moment | None = None
    """When it kills itself."""
    version: int = -1
    """Of the exchange that dies at an event of the swap machine."""


class Child:
    """A forked command."""

    def __init__(self, nursery: "Nursery", pid: int, folder: Path) -> None:
        self.pid = pid
        self._nursery = nursery
        self._folder = folder
        self._ending: str | None = None

    @property
    def url(self) -> str:
        """Its base URL, once it has printed it."""
        return until(self._ready, f"{self._folder.name} is ready")

    @property
    def reads(self) -> list[str]:
        """Keys of the anchors' files and packs that it asked its bucket for, in order."""
        return (self._folder / "reads").read_text("utf-8").split()

    @property
    def stderr(self) -> str:
        """What it wrote so far."""
        return (self._folder / "err").read_text("utf-8", "replace")

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal."""
        os.kill(self.pid, number)

    def dies(self) -> str:
        """Wait for its end: the signal that killed it, or its status."""
        if self._ending is None:
            self._ending = self._nursery.wait(self.pid)
        return self._ending

    def kill(self) -> None:
        """End it as a crash does."""
        self.signal(signal.SIGKILL)
        self.dies()

    @property
    def lives(self) -> bool:
        """Whether nobody has waited for its end yet."""
        return self._ending is None

    def _ready(self) -> str | None:
        line, newline, _ = (self._folder / "out").read_text("utf-8", "replace").partition("\n")
        if newline:
            return str(json.loads(line)["ready"])
        if self._is_gone():
            raise ChildProcessError(f"{self._folder.name} ended with {self.dies()}:\n{self.stderr[-4000:]}")
        return None

    def _is_gone(self) -> bool:
        """Whether it has ended, which its parent learns when it waits."""
        return Path(f"/proc/{self.pid}/stat").read_text("utf-8").rpartition(")")[2].split()[0] == "Z"


class Nursery:
    """Forks commands. Leaving it kills those that are left."""

    def __init__(self, root: Path) -> None:
        root.mkdir(parents=True, exist_ok=True)
        self._root = root
        self.children: list[Child] = []
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment()
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for child in self.children:
            if child.lives:
                child.kill()
        self._process.communicate(timeout=WITHIN_S)

    def start(self, *arguments: str, moment: Moment | None = None, version: int = -1) -> Child:
        """Fork a ``slackwater`` command."""
        folder = self._root / f"{len(self.children)}-{arguments[0]}"
        folder.mkdir()
        for name in ("out", "err", "reads"):
            (folder / name).touch()
        task = Task(arguments=arguments, folder=str(folder), moment=moment, version=version)
        child = Child(self, int(self._ask(msgspec.json.encode(task))), folder)
        self.children.append(child)
        return child

    def wait(self, pid: int) -> str:
        """Wait for a child's end."""
        return self._ask(msgspec.json.encode(pid))

    def _ask(self, line: bytes) -> str:
        stdin, stdout = self._process.stdin, self._process.stdout
        if stdin is None or stdout is None:
            raise BrokenPipeError
        stdin.write(line + b"\n")
        stdin.flush()
        return stdout.readline().decode().strip()


def serve() -> None:
    """Fork a command for each task that comes, and answer with its pid; for a pid, wait for its end instead."""
    alive = os.pipe()
    for line in iter(sys.stdin.buffer.readline, b""):
        asked = msgspec.json.decode(line, type=Task | int)
        answer = _end_of(asked) if isinstance(asked, int) else str(_fork(asked, alive))
        sys.stdout.write(answer + "\n")
        sys.stdout.flush()


def _end_of(pid: int) -> str:
    status = os.waitpid(pid, 0)[1]
    if os.WIFSIGNALED(status):
        return signal.Signals(os.WTERMSIG(status)).name
    return str(os.WEXITSTATUS(status))


def _fork(task: Task, alive: tuple[int, int]) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        os.setsid()
        os.dup2(alive[0], 0)  # its other end is open for as long as the nursery lives
        os.close(alive[1])
        for name, number in (("out", 1), ("err", 2)):
            os.dup2(os.open(f"{task.folder}/{name}", os.O_WRONLY | os.O_APPEND), number)
        _note_reads(f"{task.folder}/reads")
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        if task.moment is not None:
            _arrange(task.moment, task.version)
        status = _run(task.arguments)
    finally:
        if sys.exc_info()[0] is not None:
            traceback.print_exc()
        os._exit(status)


def _run(arguments: Sequence[str]) -> int:
    sys.argv = ["slackwater", *arguments, "--supervised"]
    try:
        importlib.import_module("slackwater.cli.main").main()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 1
    return 0


def _note_reads(path: str) -> None:
    log = os.open(path, os.O_WRONLY | os.O_APPEND)

    def note(args: tuple[Any, ...]) -> None:
        if _is_object(args[1]):
            os.write(log, f"{args[1]}\n".encode())

    _hook(LocalBucket, "get", before=note)
    _hook(LocalBucket, "get_range", before=note)


def _is_object(key: str) -> bool:
    return "/anchors/" in key or "/blobs/" in key


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _hook(
    owner: Any,
    name: str,
    *,
    before: Callable[[tuple[Any, ...]], None] | None = None,
    after: Callable[[tuple[Any, ...], Any], None] | None = None,
) -> None:
    """Have something done around each call of a function or method."""
    inner = getattr(owner, name)

    def outer(*args: Any, **more: Any) -> Any:
        if before is not None:
            before(args)
        made = inner(*args, **more)
        if after is not None:
            after(args, made)
        return made

    setattr(owner, name, outer)


def _arrange(moment: Moment, version: int) -> None:
    """Have this process die at a moment."""
    match moment:
        case "half_file":
            _die_at_half("/model.safetensors")
        case "unnamed_folder":
            _hook(Path, "replace", before=lambda args: _die_if(args[0].name.startswith(".partial-")))
        case "half_pack" | "unnamed_pack" | "named_pack":
            fetched = partial(_arrange_pack, moment)
            _hook(Fetcher, "bodies", before=lambda args: fetched() if args[1].version == version else None)
        case "decode":
            _hook(Fetcher, "bodies", after=lambda args, _: _die_if(args[1].version == version))
        case "written":
            core = importlib.import_module("slackwater.engine.torch.core").Core
            _hook(core, "relabel", before=lambda args: _die_if(args[1] == version))
        case "relabelled":
            core = importlib.import_module("slackwater.engine.torch.core").Core
            _hook(core, "relabel", after=lambda args, _: _die_if(args[1] == version))
        case _:
            _die_at_event(Event(moment), version)


def _arrange_pack(moment: Moment) -> None:
    if moment == "half_pack":
        _die_at_half("/blobs/")
    elif moment == "unnamed_pack":
        _hook(Path, "replace", before=lambda args: _die_if(args[0].name.startswith(".put-")))
    else:
        _hook(Path, "replace", after=lambda args, _: _die_if(args[0].name.startswith(".put-")))


def _die_if(now: object) -> None:
    if now:
        _die()


def _die_at_half(part: str) -> None:
    """Let the next file be cut by the kernel at half of the object's bytes; that kills its writer."""

    def limit(args: tuple[Any, ...], body: bytes) -> None:
        if part in args[1]:
            resource.setrlimit(resource.RLIMIT_FSIZE, (len(body) // 2, -1))

    _hook(LocalBucket, "get", after=limit)


def _die_at_event(event: Event, version: int) -> None:
    def made(swap: Swap, args: tuple[Any, ...]) -> int | None:
        return (
            swap.goal if swap.goal is not None else args[2] if len(args) > 2 and args[2] is not None else swap.version
        )

    _hook(Swap, "after", before=lambda args: _die_if(args[1] is event and made(args[0], args) == version))


if __name__ == "__main__":
    for module in _IMPORTED:
        importlib.import_module(module)
    warm_kernels({"BF16"})
    warm({np.dtype(np.uint16)})
    serve()
