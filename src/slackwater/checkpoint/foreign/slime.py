"""slime's layout, which miles, Stitch and CoreWeave share: changed tensors alone, and both versions in the index.

Sources: slime's documentation of delta weight sync; CoreWeave's package ``cwtrain``, which reads and writes the
part of it that their service takes (``xor``, ``adler32``).
"""

import json
from collections.abc import Iterable, Mapping

import msgspec

from slackwater.checkpoint.foreign.blobs import Blob, build_blobs, read_patches
from slackwater.checkpoint.foreign.checksum import Checksum, digest_of, find_checksum
from slackwater.checkpoint.foreign.delta import Change, Files, ForeignDelta, each_once
from slackwater.checkpoint.foreign.files import INDEX, SUFFIX, Index, check_map, read_index
from slackwater.checkpoint.foreign.patches import ENCODINGS, Encoding, encode_bytes
from slackwater.checkpoint.shards import SHARD_BYTES, cut_shards
from slackwater.errors import CorruptError, InvalidInputError, UnsupportedError


class _Metadata(msgspec.Struct, frozen=True):
    """What the index says beside its map."""

    delta_encoding: str = ""
    version: str = ""
    base_version: str = ""
    compression_format: str = "zstd"
    checksum_format: str = ""


def read_slime(files: Files) -> ForeignDelta:
    """Read a delta of ``xor`` or ``overwrite``, zstd, and a checksum of `CHECKSUMS`.

    Raises:
        InvalidInputError: The files are a full snapshot.
        UnsupportedError: Another encoding, compression or checksum, or a pickle.
        CorruptError: The files break the layout, or one of them is missing.
    """
    index = read_index(files)
    if index is None:
        raise CorruptError(f"the delta has no {INDEX}", hint="it is uploaded last: fetch the delta again")
    metadata = _read_metadata(index)
    encoding, checksum = _read_formats(metadata)
    patches, found = read_patches(
        files, sorted(set(index.weight_map.values())), encoding=encoding, compression="zstd", checksum=checksum
    )
    check_map(index.weight_map, found)
    return ForeignDelta(
        version=metadata.version, base_version=metadata.base_version, checksum=checksum.name, patches=patches
    )


def _read_metadata(index: Index) -> _Metadata:
    try:
        metadata = msgspec.json.decode(index.metadata, type=_Metadata)
    except (msgspec.MsgspecError, RecursionError, UnicodeError) as error:
        raise CorruptError(f"{INDEX}: its metadata can't be read: {error}", hint="fetch the delta again") from error
    if not metadata.delta_encoding:
        raise InvalidInputError(f"{INDEX} names no delta_encoding: it is a full snapshot", hint="load it as an anchor")
    if not (metadata.version and metadata.base_version):
        raise CorruptError(f"{INDEX} doesn't name both version and base_version")
    return metadata


def _read_formats(metadata: _Metadata) -> tuple[Encoding, Checksum]:
    encoding = ENCODINGS.get(metadata.delta_encoding)
    if encoding is None:
        raise UnsupportedError(
            f"{INDEX} names the delta_encoding {metadata.delta_encoding[:40]!r}", hint=f"one of {', '.join(ENCODINGS)}"
        )
    if metadata.compression_format != "zstd":
        raise UnsupportedError(
            f"{INDEX} names the compression_format {metadata.compression_format[:40]!r}", hint="it has to be zstd"
        )
    return encoding, find_checksum(metadata.checksum_format)


def write_slime(
    changes: Iterable[Change],
    *,
    version: str,
    base_version: str,
    encoding: Encoding = "xor",
    checksum: str = "xxh3-128",
    shard_bytes: int = SHARD_BYTES,
) -> Files:
    """Write a delta; tensors without change are left out. Only compressed bodies are held, never all of ``changes``.

    Args:
        changes: Each tensor at most once.
        version: What the delta makes; CoreWeave wants the snapshot's identity here.
        base_version: What it was made on.
        encoding: ``overwrite`` is larger, and harmless to apply twice for readers that don't check.
        checksum: A name of `CHECKSUMS`; CoreWeave takes ``adler32`` alone.
        shard_bytes: Most compressed bytes in a file, where a tensor fits.

    Returns:
        The files by name, the index last. Without any change it is the only one.

    Raises:
        InvalidInputError: A version is empty, or a tensor comes twice.
        UnsupportedError: No such checksum, or a tensor is too large for the encoding.
    """
    if not (version and base_version):
        raise InvalidInputError("a delta in slime's layout names its version and the one that it was made on")
    kind = find_checksum(checksum)
    blobs = {
        change.spec.name: Blob(body=encode_bytes(change, encoding, "zstd"), checksum=digest_of(kind, change.new))
        for change in each_once(changes)
        if change.changed
    }
    metadata = {
        "version": version,
        "base_version": base_version,
        "delta_encoding": encoding,
        "compression_format": "zstd",
        "checksum_format": checksum,
    }
    return _lay_out(blobs, metadata, shard_bytes)


def _lay_out(blobs: Mapping[str, Blob], metadata: Mapping[str, str], shard_bytes: int) -> Files:
    shards = cut_shards([blob.spec(name) for name, blob in blobs.items()], shard_bytes) if blobs else ()
    files: dict[str, bytes | bytearray] = {}
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards):  # from 0, where Hugging Face counts from 1
        file = f"model-{number:05d}-of-{len(shards):05d}{SUFFIX}"
        chosen = {spec.name: blobs[spec.name] for spec in shard.specs}
        files[file] = build_blobs(file, chosen)
        weight_map |= dict.fromkeys(chosen, file)
    files[INDEX] = json.dumps({"metadata": metadata, "weight_map": weight_map}).encode()
    return files
