"""A directory as a bucket: what crashes, other writers and the operating system do to it."""

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import IO

import pytest

from slackwater.bucket.local import LocalBucket
from slackwater.errors import (
    AuthError,
    CorruptError,
    InvalidInputError,
    NotFoundError,
    UnavailableError,
    UnsupportedError,
)

KILLED_WRITER = """
import os, signal, sys
from pathlib import Path
from slackwater.bucket.local import LocalBucket

step, root = sys.argv[1], sys.argv[2]

def die(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGKILL)

if step == "fsync":
    os.fsync = die
elif step == "flush":
    flushed, fsync = [], os.fsync
    os.fsync = lambda handle: die() if flushed else flushed.append(fsync(handle))
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


RACER = """
import sys
from slackwater.bucket.local import LocalBucket

bucket, name = LocalBucket(sys.argv[1]), sys.argv[2].encode()
for key in sys.stdin:
    print(bucket.put_if_absent(key.strip(), name), flush=True)
"""
ROUNDS = 200


@pytest.fixture
def bucket(tmp_path: Path) -> LocalBucket:
    return LocalBucket(tmp_path / "bucket", create=True)


def refuse(monkeypatch: pytest.MonkeyPatch, name: str, number: int) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, name, fail)


def pipes(process: subprocess.Popen[str]) -> tuple[IO[str], IO[str]]:
    """What it reads and what it writes."""
    assert process.stdin is not None
    assert process.stdout is not None
    return process.stdin, process.stdout


def hidden_files(root: Path) -> list[str]:
    return [path.name for path in root.rglob(".*")]


@pytest.mark.parametrize("step", ["fsync", "link", "replace", "unlink", "flush"])
def test_a_writer_killed_at_any_step_leaves_a_whole_object_or_none(tmp_path: Path, step: str) -> None:
    bucket = LocalBucket(tmp_path / "bucket", create=True)
    (tmp_path / "bucket" / "m").mkdir()
    if step == "replace":
        bucket.put("m/1", b"old")
    died = subprocess.run(
        [sys.executable, "-c", KILLED_WRITER, step, str(tmp_path / "bucket")], check=False, timeout=60
    )
    assert died.returncode == -9
    assert len(hidden_files(tmp_path / "bucket")) == (step != "flush")
    left = [(info.key, bucket.get(info.key, max_bytes=10)) for info in bucket.list("")]
    made = [("m/1", b"new")]
    assert left == {"fsync": [], "link": [], "replace": [("m/1", b"old")], "unlink": made, "flush": made}[step]


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
def test_f29_a_full_disk_is_unavailable_and_leaves_nothing(
    bucket: LocalBucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    refuse(monkeypatch, "fsync", number)
    with pytest.raises(UnavailableError, match="free space"):
        bucket.put("k", b"x")
    assert list((tmp_path / "bucket").iterdir()) == []


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS])
def test_f29_a_directory_without_rights_is_an_auth_error(
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


@pytest.mark.parametrize("create", [False, True])
@pytest.mark.parametrize("below", ["", "sub", "sub/deep"])
def test_a_file_in_the_path_of_a_bucket_is_told_by_its_own_name(tmp_path: Path, below: str, *, create: bool) -> None:
    (tmp_path / "afile").write_bytes(b"x")
    with pytest.raises(InvalidInputError) as raised:
        LocalBucket(tmp_path / "afile" / below, create=create)
    assert raised.value.message.startswith(f"{tmp_path / 'afile'} is a file, no bucket")
    assert (str(tmp_path / "afile" / below) in raised.value.message, "key" in str(raised.value)) == (True, False)
    assert raised.value.hint == "name a directory"


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


def test_f07_of_two_processes_that_create_at_once_one_wins_each_time(bucket: LocalBucket, tmp_path: Path) -> None:
    commands = {name: [sys.executable, "-c", RACER, str(tmp_path / "bucket"), name] for name in ("first", "second")}
    racers = {
        name: subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
        for name, command in commands.items()
    }
    for key in (f"m/{number}" for number in range(ROUNDS)):
        for racer in racers.values():
            pipes(racer)[0].write(f"{key}\n")
        winners = [name for name, racer in racers.items() if pipes(racer)[1].readline() == "True\n"]
        assert winners == [bucket.get(key, max_bytes=10).decode()]
    for racer in racers.values():
        racer.communicate(timeout=30)
    assert hidden_files(tmp_path) == []


def test_a_new_name_is_flushed_with_every_folder_that_leads_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[Path] = []
    fsync = os.fsync

    def record(handle: int) -> None:
        flushed.append(Path(f"/proc/self/fd/{handle}").readlink())
        fsync(handle)

    monkeypatch.setattr(os, "fsync", record)
    LocalBucket(tmp_path / "new" / "bucket", create=True).put("run/m/1", b"x")
    root = tmp_path / "new" / "bucket"
    body, *folders = [path for path in flushed if path.name.startswith(".put-") or path == root / "run" / "m"]
    assert body.parent == root / "run" / "m"
    assert folders == [root / "run" / "m"]
    assert {tmp_path, tmp_path / "new", root, root / "run"} <= set(flushed)


def test_a_refused_creation_is_flushed_too_before_it_is_told(
    bucket: LocalBucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket.put_if_absent("m/1", b"theirs")
    flushed: list[Path] = []
    monkeypatch.setattr(os, "fsync", lambda handle: flushed.append(Path(f"/proc/self/fd/{handle}").readlink()))
    assert bucket.put_if_absent("m/1", b"ours") is False
    assert flushed[-1] == tmp_path / "bucket" / "m"


def test_a_file_is_no_bucket(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    with pytest.raises(InvalidInputError, match="is a file, no bucket"):
        LocalBucket(tmp_path / "file", create=True)


def test_a_listing_passes_over_what_is_deleted_meanwhile(bucket: LocalBucket) -> None:
    for key in ("m/1", "m/2"):
        bucket.put(key, b"x")
    listing = bucket.list("m")
    other = {"m/1", "m/2"} - {next(listing).key}
    bucket.delete(other.pop())
    assert list(listing) == []


def test_a_folder_that_can_not_be_read_does_not_look_empty(
    bucket: LocalBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket.put("m/1", b"x")
    refuse(monkeypatch, "scandir", errno.EACCES)
    with pytest.raises(AuthError, match="right to the bucket's directory"):
        list(bucket.list(""))


def test_deleting_from_a_missing_directory_is_told(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no such bucket"):
        LocalBucket(tmp_path / "absent").delete("k")


def test_a_file_whose_name_is_no_text_is_no_object(tmp_path: Path) -> None:
    bucket = LocalBucket(tmp_path)
    bucket.put("r/x", b"1")
    (Path(os.fsdecode(os.fsencode(tmp_path) + b"/r/\xff\xfe"))).write_bytes(b"2")
    assert [item.key for item in bucket.list("r")] == ["r/x"]
