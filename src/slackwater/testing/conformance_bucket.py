"""What every bucket must do, as a suite to inherit from.

::

    class TestMyBucket(BucketTests):
        @pytest.fixture
        def bucket(self) -> Bucket:
            return MyBucket(...)   # empty for each test

The suite needs pytest, and the bucket a right to list, get and put below its prefix.
"""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import pytest

from slackwater.bucket.base import Bucket
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
