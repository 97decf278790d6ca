"""The committed state that a publisher holds. It moves after the commit, by the very bytes that were committed."""

import logging
from collections.abc import Collection, Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import lru_cache
from typing import Final, Protocol

from slackwater.checkpoint.digest import tile_digest
from slackwater.checkpoint.manifest import Manifest
from slackwater.checkpoint.outline import Outline
from slackwater.checkpoint.pieces import WHOLE, Pieces, cut_out, locate
from slackwater.checkpoint.state import StateTable
from slackwater.checkpoint.tensor import Bits, TensorSpec
from slackwater.errors import CorruptError, InvalidInputError, LostRaceError, NotFoundError, WrongBaseError
from slackwater.ids import RunId, Version
from slackwater.publish.draft import Draft
from slackwater.publish.in_memory import apply
from slackwater.publish.lineage import check_tip, find_head
from slackwater.publish.path import Reads
from slackwater.publish.restore import Restored, outline, outline_broken, restore
from slackwater.weights.source import TensorSource, pieces_of

_LOG: Final = logging.getLogger(__name__)


class Store(Protocol):
    """Where a baseline's bits lie, and where they come from after a start."""

    def load(self, version: Version, names: Collection[str] | None, pieces: Pieces = WHOLE) -> Restored:
        """A committed version, proved; with all its bits, or those of some tensors.

        Args:
            version: Which.
            names: The tensors; None: all of them.
            pieces: What is wanted of them, with edges that are those of tiles.

        Raises:
            NotFoundError: It isn't committed, or nothing leads to it.
            CorruptError: A manifest, an object or a tile isn't what its digest says.
        """
        ...

    def keep(self, held: Restored) -> Restored:
        """Take a new anchor, whose bits are the caller's own; returns it with the bits to hold."""
        ...

    def moved(self, held: Restored) -> None:
        """The bits held have become another version's, in place."""
        ...


class MemoryStore:
    """Bits in memory, rebuilt from the bucket after a start.

    Args:
        bucket: Where the run lies.
        run: The run.
    """

    def __init__(self, bucket: Reads, run: RunId) -> None:
        self._bucket: Final = bucket
        self._run: Final = run

    def load(self, version: Version, names: Collection[str] | None, pieces: Pieces = WHOLE) -> Restored:
        """See `Store.load`."""
        return narrowed(restore(self._bucket, self._run, version), names, pieces)

    def keep(self, held: Restored) -> Restored:
        """See `Store.keep`."""
        return held

    def moved(self, held: Restored) -> None:
        """See `Store.moved`."""


