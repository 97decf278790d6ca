"""A baseline in a mapped file, which survives a restart.

Nothing in the folder is trusted: every tile is compared with the chain's digests before it is used, and a version that
the file has missed is applied to it. So no order of writes matters, and whatever a kill or a power cut leaves there is
used, completed, or made again.
"""

import fcntl
import logging
import os
import weakref
from collections.abc import Collection, Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Final

import msgspec
import numpy as np

from slackwater.checkpoint.outline import Outline
from slackwater.checkpoint.pieces import WHOLE, Pieces, held_elements
from slackwater.checkpoint.tensor import Bits, TensorSpec
from slackwater.errors import ConflictError, CorruptError, InvalidInputError, NotFoundError, WrongBaseError
from slackwater.ids import RunId, Version
from slackwater.publish.baseline import Store
from slackwater.publish.in_memory import apply, first_wrong
from slackwater.publish.objects import fetch_object
from slackwater.publish.path import Reads, read_path
from slackwater.publish.restore import Restored, outline

_LOG: Final = logging.getLogger(__name__)
_ALIGNMENT: Final = 64
_Lengths = list[tuple[TensorSpec, int]]


class _Note(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the file was last known to hold: where to begin, never a fact."""

    run: str
    version: Annotated[int, msgspec.Meta(ge=0, le=99_999_999)]


class MappedStore:
    """Bits in ``baseline.bin`` of a folder: tensors, or pieces, by rising name, each from a multiple of 64 bytes on.

    The folder takes the model's size, and is for one publisher, or one rank, at a time.

    Args:
        folder: Made where it doesn't exist.
        bucket: Where the run lies.
        run: The run.
        rebuild: Where bits come from that the file hasn't.

    Raises:
        InvalidInputError: Another publisher uses the folder, or it can't be written; later too, where it is full.
    """

    def __init__(self, folder: Path, bucket: Reads, run: RunId, rebuild: Store) -> None:
        self._file: Final = folder / "baseline.bin"
        self._note: Final = folder / "baseline.json"
        self._bucket: Final = bucket
        self._run: Final = run
        self._rebuild: Final = rebuild
        with self._writing():
            folder.mkdir(parents=True, exist_ok=True)
            lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o644)
            self._unlock: Final = weakref.finalize(self, os.close, lock)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def close(self) -> None:
        """Let others have the folder. What is held stays mapped, and must not be written any more."""
        self._unlock()

    def load(self, version: Version, names: Collection[str] | None, pieces: Pieces = WHOLE) -> Restored:
        """See `slackwater.publish.baseline.Store.load`."""
        try:
            held = self._resume(version, names, pieces)
        except (CorruptError, NotFoundError, WrongBaseError) as error:
            _LOG.warning("%s is no help to version %d of %s: %s", self._file, version, self._run, error)
            held = None
        return self.keep(self._rebuild.load(version, names, pieces)) if held is None else held

    def keep(self, held: Restored) -> Restored:
        """See `slackwater.publish.baseline.Store.keep`. Copies the bits."""
        with self._writing():
            self._note.unlink(missing_ok=True)
            self._file.unlink(missing_ok=True)  # an earlier mapping keeps its own bits
            bits = _map(self._file, _lengths(held.table.outline, held.bits, held.pieces))
        for name, source in held.bits.items():
            bits[name][:] = source
        kept = replace(held, bits=bits)
        self.moved(kept)
        return kept

    def moved(self, held: Restored) -> None:
        """See `slackwater.publish.baseline.Store.moved`."""
        note = self._note.with_suffix(".new")
        with self._writing():
            note.write_bytes(msgspec.json.encode(_Note(run=self._run, version=held.version)))
            note.replace(self._note)

    @contextmanager
    def _writing(self) -> Generator[None]:
        try:
            yield
        except OSError as error:
            raise InvalidInputError(
                f"{self._file.parent} can't hold a baseline: {error.strerror}",
                hint="give each publisher, and each rank, a folder of its own that it may write and that has room",
            ) from error

    def _resume(self, version: Version, names: Collection[str] | None, pieces: Pieces) -> Restored | None:
        """What the file holds of a version, once what it has missed is applied; None where that isn't enough."""
        noted = self._read_note()
        if noted is None:
            return None
        if noted > version:  # written after that commit was answered
            raise ConflictError(
                f"{self._note} tells of version {noted} of {self._run}, and version {version} is the newest that is "
                "there: the bucket was set back",
                hint="start a new run or put the lost versions back; without that folder it goes on all the same",
            )
        now = outline(self._bucket, self._run, version)
        lengths = _lengths(now.table.outline, now.table.outline.by_name if names is None else names, pieces)
        if self._file.stat().st_size != _size(lengths):
            return None
        held = replace(now, bits=_map(self._file, lengths), pieces=pieces)
        if _is_right(held):
            self.moved(held)
            return held
        return self._catch_up(held, noted)

    def _catch_up(self, held: Restored, noted: Version) -> Restored | None:
        if noted >= held.version:
            return None
        for manifest in read_path(self._bucket, self._run, held.version, held=noted):
            if manifest.kind == "anchor":
                return None
            apply(manifest, held.table.outline, partial(fetch_object, self._bucket), held.bits, held.pieces)
        if not _is_right(held):
            return None
        self.moved(held)
        return held

    def _read_note(self) -> Version | None:
        try:
            note = msgspec.json.decode(self._note.read_bytes(), type=_Note)
        except (FileNotFoundError, msgspec.MsgspecError, UnicodeError):
            return None
        return Version(note.version) if note.run == self._run and self._file.is_file() else None


def _lengths(outline: Outline, names: Iterable[str], pieces: Pieces) -> _Lengths:
    """How many elements are held of some tensors, by rising name."""
    wanted = frozenset(names)
    return [(spec, held_elements(spec, pieces)) for spec in outline.specs if spec.name in wanted]


def _size(lengths: _Lengths) -> int:
    return sum(-(-length * spec.bits_dtype.itemsize // _ALIGNMENT) * _ALIGNMENT for spec, length in lengths)


def _map(file: Path, lengths: _Lengths) -> Mapping[str, Bits]:
    """Tensors in a file, which is made as large as they are; bits that it hasn't are zero."""
    size = _size(lengths)
    if size == 0:
        file.touch()
        return {spec.name: np.empty(0, dtype=spec.bits_dtype) for spec, _ in lengths}
    with file.open("ab") as sized:
        os.posix_fallocate(sized.fileno(), 0, size)  # a disk that is full is told here, not by a signal later
    whole = np.memmap(file, dtype=np.uint8, mode="r+", shape=(size,))
    bits: dict[str, Bits] = {}
    begin = 0
    for spec, length in lengths:
        num_bytes = length * spec.bits_dtype.itemsize
        bits[spec.name] = whole[begin : begin + num_bytes].view(np.ndarray).view(spec.bits_dtype)
        begin += _size([(spec, length)])
    return bits


def _is_right(held: Restored) -> bool:
    """Whether all tiles held are those of the version."""
    return first_wrong(held.table, held.bits, held.pieces) is None
