"""Manifests to write and read."""

from typing import Final

from slackwater.checkpoint.manifest import FORMAT, Bodies, Manifest, ObjectRef, Parent, Tiles
from slackwater.ids import ObjectDigest, RunId, StateDigest, Version

SHA: Final = ObjectDigest("a" * 64)
STATE: Final = StateDigest("b" * 64)


def delta(
    *,
    objects: tuple[ObjectRef, ...],
    bodies: Bodies,
    tiles: Tiles,
    parent: StateDigest = STATE,
    state: StateDigest = STATE,
) -> Manifest:
    return Manifest(
        format=FORMAT,
        run=RunId("r"),
        version=Version(8),
        kind="delta",
        parent=Parent(version=Version(7), state=parent),
        state=state,
        step=8,
        created_at="2026-01-01T00:00:00+00:00",
        objects=objects,
        bodies=bodies,
        tiles=tiles,
    )


def blob(size: int, number: int = 0) -> ObjectRef:
    digest = ObjectDigest(f"{number:064x}")
    return ObjectRef(f"r/blobs/{digest}", size, digest)
