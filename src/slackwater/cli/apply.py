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
    """Elements that were changed."""
    num_bytes: int
    """Bytes of the delta's objects."""
    was_after: bool
    """Whether the state was what the delta makes already."""


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
    return _applied(out, delta, table)


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
        source = FolderSource(folder, half_written=True)
        _check_alone(source)
        target, undo = WritableFolder(source), UndoLog(folder, Outline(source.specs().values()))
        undo.put_back(target, delta.pairs)
        table = _read(target, "read", threads, work)
        wanted = state_after(table, delta.manifest)
        for ref in delta.manifest.objects:
            delta.pack(ref)  # all there and whole, before anything is written
        try:
            write(target, wanted.outline, delta, threads=threads, work=work, undo=undo)
        except CorruptError as error:
            raise CorruptError(
                f"{error.message}; {folder} is partly changed", hint="apply an undamaged copy of this delta to it"
            ) from error
        _verify(target, wanted, threads, work)
        target.flush()
        undo.close()
    return _applied(folder, delta, table)


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


def _applied(folder: Path, delta: Delta, before: StateTable) -> Applied:
    manifest, was_after = delta.manifest, before.digest == delta.manifest.state
    return Applied(
        folder=folder,
        state=manifest.state,
        num_changed=0 if was_after else manifest.num_changed,
        num_bytes=manifest.num_bytes,
        was_after=was_after,
    )


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
