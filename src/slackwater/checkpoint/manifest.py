"""The manifest: one JSON object per version, whose creation is the commit. Normative page: docs/format.md.

An anchor lists every tensor, raw, inside ordinary safetensors files. A delta lists the bodies that make its changes,
and the tiles that these change; a fold is a delta over several versions. All name each object's size and SHA-256.
"""

from collections.abc import Iterator
from functools import cached_property
from itertools import accumulate
from typing import Annotated, Final, Literal, TypeVar

import msgspec

from slackwater.checkpoint.canary import Canary
from slackwater.checkpoint.columns import from_column
from slackwater.checkpoint.outline import Outline
from slackwater.checkpoint.tensor import TensorSpec, Words
from slackwater.errors import CorruptError, InvalidInputError
from slackwater.ids import ObjectDigest, RunId, StateDigest, Version

FORMAT: Final = "slackwater/2"
"""Format name and version; readers refuse any other."""

MAX_MANIFEST_BYTES: Final = 256 * 1024 * 1024
"""Readers hold no larger manifest."""

MAX_NANS: Final = 16
"""Most tensors with NaN that a manifest names."""

Encoding = Literal["sparse", "dense", "full"]
"""How a body tells new bits: what changed, two bits for each element, or the bits themselves."""

ENCODINGS: Final[dict[str, Encoding]] = {"s": "sparse", "d": "dense", "f": "full"}
"""Encodings by their letters in a manifest."""

_Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_Positive = Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]
_Sha256 = Annotated[ObjectDigest, msgspec.Meta(pattern=r"\A[0-9a-f]{64}\Z")]
_State = Annotated[StateDigest, msgspec.Meta(pattern=r"\A[0-9a-f]{64}\Z")]
_Number = Annotated[Version, msgspec.Meta(ge=0, le=99_999_999)]
_Short = Annotated[str, msgspec.Meta(min_length=1, max_length=512)]
_Shape = Annotated[tuple[_Count, ...], msgspec.Meta(max_length=8)]


