"""Objects and tensors of a snapshot, read and compared with its manifests: the deeper parts of an audit."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path

import numpy as np

from slackwater.bucket.base import Get
from slackwater.checkpoint.application import places_of
from slackwater.checkpoint.codec import Place
from slackwater.checkpoint.manifest import BodyEntry, Manifest
from slackwater.checkpoint.outline import Outline
from slackwater.checkpoint.state import StateTable
from slackwater.errors import CorruptError, InvalidInputError, SlackwaterError
from slackwater.publish.damage import Report
from slackwater.publish.delta import Progress
from slackwater.publish.objects import check_object
from slackwater.weights.diff import hash_source
from slackwater.weights.patch import Delta, WritableFolder, apply_pack
from slackwater.weights.source import FolderSource
from slackwater.weights.watched import Watched


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """A manifest on the way to a snapshot."""

    key: str
    """Where it lies."""
    delta: Delta
    """Of an anchor the manifest alone is used."""

    @property
    def manifest(self) -> Manifest:
        """The manifest."""
        return self.delta.manifest


class Rebuilding:
    """A snapshot being rebuilt in a folder, which goes on where a body can't be applied.

    Args:
        report: Takes what is found.
        folder: An empty folder, or one with the base's files.
        outline: The tensors that the files must hold.
        threads: Bodies decoded at once.
    """

    def __init__(self, report: Report, folder: Path, outline: Outline, threads: int) -> None:
        self.folder = folder
        self._report = report
        self._outline = outline
        self._threads = threads
        self._source: WritableFolder | None = None
        self._spoilt: set[int] = set()
        """Tiles of bodies that weren't applied: what follows on them is no news."""
        self._miscounted: list[tuple[str, str]] = []
        """Where, and which tile. They are told at the end: the objects are whole, and the rest can still be rebuilt."""

    def open(self) -> None:
        """Read the files, which are all there now."""
        with self._report.noting("tensor", "files of the anchor"):
            try:
                source = WritableFolder(FolderSource(self.folder))
            except InvalidInputError as error:
                raise CorruptError(error.message) from error
            if Outline(source.specs().values()) != self._outline:
                raise CorruptError("the files hold other tensors than the manifest lists")
            self._source = source

    def apply(self, step: Step, entries: Sequence[BodyEntry], pack: memoryview) -> None:
        """Apply bodies of one object."""
        if self._source is None:
            return

        def refused(entry: BodyEntry, error: SlackwaterError) -> None:
            tiles = {tile.number for tile in entry.tiles}
            if self._spoilt.isdisjoint(tiles) and _is_miscount(error, places_of(self._outline, entry)):
                self._miscounted.append((step.key, error.message))
            elif self._spoilt.isdisjoint(tiles):
                self._report.note("tensor", step.key, error.message)
            self._spoilt.update(tiles)

        with ThreadPoolExecutor(self._threads, thread_name_prefix="tiles") as pool:
            for _ in apply_pack(self._source, self._outline, entries, pack, pool=pool, refused=refused):
                pass

    def tell_miscounted(self) -> None:
        """Note the manifests that state a wrong count of changed elements, which spoils no bits."""
        for key, what in self._miscounted:
            self._report.note("manifest", key, what)
        self._report.num_manifests -= len({key for key, _ in self._miscounted})

    def compare(self, wanted: StateTable, progress: Progress) -> None:
        """Compare every tile and every element sum with a table; the stage is ``tensors``, in tiles."""
        if self._source is None:
            return
        found = hash_source(Watched(self._source, partial(progress, "tensors")), threads=self._threads)
        self._report.num_tiles = self._outline.num_tiles
        differ = set(np.flatnonzero(wanted.tiles != found.tiles).tolist())
        for number in sorted(differ - self._spoilt):
            spec, tile = self._outline.place(number)
            self._report.note("tensor", f"{spec.name} tile {tile.index}", "it hasn't the digest that the manifest says")
        told = {self._outline.tensor_of(number) for number in differ | self._spoilt}
        for tensor in sorted(set(np.flatnonzero(wanted.sums != found.sums).tolist()) - told):
            self._report.note(
                "tensor", self._outline.specs[tensor].name, "its element sum isn't what the manifest says"
            )


def _is_miscount(error: SlackwaterError, places: Sequence[Place]) -> bool:
    """Whether all that a body was refused for is the manifest's count: see `slackwater.checkpoint.refusal`."""
    return isinstance(error, CorruptError) and any(error.message.startswith(f"{place}: changed: ") for place in places)


def prove_objects(
    report: Report, bucket: Get | None, steps: Sequence[Step], rebuilding: Rebuilding | None, progress: Progress
) -> None:
    """Read every object: a pack at once, a file of an anchor in pieces.

    Args:
        report: Takes what is found.
        bucket: Where anchors lie; None where no step is one.
        steps: In order.
        rebuilding: Takes the objects as long as all of them are whole; None looks at them only.
        progress: Told the stage ``objects`` in bytes.
    """
    done, total = 0, sum(step.manifest.num_bytes for step in steps)
    for step in steps:
        if bucket is not None and step.manifest.kind == "anchor":
            sizes = _files(report, bucket, step.manifest, rebuilding)
        else:
            sizes = _packs(report, step, rebuilding)
        for size in sizes:
            done += size
            report.num_bytes += size
            progress("objects", done, total)


def _files(report: Report, bucket: Get, manifest: Manifest, rebuilding: Rebuilding | None) -> Iterator[int]:
    unnamed = set(range(len(manifest.objects))) - set(manifest.files.values())
    for index, file in [*((index, file) for file, index in manifest.files.items()), *((i, None) for i in unnamed)]:
        into = None if rebuilding is None or file is None else rebuilding.folder / file
        with report.noting("object", manifest.objects[index].key):
            yield from check_object(bucket, manifest.objects[index], into)
            report.num_objects += 1
    if rebuilding is not None and report.is_rebuildable:
        rebuilding.open()


def _packs(report: Report, step: Step, rebuilding: Rebuilding | None) -> Iterator[int]:
    entries = {index: list(found) for index, found in groupby(step.manifest.listed(), lambda entry: entry.object)}
    for index, ref in enumerate(step.manifest.objects):
        with report.noting("object", ref.key):
            pack = step.delta.pack(ref)
            report.num_objects += 1
            yield ref.size
            if rebuilding is not None and report.is_rebuildable:
                rebuilding.apply(step, entries.get(index, []), pack)