class Baseline:
    """The newest version known to be committed.

    Args:
        bucket: Where the run lies.
        run: The run.
        store: Where the bits lie.
    """

    def __init__(self, bucket: Reads, run: RunId, store: Store) -> None:
        self._bucket: Final = bucket
        self._run: Final = run
        self._store: Final = store
        self.held: Restored | None = None
        self._is_current = False
        """Whether it is the chain's head, as far as is known: not at the start, nor after an unanswered commit."""

    @property
    def version(self) -> Version | None:
        """None before the first."""
        return None if self.held is None else self.held.version

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """Its tensors; empty before the first version."""
        return {} if self.held is None else {spec.name: spec for spec in self.held.table.outline.specs}

    def bits(self, name: str) -> Bits:
        """One tensor, flat.

        Raises:
            NotFoundError: Nothing is committed yet, or there is no such tensor.
        """
        if self.held is None or name not in self.held.bits:
            raise NotFoundError(f"{self._run} has no committed {name}", hint="publish an anchor first")
        return self.held.bits[name]

    def sync(self, *, with_bits: bool) -> None:
        """Learn the chain's head. A forced anchor needs no bits of it, so it heals a chain that is broken.

        Raises:
            ConflictError: What was held is gone from the bucket, or another version now.
            NotFoundError: Nothing leads to the head; or, without bits, no anchor's manifest can be read.
            CorruptError: Something on the way to the head isn't what its digest says.
        """
        self.sync_to(self.find_head(), None, with_bits=with_bits)

    def sync_to(
        self, head: Version | None, names: frozenset[str] | None, pieces: Pieces = WHOLE, *, with_bits: bool
    ) -> None:
        """Hold a version that is known to be the head: with all its bits, those of some tensors or pieces, or none."""
        if not self._is_current or self.version != head or (with_bits and self._lacks(names, pieces)):
            self._load(head, names, pieces, with_bits=with_bits)

    def find_head(self) -> Version | None:
        """The chain's head, looked for where it isn't known; what is held must still be in the chain.

        Raises:
            ConflictError: It is gone from the bucket, or another version now. It stays so until it is put back, or the
                publisher is opened again.
        """
        if not self._is_current and self.held is not None:
            with suppress(CorruptError):  # it is there; what it is worth is seen where it is read
                check_tip(self._bucket, self._run, self.held.tip)
        return self.version if self._is_current else find_head(self._bucket, self._run, at_least=self.version)

    @contextmanager
    def committing(self) -> Generator[None]:
        """The block commits. Unless it was answered, the chain is read again: it may have happened."""
        with self.moving():
            try:
                yield
            except LostRaceError:
                self._is_current = True  # it stays lost until the publisher is opened again
                raise

    @contextmanager
    def moving(self) -> Generator[None]:
        """Distrust what is held unless the block ends well: the chain is read again then."""
        self._is_current = False
        yield
        self._is_current = True

    def replace(self, manifest: Manifest, table: StateTable, bits: Mapping[str, Bits], pieces: Pieces = WHOLE) -> None:
        """Hold an anchor that was committed: all its bits, or those of some tensors and pieces."""
        with self.moving():
            version = manifest.version
            held = Restored(
                version=version, anchor=version, files=manifest.folder, table=table, bits=bits, pieces=pieces
            )  # fmt: skip
            self.held = self._store.keep(held)

    def advance(self, held: Restored, part: Draft, table: StateTable, num_bytes: int) -> None:
        """Apply a delta that was committed, or a rank's part of it.

        Args:
            held: What it was made on: what is held.
            part: What changes the tensors held here.
            table: The state after all of it.
            num_bytes: Of all its objects.

        Raises:
            WrongBaseError: The bits held aren't what they should be.
        """
        version = Version(held.version + 1)
        with self.moving():
            apply(part.manifest, held.table.outline, lambda ref: part.bodies[ref.key], held.bits, held.pieces)
            self.held = replace(held, version=version, table=table, delta_bytes=held.delta_bytes + num_bytes)
            self._store.moved(self.held)

    def _lacks(self, names: frozenset[str] | None, pieces: Pieces) -> bool:
        if self.held is None:
            return False
        if self.held.broken is not None:
            return True
        wanted = self.held.table.outline.by_name.keys() if names is None else names
        held = self.held.pieces
        return not wanted <= self.held.bits.keys() or any(held.get(name) != pieces.get(name) for name in wanted)

    def _load(self, head: Version | None, names: frozenset[str] | None, pieces: Pieces, *, with_bits: bool) -> None:
        if head is None:
            self.held = None
        elif with_bits:
            self.held = self._store.load(head, names, pieces)
        else:
            self.held = self._outline(head)
        self._is_current = True

    def _outline(self, head: Version) -> Restored:
        try:
            return outline(self._bucket, self._run, head)
        except (NotFoundError, CorruptError, WrongBaseError) as error:
            found = outline_broken(self._bucket, self._run, head)
            _LOG.warning(
                "version %d of %s can't be reached, and an anchor follows it on the tensors of anchor %d: %s",
                head,
                self._run,
                found.anchor,
                error,
            )
            return found


def narrowed(held: Restored, names: Collection[str] | None, pieces: Pieces) -> Restored:
    """Some tensors, and pieces of them, out of a version.

    Args:
        held: Has them all, whole or in those very pieces.
        names: The tensors; None: all of them. Those that there aren't are left out.
        pieces: What is wanted of them.
    """
    outline = held.table.outline
    wanted = outline.by_name.keys() if names is None else names
    bits = {name: held.bits[name] for name in wanted if name in held.bits}
    for name, piece in pieces.items():
        if name in bits and name not in held.pieces:
            bits[name] = cut_out(outline.specs[outline.by_name[name]], piece, bits[name])
    return replace(held, bits=bits, pieces={name: piece for name, piece in pieces.items() if name in bits})


def check_unwritten(manifest: Manifest, outline: Outline, source: TensorSource) -> None:
    """Check that a source which goes on from what it holds still holds what was committed.

    Raises:
        InvalidInputError: It was written; the message names the tensor.
    """
    read, pieces = lru_cache(maxsize=1)(source.bits), pieces_of(source)
    for listed in (tile for body in manifest.listed() for tile in body.tiles):
        spec, tile = outline.place(listed.number)
        if tile_digest(locate(spec, tile, pieces).take(read(spec.name))) != listed.post:
            raise InvalidInputError(
                f"{spec.name} was written while it was published; the version is committed as it was read",
                hint="let publish() return before the next optimizer step",
            )
