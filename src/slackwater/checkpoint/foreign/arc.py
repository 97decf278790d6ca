"""Fireworks' layout: every tensor of the model, changed or not, in the files of the full snapshot.

Source: their package ``fireworks-delta-compression``. What a delta makes and was made on is said in the request
that loads it, not in its files. ``arc_v3`` holds pickles and isn't read.
"""

from collections.abc import Iterable, Mapping

from slackwater.checkpoint.foreign.blobs import Blob, build_blobs, read_patches
from slackwater.checkpoint.foreign.checksum import ADLER32_DECIMAL, digest_of
from slackwater.checkpoint.foreign.delta import Change, Files, ForeignDelta, each_once
from slackwater.checkpoint.foreign.files import INDEX, check_map, read_index, weight_files
from slackwater.checkpoint.foreign.packing import Compression
from slackwater.checkpoint.foreign.patches import encode_bytes
from slackwater.checkpoint.shards import Shard, build_index, cut_shards
from slackwater.checkpoint.tensor import TensorSpec
from slackwater.errors import InvalidInputError


def read_arc(files: Files, compression: Compression) -> ForeignDelta:
    """Read ``arc_v2`` (zstd) or ``arc_v1`` (zlib). An index, where there is one, has to agree with the files.

    Raises:
        UnsupportedError: A file or a body is a pickle.
        CorruptError: The files break the layout, or one of them is missing.
    """
    patches, found = read_patches(
        files, weight_files(files), encoding="xor", compression=compression, checksum=ADLER32_DECIMAL
    )
    index = read_index(files)
    if index is not None:
        check_map(index.weight_map, found)
    return ForeignDelta(version=None, base_version=None, checksum=ADLER32_DECIMAL.name, patches=patches)


def write_arc(
    changes: Iterable[Change], *, compression: Compression, weight_map: Mapping[str, str] | None = None
) -> Files:
    """Write a delta. Only compressed bodies are held, never all of ``changes``.

    Args:
        changes: Every tensor of the model once, also those that didn't change: their reader wants them all.
        compression: ``zstd`` for ``arc_v2``, ``zlib`` for ``arc_v1``.
        weight_map: Tensor name to file of the full snapshot, for the delta has to have the same files; without it,
            as `cut_shards` shares a full snapshot out.

    Raises:
        InvalidInputError: A tensor comes twice, or ``weight_map`` names others.
    """
    specs: list[TensorSpec] = []
    blobs: dict[str, Blob] = {}
    for change in each_once(changes):
        specs.append(change.spec)
        blobs[change.spec.name] = Blob(
            body=encode_bytes(change, "xor", compression), checksum=digest_of(ADLER32_DECIMAL, change.new)
        )
    shards = cut_shards(specs) if weight_map is None else _group(specs, weight_map)
    files: dict[str, bytes | bytearray] = {
        shard.file: build_blobs(shard.file, {spec.name: blobs[spec.name] for spec in shard.specs}) for shard in shards
    }
    if len(shards) > 1:
        files[INDEX] = build_index(shards)
    return files


def _group(specs: list[TensorSpec], weight_map: Mapping[str, str]) -> tuple[Shard, ...]:
    odd = sorted({spec.name for spec in specs} ^ weight_map.keys())
    if odd:
        raise InvalidInputError(
            f"the full snapshot and the changes differ in {len(odd)} tensors, {odd[0]} among them",
            hint="give every tensor, also those that didn't change",
        )
    return tuple(
        Shard(file=file, specs=tuple(spec for spec in specs if weight_map[spec.name] == file))
        for file in sorted(set(weight_map.values()))
    )
