"""What others ship, on the same data: encoded and applied tensor by tensor, on one thread, checked bit for bit.

Layouts and the shape of the loops are those of each project's published code or documents, written anew; Fireworks'
package is the real one. Hashes of the new tensor are taken on both sides where the project takes them. All run in one
process after another codec has: what their arrays cost depends on the memory that the allocator kept, here to their
advantage.
"""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import fireworks_delta_compression as fireworks
import numpy as np
import torch
import xxhash
import zstandard
from pcodec import ChunkConfig, standalone  # pyright: ignore[reportAttributeAccessIssue] : a compiled module

from measure import Speed, one_core, timed
from pairs import Pair, States, copy, copy_onto, same
from slackwater.checkpoint.changes import steps_between, steps_onto
from slackwater.checkpoint.tensor import Bits
from slackwater.errors import CorruptError, InternalError

Body = tuple[bytes | memoryview, ...]
"""A tensor's parts; empty where nothing has to be sent of it."""

_LEVEL: Final = 1
"""zstd's, as all of them have it."""
_PATIENCE: Final = 2.0
"""Seconds after which a slow peer is run no more, three times apart."""
_STEP: Final = 2 << 20
"""Bytes that slime's and SkyRL's receivers inflate at a time."""
_BITS: Final = 16
_POSITION: Final = np.dtype("<u4")
_NARROW: Final = np.dtype("<u2")
_ELEMENT: Final = np.dtype("<u2")


@dataclass(frozen=True, kw_only=True, slots=True)
class Peer:
    """A codec of bf16 tensors."""

    name: str
    proof: str
    """The hash of each new tensor that both sides take."""
    encode: Callable[[Bits, Bits], Body]
    """Old and new bits to a body."""
    apply: Callable[[Bits, Body], Bits]
    """Bits held and a body to the new bits: the same array, written, where it can; else another one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """A peer's size and speeds."""

    peer: Peer
    num_bytes: int
    encode: Speed
    decode: Speed


def run(peer: Peer, pair: Pair, runs: int) -> Outcome:
    """Encode and apply a pair.

    Raises:
        InternalError: The result isn't the new bits.
    """
    encoded, bodies = timed(
        pair.num_bytes,
        runs,
        lambda: {name: peer.encode(old, pair.new[name]) for name, old in pair.old.items()},
        patience=_PATIENCE,
    )
    held = copy(pair.old)
    decoded, made = timed(
        pair.num_bytes,
        runs,
        lambda: _apply(peer, bodies, held),
        before=lambda: copy_onto(held, pair.old),
        patience=_PATIENCE,
    )
    if not same(made, pair.new):
        raise InternalError(f"{peer.name} doesn't make the new bits")
    num_bytes = sum(len(part) for body in bodies.values() for part in body)
    return Outcome(peer=peer, num_bytes=num_bytes, encode=encoded, decode=decoded)


def _apply(peer: Peer, bodies: Mapping[str, Body], held: States) -> States:
    return {name: peer.apply(held[name], body) if body else held[name] for name, body in bodies.items()}


def all_peers() -> tuple[Peer, ...]:
    """Every peer, the one that claims are made against first."""
    tuned = Tuned()
    return (
        Peer(name="XOR + zstd-1 (slime, SkyRL)", proof="xxh3-128", encode=encode_xor, apply=apply_xor),
        Peer(name="the same, buffers reused", proof="xxh3-128", encode=tuned.encode, apply=tuned.apply),
        Peer(name="XOR, bytes apart + zstd-1", proof="none", encode=encode_apart, apply=apply_apart),
        Peer(name="bytes overwritten + zstd-1 (slime)", proof="xxh3-128", encode=encode_bytes, apply=apply_bytes),
        Peer(name="int32 + bf16 (TRL, verl)", proof="none", encode=encode_indices, apply=apply_indices),
        Peer(name="gaps + XOR values + zstd-1 (NeMo-RL)", proof="none", encode=encode_gaps, apply=apply_gaps),
        Peer(name="pcodec: gaps, steps", proof="none", encode=encode_pcodec, apply=apply_pcodec),
        Peer(name="fireworks-delta-compression arc_v2", proof="adler32", encode=encode_arc, apply=apply_arc),
    )


