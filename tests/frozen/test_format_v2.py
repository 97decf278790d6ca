"""`slackwater/2` as bytes that never change: read from the page alone, read by the package, and written as they were.

``v2/bucket`` is one run, ``v2/expected.json`` what its versions are; ``make_v2.py`` wrote both.
"""

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import make_v2
import numpy as np
import pytest
import reader_v2
from make_v2 import FOLD, RUN
from reader_v2 import Reader

from slackwater.bucket.local import LocalBucket
from slackwater.checkpoint.codec import EncodedBody, Level, Place, encode_body
from slackwater.checkpoint.manifest import encode_manifest
from slackwater.checkpoint.rules import decode_manifest
from slackwater.checkpoint.shards import read_slots
from slackwater.checkpoint.tensor import TensorSpec, tile_at
from slackwater.errors import CorruptError
from slackwater.ids import Version
from slackwater.publish.restore import restore

HERE = Path(__file__).parent
BUCKET = HERE / "v2" / "bucket"
EXPECTED: dict[str, dict[str, Any]] = json.loads((HERE / "v2" / "expected.json").read_text())
VERSIONS = range(len(EXPECTED))
PAIR = HERE.parent / "data" / "adamw_pair.safetensors"


def files(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def digests(reader: Reader) -> dict[str, str]:
    """SHA-256 of each tensor's bytes, as the page's reader holds them."""
    widths = {name: reader_v2.WIDTHS[dtype] for name, (dtype, _) in make_v2.SHAPES.items()}
    return {
        name: hashlib.sha256(b"".join(bits.to_bytes(widths[name], "little") for bits in elements)).hexdigest()
        for name, elements in reader.bits.items()
    }


@cache
def _reader(version: int) -> Reader:
    reader = read(version - 1) if version else Reader(BUCKET, RUN)
    assert reader.next()
    return reader


def read(version: int, root: Path = BUCKET) -> Reader:
    """One that holds a version of ``root``; those before it are read from the bucket as it was frozen."""
    if root == BUCKET:
        return deepcopy(_reader(version))
    reader = read(version - 1) if version else Reader(root, RUN)
    reader._root = root
    assert reader.next()
    return reader


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A bucket to break."""
    return shutil.copytree(BUCKET, tmp_path / "bucket")


def test_the_pages_reader_finds_every_version() -> None:
    reader = Reader(BUCKET, RUN)
    for version in VERSIONS:
        assert reader.next()
        assert (reader.version, reader.state) == (version, EXPECTED[str(version)]["state"])
        assert digests(reader) == EXPECTED[str(version)]["tensors"]
    assert not reader.next()


@pytest.mark.parametrize("version", VERSIONS)
def test_todays_reader_finds_every_version(version: int) -> None:
    found = restore(LocalBucket(BUCKET), RUN, Version(version))
    assert found.table.digest == EXPECTED[str(version)]["state"]
    assert {name: hashlib.sha256(bits.tobytes()).hexdigest() for name, bits in found.bits.items()} == EXPECTED[
        str(version)
    ]["tensors"]


def test_todays_writer_writes_the_same_bytes(tmp_path: Path) -> None:
    make_v2.make(tmp_path / "bucket")
    assert files(tmp_path / "bucket") == files(BUCKET)
    assert make_v2.expected(BUCKET) == EXPECTED


def test_the_frozen_versions_have_bodies_of_each_kind() -> None:
    anchor, fast, wan, dense, full, empty, second, on_second = (_reader(version).bodies for version in VERSIONS)
    assert (anchor, second, empty) == ([], [], [])
    assert fast == [("s", 1), ("s", 1), ("f", 0), *[("s", 1)] * 16]
    assert wan == [("s", 6)]
    assert dense == [("d", 0)] * 3
    assert full == [("f", 0)] * 2
    assert on_second == [("s", 1)]


def test_the_frozen_tensors_have_every_dtype_and_the_bits_that_get_lost() -> None:
    assert {dtype for dtype, _ in make_v2.SHAPES.values()} == set(reader_v2.WIDTHS)
    assert {(), (0, 4)} <= {shape for _, shape in make_v2.SHAPES.values()}
    first, second = read(0).bits, read(1).bits
    special = first[make_v2.EMBEDDING][: len(make_v2.SPECIAL)]
    assert tuple(special) == make_v2.SPECIAL
    assert [second[make_v2.EMBEDDING][place] for place in (0, 1, 4)] == [0x0000, 0x8000, 0x7FC0]
    steps = {
        reader_v2.on_line(new, 64) - reader_v2.on_line(old, 64)
        for old, new in zip(first["model.of.I64"], second["model.of.I64"], strict=True)
    }
    assert -(2**63) in steps


def test_a_fold_leads_to_the_same_bits() -> None:
    begin, end = FOLD
    reader = read(begin)
    reader.fold(end)
    assert (reader.version, digests(reader)) == (end, EXPECTED[str(end)]["tensors"])
    for version in range(end + 1, len(EXPECTED)):
        assert reader.next()
        assert reader.state == EXPECTED[str(version)]["state"]


def test_a_fold_stands_only_under_a_folds_key() -> None:
    begin, end = FOLD
    body = (BUCKET / RUN / "folds" / f"{begin:08d}-{end:08d}.json").read_bytes()
    assert decode_manifest(body, fold=True).state == EXPECTED[str(end)]["state"]
    with pytest.raises(CorruptError, match="parent"):
        decode_manifest(body)


def test_manifests_are_written_as_they_were() -> None:
    for path in sorted((BUCKET / RUN).glob("*s/*.json")):
        body = path.read_bytes()
        assert encode_manifest(decode_manifest(body, fold=path.parent.name == "folds")) == body


def test_format_1_is_refused_by_name() -> None:
    body = (BUCKET / RUN / "manifests" / "00000000.json").read_bytes().replace(b"slackwater/2", b"slackwater/1")
    with pytest.raises(CorruptError, match="slackwater/1") as caught:
        decode_manifest(body)
    assert caught.value.hint
    with pytest.raises(ValueError, match="slackwater/1"):
        reader_v2.read_manifest(body)


@pytest.mark.parametrize("version", [1, 2, 3, 4])
def test_applying_a_delta_twice_is_harmless(version: int) -> None:
    manifest = reader_v2.read_manifest((BUCKET / RUN / "manifests" / f"{version:08d}.json").read_bytes())
    objects = [(BUCKET / key).read_bytes() for key, *_ in manifest["objects"]]
    reader = read(version)
    reader.apply(manifest, objects)
    assert digests(reader) == EXPECTED[str(version)]["tensors"]


@pytest.mark.parametrize("version", [1, 3, 4])
def test_an_interrupted_delta_goes_on(version: int) -> None:
    manifest = reader_v2.read_manifest((BUCKET / RUN / "manifests" / f"{version:08d}.json").read_bytes())
    objects = [(BUCKET / key).read_bytes() for key, *_ in manifest["objects"]]
    reader, after = read(version - 1), read(version)
    for name in sorted(reader.bits)[::2]:
        reader.bits[name] = after.bits[name]
    reader.apply(manifest, objects)
    assert digests(reader) == EXPECTED[str(version)]["tensors"]


def test_a_body_of_several_contexts_is_never_applied_by_half() -> None:
    manifest = reader_v2.read_manifest((BUCKET / RUN / "manifests" / "00000002.json").read_bytes())
    objects = [(BUCKET / key).read_bytes() for key, *_ in manifest["objects"]]
    reader = read(1)
    reader.bits[make_v2.EMBEDDING] = read(2).bits[make_v2.EMBEDDING]
    with pytest.raises(ValueError, match="by half"):
        reader.apply(manifest, objects)


def test_the_pages_reader_notices_a_changed_byte_anywhere(copy: Path) -> None:
    for version in VERSIONS:
        manifest = reader_v2.read_manifest((copy / RUN / "manifests" / f"{version:08d}.json").read_bytes())
        for path in [copy / key for key, *_ in manifest["objects"]]:
            body = path.read_bytes()
            path.write_bytes(body[:-1] + bytes([body[-1] ^ 1]))
            with pytest.raises(ValueError, match="SHA-256"):
                read(version, copy)
            path.write_bytes(body)


def _broken_columns(manifest: dict[str, Any]) -> Iterator[tuple[str, Callable[[], None]]]:
    """Ways to break a delta's manifest, and what a reader says of each."""
    tiles, bodies = manifest["tiles"], manifest["bodies"]
    digests = reader_v2.column(tiles["digests"], 2 * len(tiles["number"]))

    def put(words: list[int]) -> None:
        tiles["digests"] = reader_v2.base64.b64encode(np.array(words, dtype="<u8").tobytes()).decode()

    yield "base is wrong", lambda: put([digests[0] ^ 1, *digests[1:]])
    yield "digest after", lambda: put([digests[0], digests[1] ^ 1, *digests[2:]])
    yield "another length", lambda: put(digests[:-1])
    yield "element sum", lambda: tiles.update(sums="A" + tiles["sums"][1:])
    yield "number of elements", lambda: tiles["changed"].__setitem__(0, tiles["changed"][0] + 1)
    yield "add up", lambda: tiles["number"].append(tiles["number"][0])
    yield "state is another", lambda: manifest.update(state="0" * 64)
    yield "parent is another", lambda: manifest["parent"].update(state="0" * 64)
    yield "fill", lambda: bodies["length"].__setitem__(-1, bodies["length"][-1] - 1)


def test_the_pages_reader_notices_a_changed_manifest(copy: Path) -> None:
    path = copy / RUN / "manifests" / "00000001.json"
    body = path.read_bytes()
    for index in range(9):
        manifest = json.loads(body)
        says, break_it = list(_broken_columns(manifest))[index]
        break_it()
        path.write_text(json.dumps(manifest))
        with pytest.raises(ValueError, match=says):
            read(1, copy)


PAIR_BYTES: dict[Level, tuple[int, int]] = {"fast": (593, 5784), "wan": (458, 4296)}
"""Bodies of the two tensors of a real step of AdamW, one by one: `data/adamw_pair.safetensors`."""


@pytest.mark.parametrize("level", ["fast", "wan"])
def test_a_real_step_takes_the_bytes_that_it_took(level: Level) -> None:
    bodies = [_encoded(name, level) for name in _pair_names()]
    assert tuple(len(encoded.body) for _, _, encoded in bodies) == PAIR_BYTES[level]
    for old, new, encoded in bodies:
        (made,) = reader_v2.sparse(encoded.body, [old], "BF16")
        assert (encoded.encoding, made) == ("sparse", new)


def _pair_names() -> list[str]:
    slots = read_slots(PAIR.name, PAIR.read_bytes())
    return [name.removeprefix("old.") for name in slots if name.startswith("old.")]


def _encoded(name: str, level: Level) -> tuple[list[int], list[int], EncodedBody]:
    body = PAIR.read_bytes()
    old, new = (read_slots(PAIR.name, body)[f"{age}.{name}"] for age in ("old", "new"))
    spec = TensorSpec(name=name, dtype=old.spec.dtype, shape=old.spec.shape)
    encoded = encode_body([Place(spec=spec, tile=tile_at(spec, 0))], [old.bits(body)], [new.bits(body)], level)
    assert encoded is not None
    return old.bits(body).tolist(), new.bits(body).tolist(), encoded
