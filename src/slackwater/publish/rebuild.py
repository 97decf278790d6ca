"""A version rebuilt from the bucket as an ordinary model folder, on the disk instead of in memory, and proved."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from slackwater.bucket.base import Get
from slackwater.checkpoint.manifest import Manifest
from slackwater.checkpoint.outline import Outline
from slackwater.checkpoint.state import StateTable
from slackwater.errors import CorruptError, InternalError
from slackwater.ids import RunId, Version
from slackwater.publish.delta import Progress
from slackwater.publish.objects import check_object, fetch_object
from slackwater.publish.path import Reads, along
from slackwater.weights.diff import hash_source
from slackwater.weights.patch import Delta, WritableFolder, apply_delta, copy_folder, folder_bytes
from slackwater.weights.source import FolderSource
from slackwater.weights.watched import Watched


@dataclass(frozen=True, kw_only=True, slots=True)
class Rebuilt:
    """A version on the disk."""

    version: Version
    folder: Path
    table: StateTable


def rebuild(
    bucket: Reads,
    run: RunId,
    version: Version,
    folder: Path,
    *,
    threads: int,
    progress: Progress,
    start: Rebuilt | None = None,
) -> Rebuilt:
    """Bring a version into a folder: its anchor's files, patched by deltas and folds in place.

    Args:
        bucket: Where the run lies.
        run: The run.
        version: Which one.
        folder: An empty folder; it takes the whole model.
        threads: Bodies decoded at once.
        progress: Told the stages ``fetch`` and ``copy`` in bytes, ``apply`` in bodies, ``check`` in tiles.
        start: An earlier version at hand, whose files are copied where deltas lead on from it.

    Raises:
        NotFoundError: The version isn't committed, an object is missing, or nothing leads to it.
        CorruptError: A manifest, an object or a tile isn't what its digest says.
    """

    def follow(path: list[Manifest]) -> Rebuilt:
        for file in folder.iterdir():  # of an attempt that met a damaged fold
            file.unlink()
        if path and path[0].kind == "anchor":
            anchor, *path = path
            fetch_anchor(bucket, anchor, folder, progress)
            table = StateTable.of_anchor(anchor)
        elif start is not None:
            source = FolderSource(start.folder)
            total = folder_bytes(source)
            for done in copy_folder(source, folder):
                progress("copy", done, total)
            table = start.table
        else:
            raise InternalError(f"the path to version {version} of {run} begins nowhere")
        table = _patched(bucket, folder, table, path, threads, progress)
        return Rebuilt(version=version, folder=folder, table=table)

    return along(bucket, run, version, follow, held=None if start is None else start.version)


def fetch_anchor(bucket: Get, anchor: Manifest, folder: Path, progress: Progress) -> None:
    """Fetch an anchor's files into an empty folder.

    Raises:
        NotFoundError: One is missing.
        CorruptError: One isn't what its digest says.
    """
    done, total = 0, sum(anchor.objects[index].size for index in anchor.files.values())
    for file, index in anchor.files.items():
        for size in check_object(bucket, anchor.objects[index], folder / file):
            done += size
            progress("fetch", done, total)


def _patched(
    bucket: Get, folder: Path, table: StateTable, path: Sequence[Manifest], threads: int, progress: Progress
) -> StateTable:
    source = WritableFolder(FolderSource(folder))
    if Outline(source.specs().values()) != table.outline:
        raise CorruptError("the anchor's files hold other tensors than its manifest lists")
    done, total = 0, sum(map(_num_bodies, path))
    for manifest in path:
        table = table.after(manifest)
        delta = Delta(manifest=manifest, pack=lambda ref: memoryview(fetch_object(bucket, ref)))
        for _ in apply_delta(source, table.outline, delta, threads=threads):
            done += 1
            progress("apply", done, total)
    found = hash_source(Watched(source, partial(progress, "check")), threads=threads)
    if found.digest != table.digest:
        raise CorruptError(
            f"what was rebuilt isn't state {table.digest[:12]}: {_first_difference(table, found)} differs"
        )
    return table


def _num_bodies(manifest: Manifest) -> int:
    return 0 if manifest.bodies is None else len(manifest.bodies.length)


def _first_difference(wanted: StateTable, found: StateTable) -> str:
    tiles = np.flatnonzero(wanted.tiles != found.tiles)
    if tiles.size:
        spec, tile = wanted.outline.place(int(tiles[0]))
        return f"{spec.name} tile {tile.index}"
    return f"the element sum of {wanted.outline.specs[int(np.flatnonzero(wanted.sums != found.sums)[0])].name}"
