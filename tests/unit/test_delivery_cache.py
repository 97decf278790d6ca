"""The cache of packs: what crashes, bad disks and bounds do to it."""

import errno
import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NoReturn

import pytest

from slackwater.checkpoint.manifest import ObjectRef
from slackwater.delivery.cache import BlobCache
from slackwater.errors import CorruptError, UnavailableError
from slackwater.ids import ObjectDigest


def ref_of(body: bytes) -> ObjectRef:
    digest = hashlib.sha256(body).hexdigest()
    return ObjectRef(key=f"demo/blobs/{digest}", size=len(body), sha256=ObjectDigest(digest))


def body_of(number: int) -> bytes:
    return bytes([number]) * 100


def held(cache: BlobCache, numbers: range) -> list[int]:
    return [number for number in numbers if cache.read(ref_of(body_of(number))) is not None]


def test_reads_back_what_was_stored_also_after_a_restart(tmp_path: Path) -> None:
    BlobCache(tmp_path, max_bytes=1000).store(ref_of(b"body"), b"body")
    assert BlobCache(tmp_path, max_bytes=1000).read(ref_of(b"body")) == b"body"


def test_what_is_not_held_is_none(tmp_path: Path) -> None:
    assert BlobCache(tmp_path, max_bytes=1000).read(ref_of(b"body")) is None


@pytest.mark.parametrize("wrong", [b"Body", b"bod", b"body ", b""])
def test_wrong_bytes_are_never_stored(tmp_path: Path, wrong: bytes) -> None:
    cache = BlobCache(tmp_path, max_bytes=1000)
    with pytest.raises(CorruptError, match="demo/blobs/"):
        cache.store(ref_of(b"body"), wrong)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("spoilt", [b"Body", b"bod", b"body ", b""])
def test_f10_a_copy_that_went_bad_on_the_disk_is_dropped(tmp_path: Path, spoilt: bytes) -> None:
    cache = BlobCache(tmp_path, max_bytes=1000)
    ref = ref_of(b"body")
    cache.store(ref, b"body")
    (tmp_path / ref.sha256).write_bytes(spoilt)
    assert cache.read(ref) is None
    assert list(tmp_path.iterdir()) == []
    assert cache.num_bytes == 0


def test_what_a_killed_writer_left_is_swept_at_the_start(tmp_path: Path) -> None:
    (tmp_path / ".put-0123456789abcdef").write_bytes(b"half")
    assert BlobCache(tmp_path, max_bytes=1000).num_bytes == 0
    assert list(tmp_path.iterdir()) == []


def test_the_least_recently_read_goes_first(tmp_path: Path) -> None:
    cache = BlobCache(tmp_path, max_bytes=300)
    for number in range(3):
        cache.store(ref_of(body_of(number)), body_of(number))
    cache.read(ref_of(body_of(0)))
    cache.store(ref_of(body_of(3)), body_of(3))
    assert held(cache, range(4)) == [0, 2, 3]
    assert cache.num_bytes == 300


def test_a_smaller_bound_holds_from_the_start_on(tmp_path: Path) -> None:
    first = BlobCache(tmp_path, max_bytes=300)
    for number in range(3):
        first.store(ref_of(body_of(number)), body_of(number))
        os.utime(tmp_path / ref_of(body_of(number)).sha256, ns=(number, number))
    assert held(BlobCache(tmp_path, max_bytes=150), range(3)) == [2]


def test_pinned_files_stay_until_they_are_let_go(tmp_path: Path) -> None:
    cache = BlobCache(tmp_path, max_bytes=200)
    first = ref_of(body_of(0))
    with cache.pinned([first.sha256]), cache.pinned([first.sha256]):
        for number in range(4):
            cache.store(ref_of(body_of(number)), body_of(number))
        assert held(cache, range(4)) == [0, 3]
    cache.read(ref_of(body_of(3)))
    cache.store(ref_of(body_of(4)), body_of(4))
    assert held(cache, range(5)) == [3, 4]


def test_one_object_larger_than_the_cache_is_verified_and_not_kept(tmp_path: Path) -> None:
    cache = BlobCache(tmp_path, max_bytes=3)
    cache.store(ref_of(b"body"), b"body")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(CorruptError):
        cache.store(ref_of(b"body"), b"Body")


def test_f28_a_full_disk_drops_old_files_once_then_gives_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = BlobCache(tmp_path, max_bytes=1000)
    cache.store(ref_of(body_of(0)), body_of(0))
    attempts: list[bytes] = []

    def fill(_: Path, data: bytes) -> NoReturn:
        attempts.append(data)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", fill)
    with pytest.raises(UnavailableError, match="No space left"):
        cache.store(ref_of(body_of(1)), body_of(1))
    assert len(attempts) == 2
    assert list(tmp_path.iterdir()) == []
    assert cache.num_bytes == 0


def test_threads_that_store_at_once_keep_the_bound(tmp_path: Path) -> None:
    cache = BlobCache(tmp_path, max_bytes=500)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: cache.store(ref_of(body_of(number)), body_of(number)), range(40)))
    assert cache.num_bytes <= 500
    cache.store(ref_of(body_of(41)), body_of(41))
    assert BlobCache(tmp_path, max_bytes=500).read(ref_of(body_of(41))) == body_of(41)
