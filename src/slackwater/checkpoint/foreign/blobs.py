"""Tensors as compressed bodies: U8 vectors under the tensors' own names, and their checksums as the file's metadata."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from slackwater.checkpoint.foreign.checksum import Checksum, Proof
from slackwater.checkpoint.foreign.delta import Files
from slackwater.checkpoint.foreign.files import build_file, open_weights
from slackwater.checkpoint.foreign.packing import Compression
from slackwater.checkpoint.foreign.patches import BytePatch, Encoding
from slackwater.checkpoint.foreign.pickles import refuse_pickled_body
from slackwater.checkpoint.shards import read_metadata, read_slots
from slackwater.checkpoint.tensor import TensorSpec
from slackwater.errors import CorruptError


@dataclass(frozen=True, kw_only=True, slots=True)
class Blob:
    """One tensor's body and the checksum of its new bytes."""

    body: bytes | memoryview
    checksum: str

    def spec(self, name: str) -> TensorSpec:
        """The vector that it is in its file."""
        return TensorSpec(name=name, dtype="U8", shape=(len(self.body),))


def read_patches(
    files: Files, names: Iterable[str], *, encoding: Encoding, compression: Compression, checksum: Checksum
) -> tuple[dict[str, BytePatch], dict[str, str]]:
    """Read files of bodies.

    Returns:
        Tensor name to patch, and tensor name to file.

    Raises:
        UnsupportedError: A file or a body is a pickle.
        CorruptError: A file is missing or breaks the layout; a tensor comes twice; a checksum hasn't its form.
    """
    patches: dict[str, BytePatch] = {}
    found: dict[str, str] = {}
    for file in names:
        for name, blob in _read_blobs(files, file).items():
            if name in found:
                raise CorruptError(f"{name} is in {found[name]} and in {file}")
            found[name] = file
            patches[name] = BytePatch(
                encoding=encoding,
                compression=compression,
                body=memoryview(blob.body),
                proof=Proof.read(f"{name} in {file}", checksum, blob.checksum),
            )
    return patches, found


def _read_blobs(files: Files, file: str) -> dict[str, Blob]:
    buffer = open_weights(files, file)
    metadata = read_metadata(file, buffer)
    blobs: dict[str, Blob] = {}
    for name, slot in read_slots(file, buffer).items():
        if slot.spec.dtype != "U8" or len(slot.spec.shape) != 1:
            raise CorruptError(f"{file}: {name} is {slot.spec.dtype} {list(slot.spec.shape)}, not a vector of U8")
        if name not in metadata:
            raise CorruptError(f"{file}: {name} has no checksum")
        body = buffer[slot.offset : slot.offset + slot.spec.num_bytes]
        refuse_pickled_body(f"{name} in {file}", body)
        blobs[name] = Blob(body=body, checksum=metadata[name])
    return blobs


def build_blobs(file: str, blobs: Mapping[str, Blob]) -> bytearray:
    """One file of bodies, in the mapping's order."""
    tensors = {blob.spec(name): np.frombuffer(blob.body, dtype=np.uint8) for name, blob in blobs.items()}
    return build_file(file, tensors, {name: blob.checksum for name, blob in blobs.items()})
