"""A delta as a folder: what a bucket holds of one, without a bucket.

::

    delta.json          the manifest: run ``diff``, version 1, made on version 0
    outline.json        name, dtype and shape of each tensor of its base, by rising name: for people and their tools
    blobs/<sha256>      its packs
"""

from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from slackwater.checkpoint.columns import from_column
from slackwater.checkpoint.digest import object_digest
from slackwater.checkpoint.manifest import MAX_MANIFEST_BYTES, Manifest, ObjectRef, encode_manifest
from slackwater.checkpoint.outline import Outline
from slackwater.checkpoint.rules import decode_manifest
from slackwater.checkpoint.tensor import TensorSpec
from slackwater.errors import CorruptError, InvalidInputError, NotFoundError
from slackwater.ids import RunId, Version

MANIFEST_FILE: Final = "delta.json"
OUTLINE_FILE: Final = "outline.json"
RUN: Final = RunId("diff")
"""The run that manifests of delta folders name."""
START: Final = Version(0)
END: Final = Version(1)


def is_delta_folder(folder: Path) -> bool:
    """Whether a folder holds a delta."""
    return (folder / MANIFEST_FILE).is_file()


class DeltaFolder:
    """A delta folder, read. Its objects are read when they are asked for.

    Args:
        folder: The folder.

    Attributes:
        folder: The folder.
        manifest: The delta's, checked as far as it goes alone.
        outline: Of its base.

    Raises:
        NotFoundError: One of its files is missing.
        CorruptError: One breaks the format, or they don't fit together.
    """

    def __init__(self, folder: Path) -> None:
        self.folder: Final = folder
        self.manifest: Final = decode_manifest(_read(folder / MANIFEST_FILE))
        self.outline: Final = _decode_outline(_read(folder / OUTLINE_FILE))
        if self.manifest.tiles is None:
            raise CorruptError(f"{folder / MANIFEST_FILE} is an anchor's manifest", hint="name a delta folder")
        numbers = self.manifest.tiles.number
        if numbers and max(numbers) >= self.outline.num_tiles:
            raise CorruptError(
                f"{folder}: {MANIFEST_FILE} names tile {max(numbers)}, and {OUTLINE_FILE} has {self.outline.num_tiles}"
            )
        from_column(self.manifest.tiles.sums, len(set(map(self.outline.tensor_of, numbers))), "tiles.sums")

    def pack(self, ref: ObjectRef) -> memoryview:
        """One object, mapped, and checked against the manifest.

        Raises:
            NotFoundError: It isn't there.
            CorruptError: Its size or SHA-256 is another.
        """
        path = _blob(self.folder, ref)
        if not path.is_file():
            raise NotFoundError(f"the delta names an object that isn't there: {path}", hint="copy the whole folder")
        size = path.stat().st_size
        if size != ref.size:
            raise CorruptError(f"{path} has {size} bytes, and its manifest says {ref.size}")
        body = np.memmap(path, np.uint8, "r").data if size else memoryview(b"")
        if object_digest(body) != ref.sha256:
            raise CorruptError(f"{path} hasn't the SHA-256 that its manifest says")
        return body


def write_object(folder: Path, ref: ObjectRef, body: bytes) -> None:
    """Add an object to a delta folder that is being made."""
    path = _blob(folder, ref)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(body)


def write_delta(folder: Path, manifest: Manifest, outline: Outline) -> int:
    """Finish a delta folder whose objects are there; returns the bytes of its manifest.

    Raises:
        InvalidInputError: The manifest is larger than readers hold.
    """
    body = encode_manifest(manifest)
    specs = [(spec.name, spec.dtype, spec.shape) for spec in outline.specs]
    (folder / OUTLINE_FILE).write_bytes(msgspec.json.encode(specs))
    (folder / MANIFEST_FILE).write_bytes(body)
    return len(body)


def _blob(folder: Path, ref: ObjectRef) -> Path:
    return folder / "blobs" / ref.sha256


def _read(path: Path) -> bytes:
    if not path.is_file():
        raise NotFoundError(f"there is no {path}", hint="name a whole delta folder")
    if path.stat().st_size > MAX_MANIFEST_BYTES:
        raise CorruptError(f"{path} has {path.stat().st_size} bytes; readers hold {MAX_MANIFEST_BYTES}")
    return path.read_bytes()


def _decode_outline(body: bytes) -> Outline:
    try:
        entries = msgspec.json.decode(body, type=list[tuple[str, str, tuple[int, ...]]])
        outline = Outline(TensorSpec(name=name, dtype=dtype, shape=shape) for name, dtype, shape in entries)
    except (msgspec.MsgspecError, RecursionError, UnicodeError, InvalidInputError) as error:
        raise CorruptError(f"{OUTLINE_FILE} can't be read: {error}") from error
    if len(outline.by_name) != len(outline.specs):
        raise CorruptError(f"{OUTLINE_FILE} names a tensor twice")
    return outline
