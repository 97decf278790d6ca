"""The manifest: one JSON object per version, whose creation is the commit. Normative page: docs/format.md.

An anchor lists every tile of every tensor, raw, inside ordinary safetensors files. A delta lists the tiles
that changed since its parent and nothing else. Both name every object with its size and SHA-256.
"""

import re
from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise
from typing import Annotated, Final, Literal, NoReturn, TypeVar

import msgspec

from slackwater.checkpoint.tensor import WIDTHS, TensorSpec, Tile, tile_at, tile_count
from slackwater.errors import CorruptError, InvalidInputError
from slackwater.ids import ObjectDigest, RunId, StateDigest, Version, run_id

FORMAT: Final = "slackwater/1"
"""Format name and version; readers refuse any other."""

MAX_MANIFEST_BYTES: Final = 256 * 1024 * 1024
"""Readers hold no larger manifest."""

MAX_TILE_ELEMENTS: Final = 2**32 - 1
"""Positions inside a tile are 32 bits wide."""

Encoding = Literal["raw", "sparse", "full"]
"""``raw``: the tile's own bytes. ``sparse``: gaps and steps. ``full``: compressed bytes."""

_Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_Positive = Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]
_Sha256 = Annotated[ObjectDigest, msgspec.Meta(pattern=r"\A[0-9a-f]{64}\Z")]
_State = Annotated[StateDigest, msgspec.Meta(pattern=r"\A[0-9a-f]{64}\Z")]
_Xxh3 = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{32}\Z")]
_Number = Annotated[Version, msgspec.Meta(ge=0, le=99_999_999)]
_Short = Annotated[str, msgspec.Meta(min_length=1, max_length=512)]
_Shape = Annotated[tuple[_Count, ...], msgspec.Meta(max_length=8)]
_SEGMENT: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


class ObjectRef(msgspec.Struct, frozen=True, array_like=True):
    """One object of the bucket."""

    key: _Short
    """Relative to the bucket's prefix."""
    size: _Count
    """Bytes."""
    sha256: _Sha256


class TileEntry(msgspec.Struct, frozen=True, array_like=True):
    """Where one tile's body lies and what it makes."""

    index: _Count
    """Position in `slackwater.checkpoint.tensor.tiles`."""
    encoding: Encoding
    object: _Count
    """Index into `Manifest.objects`."""
    offset: _Count
    """First byte of the body in that object."""
    length: _Positive
    """Bytes of the body."""
    changed: _Positive
    """Elements whose bits differ from the parent's; in an anchor all of them."""
    pre: _Xxh3 | None
    """XXH3-128 in hex of the tile's bytes before; None in an anchor."""
    post: _Xxh3
    """XXH3-128 in hex of the tile's bytes after."""


class TensorEntry(msgspec.Struct, frozen=True, array_like=True):
    """One tensor and its listed tiles, by rising index."""

    name: _Short
    dtype: str
    shape: _Shape
    tiles: tuple[TileEntry, ...]

    @property
    def spec(self) -> TensorSpec:
        """The tensor without its values."""
        return TensorSpec(name=self.name, dtype=self.dtype, shape=self.shape)


class Parent(msgspec.Struct, frozen=True):
    """The version that a delta was made on."""

    version: _Number
    state: _State


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One committed version."""

    format: str
    run: RunId
    version: _Number
    kind: Literal["anchor", "delta"]
    parent: Parent | None
    """None in an anchor."""
    state: _State
    """Digest of the whole state after this version: `slackwater.checkpoint.state`."""
    step: _Count
    """The trainer's step, for people."""
    created_at: _Short
    """RFC 3339, for people; order comes from the version alone."""
    objects: tuple[ObjectRef, ...]
    tensors: tuple[TensorEntry, ...]
    """By rising name."""
    files: dict[str, _Count] = {}
    """Anchor: file name in the Hugging Face folder to index into ``objects``. Empty in a delta."""

    @property
    def side_files(self) -> dict[str, ObjectDigest]:
        """Digests of an anchor's files that hold no tensors but change what a model does: config, tokenizer, template.

        One lineage has one set of them: the same weights under another config are another model.
        """
        return {
            name: self.objects[index].sha256
            for name, index in self.files.items()
            if not name.endswith((".safetensors", ".safetensors.index.json", ".md"))
        }

    @property
    def num_bytes(self) -> int:
        """Bytes of all its objects."""
        return sum(item.size for item in self.objects)


class _Tag(msgspec.Struct, frozen=True):
    """What is read first, so that a manifest of another format is told apart from a broken one."""

    format: str


def encode_manifest(manifest: Manifest) -> bytes:
    """The manifest's bytes: the same value gives the same bytes.

    Raises:
        InvalidInputError: It is larger than readers hold.
    """
    body = msgspec.json.encode(manifest, order="deterministic")
    if len(body) > MAX_MANIFEST_BYTES:
        raise InvalidInputError(f"the manifest has {len(body)} bytes; readers hold {MAX_MANIFEST_BYTES}")
    return body


def decode_manifest(body: bytes) -> Manifest:
    """Read and check a manifest.

    The result keeps every rule of docs/format.md that a manifest can keep alone; its digests are still to be
    compared with the parent's state and with the objects.

    Raises:
        CorruptError: It breaks a rule; the message names the field.
    """
    if len(body) > MAX_MANIFEST_BYTES:
        _refuse("manifest", f"{len(body)} bytes; readers hold {MAX_MANIFEST_BYTES}")
    tag = _parse(body, _Tag).format
    if tag != FORMAT:
        raise CorruptError(
            f"the manifest's format is {tag[:40]!r}, and this reader knows {FORMAT!r}",
            hint="update slackwater",
        )
    manifest = _parse(body, Manifest)
    _check_lineage(manifest)
    _check_objects(manifest)
    _check_tensors(manifest)
    _check_bodies(manifest)
    return manifest


