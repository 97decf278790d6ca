"""Faults by their numbers, as a replica's reader meets them in a bucket that a publisher filled."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, Literal

import pytest
from bucket_rig import copied
from publish_rig import RUN, Tensors, all_bits, keys, model_folder, trained, weights

from slackwater.checkpoint.chain import plan_path
from slackwater.checkpoint.keys import head_key, manifest_key
from slackwater.checkpoint.manifest import Manifest
from slackwater.checkpoint.state import StateTable
from slackwater.delivery.fetcher import Fetcher
from slackwater.errors import AuthError, CorruptError, NotFoundError, UnavailableError, WrongBaseError
from slackwater.ids import Version
from slackwater.publish.publisher import Publisher
from slackwater.testing.bucket import Fault, FaultyBucket, Gate, MemoryBucket
from slackwater.testing.clock import ManualClock
from slackwater.weights.source import FolderSource
from slackwater.weights.state_dict import StateDictSource

CAP: Final = 1 << 20
HEAD: Final = Version(5)
ANCHOR: Final = Version(4)

Spoil = Callable[[bytes], bytes]


def flip(place: float) -> Spoil:
    """Flip a bit of the first byte (0), the middle one (0.5) or the last one (1)."""

    def spoil(body: bytes) -> bytes:
        spoilt = bytearray(body)
        spoilt[round(place * (len(body) - 1))] ^= 1
        return bytes(spoilt)

    return spoil


SPOILT: Final[dict[str, Spoil]] = {
    "first byte": flip(0),
    "middle byte": flip(0.5),
    "last byte": flip(1),
    "a byte cut": lambda body: body[:-1],
    "empty": lambda _: b"",
    "a byte more": lambda body: body + b"\0",
    "an error page": lambda body: b"<html>503</html>".ljust(len(body)),
}


def states(count: int = HEAD + 1) -> list[Tensors]:
    found = [weights()]
    for step in range(1, count):
        found.append(trained(found[-1], step))
    return found


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> MemoryBucket:
    """Anchors 0 and 4, deltas between and after."""
    bucket = MemoryBucket()
    publisher = Publisher(bucket, RUN, anchor_every=4, threads=1, clock=ManualClock())
    model = model_folder(tmp_path_factory.mktemp("run") / "model")
    for step, tensors in enumerate(states()):
        publisher.publish(StateDictSource(tensors), step=step, folder_files=model)
    publisher.close()  # writes the last hint
    return bucket


@pytest.fixture
def memory(published: MemoryBucket) -> MemoryBucket:
    """A copy, to be written."""
    return copied(published)


@pytest.fixture
def bucket(memory: MemoryBucket) -> FaultyBucket:
    return FaultyBucket(memory)


@pytest.fixture
def fetcher(bucket: FaultyBucket, tmp_path: Path) -> Fetcher:
    return Fetcher(bucket, RUN, tmp_path / "cache", threads=1)


def read(fetcher: Fetcher, version: Version) -> bytes | dict[str, bytes]:
    """A version's own bytes, as a replica fetches them."""
    manifest = fetcher.manifest(version)
    if manifest.kind == "anchor":
        return all_bits(FolderSource(fetcher.anchor(manifest)))
    return b"".join(fetcher.bodies(manifest).packs)


def own_keys(manifest: Manifest, damage: str) -> list[str]:
    """A version's objects, and its manifest where this damage shows in itself: it has no digest of its own."""
    shows = damage not in ("middle", "middle byte")
    return [ref.key for ref in manifest.objects] + [manifest_key(RUN, manifest.version)] * shows


@pytest.mark.parametrize("damage", SPOILT)
@pytest.mark.parametrize("version", [ANCHOR, HEAD])
def test_f10_f11_f22_what_stays_spoilt_is_refused_by_name_and_heals_without_a_restart(
    memory: MemoryBucket, bucket: FaultyBucket, tmp_path: Path, version: Version, damage: str
) -> None:
    plain = Fetcher(memory, RUN, tmp_path / "plain", threads=1)
    good = read(plain, version)
    for number, key in enumerate(own_keys(plain.manifest(version), damage)):
        fetcher = Fetcher(bucket, RUN, tmp_path / f"cache{number}", threads=1)
        body = memory.get(key, max_bytes=CAP)
        memory.put(key, SPOILT[damage](body))
        asked = bucket.count("get", key)
        with pytest.raises(CorruptError, match=key):
            read(fetcher, version)
        assert bucket.count("get", key) == asked + 2  # one new fetch, then the alarm
        memory.put(key, body)
        assert read(fetcher, version) == good


