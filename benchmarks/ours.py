"""Slackwater's own codec under measurement: what publisher and reader do with a model, on one thread."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from bounds import Bounds, measure
from measure import Speed, timed
from pairs import Pair, States, copy, copy_onto, same
from slackwater.checkpoint.application import apply_taken, places_at, places_of, take
from slackwater.checkpoint.bundles import Bundle, batches
from slackwater.checkpoint.codec import EncodedBody, Level, encode_body
from slackwater.checkpoint.digest import tile_digest
from slackwater.checkpoint.manifest import Manifest, ObjectRef, encode_manifest
from slackwater.checkpoint.outline import Outline
from slackwater.checkpoint.rules import decode_manifest
from slackwater.checkpoint.state import StateTable
from slackwater.errors import InternalError
from slackwater.ids import RunId, Version
from slackwater.publish.delta import Effort
from slackwater.publish.draft import DeltaDraft, Draft, Label
from slackwater.weights.diff import hash_source

_TILE_DIGESTS: Final = 16
"""Bytes of a changed tile's digests, before and after."""
_SUM: Final = 8
"""Bytes of a changed tensor's element sum."""
_MANIFEST_PER_TENSOR: Final = 64
_MANIFEST_REST: Final = 4096
_LABEL: Final = Label(
    run=RunId("codec-benchmark"), version=Version(1), step=1, created_at="2026-01-01T00:00:00.000000+00:00"
)
_THREADS: Final = 2
"""For what isn't timed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """What a delta of one level costs."""

    bodies: int
    """Bytes of all bodies."""
    tiles: int
    """Tiles that change."""
    tensors: int
    """Tensors that change."""
    changed: int
    """Elements that change."""
    manifest: int
    """Bytes of the manifest."""

    @property
    def manifest_allowed(self) -> int:
        """Bytes that the manifest may have."""
        return _MANIFEST_PER_TENSOR * self.tensors + _MANIFEST_REST

    @property
    def total(self) -> int:
        """Bytes of bodies and digests."""
        return self.bodies + _TILE_DIGESTS * self.tiles + _SUM * self.tensors

    @property
    def bits(self) -> float:
        """Bits per changed element, digests included and the manifest's other members not."""
        return 8 * self.total / max(self.changed, 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """One pair's bounds, and what it costs at both levels."""

    bounds: Bounds
    fast: Size
    wan: Size


@dataclass(frozen=True, kw_only=True, slots=True)
class Delta:
    """A delta as a reader has it: a manifest, and its objects by key."""

    outline: Outline
    manifest: Manifest
    objects: Sequence[memoryview]

    @property
    def size(self) -> Size:
        """What it costs."""
        tiles = [tile.number for body in self.manifest.listed() for tile in body.tiles]
        return Size(
            bodies=self.manifest.num_bytes,
            tiles=len(tiles),
            tensors=len({self.outline.tensor_of(number) for number in tiles}),
            changed=self.manifest.num_changed,
            manifest=len(encode_manifest(self.manifest)),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Speeds:
    """One level's speeds on one thread."""

    encode: Speed
    decode: Speed


def publish(pair: Pair, level: Level, held: StateTable | None = None) -> Delta:
    """Make a delta as a publisher does, and read its manifest as a reader does.

    Args:
        pair: The states.
        level: Of the bodies.
        held: The table of ``pair.old``, where it is at hand.
    """
    table = held or hash_source(pair.before, threads=_THREADS)
    effort = Effort(level=level, threads=_THREADS)
    draft = DeltaDraft(_LABEL, pair.after, table, pair.old, effort=effort, put=_nowhere, progress=_quietly)
    made = draft.read().finish()
    return Delta(outline=pair.outline, manifest=_reread(made), objects=_objects(made))


def _reread(draft: Draft) -> Manifest:
    return decode_manifest(encode_manifest(draft.manifest))


def _objects(draft: Draft) -> list[memoryview]:
    return [memoryview(draft.bodies[ref.key]) for ref in draft.manifest.objects]


def _nowhere(ref: ObjectRef, body: bytes) -> None:
    """Where objects go of which the draft keeps the bytes."""


def _quietly(stage: str, done: int, total: int) -> None:
    """Progress that nobody waits for."""


def sizes(pair: Pair) -> Sizes:
    """Take a pair's sizes."""
    held = hash_source(pair.before, threads=_THREADS)
    return Sizes(
        bounds=measure((pair.old[name], pair.new[name]) for name in pair.old),
        fast=publish(pair, "fast", held).size,
        wan=publish(pair, "wan", held).size,
    )


def encode(pair: Pair, level: Level) -> list[EncodedBody]:
    """What `slackwater.weights.diff.diff` does, on this thread: digests, changes, element sums, bodies."""
    bundles = [bundle for batch in batches(pair.outline, pair.old) for bundle in batch]
    bodies = (_encode_bundle(pair, bundle, level) for bundle in bundles)
    return [body for body in bodies if body is not None]


def _encode_bundle(pair: Pair, bundle: Bundle, level: Level) -> EncodedBody | None:
    places = places_at(pair.outline, bundle)
    return encode_body(places, take(places, pair.old.__getitem__), take(places, pair.new.__getitem__), level)


def apply(delta: Delta, held: States) -> None:
    """Apply every body in place: digests before, decoding with bounds checked, digests after."""
    for entry in delta.manifest.listed():
        body = delta.objects[entry.object][entry.offset : entry.offset + entry.length]
        places = places_of(delta.outline, entry)
        apply_taken(places, entry, body, take(places, held.__getitem__), held.__getitem__)


def speeds(pair: Pair, delta: Delta, level: Level, runs: int) -> Speeds:
    """Time encoding and applying; ``delta`` is that of `publish`, and the result is checked bit for bit.

    Raises:
        InternalError: The bodies aren't the published ones, or don't make the new bits.
    """
    encoded, bodies = timed(pair.num_bytes, runs, lambda: encode(pair, level))
    if b"".join(body.body for body in bodies) != b"".join(delta.objects):
        raise InternalError(f"the bodies of level {level} aren't those that a publisher makes")
    held = copy(pair.old)
    decoded, _ = timed(pair.num_bytes, runs, lambda: apply(delta, held), before=lambda: copy_onto(held, pair.old))
    if not same(held, pair.new):
        raise InternalError(f"level {level} doesn't make the new bits")
    return Speeds(encode=encoded, decode=decoded)


def copying(pair: Pair, runs: int) -> Speed:
    """Time a plain copy of the same bytes: what memory does at best."""
    held = copy(pair.old)
    return timed(pair.num_bytes, runs, lambda: copy_onto(held, pair.new))[0]


def digesting(pair: Pair, runs: int) -> Speed:
    """Time the digests of old and new bits alone: what encoding and applying take at least, however little changes."""

    def work() -> None:
        for name, old in pair.old.items():
            tile_digest(old)
            tile_digest(pair.new[name])

    return timed(pair.num_bytes, runs, work)[0]
