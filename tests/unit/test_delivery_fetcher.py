"""Fetching versions out of buckets that lose, spoil and exchange things."""

import errno
import hashlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slackwater.checkpoint.columns import to_column
from slackwater.checkpoint.keys import manifest_key
from slackwater.checkpoint.manifest import (
    FORMAT,
    BodyEntry,
    Manifest,
    ObjectRef,
    Parent,
    Tiles,
    encode_manifest,
)
from slackwater.checkpoint.manifest import Bodies as BodyColumns
from slackwater.delivery import objects
from slackwater.delivery.fetcher import Bodies, Fetcher
from slackwater.errors import CorruptError, InvalidInputError, NotFoundError, UnavailableError
from slackwater.ids import ObjectDigest, RunId, StateDigest, Version
from slackwater.testing.bucket import Fault, FaultyBucket, Gate, MemoryBucket

RUN = RunId("demo")
FILES = {
    "config.json": b"{}",
    "empty.txt": b"",
    "model.safetensors": bytes(range(256)),
    "tokenizer.json": b"{ }",
}
FETCHED = len(FILES) - 1
"""Files that cost a call: an empty one is known by its digest."""


def state(version: int) -> StateDigest:
    return StateDigest(f"{version:064x}")


def put_object(bucket: MemoryBucket, key: str, body: bytes) -> ObjectRef:
    bucket.put(key, body)
    return ObjectRef(key=key, size=len(body), sha256=ObjectDigest(hashlib.sha256(body).hexdigest()))


def commit(bucket: MemoryBucket, manifest: Manifest) -> Manifest:
    bucket.put_if_absent(manifest_key(manifest.run, manifest.version), encode_manifest(manifest))
    return manifest


def anchor_of(bucket: MemoryBucket, version: int = 0, run: RunId = RUN) -> Manifest:
    refs = [put_object(bucket, f"{run}/anchors/{version:08d}/{name}", body) for name, body in FILES.items()]
    manifest = Manifest(
        format=FORMAT,
        run=run,
        version=Version(version),
        kind="anchor",
        parent=None,
        state=state(version),
        step=0,
        created_at="2026-01-01T00:00:00Z",
        objects=tuple(refs),
        tensors=(),
        files={name: index for index, name in enumerate(FILES)},
    )
    return commit(bucket, manifest)


def delta_of(bucket: MemoryBucket, version: int, *packs: bytes) -> Manifest:
    """A delta whose every pack is one body of one tile."""
    digests = [hashlib.sha256(pack).hexdigest() for pack in packs]
    refs = [put_object(bucket, f"{RUN}/blobs/{name}", pack) for name, pack in zip(digests, packs, strict=True)]
    manifest = Manifest(
        format=FORMAT,
        run=RUN,
        version=Version(version),
        kind="delta",
        parent=Parent(version=Version(version - 1), state=state(version - 1)),
        state=state(version),
        step=version,
        created_at="2026-01-01T00:00:00Z",
        objects=tuple(refs),
        bodies=BodyColumns(
            object=tuple(range(len(packs))),
            length=tuple(map(len, packs)),
            encoding="f" * len(packs),
            tiles=(1,) * len(packs),
        ),
        tiles=Tiles(
            number=tuple(range(len(packs))),
            changed=(1,) * len(packs),
            digests=to_column(np.arange(2 * len(packs), dtype=np.uint64)),
            sums="",
        ),
    )
    return commit(bucket, manifest)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def memory() -> MemoryBucket:
    return MemoryBucket()


@pytest.fixture
def bucket(memory: MemoryBucket) -> FaultyBucket:
    return FaultyBucket(memory)


@pytest.fixture
def fetcher(bucket: FaultyBucket, tmp_path: Path) -> Fetcher:
    return Fetcher(bucket, RUN, tmp_path)


# Manifests


def test_reads_a_manifest_by_its_number(fetcher: Fetcher, memory: MemoryBucket) -> None:
    anchor = anchor_of(memory)
    delta = delta_of(memory, 1, b"pack")
    assert fetcher.manifest(Version(0)) == anchor
    assert fetcher.manifest(Version(1)) == delta


def test_a_version_that_is_not_committed_is_not_found(fetcher: Fetcher) -> None:
    with pytest.raises(NotFoundError, match="demo/3 isn't committed"):
        fetcher.manifest(Version(3))