def encode_xor(old: Bits, new: Bits) -> Body:
    """XOR as slime's sender: mask, count what differs, compress, hash. A fresh array and compressor for each tensor."""
    after = new.view(np.uint8)
    mask = after ^ old.view(np.uint8)
    if not np.count_nonzero(mask):
        return ()
    return zstandard.ZstdCompressor(level=_LEVEL).compress(mask.data), xxhash.xxh3_128_digest(after.data)


def apply_xor(held: Bits, body: Body) -> Bits:
    """XOR as slime's receiver in the engine: inflate, XOR and hash by pieces that stay in the cache."""
    target, hasher = held.view(np.uint8), xxhash.xxh3_128()
    reader, at = zstandard.ZstdDecompressor().stream_reader(body[0]), 0
    while at < target.size:
        mask = np.frombuffer(reader.read(min(_STEP, target.size - at)), dtype=np.uint8)
        if not mask.size:
            break
        piece = target[at : at + mask.size]
        piece ^= mask
        hasher.update(piece.data)
        at += mask.size
    _check(hasher.digest(), body[1])
    return held


class Tuned:
    """The same bytes with buffers and contexts kept: about the best that XOR and zstd do from Python."""

    def __init__(self) -> None:
        self._room = np.empty(0, dtype=np.uint8)
        self._compressor = zstandard.ZstdCompressor(level=_LEVEL)
        self._decompressor = zstandard.ZstdDecompressor()

    def encode(self, old: Bits, new: Bits) -> Body:
        """See `encode_xor`."""
        before, after = old.view(np.uint8), new.view(np.uint8)
        mask = np.bitwise_xor(before, after, out=self._of(after.size))
        if not mask.any():
            return ()
        return self._compressor.compress(mask.data), xxhash.xxh3_128_digest(after.data)

    def apply(self, held: Bits, body: Body) -> Bits:
        """See `apply_xor`."""
        target, hasher, at = held.view(np.uint8), xxhash.xxh3_128(), 0
        with self._decompressor.stream_reader(body[0]) as reader:
            while at < target.size:
                mask = self._of(min(_STEP, target.size - at))
                found = reader.readinto(mask.data)
                if not found:
                    break
                piece = target[at : at + found]
                piece ^= mask[:found]
                hasher.update(piece.data)
                at += found
        _check(hasher.digest(), body[1])
        return held

    def _of(self, size: int) -> np.ndarray:
        if self._room.size < size:
            self._room = np.empty(size, dtype=np.uint8)
        return self._room[:size]


def encode_apart(old: Bits, new: Bits) -> Body:
    """XOR with all low bytes before all high ones."""
    mask = new ^ old
    if not mask.any():
        return ()
    low, high = mask.astype(np.uint8), (mask >> 8).astype(np.uint8)
    return (_deflate(np.concatenate((low, high)).data),)


def apply_apart(held: Bits, body: Body) -> Bits:
    """Undo `encode_apart`."""
    low, high = np.frombuffer(_inflate(body[0]), dtype=np.uint8).reshape(2, -1)
    held ^= low
    held ^= high.astype(_ELEMENT) << 8
    return held


def encode_bytes(old: Bits, new: Bits) -> Body:
    """Bytes as slime's ``overwrite``: a count, positions of changed bytes in 32 bits, the new bytes."""
    after = new.view(np.uint8)
    differs = after != old.view(np.uint8)
    positions = np.flatnonzero(differs).astype(_POSITION)
    if not positions.size:
        return ()
    count = np.array([positions.size], dtype=_POSITION)
    body = np.concatenate((count.view(np.uint8), positions.view(np.uint8), after[differs]))
    return _deflate(body.data), xxhash.xxh3_128_digest(after.data)


def apply_bytes(held: Bits, body: Body) -> Bits:
    """Undo `encode_bytes`."""
    found = np.frombuffer(_inflate(body[0]), dtype=np.uint8)
    end = _POSITION.itemsize * (1 + int(found[: _POSITION.itemsize].view(_POSITION)[0]))
    target = held.view(np.uint8)
    target[found[_POSITION.itemsize : end].view(_POSITION)] = found[end:]
    _check(xxhash.xxh3_128_digest(target.data), body[1])
    return held


