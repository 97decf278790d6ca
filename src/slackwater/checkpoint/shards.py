"""safetensors files as bytes: a strict reader of their header, and a writer.

The reader looks at the header alone and takes no number in it on trust: the file's length, every span and the
order of all spans have to agree before anything is read or allocated by them.
"""

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import Annotated, Any, Final, NoReturn, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from slackwater.checkpoint.filling import filled
from slackwater.checkpoint.tensor import WIDTHS, Bits, TensorSpec
from slackwater.errors import CorruptError

SHARD_BYTES: Final = 2 * 1024**3
"""Most tensor bytes in a shard that we write, where a tensor fits."""

MAX_HEADER_BYTES: Final = 100_000_000
"""safetensors' own bound."""

_METADATA: Final = "__metadata__"
_TORCH: Final = MappingProxyType({"format": "pt"})
_ALIGNMENT: Final = 8
_Buffer = bytearray | bytes | memoryview | npt.NDArray[np.uint8]
_Offset = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class ReadsBits(Protocol):
    """What the writer needs of a source."""

    def bits(self, name: str) -> Bits:
        """One tensor, flat."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Slot:
    """One tensor inside one file."""

    spec: TensorSpec
    offset: int
    """Its first byte, counted from the file's start."""

    def bits(self, buffer: _Buffer) -> Bits:
        """A view of the tensor in its file's bytes; writable where they are."""
        if self.spec.num_elements == 0:
            return np.empty(0, dtype=self.spec.bits_dtype)
        return np.frombuffer(buffer, dtype=self.spec.bits_dtype, count=self.spec.num_elements, offset=self.offset)


class _Span(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    dtype: str
    shape: Annotated[tuple[_Offset, ...], msgspec.Meta(max_length=8)]
    data_offsets: tuple[_Offset, _Offset]


def read_slots(file: str, buffer: _Buffer) -> Mapping[str, Slot]:
    """Read a file's header.

    Args:
        file: Its name, for messages.
        buffer: The whole file, mapped or held.

    Raises:
        CorruptError: The header breaks safetensors' rules or doesn't fit the file; the message names both.
    """
    header = _header_text(file, buffer)
    start = _ALIGNMENT + len(header)
    spans = _parse(file, header)
    _check_cover(file, spans, len(buffer) - start)
    return {name: _slot(file, name, span, start) for name, span in sorted(spans.items())}


def read_metadata(file: str, buffer: _Buffer) -> Mapping[str, str]:
    """Read the text that a file carries beside its tensors, ``__metadata__``; empty where it has none.

    Args:
        file: Its name, for messages.
        buffer: The whole file, mapped or held.

    Raises:
        CorruptError: The header can't be read, or holds something else than strings there.
    """
    try:
        raw = msgspec.json.decode(_header_text(file, buffer), type=dict[str, msgspec.Raw]).get(_METADATA)
        return {} if raw is None else msgspec.json.decode(raw, type=dict[str, str])
    except (msgspec.MsgspecError, RecursionError, UnicodeError) as error:
        raise CorruptError(f"{file}: its metadata can't be read: {error}") from error


def _header_text(file: str, buffer: _Buffer) -> bytes:
    size = len(buffer)
    if size < _ALIGNMENT:
        _refuse(file, f"{size} bytes are too few for a header")
    (length,) = struct.unpack("<Q", bytes(buffer[:_ALIGNMENT]))
    if length > min(MAX_HEADER_BYTES, size - _ALIGNMENT):
        _refuse(file, f"its header of {length} bytes doesn't fit a file of {size}")
    return bytes(buffer[_ALIGNMENT : _ALIGNMENT + length])


def _parse(file: str, header: bytes) -> dict[str, _Span]:
    try:
        entries = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        entries.pop(_METADATA, None)
        return {name: msgspec.json.decode(raw, type=_Span) for name, raw in entries.items()}
    except (msgspec.MsgspecError, RecursionError, UnicodeError) as error:
        raise CorruptError(f"{file}: its header can't be read: {error}") from error


def _check_cover(file: str, spans: Mapping[str, _Span], size: int) -> None:
    """All spans together fill the data to its last byte, without gap or overlap."""
    ordered = sorted((*span.data_offsets, name) for name, span in spans.items())
    edges = [(0, 0, "the start"), *ordered]
    for (_, end, before), (begin, _, name) in pairwise(edges):
        if begin != end:
            _refuse(file, f"{name} begins at byte {begin} of the data, and {before} ends at {end}")
    end = edges[-1][1]
    if end > size:
        _refuse(file, f"it is cut: {end - size} bytes of {edges[-1][2]} or before it are missing")
    if end < size:
        _refuse(file, f"{size - end} bytes follow its last tensor")


def _slot(file: str, name: str, span: _Span, start: int) -> Slot:
    if span.dtype not in WIDTHS:
        _refuse(file, f"{name} has the unknown dtype {span.dtype[:40]!r}")
    spec = TensorSpec(name=name, dtype=span.dtype, shape=span.shape)
    begin, end = span.data_offsets
    if end - begin != spec.num_bytes:
        _refuse(file, f"{name} is {span.dtype} {list(span.shape)[:8]}, and its span has {end - begin} bytes")
    return Slot(spec=spec, offset=start + begin)


def _refuse(file: str, why: str) -> NoReturn:
    raise CorruptError(f"{file}: {why}", hint="fetch or write the file again")


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """A file to be written: its name and the tensors in it, in order."""

    file: str
    specs: tuple[TensorSpec, ...]


def cut_shards(specs: Sequence[TensorSpec], limit: int = SHARD_BYTES) -> tuple[Shard, ...]:
    """Share tensors out over files, in order; a tensor larger than ``limit`` bytes gets a file of its own."""
    groups = list(filled(specs, lambda spec: spec.num_bytes, limit)) or [()]
    if len(groups) == 1:
        return (Shard(file="model.safetensors", specs=groups[0]),)
    return tuple(
        Shard(file=f"model-{index:05d}-of-{len(groups):05d}.safetensors", specs=group)
        for index, group in enumerate(groups, start=1)
    )


def build_shard(shard: Shard, source: ReadsBits, metadata: Mapping[str, str] = _TORCH) -> bytearray:
    """The file's bytes: an ordinary safetensors file that any reader takes, ``metadata`` as its ``__metadata__``."""
    header = _header(shard.specs, metadata)
    body = bytearray(len(header) + sum(spec.num_bytes for spec in shard.specs))
    body[: len(header)] = header
    offset = len(header)
    for spec in shard.specs:
        Slot(spec=spec, offset=offset).bits(body)[:] = source.bits(spec.name)
        offset += spec.num_bytes
    return body


def _header(specs: Sequence[TensorSpec], metadata: Mapping[str, str]) -> bytes:
    entries: dict[str, Any] = {_METADATA: dict(metadata)}
    end = 0
    for spec in specs:
        begin, end = end, end + spec.num_bytes
        entries[spec.name] = {"dtype": spec.dtype, "shape": spec.shape, "data_offsets": (begin, end)}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return struct.pack("<Q", len(text)) + text


def build_index(shards: Sequence[Shard]) -> bytes:
    """``model.safetensors.index.json`` for several files, as Hugging Face writes it."""
    specs = [(spec, shard.file) for shard in shards for spec in shard.specs]
    index = {
        "metadata": {"total_size": sum(spec.num_bytes for spec, _ in specs)},
        "weight_map": {spec.name: file for spec, file in specs},
    }
    return json.dumps(index, indent=2, sort_keys=True).encode()