@pytest.mark.parametrize("damage", ["first", "middle", "last", "cut"])
@pytest.mark.parametrize("version", [ANCHOR, HEAD])
def test_f10_f11_what_was_spoilt_on_the_way_is_fetched_once_more(
    memory: MemoryBucket, tmp_path: Path, version: Version, damage: str
) -> None:
    plain = Fetcher(memory, RUN, tmp_path / "plain", threads=1)
    good = read(plain, version)
    for number, key in enumerate(own_keys(plain.manifest(version), damage)):
        size = len(memory.get(key, max_bytes=CAP))
        flips = {"first": 0, "middle": size // 2, "last": size - 1}
        fault = Fault(verb="get", key=key, flip=flips.get(damage), cut=size - 1 if damage == "cut" else None)
        bucket = FaultyBucket(memory, fault)
        assert read(Fetcher(bucket, RUN, tmp_path / f"cache{number}", threads=1), version) == good
        assert bucket.count("get", key) == 2


@pytest.mark.parametrize("version", [ANCHOR, HEAD])
@pytest.mark.parametrize("place", [number / 40 for number in range(41)])
def test_f10_a_manifest_that_was_spoilt_on_the_way_gives_right_bytes_or_none(
    memory: MemoryBucket, tmp_path: Path, version: Version, place: float
) -> None:
    """Bits inside it that still read as a manifest are found by what they point at; the next look reads it anew."""
    key = manifest_key(RUN, version)
    good = read(Fetcher(memory, RUN, tmp_path / "plain", threads=1), version)
    at = round(place * (len(memory.get(key, max_bytes=CAP)) - 1))
    fetcher = Fetcher(FaultyBucket(memory, Fault(verb="get", key=key, flip=at)), RUN, tmp_path / "cache", threads=1)
    try:
        found = read(fetcher, version)
    except (CorruptError, NotFoundError):
        found = good
    assert found == good
    assert read(fetcher, version) == good


@pytest.mark.parametrize("version", [ANCHOR, HEAD])
def test_f11_what_was_deleted_is_not_found_by_name(memory: MemoryBucket, tmp_path: Path, version: Version) -> None:
    plain = Fetcher(memory, RUN, tmp_path / "plain", threads=1)
    for number, key in enumerate(own_keys(plain.manifest(version), "")):
        body = memory.get(key, max_bytes=CAP)
        memory.delete(key)
        with pytest.raises(NotFoundError, match=key):
            read(Fetcher(memory, RUN, tmp_path / f"cache{number}", threads=1), version)
        memory.put(key, body)


def test_f12_a_delta_under_a_later_number_is_refused(fetcher: Fetcher, memory: MemoryBucket) -> None:
    memory.put(manifest_key(RUN, HEAD), memory.get(manifest_key(RUN, Version(3)), max_bytes=CAP))
    with pytest.raises(CorruptError, match=r"00000005\.json is the manifest of demo/3"):
        fetcher.manifest(HEAD)


def test_f13_an_object_that_hangs_in_the_store_is_awaited_and_the_version_comes_whole(
    memory: MemoryBucket, tmp_path: Path
) -> None:
    gate = Gate()
    bucket = FaultyBucket(memory, Fault(verb="get", key="/blobs/", gate=gate))
    fetcher = Fetcher(bucket, RUN, tmp_path / "cache")
    manifest = fetcher.manifest(HEAD)
    with ThreadPoolExecutor(1) as pool:
        coming = pool.submit(fetcher.bodies, manifest)
        assert gate.reached.wait(30)
        assert fetcher.head(HEAD) == HEAD  # nothing else waits for it
        assert not coming.done()
        gate.open()
        assert coming.result(30).num_bytes == manifest.num_bytes


def test_f13_an_object_that_comes_late_is_missing_until_then_and_nothing_comes_twice(
    fetcher: Fetcher, memory: MemoryBucket, bucket: FaultyBucket, tmp_path: Path
) -> None:
    manifest = fetcher.manifest(ANCHOR)
    late = manifest.objects[manifest.files["tokenizer.json"]].key
    body = memory.get(late, max_bytes=CAP)
    memory.delete(late)
    for _ in range(3):
        with pytest.raises(NotFoundError, match=late):
            fetcher.anchor(manifest)
    folders = [path.name for path in (tmp_path / "cache" / "anchors").iterdir()]
    assert all(name.startswith(".") for name in folders)  # no partial stage under a name
    memory.put(late, body)
    assert all_bits(FolderSource(fetcher.anchor(manifest))) == all_bits(StateDictSource(states()[ANCHOR]))
    assert bucket.count("get", "model.safetensors") == 1


@pytest.mark.parametrize("held", [None, 2])
def test_f14_a_gap_is_gone_around_by_the_newest_anchor(
    fetcher: Fetcher, memory: MemoryBucket, held: int | None
) -> None:
    memory.delete(manifest_key(RUN, Version(3)))
    assert fetcher.head(None if held is None else Version(held)) == HEAD
    path = plan_path(None if held is None else Version(held), HEAD, lambda version: kind_of(fetcher, version))
    assert (path.anchor, path.deltas) == (ANCHOR, (HEAD,))


def test_f14_a_gap_that_no_anchor_goes_around_is_told(fetcher: Fetcher, memory: MemoryBucket) -> None:
    memory.delete(manifest_key(RUN, ANCHOR))
    assert fetcher.head(None) == HEAD  # by the hint
    with pytest.raises(NotFoundError):
        plan_path(Version(2), HEAD, lambda version: kind_of(fetcher, version))


def kind_of(fetcher: Fetcher, version: Version) -> Literal["anchor", "delta"] | None:
    try:
        return fetcher.manifest(version).kind
    except NotFoundError:
        return None


def set_back(memory: MemoryBucket, newest: Version) -> None:
    for key in keys(memory, "/manifests/"):
        if key > manifest_key(RUN, newest):
            memory.delete(key)
    memory.put(head_key(RUN), b'{"version":%d}' % newest)


def test_f16_a_bucket_that_was_set_back_is_refused_and_what_is_made_on_it_does_not_fit(
    fetcher: Fetcher, memory: MemoryBucket
) -> None:
    held = table_of(fetcher, HEAD)
    set_back(memory, Version(2))
    view = fetcher.look(HEAD)
    assert (view.version, view.receded) == (HEAD, True)
    publisher = Publisher.open(memory, RUN, threads=1)
    for step in range(3, HEAD + 2):
        publisher.publish(StateDictSource(trained(weights(), 90 + step)), step=step)
    assert fetcher.head(HEAD) == HEAD + 1
    with pytest.raises(WrongBaseError):
        held.after(fetcher.manifest(Version(HEAD + 1)))


def table_of(fetcher: Fetcher, version: Version) -> StateTable:
    table = StateTable.of_anchor(fetcher.manifest(ANCHOR))
    for number in range(ANCHOR + 1, version + 1):
        table = table.after(fetcher.manifest(Version(number)))
    return table


def test_f17_a_version_that_is_only_announced_changes_nothing(
    fetcher: Fetcher, memory: MemoryBucket, bucket: FaultyBucket
) -> None:
    good = read(fetcher, HEAD)
    memory.put(head_key(RUN), b'{"version":%d}' % (HEAD + 1))
    for _ in range(5):
        view = fetcher.look(HEAD)
        assert (view.version, view.receded) == (HEAD, False)
    assert bucket.count("list") == 0
    assert read(fetcher, HEAD) == good


@pytest.mark.parametrize("error", [UnavailableError("reset"), AuthError("the token was revoked")], ids=["away", "auth"])
def test_f18_f26_a_fetch_that_fails_goes_on_where_it_was(
    fetcher: Fetcher, bucket: FaultyBucket, error: UnavailableError | AuthError
) -> None:
    anchor = fetcher.manifest(ANCHOR)
    bucket.add(Fault(verb="get", key="tokenizer.json", before=error))
    with pytest.raises(type(error)):
        fetcher.anchor(anchor)
    assert all_bits(FolderSource(fetcher.anchor(anchor))) == all_bits(StateDictSource(states()[ANCHOR]))
    assert all(bucket.count("get", ref.key) == 1 for ref in anchor.objects if "tokenizer.json" not in ref.key)


def test_a6_07_a_pack_in_pieces_that_ends_early_is_refused(
    memory: MemoryBucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slackwater.delivery.objects.PIECE_BYTES", 16)
    plain = Fetcher(memory, RUN, tmp_path / "plain", threads=1)
    manifest = plain.manifest(HEAD)
    pack = manifest.objects[0]
    assert pack.size > 32
    once = FaultyBucket(memory, Fault(verb="get_range", key=pack.key, cut=11))
    assert Fetcher(once, RUN, tmp_path / "once", threads=1).bodies(manifest).num_bytes == manifest.num_bytes
    ever = FaultyBucket(memory, Fault(verb="get_range", key=pack.key, cut=11, times=9))
    with pytest.raises(CorruptError, match=pack.key):
        Fetcher(ever, RUN, tmp_path / "ever", threads=1).bodies(manifest)


def test_a6_10_readers_decide_by_the_manifest_alone(memory: MemoryBucket, tmp_path: Path) -> None:
    """The listing fails, or lags behind; objects of a version that isn't committed are there."""
    memory.put(f"{RUN}/blobs/{'0' * 64}", b"of a version that never came")
    memory.put(f"{RUN}/anchors/00000006-{'0' * 16}/config.json", b"{}")
    bucket = FaultyBucket(memory, Fault(verb="list", times=99, before=UnavailableError("the listing is away")))
    fetcher = Fetcher(bucket, RUN, tmp_path / "cache")
    assert fetcher.head(None) == HEAD
    assert fetcher.head(Version(2)) == HEAD
