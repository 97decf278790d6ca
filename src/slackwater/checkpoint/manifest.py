"""The manifest: one small JSON object per version, whose creation is the commit. Normative page: docs/format.md.

An anchor lists every tile of every tensor, raw, inside ordinary safetensors files. A delta lists the tiles that
changed since its parent and nothing else. Both name every object with its size and SHA-256.
"""

from typing import Final, Literal

import msgspec

from slackwater.checkpoint.tensor import TensorSpec
from slackwater.ids import ObjectDigest, RunId, StateDigest, Version

FORMAT: Final = "slackwater/1"
"""Format name and version; readers refuse any other."""

MAX_MANIFEST_BYTES: Final = 256 * 1024 * 1024
"""Readers hold no larger manifest."""

Encoding = Literal["raw", "sparse", "full"]
"""``raw``: the tile's own bytes. ``sparse``: gaps and steps. ``full``: compressed bytes."""


class ObjectRef(msgspec.Struct, frozen=True, array_like=True):
    """One object of the bucket."""

    key: str
    """Relative to the bucket's prefix."""
    size: int
    """Bytes."""
    sha256: ObjectDigest


class TileEntry(msgspec.Struct, frozen=True, array_like=True):
    """Where one tile's body lies and what it makes."""

    index: int
    """Position in `slackwater.checkpoint.tensor.tiles`."""
    encoding: Encoding
    object: int
    """Index into `Manifest.objects`."""
    offset: int
    """First byte of the body in that object."""
    length: int
    """Bytes of the body."""
    changed: int
    """Elements whose bits differ from the parent's; in an anchor all of them."""
    pre: str | None
    """XXH3-128 in hex of the tile's bytes before; None in an anchor."""
    post: str
    """XXH3-128 in hex of the tile's bytes after."""


class TensorEntry(msgspec.Struct, frozen=True, array_like=True):
    """One tensor and its listed tiles, by rising index."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    tiles: tuple[TileEntry, ...]

    @property
    def spec(self) -> TensorSpec:
        """The tensor without its values."""
        return TensorSpec(name=self.name, dtype=self.dtype, shape=self.shape)


class Parent(msgspec.Struct, frozen=True):
    """The version that a delta was made on."""

    version: Version
    state: StateDigest


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One committed version."""

    format: str
    run: RunId
    version: Version
    kind: Literal["anchor", "delta"]
    parent: Parent | None
    """None in an anchor."""
    state: StateDigest
    """Digest of the whole state after this version: `slackwater.checkpoint.state`."""
    step: int
    """The trainer's step, for people."""
    created_at: str
    """RFC 3339, for people; order comes from the version alone."""
    objects: tuple[ObjectRef, ...]
    tensors: tuple[TensorEntry, ...]
    """By rising name."""
    files: dict[str, int] = {}
    """Anchor: file name in the Hugging Face folder to index into ``objects``. Empty in a delta."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all its objects."""
        return sum(item.size for item in self.objects)