def test_f12_a_manifest_under_another_number_is_refused(fetcher: Fetcher, memory: MemoryBucket) -> None:
    third = delta_of(memory, 3, b"pack")
    memory.put(manifest_key(RUN, Version(5)), encode_manifest(third))
    with pytest.raises(CorruptError, match=r"00000005\.json is the manifest of demo/3"):
        fetcher.manifest(Version(5))


def test_a1_21_a_manifest_of_another_run_is_refused(fetcher: Fetcher, memory: MemoryBucket) -> None:
    other = anchor_of(memory, run=RunId("other"))
    memory.put(manifest_key(RUN, Version(0)), encode_manifest(other))
    with pytest.raises(CorruptError, match="other/0"):
        fetcher.manifest(Version(0))


@pytest.mark.parametrize("fault", [Fault(verb="get", flip=1), Fault(verb="get", cut=20), Fault(verb="get", cut=0)])
def test_f10_a_manifest_spoilt_on_the_way_is_fetched_once_more(
    fetcher: Fetcher, memory: MemoryBucket, bucket: FaultyBucket, fault: Fault
) -> None:
    anchor = anchor_of(memory)
    bucket.add(fault)
    assert fetcher.manifest(Version(0)) == anchor
    assert bucket.count("get") == 2


def test_f11_a_manifest_that_stays_cut_is_corrupt_and_named(fetcher: Fetcher, memory: MemoryBucket) -> None:
    anchor = anchor_of(memory)
    memory.put(manifest_key(RUN, Version(0)), encode_manifest(anchor)[:-1])
    with pytest.raises(CorruptError, match=r"demo/manifests/00000000\.json"):
        fetcher.manifest(Version(0))


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", ".hidden", "a/b", "", "x\x00", "\uff0e\uff0e"])
def test_a8_04_a_hostile_file_name_is_refused_before_any_file(
    fetcher: Fetcher, memory: MemoryBucket, tmp_path: Path, name: str
) -> None:
    anchor = anchor_of(memory)
    hostile = msgspec.structs.replace(anchor, files={name: 0})
    memory.put(manifest_key(RUN, Version(0)), encode_manifest(hostile))
    with pytest.raises(CorruptError):
        fetcher.manifest(Version(0))
    assert not (tmp_path / "anchors").exists()


# Anchors


def test_brings_an_anchor_as_a_plain_folder(fetcher: Fetcher, memory: MemoryBucket, tmp_path: Path) -> None:
    folder = fetcher.anchor(anchor_of(memory, 7))
    assert folder == tmp_path / "anchors" / f"00000007-{state(7)[:16]}"
    assert contents(folder) == FILES
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_an_anchor_on_the_disk_costs_no_call(fetcher: Fetcher, memory: MemoryBucket, bucket: FaultyBucket) -> None:
    anchor = anchor_of(memory)
    fetcher.anchor(anchor)
    before = bucket.count("get")
    fetcher.anchor(anchor)
    assert bucket.count("get") == before


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
@pytest.mark.parametrize("spoil", [lambda path: path.write_bytes(b"spoilt"), lambda path: path.unlink()])
def test_f10_a_file_that_changed_on_the_disk_comes_again_and_only_that_one(
    fetcher: Fetcher, memory: MemoryBucket, bucket: FaultyBucket, name: str, spoil: Callable[[Path], object]
) -> None:
    anchor = anchor_of(memory)
    folder = fetcher.anchor(anchor)
    spoil(folder / name)
    before = bucket.count("get")
    assert contents(fetcher.anchor(anchor)) == FILES
    assert bucket.count("get") == before + 1


def test_a_stray_file_in_an_anchors_folder_is_not_served(fetcher: Fetcher, memory: MemoryBucket) -> None:
    anchor = anchor_of(memory)
    (fetcher.anchor(anchor) / "adapter.safetensors").write_bytes(b"stray")
    assert contents(fetcher.anchor(anchor)) == FILES


def test_older_anchors_leave_the_disk(fetcher: Fetcher, memory: MemoryBucket, tmp_path: Path) -> None:
    anchors = [anchor_of(memory, version) for version in range(4)]
    for anchor in anchors:
        fetcher.anchor(anchor)
    assert {path.name[:8] for path in (tmp_path / "anchors").iterdir()} == {"00000002", "00000003"}


