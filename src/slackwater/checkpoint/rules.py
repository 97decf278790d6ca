"""The rules that a manifest has to keep by itself, checked before any part of it is used: docs/format.md, section 3."""

import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Final, NoReturn

from slackwater.checkpoint.columns import from_column
from slackwater.checkpoint.keys import blob_key
from slackwater.checkpoint.manifest import ENCODINGS, MAX_NANS, AnchorTensor, Bodies, Manifest, Tiles, parse_manifest
from slackwater.checkpoint.tensor import WIDTHS, tile_at, tile_count
from slackwater.errors import CorruptError, InvalidInputError
from slackwater.ids import run_id

MAX_TILE_ELEMENTS: Final = 2**32 - 1
"""Positions inside a tile are 32 bits wide."""

_SEGMENT: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


def decode_manifest(body: bytes, *, fold: bool = False) -> Manifest:
    """Read and check a manifest.

    Args:
        body: Hostile until it has been read.
        fold: Whether it was found where folds are.

    The result keeps every rule that a manifest can keep alone; `slackwater.checkpoint.state.StateTable` compares its
    digests with the parent's state, and the objects are still to be compared with theirs.

    Raises:
        CorruptError: It breaks a rule; the message names the field.
    """
    manifest = parse_manifest(body)
    _check_lineage(manifest, fold=fold)
    _check_objects(manifest)
    if len(manifest.nans) > MAX_NANS or any(before >= after for before, after in pairwise(manifest.nans)):
        _refuse("nans", f"at most {MAX_NANS} names, which rise")
    if manifest.kind == "anchor":
        _check_anchor(manifest)
    else:
        _check_delta(manifest)
    return manifest


def _check_lineage(manifest: Manifest, *, fold: bool) -> None:
    try:
        run_id(manifest.run)
    except InvalidInputError as error:
        raise CorruptError(f"manifest field run: {error.message}") from error
    parent, version = manifest.parent, manifest.version
    if (parent is None) != (manifest.kind == "anchor"):
        _refuse("parent", "an anchor has none, and a delta has one")
    if fold and parent is None:
        _refuse("kind", "a fold is a delta")
    if parent is not None and (parent.version >= version if fold else parent.version != version - 1):
        _refuse("parent", f"version {version} can't be a {'fold' if fold else 'delta'} on version {parent.version}")


def _check_objects(manifest: Manifest) -> None:
    keys = [item.key for item in manifest.objects]
    for key in keys:
        segments = key.split("/")
        if segments[0] != manifest.run or not all(map(_is_segment, segments)):
            _refuse("objects", f"{key[:80]!r} is no key of run {manifest.run}")
    if len(set(keys)) != len(set(manifest.objects)):
        _refuse("objects", "a key is named twice with different contents")


def _is_segment(text: str) -> bool:
    return _SEGMENT.fullmatch(text) is not None and ".." not in text


def _check_anchor(manifest: Manifest) -> None:
    if manifest.bodies is not None or manifest.tiles is not None:
        _refuse("bodies", "an anchor has none")
    for name, index in manifest.files.items():
        if not _is_segment(name):
            _refuse("files", f"{name[:80]!r} is no file name")
        if index >= len(manifest.objects):
            _refuse("files", f"{name} is object {index} of {len(manifest.objects)}")
    _check_rising([tensor.name for tensor in manifest.tensors])
    shards = {index for name, index in manifest.files.items() if name.endswith(".safetensors")}
    for tensor in manifest.tensors:
        _check_tensor(manifest, tensor)
        if tensor.object not in shards:
            _refuse("files", f"{tensor.name} doesn't lie in a safetensors file of them")
    spans = sorted((t.object, t.offset, t.offset + t.spec.num_bytes, t.name) for t in manifest.tensors)
    for (item, _, end, before), (after, begin, _, name) in pairwise(spans):
        if item == after and begin < end:
            _refuse(f"{name}: offset", f"its bytes overlap those of {before}")


def _check_rising(names: Sequence[str]) -> None:
    for before, after in pairwise(names):
        if before >= after:
            _refuse("tensors", f"{after!r} follows {before!r}; names rise, each once")


def _check_tensor(manifest: Manifest, tensor: AnchorTensor) -> None:
    if tensor.dtype not in WIDTHS:
        _refuse(f"{tensor.name}: dtype", f"{tensor.dtype[:40]!r} is unknown")
    spec = tensor.spec
    if spec.num_bytes > 2**63 - 1:
        _refuse(f"{tensor.name}: shape", f"{list(tensor.shape)} is more than any file holds")
    if spec.num_elements and tile_at(spec, 0).count > MAX_TILE_ELEMENTS:
        _refuse(f"{tensor.name}: shape", f"a line of {list(tensor.shape)} is longer than {MAX_TILE_ELEMENTS}")
    if tensor.object >= len(manifest.objects):
        _refuse(f"{tensor.name}: object", f"{tensor.object} of {len(manifest.objects)}")
    end, size = tensor.offset + spec.num_bytes, manifest.objects[tensor.object].size
    if end > size:
        _refuse(f"{tensor.name}: offset", f"its bytes end at {end} of {size}")
    from_column(tensor.digests, tile_count(spec) + 1, f"{tensor.name}: digests")


def _check_delta(manifest: Manifest) -> None:
    if manifest.tensors or manifest.files:
        _refuse("tensors", "a delta has neither")
    if manifest.bodies is None or manifest.tiles is None:
        _refuse("bodies", "a delta has bodies and tiles")
    for item in manifest.objects:
        if item.key != blob_key(manifest.run, item.sha256):
            _refuse("objects", f"{item.key[:80]!r} isn't named by its SHA-256")
    _check_bodies(manifest, manifest.bodies)
    _check_tiles(manifest.tiles, sum(manifest.bodies.tiles))


def _check_bodies(manifest: Manifest, bodies: Bodies) -> None:
    counts = {len(bodies.object), len(bodies.length), len(bodies.encoding), len(bodies.tiles)}
    if len(counts) > 1:
        _refuse("bodies", f"columns of {sorted(counts)} entries")
    unknown = set(bodies.encoding) - ENCODINGS.keys()
    if unknown:
        _refuse("bodies.encoding", f"{min(unknown)!r} is none of {''.join(ENCODINGS)}")
    if any(before > after for before, after in pairwise(bodies.object)):
        _refuse("bodies.object", "it rises")
    filled = [0] * len(manifest.objects)
    for item, length in zip(bodies.object, bodies.length, strict=True):
        if item >= len(filled):
            _refuse("bodies.object", f"{item} of {len(filled)}")
        filled[item] += length
    for item, end in zip(manifest.objects, filled, strict=True):
        if item.size != end:
            _refuse("bodies.length", f"bodies of {end} bytes in {item.key}, which has {item.size}")


def _check_tiles(tiles: Tiles, count: int) -> None:
    if not len(tiles.number) == len(tiles.changed) == count:
        _refuse("tiles", f"{len(tiles.number)} numbers and {len(tiles.changed)} counts for {count} tiles of bodies")
    if len(set(tiles.number)) != count:
        _refuse("tiles.number", "a tile is named twice")
    if tiles.number and max(tiles.number) >= MAX_TILE_ELEMENTS:
        _refuse("tiles.number", f"{max(tiles.number)} is no tile's")
    if count and (tiles.pre == tiles.post).any():
        _refuse("tiles.digests", "a listed tile stays as it was")


def _refuse(field: str, why: str) -> NoReturn:
    raise CorruptError(f"manifest field {field}: {why}")
