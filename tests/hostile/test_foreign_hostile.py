"""Foreign deltas that an attacker or a bad disk could send: each ends in a typed error, in bounded memory."""

import io
import json
import pickle
import struct
import tracemalloc
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from slackwater.checkpoint.foreign.delta import Change, Files
from slackwater.checkpoint.foreign.layouts import LAYOUTS, read_delta, write_delta
from slackwater.checkpoint.foreign.slime import write_slime
from slackwater.checkpoint.shards import MAX_HEADER_BYTES
from slackwater.checkpoint.tensor import Bits, TensorSpec
from slackwater.errors import CorruptError, InvalidInputError, SlackwaterError, UnsupportedError, WrongBaseError

INDEX = "model.safetensors.index.json"
SHARD = "model-00000-of-00001.safetensors"
SPEC = TensorSpec(name="w", dtype="U16", shape=(40,))
OLD: Bits = np.arange(40, dtype="<u2")
NEW: Bits = (OLD ^ (np.arange(40) % 3 == 0)).astype("<u2")
CHANGE = Change(spec=SPEC, old=OLD, new=NEW)
BOMB_BYTES = 512 * 1024**2


def written() -> dict[str, tuple[str, Files]]:
    files = {layout: (layout, write_delta(layout, [CHANGE], version="8", base_version="7")) for layout in LAYOUTS}
    return {**files, "overwrite": ("slime", write_slime([CHANGE], version="8", base_version="7", encoding="overwrite"))}


WRITTEN = written()
CASES = [pytest.param(layout, files, id=name) for name, (layout, files) in WRITTEN.items()]


def decode(layout: str, files: Files) -> Bits:
    return read_delta(layout, files).decode(SPEC, OLD)


def slime(body: bytes, *, encoding: str = "xor", checksum: str = "0" * 32) -> Files:
    """A delta of one tensor with this body, right in all else."""
    index = {
        "metadata": {
            "version": "8",
            "base_version": "7",
            "delta_encoding": encoding,
            "compression_format": "zstd",
            "checksum_format": "xxh3-128",
        },
        "weight_map": {"w": SHARD},
    }
    return {SHARD: blob(body, checksum), INDEX: json.dumps(index).encode()}


def blob(body: bytes, checksum: str) -> bytes:
    return safetensors.numpy.save({"w": np.frombuffer(body, np.uint8)}, metadata={"w": checksum})


def frame(data: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=1).compress(data)


def relisted(**changes: Any) -> Files:
    """slime's files with another index."""
    files = dict(WRITTEN["slime"][1])
    index = json.loads(bytes(files[INDEX]))
    return {**files, INDEX: json.dumps({**index, **changes}).encode()}


@pytest.mark.parametrize(("layout", "files"), CASES)
def test_every_truncation_of_every_file_is_refused(layout: str, files: Files) -> None:
    for name, raw in files.items():
        for end in range(len(raw)):
            with pytest.raises(CorruptError):
                decode(layout, {**files, name: bytes(raw)[:end]})


@pytest.mark.parametrize(("layout", "files"), CASES)
def test_a_file_that_is_missing_is_told(layout: str, files: Files) -> None:
    for name in files:
        with pytest.raises(CorruptError, match=r"lacks its file|has no"):
            decode(layout, {other: raw for other, raw in files.items() if other != name})