def test_two_threads_bring_one_anchor_once(fetcher: Fetcher, memory: MemoryBucket, bucket: FaultyBucket) -> None:
    anchor = anchor_of(memory)
    gate = Gate()
    bucket.add(Fault(verb="get", key="config.json", gate=gate))
    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(fetcher.anchor, anchor) for _ in range(2)]
        assert gate.reached.wait(10)
        gate.open()
        assert calls[0].result() == calls[1].result()
    assert bucket.count("get") == FETCHED


def test_p9_a_restart_fetches_only_the_files_that_are_missing(
    fetcher: Fetcher, memory: MemoryBucket, bucket: FaultyBucket, tmp_path: Path
) -> None:
    anchor = anchor_of(memory)
    serial = Fetcher(bucket, RUN, tmp_path, threads=1)
    bucket.add(Fault(verb="get", key="tokenizer", before=UnavailableError("away")))
    with pytest.raises(UnavailableError):
        serial.anchor(anchor)
    assert not (tmp_path / "anchors" / f"00000000-{state(0)[:16]}").exists()
    assert contents(fetcher.anchor(anchor)) == FILES
    assert bucket.count("get") == FETCHED + 1


def test_a_file_kept_from_a_killed_start_is_verified_again(
    fetcher: Fetcher, memory: MemoryBucket, tmp_path: Path
) -> None:
    anchor = anchor_of(memory)
    partial = tmp_path / "anchors" / f".partial-00000000-{state(0)[:16]}"
    partial.mkdir(parents=True)
    (partial / "model.safetensors").write_bytes(bytes(256))
    (partial / "config.json").write_bytes(b"{")
    (partial / "stray.bin").write_bytes(b"of another anchor")
    assert contents(fetcher.anchor(anchor)) == FILES


def test_p9_a_large_file_goes_on_at_its_last_whole_piece(
    fetcher: Fetcher, memory: MemoryBucket, bucket: FaultyBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objects, "PIECE_BYTES", 100)
    anchor = anchor_of(memory)
    bucket.add(Fault(verb="get_range", times=2))
    bucket.add(Fault(verb="get_range", before=UnavailableError("away")))
    with pytest.raises(UnavailableError):
        fetcher.anchor(anchor)
    assert contents(fetcher.anchor(anchor)) == FILES
    assert bucket.count("get_range") == 4


def test_pieces_kept_from_a_killed_start_that_are_wrong_are_fetched_anew(
    fetcher: Fetcher, memory: MemoryBucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objects, "PIECE_BYTES", 100)
    anchor = anchor_of(memory)
    partial = tmp_path / "anchors" / f".partial-00000000-{state(0)[:16]}"
    partial.mkdir(parents=True)
    (partial / ".model.safetensors.part").write_bytes(bytes(250))
    assert contents(fetcher.anchor(anchor)) == FILES


@pytest.mark.parametrize(
    "fault",
    [
        Fault(verb="get", key="model", flip=0),
        Fault(verb="get", key="model", flip=255),
        Fault(verb="get", key="model", cut=255),
        Fault(verb="get", key="model", cut=0),
    ],
)
def test_f10_f11_f22_a_spoilt_file_is_fetched_once_more(
    fetcher: Fetcher, memory: MemoryBucket, bucket: FaultyBucket, fault: Fault
) -> None:
    anchor = anchor_of(memory)
    bucket.add(fault)
    assert contents(fetcher.anchor(anchor)) == FILES
    assert bucket.count("get", "model") == 2


def test_f10_a_file_that_stays_spoilt_is_corrupt_named_and_shows_no_folder(
    fetcher: Fetcher, memory: MemoryBucket, bucket: FaultyBucket, tmp_path: Path
) -> None:
    anchor = anchor_of(memory)
    bucket.add(Fault(verb="get", key="model", flip=5, times=2))
    with pytest.raises(CorruptError, match=r"demo/anchors/00000000/model\.safetensors"):
        fetcher.anchor(anchor)
    assert [path.name[:9] for path in (tmp_path / "anchors").iterdir()] == [".partial-"]


