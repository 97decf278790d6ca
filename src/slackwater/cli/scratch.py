"""Folders that a command works in, and that are gone when it ends, also where a signal ends it."""

import os
import secrets
import shutil
import tempfile
import threading
from pathlib import Path
from typing import Final, Self

from slackwater.bucket.local import flush_folder
from slackwater.errors import InvalidInputError

_TRIES: Final = 100
"""How often a folder is removed that a thread goes on to fill: once it is gone, the thread's next file fails."""


class Scratch:
    """Temporary folders, removed at the end of its context. One of them may become the command's result.

    A process that is killed leaves them: they are called ``.slackwater-…``.
    """

    def __init__(self) -> None:
        self._folders: list[Path] = []
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._remove()

    def folder(self) -> Path:
        """An empty folder in the system's temporary directory: see ``TMPDIR``."""
        return self._made(Path(tempfile.gettempdir()), mode=0o700)

    def beside(self, target: Path) -> Path:
        """An empty folder on the file system of ``target``, which it is to become.

        Raises:
            InvalidInputError: ``target`` is there already, or its parent isn't.
        """
        if target.exists():
            raise InvalidInputError(f"{target} is there already", hint="name a folder that isn't, or remove it")
        if not target.absolute().parent.is_dir():
            raise InvalidInputError(f"{target.absolute().parent} is no folder", hint="make it first")
        return self._made(target.absolute().parent, mode=0o777)

    def appear(self, folder: Path, target: Path) -> None:
        """Give a folder of `beside` its name, in one step, once all of it is on the disk.

        Raises:
            InvalidInputError: ``target`` has been made meanwhile.
        """
        for path in (path for path in folder.rglob("*") if path.is_file()):
            with path.open("rb") as file:
                os.fsync(file.fileno())
        for path in (folder, *(path for path in folder.rglob("*") if path.is_dir())):
            flush_folder(path)
        with self._lock:
            if target.exists():
                raise InvalidInputError(f"{target} has been made meanwhile", hint="name another folder")
            folder.rename(target)
        flush_folder(target.absolute().parent)

    def end(self) -> None:
        """Remove them now, from any thread. Nothing appears after this: the process is about to end."""
        self._lock.acquire()
        self._remove()

    def _made(self, parent: Path, *, mode: int) -> Path:
        folder = parent / f".slackwater-{secrets.token_hex(6)}"
        with self._lock:
            folder.mkdir(mode=mode)
            self._folders.append(folder)
        return folder

    def _remove(self) -> None:
        for folder in self._folders:
            for _ in range(_TRIES):
                shutil.rmtree(folder, ignore_errors=True)  # threads may still write into it
                if not folder.exists():
                    break
        self._folders.clear()
