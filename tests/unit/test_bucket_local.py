"""A directory as a bucket: what crashes, other writers and the operating system do to it."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from slackwater.bucket.local import LocalBucket
from slackwater.errors import AuthError, CorruptError, NotFoundError, UnavailableError, UnsupportedError

KILLED_WRITER = """
import os, signal, sys
from pathlib import Path
from slackwater.bucket.local import LocalBucket

step, root = sys.argv[1], sys.argv[2]

def die(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGKILL)

if step == "fsync":
    os.fsync = die
elif step == "link":
    os.link = die
elif step == "replace":
    Path.replace = die
elif step == "unlink":
    Path.unlink = die
bucket = LocalBucket(root)
if step == "replace":
    bucket.put("m/1", b"new")
else:
    bucket.put_if_absent("m/1", b"new")
"""


@pytest.fixture
def bucket(tmp_path: Path) -> LocalBucket:
    return LocalBucket(tmp_path / "bucket", create=True)


def refuse(monkeypatch: pytest.MonkeyPatch, name: str, number: int) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, name, fail)


def hidden_files(root: Path) -> list[str]:
    return [path.name for path in root.rglob(".*")]


@pytest.mark.parametrize("step", ["fsync", "link", "replace", "unlink"])
def test_a_writer_killed_at_any_step_leaves_a_whole_object_or_none(tmp_path: Path, step: str) -> None:
    bucket = LocalBucket(tmp_path / "bucket", create=True)
    (tmp_path / "bucket" / "m").mkdir()
    if step == "replace":
        bucket.put("m/1", b"old")
    died = subprocess.run(
        [sys.executable, "-c", KILLED_WRITER, step, str(tmp_path / "bucket")], check=False, timeout=60
    )
    assert died.returncode == -9
    assert len(hidden_files(tmp_path / "bucket")) == 1
    left = [(info.key, bucket.get(info.key, max_bytes=10)) for info in bucket.list("")]
    assert left == {"fsync": [], "link": [], "replace": [("m/1", b"old")], "unlink": [("m/1", b"new")]}[step]


def test_a_writer_after_a_killed_one_commits(bucket: LocalBucket, tmp_path: Path) -> None:
    (tmp_path / "bucket" / "m").mkdir()
    (tmp_path / "bucket" / "m" / ".put-0123456789abcdef").write_bytes(b"half")
    assert bucket.put_if_absent("m/1", b"whole") is True
    assert [info.key for info in bucket.list("m")] == ["m/1"]


def test_writing_leaves_no_hidden_files(bucket: LocalBucket, tmp_path: Path) -> None:
    bucket.put("a/b", b"x")
    bucket.put_if_absent("a/b", b"y")
    bucket.put_if_absent("a/c", b"z")
    assert hidden_files(tmp_path) == []


def test_a_missing_directory_is_no_bucket_in_any_verb(tmp_path: Path) -> None:
    bucket = LocalBucket(tmp_path / "absent")
    with pytest.raises(NotFoundError, match="no such bucket"):
        bucket.get("k", max_bytes=1)
    with pytest.raises(NotFoundError, match="no such bucket"):
        bucket.get_range("k", 0, 1)
    with pytest.raises(NotFoundError, match="no such bucket"):
        bucket.put("k", b"x")
    with pytest.raises(NotFoundError, match="no such bucket"):
        bucket.put_if_absent("k", b"x")
    with pytest.raises(NotFoundError, match="no such bucket"):
        list(bucket.list(""))
    assert not (tmp_path / "absent").exists()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_unavailable_and_leaves_nothing(
    bucket: LocalBucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    refuse(monkeypatch, "fsync", number)
    with pytest.raises(UnavailableError, match="free space"):
        bucket.put("k", b"x")
    assert list((tmp_path / "bucket").iterdir()) == []


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS])
def test_a_directory_without_rights_is_an_auth_error(
    bucket: LocalBucket, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    refuse(monkeypatch, "fsync", number)
    with pytest.raises(AuthError, match="right to the bucket's directory"):
        bucket.put_if_absent("k", b"x")


@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOTSUP])
def test_a6_09_a_file_system_without_hard_links_is_named(
    bucket: LocalBucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    refuse(monkeypatch, "link", number)
    with pytest.raises(UnsupportedError, match="no hard links"):
        bucket.put_if_absent("k", b"x")
    assert list((tmp_path / "bucket").iterdir()) == []


def test_a_file_can_not_become_a_folder_nor_a_folder_a_file(bucket: LocalBucket) -> None:
    bucket.put("a/b", b"x")
    with pytest.raises(UnsupportedError, match="a file and a folder"):
        bucket.put("a/b/c", b"x")
    with pytest.raises(UnsupportedError, match="a file and a folder"):
        bucket.put("a", b"x")
    with pytest.raises(UnsupportedError, match="a file and a folder"):
        bucket.put_if_absent("a", b"x")
    with pytest.raises(NotFoundError, match="no such object"):
        bucket.get("a/b/c", max_bytes=1)


def test_a_huge_range_of_a_small_file_allocates_nothing(bucket: LocalBucket) -> None:
    bucket.put("k", b"x")
    with pytest.raises(CorruptError, match="too few"):
        bucket.get_range("k", 0, 2**60)


def test_two_buckets_on_one_directory_see_each_other(tmp_path: Path) -> None:
    first = LocalBucket(tmp_path, create=True)
    second = LocalBucket(str(tmp_path))
    assert first.put_if_absent("m/1", b"first")
    assert not second.put_if_absent("m/1", b"second")
    assert second.url == first.url == tmp_path.as_uri()
