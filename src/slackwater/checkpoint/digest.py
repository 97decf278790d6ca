"""Digests of bytes: SHA-256 for objects and states, XXH3-64 for tiles. See also `slackwater.checkpoint.element_sum`."""

import hashlib

import numpy as np
import xxhash

from slackwater.checkpoint.tensor import Bits
from slackwater.ids import ObjectDigest


def object_digest(body: bytes | bytearray | memoryview) -> ObjectDigest:
    """SHA-256 of an object's bytes, in lower-case hex: proof that it is the object a manifest names."""
    return ObjectDigest(hashlib.sha256(body).hexdigest())


def tile_digest(bits: Bits) -> int:
    """XXH3-64 (seed 0) of a tile's little-endian bytes.

    Fast enough to be taken before and after each write. It finds accidents; attacks are SHA-256's part.
    """
    return xxhash.xxh3_64_intdigest(np.ascontiguousarray(bits).data)