class ObjectRef(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One object of the bucket."""

    key: _Short
    """Relative to the bucket's prefix."""
    size: _Count
    """Bytes."""
    sha256: _Sha256


class AnchorTensor(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One tensor of an anchor, and where its bytes lie."""

    name: _Short
    dtype: str
    shape: _Shape
    object: _Count
    """Index into `Manifest.objects`."""
    offset: _Count
    """Its first byte in that object."""
    digests: str
    """Column: the digests of its tiles, then its element sum."""

    @property
    def spec(self) -> TensorSpec:
        """The tensor without its values."""
        return TensorSpec(name=self.name, dtype=self.dtype, shape=self.shape)


class Bodies(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A delta's bodies, in columns: in the order of the objects, in which they lie end to end."""

    object: tuple[_Count, ...]
    """Index into `Manifest.objects`."""
    length: tuple[_Positive, ...]
    """Bytes."""
    encoding: str
    """A letter each: `ENCODINGS`."""
    tiles: tuple[_Positive, ...]
    """How many tiles it makes: the next ones of `Tiles`."""


class Tiles(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, dict=True):
    """The tiles that a delta changes, in columns, in the order of its bodies."""

    number: tuple[_Count, ...]
    """As the run's outline numbers them."""
    changed: tuple[_Positive, ...]
    """How many elements differ from the parent's."""
    digests: str
    """Column: for each tile its digest before and its digest after."""
    sums: str
    """Column: the element sums after, of each tensor that changes, by rising name."""

    @cached_property
    def _pairs(self) -> Words:
        return from_column(self.digests, 2 * len(self.number), "tiles.digests")

    @property
    def pre(self) -> Words:
        """Digests before."""
        return self._pairs[0::2]

    @property
    def post(self) -> Words:
        """Digests after."""
        return self._pairs[1::2]


class TileEntry(msgspec.Struct, frozen=True):
    """One changed tile."""

    number: int
    changed: int
    pre: int
    post: int


class BodyEntry(msgspec.Struct, frozen=True):
    """One body: where it lies and what it makes."""

    object: int
    offset: int
    length: int
    encoding: Encoding
    tiles: tuple[TileEntry, ...]


class Parent(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The version that a delta was made on."""

    version: _Number
    state: _State


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True, dict=True):
    """One committed version, or a fold."""

    format: str
    run: RunId
    version: _Number
    kind: Literal["anchor", "delta"]
    parent: Parent | None = None
    """None in an anchor. A delta's is the version before; a fold's any earlier one."""
    state: _State
    """Digest of the whole state after this version: `slackwater.checkpoint.state`."""
    step: _Count
    """The trainer's step, for people."""
    created_at: _Short
    """RFC 3339, for people; order comes from the version alone."""
    objects: tuple[ObjectRef, ...]
    tensors: tuple[AnchorTensor, ...] = ()
    """Anchor: by rising name."""
    files: dict[str, _Count] = {}
    """Anchor: file name in the Hugging Face folder to index into ``objects``."""
    bodies: Bodies | None = None
    """Delta."""
    tiles: Tiles | None = None
    """Delta."""
    quantizers: tuple[_Short, ...] = ()
    """Names of the quantisers that made these bits of a trainer's, by rising name; for people and their tools."""
    nans: tuple[_Short, ...] = ()
    """Tensors in which this version wrote a NaN, by rising name, the first `MAX_NANS`; for people and their tools."""
    canary: Canary | None = None
    """What an engine with these weights computes, for replicas to check; no part of the state."""

    @cached_property
    def outline(self) -> Outline:
        """An anchor's tensors; empty in a delta, whose outline is its anchor's."""
        return Outline(tensor.spec for tensor in self.tensors)

    @property
    def folder(self) -> dict[str, ObjectRef]:
        """An anchor's files by name."""
        return {name: self.objects[index] for name, index in self.files.items()}

    @property
    def side_files(self) -> dict[str, ObjectDigest]:
        """Digests of an anchor's files that hold no tensors but change what a model does: config, tokenizer, template.

        One lineage has one set of them: the same weights under another config are another model.
        """
        return {name: ref.sha256 for name, ref in self.folder.items() if is_side_file(name)}

    @property
    def num_bytes(self) -> int:
        """Bytes of all its objects."""
        return sum(item.size for item in self.objects)

    @property
    def num_changed(self) -> int:
        """Elements that it changes; in an anchor all."""
        return self.outline.num_elements if self.tiles is None else sum(self.tiles.changed)

    def listed(self) -> Iterator[BodyEntry]:
        """A delta's bodies, in order."""
        if self.bodies is None or self.tiles is None:
            return
        tiles = map(TileEntry, self.tiles.number, self.tiles.changed, self.tiles.pre.tolist(), self.tiles.post.tolist())
        for place, letter, count in zip(_places(self.bodies), self.bodies.encoding, self.bodies.tiles, strict=True):
            made = tuple(next(tiles) for _ in range(count))
            yield BodyEntry(*place, encoding=ENCODINGS[letter], tiles=made)


def is_side_file(name: str) -> bool:
    """Whether a file of a model folder holds no tensors and changes what the model does."""
    return not name.endswith((".safetensors", ".safetensors.index.json", ".md"))


def _places(bodies: Bodies) -> Iterator[tuple[int, int, int]]:
    """Object, offset and length of each body: the first one of an object begins at 0."""
    ends = accumulate(bodies.length)
    begin, before = 0, -1
    for item, length, end in zip(bodies.object, bodies.length, ends, strict=True):
        if item != before:
            begin, before = end - length, item
        yield item, end - length - begin, length


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


def parse_manifest(body: bytes) -> Manifest:
    """Read a manifest's members; `slackwater.checkpoint.rules.decode_manifest` checks them as well.

    Raises:
        CorruptError: It is no JSON object of this format; the message names the member.
    """
    if len(body) > MAX_MANIFEST_BYTES:
        raise CorruptError(f"manifest field manifest: {len(body)} bytes; readers hold {MAX_MANIFEST_BYTES}")
    tag = _parse(body, _Tag).format
    if tag != FORMAT:
        raise CorruptError(
            f"the manifest's format is {tag[:40]!r}, and this reader knows {FORMAT!r}",
            hint="update slackwater, or publish the run again with this one",
        )
    return _parse(body, Manifest)


_Parsed = TypeVar("_Parsed", _Tag, Manifest)


def _parse(body: bytes, into: type[_Parsed]) -> _Parsed:
    try:
        return msgspec.json.decode(body, type=into)
    except (msgspec.MsgspecError, RecursionError, UnicodeError) as error:
        raise CorruptError(f"the manifest can't be read: {error}") from error