_Parsed = TypeVar("_Parsed", _Tag, Manifest)


def _parse(body: bytes, into: type[_Parsed]) -> _Parsed:
    try:
        return msgspec.json.decode(body, type=into)
    except (msgspec.MsgspecError, RecursionError, UnicodeError) as error:
        raise CorruptError(f"the manifest can't be read: {error}") from error


def _check_lineage(manifest: Manifest) -> None:
    try:
        run_id(manifest.run)
    except InvalidInputError as error:
        raise CorruptError(f"manifest field run: {error.message}") from error
    parent = manifest.parent
    if (parent is None) != (manifest.kind == "anchor"):
        _refuse("parent", "an anchor has none, and a delta has one")
    if parent is not None and parent.version != manifest.version - 1:
        _refuse("parent", f"version {manifest.version} can't be a delta on version {parent.version}")
    if parent is not None and manifest.files:
        _refuse("files", "a delta has none")


def _check_objects(manifest: Manifest) -> None:
    keys = [item.key for item in manifest.objects]
    for key in keys:
        segments = key.split("/")
        if segments[0] != manifest.run or not all(map(_is_segment, segments)):
            _refuse("objects", f"{key[:80]!r} is no key of run {manifest.run}")
    if len(set(keys)) != len(set(manifest.objects)):
        _refuse("objects", "a key is named twice with different contents")
    for name, index in manifest.files.items():
        if not _is_segment(name):
            _refuse("files", f"{name[:80]!r} is no file name")
        if index >= len(keys):
            _refuse("files", f"{name} is object {index} of {len(keys)}")


def _is_segment(text: str) -> bool:
    return _SEGMENT.fullmatch(text) is not None and ".." not in text


def _check_tensors(manifest: Manifest) -> None:
    names = [entry.name for entry in manifest.tensors]
    for before, after in pairwise(names):
        if before >= after:
            _refuse("tensors", f"{after!r} follows {before!r}; names rise, each once")
    for entry in manifest.tensors:
        spec = _checked_spec(entry)
        indexes = [tile.index for tile in entry.tiles]
        if any(before >= after for before, after in pairwise(indexes)):
            _refuse(f"{entry.name}: tiles", "indexes rise, each once")
        if indexes and indexes[-1] >= tile_count(spec):
            _refuse(f"{entry.name}: tiles", f"there is no tile {indexes[-1]} of {tile_count(spec)}")
        if manifest.kind == "anchor" and len(indexes) != tile_count(spec):
            _refuse(f"{entry.name}: tiles", f"an anchor lists all {tile_count(spec)}, not {len(indexes)}")
        if manifest.kind == "delta" and not indexes:
            _refuse(f"{entry.name}: tiles", "a delta lists only tensors that change")


def _checked_spec(entry: TensorEntry) -> TensorSpec:
    if entry.dtype not in WIDTHS:
        _refuse(f"{entry.name}: dtype", f"{entry.dtype[:40]!r} is unknown")
    spec = entry.spec
    if spec.num_bytes > 2**63 - 1:
        _refuse(f"{entry.name}: shape", f"{list(entry.shape)} is more than any file holds")
    if spec.num_elements and tile_at(spec, 0).count > MAX_TILE_ELEMENTS:
        _refuse(f"{entry.name}: shape", f"a row of {list(entry.shape)} is longer than {MAX_TILE_ELEMENTS}")
    return spec


def _check_bodies(manifest: Manifest) -> None:
    spans: defaultdict[int, list[tuple[int, int, str]]] = defaultdict(list)
    for entry, tile, body in _listed(manifest):
        where = f"{entry.name} tile {tile.index}"
        _check_body(manifest, entry, tile, body)
        spans[body.object].append((body.offset, body.offset + body.length, where))
    if manifest.kind == "anchor" and not spans.keys() <= set(manifest.files.values()):
        _refuse("files", "an anchor's tensors lie in its files")
    for listed in spans.values():
        listed.sort()
        for (_, end, before), (start, _, after) in pairwise(listed):
            if start < end:
                _refuse(f"{after}: offset", f"its body overlaps that of {before}")


def _listed(manifest: Manifest) -> Iterator[tuple[TensorEntry, Tile, TileEntry]]:
    for entry in manifest.tensors:
        spec = entry.spec
        for body in entry.tiles:
            yield entry, tile_at(spec, body.index), body


def _check_body(manifest: Manifest, entry: TensorEntry, tile: Tile, body: TileEntry) -> None:
    where = f"{entry.name} tile {tile.index}"
    if body.object >= len(manifest.objects):
        _refuse(f"{where}: object", f"{body.object} of {len(manifest.objects)}")
    size = manifest.objects[body.object].size
    if body.offset + body.length > size:
        _refuse(f"{where}: length", f"its body ends at byte {body.offset + body.length} of {size}")
    if (body.encoding == "raw") != (manifest.kind == "anchor"):
        _refuse(f"{where}: encoding", f"{body.encoding} in a manifest of kind {manifest.kind}")
    if (body.pre is None) != (manifest.kind == "anchor"):
        _refuse(f"{where}: pre", "an anchor's tile has none, and a delta's has one")
    if body.changed > tile.count:
        _refuse(f"{where}: changed", f"{body.changed} elements in a tile of {tile.count}")
    if body.encoding == "raw" and (body.changed, body.length) != (
        tile.count,
        tile.count * WIDTHS[entry.dtype],
    ):
        _refuse(f"{where}: length", f"{body.length} bytes for {tile.count} elements of {entry.dtype}")


def _refuse(field: str, why: str) -> NoReturn:
    raise CorruptError(f"manifest field {field}: {why}")
