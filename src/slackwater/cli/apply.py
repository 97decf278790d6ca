"""``slackwater apply``: a delta makes a new model folder, or changes the old one where it lies."""

import fcntl
import os
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from slackwater.checkpoint.outline import Outline
from slackwater.checkpoint.state import StateTable
from slackwater.cli.attended import Attended
from slackwater.errors import ConflictError, CorruptError, InvalidInputError
from slackwater.ids import StateDigest
from slackwater.weights.diff import hash_source
from slackwater.weights.patch import Delta, WritableFolder, apply_delta, copy_folder, folder_bytes, state_after
from slackwater.weights.source import FolderSource, ShardSource
from slackwater.weights.undo import UndoLog
from slackwater.weights.watched import Watched


@dataclass(frozen=True, kw_only=True, slots=True)
class Applied:
    """What an application made."""

    folder: Path
    state: StateDigest
    num_changed: int
    """Elements that the delta changes."""
    num_bytes: int
    """Bytes of its objects."""


def apply_to_copy(source: FolderSource, delta: Delta, out: Path, *, threads: int, work: Attended) -> Applied:
    """Make a folder that is a state after a delta. It appears whole and verified, or not at all.

    Raises:
        InvalidInputError: ``out`` is there already.
        WrongBaseError: The delta was made on another state.
        CorruptError: The delta is damaged.
        NotFoundError: A part of it is missing.
    """
    folder = work.scratch.beside(out)
    table = _read(source, "read", threads, work)
    wanted = state_after(table, delta.manifest)
    total = folder_bytes(source)
    for done in copy_folder(source, folder):
        work.tell("copy", done, total)
    target = WritableFolder(FolderSource(folder))
    write(target, wanted.outline, delta, threads=threads, work=work)
    _verify(target, wanted, threads, work)
    work.scratch.appear(folder, out)
    return _applied(out, delta)


def apply_in_place(folder: Path, delta: Delta, *, threads: int, work: Attended) -> Applied:
    """Change a folder's files where they lie. Nothing is written unless all of it is what the delta was made on.

    Ended at any point, it goes on when it is called again: tiles that were being written are put back first.

    Raises:
        InvalidInputError: It is no model folder, or its files have other names too.
        ConflictError: Another process applies something to it.
        WrongBaseError: The delta was made on another state.
        CorruptError: The delta is damaged.
        NotFoundError: A part of it is missing.
    """
    with _locked(folder):
        source = FolderSource(folder)
        _check_alone(source)
        target, undo = WritableFolder(source), UndoLog(folder, Outline(source.specs().values()))
        undo.put_back(target)
        wanted = state_after(_read(target, "read", threads, work), delta.manifest)
        write(target, wanted.outline, delta, threads=threads, work=work, undo=undo)
        _verify(target, wanted, threads, work)
        target.flush()
        undo.close()
    return _applied(folder, delta)


def write(
    target: WritableFolder,
    outline: Outline,
    delta: Delta,
    *,
    threads: int,
    work: Attended,
    undo: UndoLog | None = None,
) -> None:
    """Apply a delta to a folder: see `slackwater.weights.patch.apply_delta`."""
    total = 0 if delta.manifest.bodies is None else len(delta.manifest.bodies.length)
    for done in apply_delta(target, outline, delta, threads=threads, undo=undo):
        work.tell("apply", done, total)


def _read(source: ShardSource, stage: str, threads: int, work: Attended) -> StateTable:
    return hash_source(Watched(source, partial(work.tell, stage)), threads=threads)


def _verify(target: WritableFolder, wanted: StateTable, threads: int, work: Attended) -> None:
    found = _read(target, "verify", threads, work)
    if found.digest != wanted.digest:
        raise CorruptError(
            f"the files hold state {found.digest[:12]} instead of {wanted.digest[:12]}",
            hint="something else writes to them, or the disk fails",
        )


def _applied(folder: Path, delta: Delta) -> Applied:
    manifest = delta.manifest
    return Applied(folder=folder, state=manifest.state, num_changed=manifest.num_changed, num_bytes=manifest.num_bytes)


def _check_alone(source: FolderSource) -> None:
    """Check that nobody else's files would change: caches of models are made of links."""
    for path in source.shards.values():
        if path.is_symlink() or path.stat().st_nlink > 1:
            raise InvalidInputError(f"{path} is a link to a file that has another name too", hint="use --out")


@contextmanager
def _locked(folder: Path) -> Generator[None]:
    """Keep other applications away, until this process ends at the latest."""
    if not folder.is_dir():
        raise InvalidInputError(f"{folder} is no folder", hint="name a Hugging Face model folder")
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConflictError(f"another process applies a delta to {folder}", hint="wait for its end") from error
        yield
    finally:
        os.close(handle)