def test_f11_a_file_that_was_deleted_is_not_found_and_named(fetcher: Fetcher, memory: MemoryBucket) -> None:
    anchor = anchor_of(memory)
    memory.delete(anchor.objects[2].key)
    with pytest.raises(NotFoundError, match=r"isn't there.*model\.safetensors"):
        fetcher.anchor(anchor)


def test_a_closed_fetcher_ends_before_the_next_object(
    memory: MemoryBucket, bucket: FaultyBucket, tmp_path: Path
) -> None:
    anchor = anchor_of(memory)
    gate = Gate()
    bucket.add(Fault(verb="get", gate=gate))
    fetcher = Fetcher(bucket, RUN, tmp_path, threads=1)
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(fetcher.anchor, anchor)
        assert gate.reached.wait(10)
        fetcher.close()
        gate.open()
        with pytest.raises(UnavailableError, match="closed"):
            call.result()
    assert bucket.count("get") == 1


def test_kinds_are_not_mixed_up(fetcher: Fetcher, memory: MemoryBucket) -> None:
    with pytest.raises(InvalidInputError, match="is a delta"):
        fetcher.anchor(delta_of(memory, 1, b"pack"))
    with pytest.raises(InvalidInputError, match="is an anchor"):
        fetcher.bodies(anchor_of(memory))


# Deltas


def entry(pack: int, offset: int, length: int) -> BodyEntry:
    return BodyEntry(object=pack, offset=offset, length=length, encoding="sparse", tiles=())


def test_brings_packs_and_cuts_bodies_out_of_them(fetcher: Fetcher, memory: MemoryBucket) -> None:
    bodies = fetcher.bodies(delta_of(memory, 1, b"0123456789", b"abc"))
    assert bytes(bodies.of(entry(0, 3, 4))) == b"3456"
    assert bytes(bodies.of(entry(1, 0, 3))) == b"abc"
    assert bodies.num_bytes == 13


def test_the_bodies_that_a_manifest_lists_fill_its_packs(fetcher: Fetcher, memory: MemoryBucket) -> None:
    delta = delta_of(memory, 1, b"0123456789", b"abc")
    cut = msgspec.structs.replace(
        delta,
        bodies=BodyColumns(object=(0, 0, 1), length=(3, 7, 3), encoding="sdf", tiles=(1, 2, 1)),
        tiles=Tiles(number=(5, 0, 3, 1), changed=(1,) * 4, digests=to_column(np.arange(8, dtype=np.uint64)), sums=""),
    )
    memory.put(manifest_key(RUN, Version(1)), encode_manifest(cut))
    read = fetcher.manifest(Version(1))
    bodies = fetcher.bodies(read)
    assert [bytes(bodies.of(body)) for body in read.listed()] == [b"012", b"3456789", b"abc"]


def test_a_body_is_a_view_of_its_pack() -> None:
    pack = b"0123456789"
    body = Bodies(packs=(pack,)).of(entry(0, 2, 5))
    assert body.obj is pack
    assert body.readonly


@pytest.mark.parametrize(
    ("pack", "offset", "length"),
    [(1, 0, 1), (-1, 0, 1), (0, 10, 1), (0, 0, 11), (0, -1, 2), (0, 5, -1), (0, 2**63 - 1, 2**63 - 1)],
)
def test_a_body_one_byte_past_any_bound_is_refused(pack: int, offset: int, length: int) -> None:
    bodies = Bodies(packs=(b"0123456789",))
    with pytest.raises(CorruptError, match="a body points at"):
        bodies.of(entry(pack, offset, length))


def test_a_body_may_end_where_its_pack_does() -> None:
    bodies = Bodies(packs=(b"0123456789",))
    assert bytes(bodies.of(entry(0, 9, 1))) == b"9"
    assert bytes(bodies.of(entry(0, 0, 10))) == b"0123456789"


@given(st.integers(-5, 20), st.integers(-5, 20), st.integers(-5, 20))
def test_a_body_lies_inside_its_pack_or_is_refused(index: int, offset: int, length: int) -> None:
    bodies = Bodies(packs=(b"0123456789",))
    try:
        body = bodies.of(entry(index, offset, length))
    except CorruptError:
        assert index != 0 or offset < 0 or length < 0 or offset + length > 10
    else:
        assert bytes(body) == b"0123456789"[offset : offset + length]
        assert len(body) == length