def encode_indices(old: Bits, new: Bits) -> Body:
    """Positions in 32 bits, and new elements."""
    positions = np.flatnonzero(old != new)
    return (positions.astype("<i4").tobytes(), new[positions].tobytes()) if positions.size else ()


def apply_indices(held: Bits, body: Body) -> Bits:
    """Undo `encode_indices`."""
    held[np.frombuffer(body[0], dtype="<i4")] = np.frombuffer(body[1], dtype=_ELEMENT)
    return held


def encode_gaps(old: Bits, new: Bits) -> Body:
    """Gaps in 16 bits where they fit and in 32 elsewhere, then XORs, in one zstd frame."""
    positions = np.flatnonzero(old != new)
    if not positions.size:
        return ()
    gaps = _gaps(positions)
    dtype = _NARROW if int(gaps.max()) <= np.iinfo(_NARROW).max else _POSITION
    masks = old[positions] ^ new[positions]
    return bytes([dtype.itemsize]), _deflate(gaps.astype(dtype).tobytes() + masks.tobytes())


def apply_gaps(held: Bits, body: Body) -> Bits:
    """Undo `encode_gaps`."""
    dtype = np.dtype(f"<u{body[0][0]}")
    found = _inflate(body[1])
    count = len(found) // (dtype.itemsize + _ELEMENT.itemsize)
    gaps = np.frombuffer(found, dtype=dtype, count=count)
    held[_positions(gaps)] ^= np.frombuffer(found, dtype=_ELEMENT, offset=gaps.nbytes)
    return held


def encode_pcodec(old: Bits, new: Bits) -> Body:
    """Gaps and signed steps between neighbouring numbers, each in pcodec's own file at its default level."""
    positions = np.flatnonzero(old != new)
    if not positions.size:
        return ()
    steps = np.empty(positions.size, dtype=np.int64)
    steps_between(old[positions].astype(np.uint64), new[positions].astype(np.uint64), _BITS, steps)
    gaps = _gaps(positions).astype(np.uint32)
    config = ChunkConfig()
    return standalone.simple_compress(gaps, config), standalone.simple_compress(steps.astype(np.int16), config)


def apply_pcodec(held: Bits, body: Body) -> Bits:
    """Undo `encode_pcodec`."""
    gaps, steps = (standalone.simple_decompress(bytes(part)) for part in body)
    positions = _positions(gaps)
    made = np.empty(positions.size, dtype=np.uint64)
    steps_onto(held[positions].astype(np.uint64), steps.astype(np.int64), _BITS, made)
    held[positions] = made
    return held


def encode_arc(old: Bits, new: Bits) -> Body:
    """Fireworks' `delta_compress`: XOR and zstd-3; every tensor has a body."""
    with one_core():  # its zstd starts a thread for each core
        body, checksum = fireworks.delta_compress(src=_tensor(old), dst=_tensor(new), compression_format="arc_v2")
    return body.numpy().data, checksum.encode()


def apply_arc(held: Bits, body: Body) -> Bits:
    """Fireworks' `delta_decompress`, which makes another tensor; theirs in place works on files alone."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # theirs makes a tensor of bytes, which can't be written
        found = fireworks.delta_decompress(
            src=_tensor(held),
            compressed_diff=torch.from_numpy(np.frombuffer(body[0], dtype=np.uint8)),
            checksum=bytes(body[1]).decode(),
            compression_format="arc_v2",
        )
    return found.view(torch.int16).numpy().view(_ELEMENT)


def _tensor(bits: Bits) -> torch.Tensor:
    return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)


def _gaps(positions: np.ndarray) -> np.ndarray:
    return np.diff(positions, prepend=-1) - 1


def _positions(gaps: np.ndarray) -> np.ndarray:
    return np.cumsum(gaps.astype(np.int64) + 1) - 1


def _deflate(data: bytes | memoryview) -> bytes:
    return zstandard.ZstdCompressor(level=_LEVEL).compress(data)


def _inflate(body: bytes | memoryview) -> bytes:
    return zstandard.ZstdDecompressor().decompress(body)


def _check(found: bytes, expected: bytes | memoryview) -> None:
    if found != expected:
        raise CorruptError("a peer's result hasn't the hash that its sender took")
