"""What a whole state is, by digests alone: which tensors, and the digest of each of their tiles.

Publisher and replica each keep one table, follow a chain with it, and compare digests instead of weights.
"""

import hashlib
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final, Self

from slackwater.checkpoint.manifest import Manifest, TensorEntry
from slackwater.checkpoint.tensor import TensorSpec
from slackwater.errors import CorruptError, NotFoundError, WrongBaseError
from slackwater.ids import StateDigest

_DOMAIN: Final = b"slackwater/1 state\n"


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorState:
    """One tensor and the digests of all its tiles, by index."""

    spec: TensorSpec
    digests: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class StateTable:
    """Every tensor of a state, by rising name."""

    tensors: Mapping[str, TensorState]
    digest: StateDigest = field(init=False)
    """SHA-256 over names, dtypes, shapes and tile digests: see docs/format.md."""

    def __post_init__(self) -> None:
        ordered = dict(sorted(self.tensors.items()))
        object.__setattr__(self, "tensors", MappingProxyType(ordered))
        object.__setattr__(self, "digest", _digest(ordered.values()))

    @classmethod
    def of_digests(cls, specs: Mapping[str, TensorSpec], digests: Mapping[str, Sequence[str]]) -> Self:
        """Build a table from tile digests that the caller computed; every spec has its digests, by index."""
        return cls(tensors={n: TensorState(spec=s, digests=tuple(digests[n])) for n, s in specs.items()})

    @classmethod
    def of_anchor(cls, manifest: Manifest) -> Self:
        """Read an anchor's table.

        Raises:
            CorruptError: It is no anchor, or its tiles don't make the state that it names.
        """
        if manifest.kind != "anchor":
            raise CorruptError(f"version {manifest.version} of {manifest.run} is a delta, not an anchor")
        table = cls(
            tensors={
                entry.name: TensorState(spec=entry.spec, digests=tuple(tile.post for tile in entry.tiles))
                for entry in manifest.tensors
            }
        )
        _check_result(manifest, table.digest)
        return table

    @property
    def num_elements(self) -> int:
        """Elements of all tensors."""
        return sum(tensor.spec.num_elements for tensor in self.tensors.values())

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.spec.num_bytes for tensor in self.tensors.values())

    def tile(self, name: str, index: int) -> str:
        """The digest of one tile.

        Raises:
            NotFoundError: No such tensor or tile.
        """
        tensor = self.tensors.get(name)
        if tensor is None or not 0 <= index < len(tensor.digests):
            raise NotFoundError(f"the state has no tile {index} of {name}")
        return tensor.digests[index]

    def with_tiles(self, changes: Mapping[str, Mapping[int, str]]) -> "StateTable":
        """The table after some tiles have changed: tensor name to tile index to digest, all known here."""
        changed = {name: _replace(self.tensors[name], digests) for name, digests in changes.items()}
        return StateTable(tensors={**self.tensors, **changed})

    def after(self, manifest: Manifest) -> "StateTable":
        """The table after a delta.

        Raises:
            WrongBaseError: The delta was made on another state.
            CorruptError: It is no delta, or it contradicts its own parent: an unknown tensor, another
                shape or dtype, another digest before, or tiles that don't make the state that it names.
        """
        if manifest.parent is None:
            raise CorruptError(f"version {manifest.version} of {manifest.run} is an anchor, not a delta")
        if manifest.parent.state != self.digest:
            raise WrongBaseError(
                f"version {manifest.version} of {manifest.run} was made on {manifest.parent.state[:12]}, "
                f"and the state held is {self.digest[:12]}",
                hint="catch up from an anchor",
            )
        for entry in manifest.tensors:
            self._check_entry(entry)
        result = self.with_tiles({e.name: {t.index: t.post for t in e.tiles} for e in manifest.tensors})
        _check_result(manifest, result.digest)
        return result

    def _check_entry(self, entry: TensorEntry) -> None:
        held = self.tensors.get(entry.name)
        if held is None:
            raise CorruptError(f"the delta names {entry.name}, a tensor that its parent doesn't have")
        if held.spec != entry.spec:
            raise CorruptError(
                f"{entry.name} is {entry.dtype} {list(entry.shape)} in the delta "
                f"and {held.spec.dtype} {list(held.spec.shape)} in its parent"
            )
        for tile in entry.tiles:
            if held.digests[tile.index] != tile.pre:
                raise CorruptError(f"{entry.name} tile {tile.index}: the delta's digest before isn't its parent's")


def _replace(tensor: TensorState, digests: Mapping[int, str]) -> TensorState:
    merged = tuple(digests.get(index, digest) for index, digest in enumerate(tensor.digests))
    return TensorState(spec=tensor.spec, digests=merged)


def _check_result(manifest: Manifest, found: StateDigest) -> None:
    if found != manifest.state:
        raise CorruptError(
            f"the tiles of version {manifest.version} of {manifest.run} make state {found[:12]}, "
            f"and the manifest names {manifest.state[:12]}"
        )


def _digest(tensors: Iterable[TensorState]) -> StateDigest:
    hasher = hashlib.sha256(_DOMAIN)
    for tensor in tensors:
        hasher.update(_canonical(tensor))
    return StateDigest(hasher.hexdigest())


def _canonical(tensor: TensorState) -> bytes:
    """Every length stands before what it counts, so that two tables never share an encoding."""
    name, dtype, shape = tensor.spec.name.encode(), tensor.spec.dtype.encode(), tensor.spec.shape
    return b"".join((
        struct.pack("<I", len(name)), name,
        struct.pack("<I", len(dtype)), dtype,
        struct.pack(f"<I{len(shape)}Q", len(shape), *shape),
        struct.pack("<I", len(tensor.digests)), bytes.fromhex("".join(tensor.digests)),
    ))  # fmt: skip