def test_p9_a_restart_takes_packs_from_the_disk(
    fetcher: Fetcher, memory: MemoryBucket, bucket: FaultyBucket, tmp_path: Path
) -> None:
    delta = delta_of(memory, 1, b"first", b"second")
    fetcher.bodies(delta)
    assert Fetcher(bucket, RUN, tmp_path).bodies(delta).packs == (b"first", b"second")
    assert bucket.count("get", "blobs") == 2


def test_a_pack_that_went_bad_on_the_disk_is_fetched_again(
    fetcher: Fetcher, memory: MemoryBucket, bucket: FaultyBucket, tmp_path: Path
) -> None:
    delta = delta_of(memory, 1, b"pack")
    fetcher.bodies(delta)
    (tmp_path / "blobs" / delta.objects[0].sha256).write_bytes(b"Pack")
    assert fetcher.bodies(delta).packs == (b"pack",)
    assert bucket.count("get", "blobs") == 2


@pytest.mark.parametrize("spoil", [{"flip": 0}, {"flip": 3}, {"cut": 3}, {"cut": 0}])
def test_f10_f11_a_spoilt_pack_is_fetched_once_more_then_corrupt(
    fetcher: Fetcher, memory: MemoryBucket, bucket: FaultyBucket, spoil: dict[str, int]
) -> None:
    delta = delta_of(memory, 1, b"pack")
    fault = Fault(verb="get", flip=spoil.get("flip"), cut=spoil.get("cut"), times=3)
    bucket.add(fault)
    with pytest.raises(CorruptError, match="demo/blobs/"):
        fetcher.bodies(delta)
    assert fetcher.bodies(delta).packs == (b"pack",)
    assert bucket.count("get") == 4


def test_f12_two_exchanged_packs_are_refused_by_digest(fetcher: Fetcher, memory: MemoryBucket) -> None:
    delta = delta_of(memory, 1, b"pack1", b"pack2")
    memory.put(delta.objects[0].key, b"pack2")
    memory.put(delta.objects[1].key, b"pack1")
    with pytest.raises(CorruptError, match="SHA-256"):
        fetcher.bodies(delta)


def test_f22_an_error_page_instead_of_a_pack_is_found_by_its_size(fetcher: Fetcher, memory: MemoryBucket) -> None:
    delta = delta_of(memory, 1, b"pack")
    memory.put(delta.objects[0].key, b"<html>please sign in</html>")
    with pytest.raises(CorruptError, match="27 bytes"):
        fetcher.bodies(delta)


def test_a_pack_of_many_pieces_is_joined(
    fetcher: Fetcher, memory: MemoryBucket, bucket: FaultyBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objects, "PIECE_BYTES", 7)
    delta = delta_of(memory, 1, bytes(range(100)))
    assert fetcher.bodies(delta).packs == (bytes(range(100)),)
    assert bucket.count("get_range") == 15


def test_packs_are_fetched_side_by_side(fetcher: Fetcher, memory: MemoryBucket, bucket: FaultyBucket) -> None:
    delta = delta_of(memory, 1, b"first", b"second")
    gates = [Gate(), Gate()]
    for gate in gates:
        bucket.add(Fault(verb="get", gate=gate))
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(fetcher.bodies, delta)
        assert all(gate.reached.wait(10) for gate in gates)
        for gate in gates:
            gate.open()
        assert call.result().num_bytes == 11


def test_a_cache_that_can_not_hold_a_pack_does_not_stop_its_use(
    memory: MemoryBucket, bucket: FaultyBucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    fetcher = Fetcher(bucket, RUN, tmp_path)
    monkeypatch.setattr(Path, "write_bytes", fill)
    assert fetcher.bodies(delta_of(memory, 1, b"pack")).packs == (b"pack",)


def test_the_head_may_be_asked_for_while_an_anchor_comes(
    fetcher: Fetcher, memory: MemoryBucket, bucket: FaultyBucket
) -> None:
    anchor = anchor_of(memory)
    gate = Gate()
    bucket.add(Fault(verb="get", key="anchors", gate=gate))
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(fetcher.anchor, anchor)
        assert gate.reached.wait(10)
        assert fetcher.head(None) == 0
        gate.open()
        assert call.result().is_dir()
