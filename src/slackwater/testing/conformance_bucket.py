"""What every bucket must do, as a suite to inherit from.

::

    class TestMyBucket(BucketTests):
        @pytest.fixture
        def bucket(self) -> Bucket:
            return MyBucket(...)   # empty for each test

The suite needs pytest, and the bucket a right to list, get and put below its prefix. Buckets that can also delete,
swap, or upload in parts inherit from `DeleteTests`, `SwapTests` and `UploadTests` as well; those that find and abort
what broken writers left, from `AbortTests`, and give a ``begin`` fixture: a `Begin`.
"""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, Protocol, TypeAlias

import pytest

from slackwater.bucket.base import Abort, Bucket, Delete, Swap, Unfinished, Upload
from slackwater.errors import CorruptError, InvalidInputError, NotFoundError

_LARGE: Final = 9 * 1024 * 1024
_RACERS: Final = 16

HOSTILE_KEYS: Final = (
    "",
    "/etc/passwd",
    "..",
    "../x",
    "a/../../x",
    "a//b",
    "a/",
    "./a",
    ".hidden",
    "a/.hidden",
    "a\x00b",
    "a\nb",
    "a b",
    "a\\b",
    "a?b=c",
    "a%2e%2e",
    "C:x",
    "\uff0e\uff0e/x",
    "\u0661",
    "k" * 513,
    "s3://other/key",
    "http://169.254.169.254/",
)
"""Names that no bucket lets near a path or a URL."""


Begin: TypeAlias = Callable[[str], None]
"""Leaves a write of a key behind as a writer does that is killed in its middle."""


class AbortingBucket(Bucket, Abort, Protocol):
    """What `AbortTests` test."""


class DeletingBucket(Bucket, Delete, Protocol):
    """What `DeleteTests` test."""


class SwappingBucket(Bucket, Delete, Swap, Protocol):
    """What `SwapTests` test."""


class UploadingBucket(Bucket, Upload, Protocol):
    """What `UploadTests` test."""


