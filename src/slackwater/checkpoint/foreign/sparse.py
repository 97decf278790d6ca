"""Sparse patches: of each changed tensor the flat positions and the new elements, as two tensors of a safetensors file.

Sources: the two forms of TRL's proposed delta sync, ``<name>.indices`` with ``<name>.values`` (pull request 5417;
read and written) and ``<name>.idx`` with ``<name>.val``, where gaps may stand for positions (5937; read). prime-rl's
patches are of the first form. There is no checksum, and no word of what a patch was made on.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Final

import numpy as np

from slackwater.checkpoint.foreign.delta import Change, Files, ForeignDelta, each_once
from slackwater.checkpoint.foreign.files import SUFFIX, build_file, open_weights, weight_files
from slackwater.checkpoint.foreign.patches import SparsePatch
from slackwater.checkpoint.shards import Slot, read_metadata, read_slots
from slackwater.checkpoint.tensor import Bits, TensorSpec
from slackwater.errors import CorruptError, InvalidInputError, UnsupportedError

_PAIRS: Final = {".indices": ".values", ".idx": ".val"}
_POSITIONS: Final[Mapping[str, Mapping[str, str]]] = {
    "raw": {"I32": "<i4", "I64": "<i8"},
    "gap_delta": {"U16": "<u2", "U32": "<u4"},
}
"""Encoding to the dtypes that it has: safetensors' name, numpy's."""


def read_sparse(files: Files) -> ForeignDelta:
    """Read a patch of one or more files.

    Raises:
        InvalidInputError: The files are a full snapshot.
        UnsupportedError: The positions are encoded otherwise, or a file is a pickle.
        CorruptError: The files break the layout, or disagree about the version.
    """
    versions: dict[str, str] = {}
    patches: dict[str, SparsePatch] = {}
    for file in weight_files(files):
        buffer = open_weights(files, file)
        metadata = read_metadata(file, buffer)
        if metadata.get("sparse", "True") != "True":
            raise InvalidInputError(f"{file} isn't sparse: it is a full snapshot", hint="load it as an anchor")
        if "model_version" in metadata:
            versions[metadata["model_version"]] = file
        found = _read_pairs(file, buffer, metadata.get("encoding", "raw"))
        twice = sorted(found.keys() & patches.keys())
        if twice:
            raise CorruptError(f"{twice[0]} is in {file} and in a file before it")
        patches |= found
    if len(versions) > 1:
        raise CorruptError(f"the files {', '.join(versions.values())} are of different versions")
    return ForeignDelta(version=next(iter(versions), None), base_version=None, checksum=None, patches=patches)


def _read_pairs(file: str, buffer: memoryview, encoding: str) -> dict[str, SparsePatch]:
    slots = dict(read_slots(file, buffer))
    patches: dict[str, SparsePatch] = {}
    for suffix, partner in _PAIRS.items():
        for name in [key.removesuffix(suffix) for key in slots if key.endswith(suffix)]:
            if name in patches or name + partner not in slots:
                raise CorruptError(f"{file}: {name}{suffix} is there twice, or without {name}{partner}")
            patches[name] = _read_pair(file, buffer, slots.pop(name + suffix), slots.pop(name + partner), encoding)
    if slots:
        raise CorruptError(
            f"{file}: {next(iter(slots))} is no half of a pair {' or '.join(map('-'.join, _PAIRS.items()))}"
        )
    return patches


def _read_pair(file: str, buffer: memoryview, indices: Slot, values: Slot, encoding: str) -> SparsePatch:
    dtypes = _POSITIONS.get(encoding)
    if dtypes is None:
        raise UnsupportedError(
            f"{file} encodes its positions as {encoding[:40]!r}", hint=f"one of {', '.join(_POSITIONS)}"
        )
    dtype = dtypes.get(indices.spec.dtype)
    if dtype is None or len(indices.spec.shape) != 1:
        raise CorruptError(
            f"{file}: {indices.spec.name} is {indices.spec.dtype} {list(indices.spec.shape)}, not a vector of "
            f"{' or '.join(dtypes)}"
        )
    if values.spec.shape != indices.spec.shape:
        raise CorruptError(
            f"{file}: {values.spec.name} is {list(values.spec.shape)}, and its positions {list(indices.spec.shape)}"
        )
    return SparsePatch(
        indices=indices.bits(buffer).view(dtype),
        gaps=encoding == "gap_delta",
        dtype=values.spec.dtype,
        values=values.bits(buffer),
    )


def write_sparse(changes: Iterable[Change], *, version: str) -> Files:
    """Write a patch in one file; tensors without change are left out. Bits are compared, so -0 and NaN count.

    Args:
        changes: Each tensor at most once.
        version: A whole number: the step.

    Raises:
        InvalidInputError: ``version`` is no number, or a tensor comes twice.
        UnsupportedError: A tensor has more elements than positions of int32 reach.
    """
    if not (version.isascii() and version.isdecimal()):
        raise InvalidInputError(f"the version {version[:40]!r} isn't a whole number")
    tensors: dict[TensorSpec, Bits] = {}
    counts: dict[str, int] = {}
    total = 0
    for change in each_once(changes):
        total += change.spec.num_elements
        pair = _pair(change)
        if pair:
            tensors |= pair
            counts[change.spec.name] = next(iter(pair)).num_elements
    file = f"deltas/step_{int(version):06d}{SUFFIX}"
    return {file: build_file(file, tensors, _metadata(version, counts, total))}


def _pair(change: Change) -> dict[TensorSpec, Bits]:
    """Positions, then values; nothing where no bit differs."""
    spec = change.spec
    if spec.num_elements > 2**31:
        raise UnsupportedError(f"{spec.name} has {spec.num_elements} elements, too many for positions of int32")
    positions = np.flatnonzero(change.old != change.new)
    if positions.size == 0:
        return {}
    shape = (positions.size,)
    return {
        TensorSpec(name=f"{spec.name}.indices", dtype="I32", shape=shape): positions.astype("<u4"),
        TensorSpec(name=f"{spec.name}.values", dtype=spec.dtype, shape=shape): change.new[positions],
    }


def _metadata(version: str, counts: Mapping[str, int], total: int) -> dict[str, str]:
    changed = sum(counts.values())
    return {
        "format": "sparse_weight_patch",
        "version": "1",
        "sparse": "True",
        "model_version": str(int(version)),
        "num_changed_params": str(len(counts)),
        "total_changed_elements": str(changed),
        "total_elements": str(total),
        "sparsity": str(1 - changed / max(total, 1)),
        "changed_params": json.dumps(list(counts)),
    }
