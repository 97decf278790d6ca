"""A run's history as its manifests tell it: what is committed, and what each version cost. No object is read."""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain, count, takewhile
from typing import Literal

from slackwater.bucket.base import Get, ObjectInfo
from slackwater.checkpoint.manifest import ENCODINGS, Encoding, Manifest
from slackwater.errors import AuthError, CorruptError, NotFoundError
from slackwater.ids import RunId, StateDigest, Version
from slackwater.publish.lineage import find_head, is_there, list_versions, listed_version, read_manifest
from slackwater.publish.path import Reads


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One version of a run."""

    version: Version
    kind: Literal["anchor", "delta", "damaged"]
    """``damaged``: its manifest can't be read, and only its number and age are known."""
    parent: Version | None
    """The version that a delta was made on."""
    state: StateDigest | None
    step: int | None
    """The trainer's."""
    created_at: str | None
    """RFC 3339, by the publisher's clock."""
    written_s: float | None
    """When its manifest was written: seconds since the epoch by the store's clock; None where it isn't told."""
    num_bytes: int
    """Of its objects."""
    num_changed: int
    """Elements that differ from the version before; in an anchor all."""
    density: float | None
    """``num_changed`` as a share of the model's elements; None where no anchor tells how many these are."""
    encodings: Mapping[Encoding, int]
    """A delta's bodies by how they are written."""
    has_canary: bool
    """Whether it has a canary: `slackwater.checkpoint.canary`."""
    damage: str | None
    """What is wrong with its manifest."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Numbers:
    """Which versions of a run are committed."""

    written_s: Mapping[Version, float | None]
    """By rising number, when each manifest was written, by the store's clock where that tells."""

    @property
    def head(self) -> Version:
        """The newest one."""
        return max(self.written_s)


def read_numbers(bucket: Reads, run: RunId, listing: Iterable[ObjectInfo] | None = None) -> Numbers:
    """Find a run's versions, whatever retention took: by a listing, and by number above it, for it may lag.

    Args:
        bucket: Where the run lies.
        run: The run.
        listing: A listing at hand; None makes one, of manifests alone.

    Raises:
        NotFoundError: The run has none.
    """
    found = _listed(run, bucket.list(f"{run}/manifests") if listing is None else listing)
    head = find_head(bucket, run, listed=found)
    if head is None and not found:
        raise NotFoundError(f"{run} has no version in this bucket", hint="check --bucket and --run")
    newest = max((*found, *(() if head is None else (head,))))
    above = range(max(found, default=-1) + 1, newest + 1)
    beyond = takewhile(lambda number: is_there(bucket, run, number), count(newest + 1))
    for number in (*(number for number in above if is_there(bucket, run, number)), *beyond):
        found[Version(number)] = None
    return Numbers(written_s=dict(sorted(found.items())))


def check_not_collected(bucket: Reads, run: RunId, version: Version) -> None:
    """Tell a version that retention took from one that was lost.

    Retention leaves no delta without its anchor. So where the oldest version that is there is an anchor, those below it
    were collected, or might as well have been: nothing that is there needs them. Where older ones are there, as kept by
    a pin, a bucket doesn't tell which of the two became of one between.

    Raises:
        NotFoundError: It was collected.
    """
    if is_there(bucket, run, version):
        return
    try:
        listed = list_versions(bucket, run)
    except AuthError:  # nothing is certain without
        return
    oldest = next((number for number in listed if is_there(bucket, run, number)), None)
    if oldest is None or oldest < version:
        return
    with suppress(CorruptError):
        if read_manifest(bucket, run, oldest).kind == "anchor":
            raise NotFoundError(
                f"version {version} of {run} was collected: the oldest that is there is anchor {oldest}",
                hint="name a newer version; `slackwater log` lists them",
            )


def _listed(run: RunId, listing: Iterable[ObjectInfo]) -> dict[Version, float | None]:
    found = ((listed_version(run, item.key), item.modified_s) for item in listing)
    return {version: modified_s for version, modified_s in found if version is not None}


def read_history(bucket: Reads, run: RunId, *, limit: int | None = None) -> list[Entry]:
    """The newest ``limit`` versions of a run, or all, the newest last.

    Raises:
        NotFoundError: The run has none.
    """
    numbers = read_numbers(bucket, run).written_s
    wanted = list(numbers)[-limit if limit else None :]
    entries = [_entry(bucket, run, version, numbers[version]) for version in wanted]
    below = (_entry(bucket, run, version, None) for version in reversed(list(numbers)) if version < wanted[0])
    anchors = (entry for entry in chain(entries, below) if entry.kind == "anchor")
    total = next((anchor.num_changed for anchor in anchors), 0)  # every anchor of a run lists the same tensors
    return [replace(entry, density=_density(entry, total)) for entry in entries]


def _density(entry: Entry, total: int) -> float | None:
    return entry.num_changed / total if total and entry.kind != "damaged" else None


def _entry(bucket: Get, run: RunId, version: Version, written_s: float | None) -> Entry:
    """A version as its manifest tells it, but for the density, which takes an anchor to tell."""
    try:
        found = read_manifest(bucket, run, version)
    except (CorruptError, NotFoundError) as error:
        return Entry(
            version=version, kind="damaged", parent=None, state=None, step=None, created_at=None, written_s=written_s,
            num_bytes=0, num_changed=0, density=None, encodings={}, has_canary=False, damage=error.message,
        )  # fmt: skip
    return Entry(
        version=version,
        kind=found.kind,
        parent=None if found.parent is None else found.parent.version,
        state=found.state,
        step=found.step,
        created_at=found.created_at,
        written_s=written_s,
        num_bytes=found.num_bytes,
        num_changed=found.num_changed,
        density=None,
        encodings=_encodings(found),
        has_canary=found.canary is not None,
        damage=None,
    )


def _encodings(manifest: Manifest) -> dict[Encoding, int]:
    letters = "" if manifest.bodies is None else manifest.bodies.encoding
    return {name: letters.count(letter) for letter, name in ENCODINGS.items() if letter in letters}