class BucketTests:
    """Inherit and give a ``bucket`` fixture."""

    def test_reads_back_what_was_put(self, bucket: Bucket) -> None:
        """Bytes are kept as they are."""
        body = bytes(range(256))
        bucket.put("a/b/c.bin", body)
        assert bucket.get("a/b/c.bin", max_bytes=256) == body

    def test_takes_a_memoryview(self, bucket: Bucket) -> None:
        """A view into a larger buffer is put without its surroundings."""
        bucket.put("view", memoryview(b"xxhelloxx")[2:7])
        assert bucket.get("view", max_bytes=5) == b"hello"

    def test_put_replaces(self, bucket: Bucket) -> None:
        """The last put wins, whole."""
        bucket.put("k", b"long before")
        bucket.put("k", b"after")
        assert bucket.get("k", max_bytes=100) == b"after"

    def test_keeps_an_empty_object(self, bucket: Bucket) -> None:
        """Zero bytes are an object."""
        bucket.put("empty", b"")
        assert bucket.get("empty", max_bytes=0) == b""
        assert bucket.put_if_absent("empty", b"x") is False

    def test_keeps_a_large_object(self, bucket: Bucket) -> None:
        """Larger than one part of a multipart upload."""
        body = bytes(range(251)) * (_LARGE // 251)
        bucket.put("large", memoryview(body))
        assert bucket.get("large", max_bytes=len(body)) == body
        assert bucket.get_range("large", 8_000_000, 1000) == body[8_000_000:8_001_000]

    def test_a_reader_never_sees_a_part(self, bucket: Bucket) -> None:
        """While one thread replaces an object, another sees only whole bodies."""
        bodies = {bytes([fill]) * 50_000 for fill in range(8)}
        bucket.put("k", bytes(50_000))
        done = threading.Event()

        def write() -> None:
            for body in sorted(bodies):
                bucket.put("k", body)
            done.set()

        with ThreadPoolExecutor(1) as pool:
            writer = pool.submit(write)
            while not done.is_set() and not writer.done():
                assert bucket.get("k", max_bytes=50_000) in bodies
            writer.result()

    def test_creates_once(self, bucket: Bucket) -> None:
        """The second creation is told apart and changes nothing."""
        assert bucket.put_if_absent("m/1", b"first") is True
        assert bucket.put_if_absent("m/1", b"second") is False
        assert bucket.get("m/1", max_bytes=100) == b"first"

    def test_one_of_many_racing_creations_wins(self, bucket: Bucket) -> None:
        """P3: the winner is told so, and its bytes are the object."""
        start = threading.Barrier(_RACERS)

        def race(racer: int) -> bool:
            start.wait()
            return bucket.put_if_absent("m/7", b"racer %d" % racer)

        with ThreadPoolExecutor(_RACERS) as pool:
            won = list(pool.map(race, range(_RACERS)))
        assert won.count(True) == 1
        assert bucket.get("m/7", max_bytes=100) == b"racer %d" % won.index(True)

    def test_ranges_are_exact(self, bucket: Bucket) -> None:
        """First byte, middle, last byte, all."""
        bucket.put("k", b"0123456789")
        assert bucket.get_range("k", 0, 1) == b"0"
        assert bucket.get_range("k", 3, 4) == b"3456"
        assert bucket.get_range("k", 9, 1) == b"9"
        assert bucket.get_range("k", 0, 10) == b"0123456789"

    @pytest.mark.parametrize(("start", "length"), [(9, 2), (10, 1), (100, 5), (0, 11)])
    def test_a_range_past_the_end_is_corrupt(self, bucket: Bucket, start: int, length: int) -> None:
        """Never answered with fewer bytes."""
        bucket.put("k", b"0123456789")
        with pytest.raises(CorruptError):
            bucket.get_range("k", start, length)

    def test_a_range_of_nothing_needs_no_object(self, bucket: Bucket) -> None:
        """Answered without a call."""
        assert bucket.get_range("absent", 5, 0) == b""

    @pytest.mark.parametrize(("start", "length"), [(-1, 2), (0, -1)])
    def test_a_range_backwards_is_refused(self, bucket: Bucket, start: int, length: int) -> None:
        """A caller's mistake, not a suffix."""
        bucket.put("k", b"0123456789")
        with pytest.raises(InvalidInputError):
            bucket.get_range("k", start, length)

    def test_an_object_over_the_cap_is_corrupt(self, bucket: Bucket) -> None:
        """The reader's memory is bounded by the reader."""
        bucket.put("k", bytes(1001))
        with pytest.raises(CorruptError, match="1001"):
            bucket.get("k", max_bytes=1000)

    def test_a_missing_object_is_not_found(self, bucket: Bucket) -> None:
        """Also where its folder or a longer name exists."""
        bucket.put("a/b", b"x")
        for key in ("absent", "a", "a/b2", "a/absent"):
            with pytest.raises(NotFoundError):
                bucket.get(key, max_bytes=10)
            with pytest.raises(NotFoundError):
                bucket.get_range(key, 0, 1)

    def test_lists_by_whole_segments(self, bucket: Bucket) -> None:
        """``a`` is not a prefix of ``ab``."""
        for key in ("a/1", "a/b/2", "ab/3", "c"):
            bucket.put(key, key.encode())
        assert {(info.key, info.size) for info in bucket.list("a")} == {("a/1", 3), ("a/b/2", 5)}
        assert {info.key for info in bucket.list("a/")} == {"a/1", "a/b/2"}
        assert {info.key for info in bucket.list("")} == {"a/1", "a/b/2", "ab/3", "c"}

    def test_lists_nothing_below_an_unknown_prefix(self, bucket: Bucket) -> None:
        """No error: the bucket is there."""
        assert list(bucket.list("absent")) == []

    @pytest.mark.parametrize("key", HOSTILE_KEYS)
    def test_refuses_a_hostile_key(self, bucket: Bucket, key: str) -> None:
        """A8-04, in every verb."""
        with pytest.raises(InvalidInputError):
            bucket.get(key, max_bytes=10)
        with pytest.raises(InvalidInputError):
            bucket.get_range(key, 0, 1)
        with pytest.raises(InvalidInputError):
            bucket.put(key, b"x")
        with pytest.raises(InvalidInputError):
            bucket.put_if_absent(key, b"x")

    def test_refuses_a_hostile_prefix(self, bucket: Bucket) -> None:
        """Before anything is walked."""
        with pytest.raises(InvalidInputError):
            bucket.list("../")


class DeleteTests:
    """Inherit beside `BucketTests` where the bucket can delete."""

    def test_deletes_one_object_and_no_other(self, bucket: DeletingBucket) -> None:
        """A longer name stays."""
        for key in ("a/b", "a/bc", "a/b2/c"):
            bucket.put(key, b"x")
        bucket.delete("a/b")
        assert {info.key for info in bucket.list("")} == {"a/bc", "a/b2/c"}
        with pytest.raises(NotFoundError):
            bucket.get("a/b", max_bytes=1)

    def test_deletes_what_is_absent_without_a_word(self, bucket: DeletingBucket) -> None:
        """Twice is as good as once: two collections may meet."""
        bucket.put("a/b", b"x")
        for key in ("a/b", "a/b", "absent/x", "a/b/c"):
            bucket.delete(key)

    def test_a_deleted_name_can_be_created_again(self, bucket: DeletingBucket) -> None:
        """The store keeps no memory of it; that names aren't used again is the publisher's promise."""
        bucket.put("k", b"before")
        bucket.delete("k")
        assert bucket.put_if_absent("k", b"after") is True

    def test_refuses_to_delete_a_hostile_key(self, bucket: DeletingBucket) -> None:
        """A8-04."""
        for key in HOSTILE_KEYS:
            with pytest.raises(InvalidInputError):
                bucket.delete(key)

    def test_lists_when_objects_were_written(self, bucket: DeletingBucket) -> None:
        """Garbage collection goes by the store's clock, to a second."""
        bucket.put("a", b"x")
        bucket.put("b", b"x")
        first, second = (info.modified_s for info in sorted(bucket.list(""), key=lambda info: info.key))
        assert first is not None
        assert second is not None
        assert first <= second + 1


class AbortTests:
    """Inherit beside `BucketTests` where the bucket finds and aborts unfinished writes; give ``begin`` too."""

    def test_lists_unfinished_writes_by_whole_segments(self, bucket: AbortingBucket, begin: Begin) -> None:
        """``a`` is not a prefix of ``ab``; an upload of a key that is there, or twice of one, counts for itself."""
        bucket.put("a/1", b"there")
        for key in ("a/1", "a/b/2", "a/b/2", "ab/3", "c"):
            begin(key)
        assert sorted(upload.key for upload in bucket.unfinished("a")) == ["a/1", "a/b/2", "a/b/2"]
        assert sorted(upload.key for upload in bucket.unfinished("a/")) == ["a/1", "a/b/2", "a/b/2"]
        assert sorted(upload.key for upload in bucket.unfinished("")) == ["a/1", "a/b/2", "a/b/2", "ab/3", "c"]
        assert len({(upload.key, upload.upload) for upload in bucket.unfinished("")}) == 5

    def test_an_unfinished_write_shows_nothing(self, bucket: AbortingBucket, begin: Begin) -> None:
        """Neither a new object nor a change of an old one; and aborted it takes nothing with it."""
        bucket.put("m/old", b"kept")
        begin("m/old")
        begin("m/new")
        for upload in list(bucket.unfinished("m")):
            assert {info.key for info in bucket.list("")} == {"m/old"}
            bucket.abort(upload)
        assert list(bucket.unfinished("m")) == []
        assert bucket.get("m/old", max_bytes=10) == b"kept"
        with pytest.raises(NotFoundError):
            bucket.get("m/new", max_bytes=10)

    def test_aborts_one_and_no_other(self, bucket: AbortingBucket, begin: Begin) -> None:
        """Two writes of one key are two."""
        for key in ("m/1", "m/1", "m/2"):
            begin(key)
        first, *others = sorted(bucket.unfinished(""), key=lambda upload: upload.key)
        bucket.abort(first)
        assert set(bucket.unfinished("")) == set(others)

    def test_aborts_what_is_gone_without_a_word(self, bucket: AbortingBucket, begin: Begin) -> None:
        """Twice is as good as once: two collections may meet, and a write may have ended."""
        begin("m/1")
        (upload,) = bucket.unfinished("m")
        bucket.abort(upload)
        bucket.put("m/1", b"whole")
        bucket.abort(upload)
        assert bucket.get("m/1", max_bytes=10) == b"whole"

    def test_whole_writes_leave_nothing_unfinished(self, bucket: AbortingBucket) -> None:
        """In parts or not, new or refused."""
        bucket.put("k", bytes(_LARGE))
        bucket.put_if_absent("m/1", b"first")
        bucket.put_if_absent("m/1", b"second")
        assert list(bucket.unfinished("")) == []

    def test_tells_when_writes_began_by_the_clock_of_listings(self, bucket: AbortingBucket, begin: Begin) -> None:
        """Garbage collection goes by the store's clock, to a second; who doesn't know it says so."""
        begin("m/1")
        bucket.put("m/2", b"x")
        (upload,), (info,) = bucket.unfinished("m"), bucket.list("m")
        if upload.started_s is not None:
            assert info.modified_s is not None
            assert upload.started_s <= info.modified_s + 1

    def test_finds_nothing_below_an_unknown_prefix(self, bucket: AbortingBucket) -> None:
        """No error: the bucket is there."""
        assert list(bucket.unfinished("absent")) == []

    def test_refuses_to_abort_a_hostile_key(self, bucket: AbortingBucket) -> None:
        """A8-04, before anything is walked or sent."""
        with pytest.raises(InvalidInputError):
            bucket.unfinished("../")
        for key in HOSTILE_KEYS:
            with pytest.raises(InvalidInputError):
                bucket.abort(Unfinished(key=key, upload="0123456789abcdef"))


class SwapTests:
    """Inherit beside `BucketTests` where the bucket has compare-and-swap."""

    def test_swaps_what_it_has_seen(self, bucket: SwappingBucket) -> None:
        """The tag of the object as it is."""
        bucket.put("k", b"one")
        assert bucket.swap("k", b"two", bucket.tag("k")) is True
        assert bucket.get("k", max_bytes=10) == b"two"

    def test_does_not_swap_what_has_changed_since(self, bucket: SwappingBucket) -> None:
        """Also back to the same bytes' sibling: another write is another tag."""
        bucket.put("k", b"one")
        before = bucket.tag("k")
        bucket.put("k", b"two")
        assert bucket.tag("k") != before
        assert bucket.swap("k", b"three", before) is False
        assert bucket.get("k", max_bytes=10) == b"two"

    def test_does_not_swap_what_is_gone(self, bucket: SwappingBucket) -> None:
        """It isn't made anew."""
        bucket.put("k", b"one")
        before = bucket.tag("k")
        bucket.delete("k")
        assert bucket.swap("k", b"two", before) is False
        assert list(bucket.list("")) == []

    def test_one_of_many_racing_swaps_wins(self, bucket: SwappingBucket) -> None:
        """From one state there is one successor."""
        bucket.put("k", b"start")
        before = bucket.tag("k")
        with ThreadPoolExecutor(_RACERS) as pool:
            won = list(pool.map(lambda racer: bucket.swap("k", b"racer %d" % racer, before), range(_RACERS)))
        assert won.count(True) == 1
        assert bucket.get("k", max_bytes=100) == b"racer %d" % won.index(True)

    def test_what_is_absent_has_no_tag(self, bucket: SwappingBucket) -> None:
        """A creation isn't a swap."""
        with pytest.raises(NotFoundError):
            bucket.tag("absent")


class UploadTests:
    """Inherit beside `BucketTests` where the bucket uploads in parts."""

    def test_an_abandoned_upload_shows_nothing(self, bucket: UploadingBucket) -> None:
        """Neither a new object nor a change of an old one."""
        bucket.put("old", b"kept")
        bucket.abandon("old")
        bucket.abandon("new")
        assert {info.key for info in bucket.list("")} == {"old"}
        assert bucket.get("old", max_bytes=10) == b"kept"

    def test_parts_join_at_their_edges(self, bucket: UploadingBucket) -> None:
        """One byte less than a part, a part, one more."""
        for size in (bucket.part_bytes - 1, bucket.part_bytes, bucket.part_bytes + 1):
            body = (bytes(range(251)) * (size // 251 + 1))[:size]
            bucket.put("k", body)
            assert bucket.get("k", max_bytes=size) == body