@pytest.mark.parametrize(("layout", "files"), CASES)
def test_a_flipped_bit_never_gives_other_weights_where_a_checksum_is(layout: str, files: Files) -> None:
    for name, raw in files.items():
        for bit in range(8 * len(raw)):
            bent = bytearray(raw)
            bent[bit // 8] ^= 1 << bit % 8
            try:
                result = decode(layout, {**files, name: bent})
            except SlackwaterError:
                continue
            # A few bits mean nothing to a reader, as in the padding of a header; sparse patches prove nothing.
            assert layout == "trl" or result.tobytes() == NEW.tobytes()


@pytest.mark.parametrize("layout", LAYOUTS)
@given(raw=st.binary(max_size=200))
def test_noise_in_place_of_a_file_is_refused(layout: str, raw: bytes) -> None:
    files = WRITTEN[layout][1]
    for name in files:
        with pytest.raises((CorruptError, UnsupportedError)):
            read_delta(layout, {**files, name: raw})


@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
@given(body=st.binary(max_size=200))
def test_noise_in_place_of_a_body_is_refused(encoding: str, body: bytes) -> None:
    with pytest.raises((CorruptError, UnsupportedError)):
        decode("slime", slime(body, encoding=encoding))
    with pytest.raises((CorruptError, WrongBaseError)):
        decode("slime", slime(frame(body), encoding=encoding))


def zstd_bomb(*, sized: bool) -> bytes:
    stream = zstandard.ZstdCompressor(level=1).compressobj(size=BOMB_BYTES if sized else -1)
    chunk = bytes(8 * 1024**2)
    return b"".join([*(stream.compress(chunk) for _ in range(BOMB_BYTES // len(chunk))), stream.flush()])


def zlib_bomb() -> bytes:
    """Its parts are flushed, so that each after the first is the same bytes."""
    stream, chunk, check = zlib.compressobj(), bytes(8 * 1024**2), 1
    first, each = (stream.compress(chunk) + stream.flush(zlib.Z_FULL_FLUSH) for _ in range(2))
    for _ in range(count := BOMB_BYTES // len(chunk)):
        check = zlib.adler32(chunk, check)
    return first + (count - 1) * each + b"\x03\x00" + check.to_bytes(4, "big")


def bombs() -> Iterator[tuple[str, str, Files]]:
    for sized in (True, False):
        bomb = zstd_bomb(sized=sized)
        assert len(bomb) < 64 * 1024
        for encoding in ("xor", "overwrite"):
            yield f"{encoding}, sized: {sized}", "slime", slime(bomb, encoding=encoding)
        yield f"arc_v2, sized: {sized}", "arc_v2", {"model.safetensors": blob(bomb, "1")}
    yield "arc_v1", "arc_v1", {"model.safetensors": blob(zlib_bomb(), "1")}


def test_a8_09_bombs_stop_at_the_size_of_the_tensor() -> None:
    for name, layout, files in bombs():
        delta = read_delta(layout, files)
        tracemalloc.start()
        try:
            with pytest.raises(CorruptError):
                delta.decode(SPEC, OLD)
            assert tracemalloc.get_traced_memory()[1] < 1024**2, name
        finally:
            tracemalloc.stop()


def test_a_frame_that_refers_far_back_is_refused_where_its_size_is_unknown() -> None:
    spec = TensorSpec(name="w", dtype="U8", shape=(32 * 1024**2,))
    window = zstandard.ZstdCompressionParameters(window_log=25, write_content_size=False)
    body = zstandard.ZstdCompressor(compression_params=window).compress(bytes(spec.num_bytes))
    with pytest.raises(CorruptError, match="zstd frame is broken or holds more"):
        read_delta("slime", slime(body)).decode(spec, np.zeros(spec.num_elements, "u1"))


def test_a_frame_of_unknown_size_is_read_where_its_content_fits() -> None:
    stream = zstandard.ZstdCompressor(level=1).compressobj()
    body = stream.compress((OLD ^ NEW).tobytes()) + stream.flush()
    files = {"model.safetensors": blob(body, str(zlib.adler32(NEW.tobytes())))}
    assert decode("arc_v2", files).tobytes() == NEW.tobytes()


@pytest.mark.parametrize(
    "body",
    [
        b"",
        frame(b""),
        frame(bytes(79)),
        frame(bytes(81)),
        frame(bytes(80)) + b"\0",
        frame(bytes(40)) + frame(bytes(40)),
        struct.pack("<II", 0x184D2A50, 80) + bytes(80),
        struct.pack("<II", 0x184D2A50, 0) + frame(bytes(80)),
    ],
    ids=["none", "empty", "short", "long", "trailing", "two frames", "skippable", "skippable first"],
)
def test_a_body_that_is_not_one_frame_of_the_tensors_bytes_is_refused(body: bytes) -> None:
    with pytest.raises(CorruptError):
        decode("slime", slime(body))


@pytest.mark.parametrize(
    "body",
    [
        zlib.compress(bytes(79)),
        zlib.compress(bytes(81)),
        zlib.compress(bytes(80)) + b"\0",
        zlib.compress(bytes(80))[:-1],
    ],
    ids=["short", "long", "trailing", "cut"],
)
def test_a_zlib_stream_that_is_not_the_tensors_bytes_is_refused(body: bytes) -> None:
    with pytest.raises(CorruptError):
        decode("arc_v1", {"model.safetensors": blob(body, "1")})


def overwrite(count: int, positions: list[int], values: bytes) -> Files:
    body = struct.pack(f"<I{len(positions)}I", count, *positions) + values
    return slime(frame(body), encoding="overwrite")


@pytest.mark.parametrize(
    ("files", "why"),
    [
        (slime(frame(b"\0\0\0"), encoding="overwrite"), "its count needs 4"),
        (overwrite(2, [1], b"x"), "2 changed bytes don't fill"),
        (overwrite(0, [1], b"x"), "0 changed bytes don't fill"),
        (overwrite(2**32 - 1, [1], b"x"), "4294967295 changed bytes don't fill"),
        (overwrite(1, [1], b"xy"), "don't fill"),
        (overwrite(2, [1, 1], b"xy"), "don't rise"),
        (overwrite(2, [2, 1], b"xy"), "don't rise"),
        (overwrite(1, [80], b"x"), "reach from 80 to 80, and it ends at 80"),
        (overwrite(2, [0, 2**32 - 1], b"xy"), "reach from 0 to 4294967295"),
        (overwrite(81, list(range(81)), bytes(81)), "and 404 fit"),
    ],
)
def test_overwritten_bytes_that_lie_are_refused(files: Files, why: str) -> None:
    with pytest.raises(CorruptError, match=why):
        decode("slime", files)


def sparse(
    indices: Any, values: Any, *, encoding: str | None = None, suffixes: tuple[str, str] = ("indices", "values")
) -> Files:
    metadata = {"sparse": "True", "model_version": "8", **({} if encoding is None else {"encoding": encoding})}
    pair = {f"w.{suffixes[0]}": np.asarray(indices), f"w.{suffixes[1]}": np.asarray(values)}
    return {"step.safetensors": safetensors.numpy.save(pair, metadata=metadata)}


def i32(*values: int) -> Any:
    return np.array(values, np.int32)


def u16(*values: int) -> Any:
    return np.array(values, np.uint16)


@pytest.mark.parametrize(
    ("files", "why"),
    [
        (sparse(i32(-1), u16(5)), "reach from -1"),
        (sparse(i32(-1, 3), u16(5, 6)), "reach from -1"),
        (sparse(i32(40), u16(5)), "reach from 40 to 40, and it ends at 40"),
        (sparse(np.array([0, 2**62], np.int64), u16(5, 6)), "reach from 0 to"),
        (sparse(i32(2, 2), u16(5, 6)), "don't rise"),
        (sparse(i32(3, 2), u16(5, 6)), "don't rise"),
        (sparse(i32(1, 2), u16(5)), "and its positions"),
        (sparse(i32(1, 2).reshape(2, 1), u16(5, 6).reshape(2, 1)), "not a vector"),
        (sparse(i32(1), np.array([5], np.float32)), "values of F32, and the tensor held is U16"),
        (sparse(u16(1), u16(5)), "not a vector of I32 or I64"),
        (sparse(i32(1), u16(5), encoding="gap_delta"), "not a vector of U16 or U32"),
        (sparse(u16(39, 0), u16(5, 6), encoding="gap_delta"), "reach from 39 to 40"),
        (sparse(np.array([2**32 - 1] * 3, np.uint32), u16(5, 6, 7), encoding="gap_delta"), "reach from 4294967295"),
    ],
)
def test_sparse_pairs_that_lie_are_refused(files: Files, why: str) -> None:
    with pytest.raises(CorruptError, match=why):
        decode("trl", files)


def test_positions_in_an_encoding_that_is_not_read_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match=r"nvcomp_cascaded.*raw, gap_delta"):
        decode("trl", sparse(np.zeros(9, np.uint8), u16(5), encoding="nvcomp_cascaded", suffixes=("idx", "val")))


@pytest.mark.parametrize(
    ("tensors", "why"),
    [
        ({"w.indices": i32(1)}, "without w.values"),
        ({"w.values": u16(1)}, "w.values is no half of a pair"),
        ({"w.indices": i32(1), "w.val": u16(1)}, "without w.values"),
        ({"w.indices": i32(1), "w.values": u16(1), "w.idx": i32(1), "w.val": u16(1)}, "twice"),
        ({"w.indices": i32(1), "w.values": u16(1), "w": u16(1)}, "w is no half of a pair"),
    ],
)
def test_halves_of_pairs_are_refused(tensors: dict[str, Any], why: str) -> None:
    with pytest.raises(CorruptError, match=why):
        decode("trl", {"step.safetensors": safetensors.numpy.save(tensors)})


def test_sparse_files_that_contradict_each_other_are_refused() -> None:
    one = sparse(i32(1), u16(5))["step.safetensors"]
    with pytest.raises(CorruptError, match=r"w is in .* and in a file before it"):
        decode("trl", {"a.safetensors": one, "b.safetensors": one})
    other = safetensors.numpy.save({"v.indices": i32(1), "v.values": u16(1)}, metadata={"model_version": "9"})
    with pytest.raises(CorruptError, match="different versions"):
        decode("trl", {"a.safetensors": one, "b.safetensors": other})


@pytest.mark.parametrize(
    ("tensors", "metadata", "why"),
    [
        ({"w": np.zeros(4, np.int8)}, {"w": "1"}, "not a vector of U8"),
        ({"w": np.zeros((2, 2), np.uint8)}, {"w": "1"}, "not a vector of U8"),
        ({"w": np.zeros(4, np.uint8)}, {"v": "1"}, "w has no checksum"),
        ({"w": np.zeros(4, np.uint8)}, {"w": ""}, "not a decimal number"),
        ({"w": np.zeros(4, np.uint8)}, {"w": "00060002f"}, "not a decimal number"),
        ({"w": np.zeros(4, np.uint8)}, {"w": "-1"}, "not a decimal number"),
        ({"w": np.zeros(4, np.uint8)}, {"w": "٣"}, "not a decimal number"),
        ({"w": np.zeros(4, np.uint8)}, {"w": "1\n"}, "not a decimal number"),
    ],
)
def test_bodies_without_their_form_are_refused(tensors: dict[str, Any], metadata: dict[str, str], why: str) -> None:
    with pytest.raises(CorruptError, match=why):
        read_delta("arc_v2", {"model.safetensors": safetensors.numpy.save(tensors, metadata=metadata)})


@pytest.mark.parametrize("checksum", ["0" * 31, "0" * 33, "0" * 31 + "G", "A" * 32, "393218"])
def test_a_checksum_of_another_form_is_refused(checksum: str) -> None:
    with pytest.raises(CorruptError, match="not 32 hex digits"):
        read_delta("slime", slime(frame(bytes(80)), checksum=checksum))


def test_a_tensor_in_two_files_is_refused() -> None:
    raw = blob(frame(bytes(80)), "1")
    with pytest.raises(CorruptError, match=r"w is in a.* and in b"):
        read_delta("arc_v2", {"a.safetensors": raw, "b.safetensors": raw})


@pytest.mark.parametrize(
    ("weight_map", "why"),
    [
        ({}, r"^$"),
        ({"w": SHARD, "v": SHARD}, "disagree about 1 tensors, v among them"),
        ({"v": SHARD}, "disagree about 2 tensors, v among them"),
        ({"w": "../" + SHARD}, "lacks its file"),
        ({"w": "/etc/passwd"}, "lacks its file"),
        ({"w": INDEX}, "lacks its file"),
        ({"w": "a" * 256}, "can't be read"),
        ({"w": 3}, "can't be read"),
        ([], "can't be read"),
        (None, "can't be read"),
    ],
)
def test_an_index_that_lies_is_refused(weight_map: Any, why: str) -> None:
    if weight_map == {}:
        assert read_delta("slime", relisted(weight_map=weight_map)).tensors == ()
        return
    with pytest.raises(CorruptError, match=why):
        read_delta("slime", relisted(weight_map=weight_map))


@pytest.mark.parametrize(
    "metadata",
    [None, [], "xor", {"delta_encoding": 1}, {"delta_encoding": "xor"}, {"delta_encoding": "xor", "version": "8"}],
)
def test_index_metadata_that_is_none_is_refused(metadata: Any) -> None:
    with pytest.raises(CorruptError):
        read_delta("slime", relisted(metadata=metadata))


@pytest.mark.parametrize("raw", [b"", b"[]", b"{}", b"\xff", b"{" * 100_000, b'{"weight_map":' * 20_000, b"NaN"])
def test_an_index_that_is_no_json_object_is_refused(raw: bytes) -> None:
    with pytest.raises(CorruptError, match="can't be read"):
        read_delta("slime", {INDEX: raw})


def header(entries: Mapping[str, Any], data: bytes = b"", *, length: int | None = None) -> bytes:
    text = json.dumps(entries).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


U8 = {"dtype": "U8", "shape": [4]}


@pytest.mark.parametrize(
    "raw",
    [
        header({}, length=2**64 - 1),
        header({}, length=MAX_HEADER_BYTES + 1),
        header({}, length=3),
        header({"w": {**U8, "data_offsets": [0, 4]}}, bytes(3)),
        header({"w": {**U8, "data_offsets": [0, 4]}}, bytes(5)),
        header({"w": {**U8, "data_offsets": [4, 0]}}, bytes(4)),
        header({"w": {**U8, "data_offsets": [1, 5]}}, bytes(5)),
        header({"w": {**U8, "data_offsets": [0, 4]}, "v": {**U8, "data_offsets": [2, 6]}}, bytes(6)),
        header({"w": {"dtype": "U8", "shape": [2**62], "data_offsets": [0, 4]}}, bytes(4)),
        header({"w": {"dtype": "U9", "shape": [4], "data_offsets": [0, 4]}}, bytes(4)),
        header({"__metadata__": {"w": 1}, "w": {**U8, "data_offsets": [0, 4]}}, bytes(4)),
        header({"__metadata__": [], "w": {**U8, "data_offsets": [0, 4]}}, bytes(4)),
        header({"__metadata__": None, "w": {**U8, "data_offsets": [0, 4]}}, bytes(4)),
    ],
)
@pytest.mark.parametrize("layout", ["arc_v2", "trl"])
def test_a8_07_a_header_that_lies_is_refused_in_little_memory(layout: str, raw: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(CorruptError):
            read_delta(layout, {"model.safetensors": raw})
        assert tracemalloc.get_traced_memory()[1] < 1024**2
    finally:
        tracemalloc.stop()


class Canary:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def pickled(canary: Canary) -> dict[str, bytes]:
    zipped, legacy = io.BytesIO(), io.BytesIO()
    torch.save({"w": canary}, zipped)
    torch.save({"w": canary}, legacy, _use_new_zipfile_serialization=False)
    plain = {f"protocol {protocol}": pickle.dumps({"w": canary}, protocol) for protocol in range(2, 6)}
    return {"zip": zipped.getvalue(), "legacy": legacy.getvalue(), **plain}


KINDS = ["zip", "legacy", "protocol 2", "protocol 3", "protocol 4", "protocol 5"]


@pytest.mark.parametrize("kind", KINDS)
def test_a8_06_a_pickle_is_refused_wherever_it_stands_and_never_run(kind: str, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    raw = pickled(Canary(canary))[kind]
    for layout in LAYOUTS:
        files = dict(WRITTEN[layout][1])
        weights = next(name for name in files if name.endswith(".safetensors"))
        with pytest.raises(UnsupportedError, match="export safetensors"):
            read_delta(layout, {**files, weights: raw})
        if layout != "trl":
            with pytest.raises(UnsupportedError, match=r"w in .* is a pickle.*export safetensors"):
                read_delta(layout, {**files, weights: blob(raw, "0" * 8)})
    assert not canary.exists()
    pickle.loads(pickle.dumps(Canary(canary)))
    assert canary.exists(), "the canary would have told"


def test_a8_06_a_pickle_of_arc_v3_in_an_arc_v2_delta_is_refused_and_never_run(tmp_path: Path) -> None:
    body = b"ARC3_ENVELOPE\0" + pickle.dumps(Canary(tmp_path / "canary"))
    with pytest.raises(UnsupportedError, match=r"w in .* is arc_v3, which holds pickles.*arc_v2"):
        read_delta("arc_v2", {"model.safetensors": blob(body, "1")})
    assert not (tmp_path / "canary").exists()


@pytest.mark.parametrize("name", ["pytorch_model.bin", "delta.pt", "delta.pth", "delta.pkl", "delta.ckpt"])
def test_a8_06_weights_under_a_pickles_name_are_refused(name: str) -> None:
    for layout in ("arc_v1", "arc_v2", "trl"):
        with pytest.raises(UnsupportedError, match=rf"{name} is a pickle.*export safetensors"):
            read_delta(layout, {name: b"anything", "config.json": b"{}"})
    with pytest.raises(UnsupportedError, match=rf"{name} is a pickle.*export safetensors"):
        read_delta("slime", {**relisted(weight_map={"w": name}), name: b"anything"})


def test_a_header_whose_length_begins_as_a_pickle_does_is_read_all_the_same() -> None:
    body = frame((OLD ^ NEW).tobytes())
    entries = {
        "__metadata__": {"w": str(zlib.adler32(NEW.tobytes()))},
        "w": {"dtype": "U8", "shape": [len(body)], "data_offsets": [0, len(body)]},
    }
    text = json.dumps(entries).encode().ljust(0x0280)
    raw = struct.pack("<Q", len(text)) + text + body
    assert raw.startswith(b"\x80\x02")
    assert decode("arc_v2", {"model.safetensors": raw}).tobytes() == NEW.tobytes()


def test_a_delta_of_no_files_is_refused() -> None:
    for layout in LAYOUTS:
        with pytest.raises(CorruptError, match="has no"):
            read_delta(layout, {})
    with pytest.raises(InvalidInputError, match="full snapshot"):
        read_delta("slime", relisted(metadata={}))
