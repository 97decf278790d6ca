"""What broken writers left: in a directory, and on an S3 server that answers by a script."""

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import cast

import botocore.loaders
import botocore.session
import pytest

from slackwater.bucket.base import Abort, Unfinished
from slackwater.bucket.local import LocalBucket
from slackwater.bucket.open import open_bucket
from slackwater.bucket.patience import Patience
from slackwater.errors import (
    AuthError,
    CorruptError,
    InvalidInputError,
    NotFoundError,
    SlackwaterError,
    UnavailableError,
    UnsupportedError,
)
from slackwater.testing.faulty_front import FaultyFront, Rule
from slackwater.testing.http_faults import Fault, Forward, Reply, Request, answer, hang_up, refuse

HASTY = Patience(deadline_s=5, attempts=4, idle_s=5, first_wait_s=0.001, longest_wait_s=0.002, renewal_s=0.001)
NOBODY = "http://127.0.0.1:1"
KILLED_WRITER = """
import os, signal, sys
from slackwater.bucket.local import LocalBucket

os.fsync = lambda handle: os.kill(os.getpid(), signal.SIGKILL)
LocalBucket(sys.argv[1]).put("demo/blobs/b", bytes(1000))
"""
LEFT = Unfinished(key="demo/blobs/b", upload="id-1")


@pytest.fixture
def local(tmp_path: Path) -> LocalBucket:
    return LocalBucket(tmp_path / "bucket", create=True)


@pytest.fixture(scope="module", autouse=True)
def _services_are_read_once() -> Iterator[None]:
    """Botocore reads its descriptions of services anew for every client: half a second of JSON."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(botocore.session, "create_loader", cache(botocore.loaders.create_loader))
        yield


@pytest.fixture
def front(monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyFront]:
    with FaultyFront(NOBODY) as front:
        settings = {"ENDPOINT_URL": front.url, "ALLOW_HTTP": "true", "ACCESS_KEY_ID": "x", "SECRET_ACCESS_KEY": "y"}
        for name, value in settings.items():
            monkeypatch.setenv(f"AWS_{name}", value)
        yield front


@pytest.fixture
def bucket(front: FaultyFront) -> Abort:
    assert front.count() == 0
    return opened()


def opened(url: str = "s3://bucket/runs") -> Abort:
    bucket = open_bucket(url, patience=HASTY)
    assert isinstance(bucket, Abort)
    return bucket


def page(
    *uploads: tuple[str, str], then: tuple[str, str] | None = None, started: str = "2026-01-02T03:04:05.000Z"
) -> Fault:
    """An answer to ListMultipartUploads; ``then``: where the next one goes on."""
    date = f"<Initiated>{started}</Initiated>" if started else ""
    items = "".join(f"<Upload><Key>{key}</Key><UploadId>{name}</UploadId>{date}</Upload>" for key, name in uploads)
    more = "" if then is None else "<NextKeyMarker>{}</NextKeyMarker><NextUploadIdMarker>{}</NextUploadIdMarker>"
    words = f"<IsTruncated>{str(then is not None).lower()}</IsTruncated>{more.format(*(then or ()))}{items}"
    text = f"<ListMultipartUploadsResult><Bucket>bucket</Bucket>{words}</ListMultipartUploadsResult>"
    return answer(text.encode(), content_type="application/xml")


def done(request: Request, forward: Forward) -> Reply:
    """The answer to an abort."""
    del request, forward
    return Reply(status=204)


# A directory


def test_f02_what_a_killed_writer_left_is_found_under_its_key_and_removed(local: LocalBucket, tmp_path: Path) -> None:
    (tmp_path / "bucket" / "demo" / "blobs").mkdir(parents=True)
    died = subprocess.run([sys.executable, "-c", KILLED_WRITER, str(tmp_path / "bucket")], check=False, timeout=60)
    assert died.returncode == -9
    (left,) = local.unfinished("demo")
    assert left.key == "demo/blobs/b"
    (file,) = (path for path in (tmp_path / "bucket").rglob("*") if path.is_file())
    assert left.started_s == file.stat().st_mtime
    local.abort(left)
    assert not file.exists()
    assert list(local.unfinished("")) == []


def test_a_live_write_counts_from_its_last_byte(local: LocalBucket, tmp_path: Path) -> None:
    half = tmp_path / "bucket" / "m" / f".put-{'0' * 16}-1"
    half.parent.mkdir()
    half.write_bytes(b"old")
    os.utime(half, (1000.0, 1000.0))
    assert [upload.started_s for upload in local.unfinished("m")] == [1000.0]
    with half.open("ab") as file:
        file.write(b"and on")
    (upload,) = local.unfinished("m")
    assert upload.started_s is not None
    assert upload.started_s > 1000.0


@pytest.mark.parametrize(
    "name",
    [".put-0123456789abcdef", ".put-0123456789ABCDEF-k", ".put-0-k", ".hidden", "put-0123456789abcdef-k", ".k.swp"],
)
def test_other_hidden_files_are_not_ours(local: LocalBucket, tmp_path: Path, name: str) -> None:
    (tmp_path / "bucket" / name).write_bytes(b"x")
    assert list(local.unfinished("")) == []


@pytest.mark.parametrize("upload", ["", "../../../etc/passwd", "0123456789abcde", "0123456789ABCDEF", "a/b"])
def test_a_made_up_name_of_a_write_is_refused(local: LocalBucket, upload: str) -> None:
    with pytest.raises(InvalidInputError, match="is no unfinished write"):
        local.abort(Unfinished(key="m/1", upload=upload))


def test_the_longest_name_of_a_key_has_room_for_its_half(local: LocalBucket) -> None:
    local.put("m/" + "k" * 200, b"x")
    assert local.get("m/" + "k" * 200, max_bytes=1) == b"x"


def test_a_directory_that_is_gone_or_can_not_be_read_is_told(
    local: LocalBucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(NotFoundError, match="no such bucket"):
        list(LocalBucket(tmp_path / "absent").unfinished(""))

    def fail(*_: object) -> None:
        raise OSError(errno.EACCES, "no")

    monkeypatch.setattr(os, "scandir", fail)
    with pytest.raises(AuthError):
        list(local.unfinished(""))


# S3


def test_pages_are_followed_to_their_end(front: FaultyFront, bucket: Abort) -> None:
    front.add(
        Rule(page(("runs/demo/blobs/a", "1"), then=("runs/demo/blobs/a", "1"))),
        Rule(page(("runs/demo/blobs/a", "2"), then=("runs/demo/blobs/b", ""))),
        Rule(page(("runs/demo/blobs/c", "3"))),
    )
    found = list(bucket.unfinished("demo"))
    assert [(upload.key, upload.upload) for upload in found] == [
        ("demo/blobs/a", "1"), ("demo/blobs/a", "2"), ("demo/blobs/c", "3"),
    ]  # fmt: skip
    assert found[0].started_s == datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC).timestamp()
    first, second, third = (each.request.path for each in front.seen)
    assert ("prefix=runs/demo/" in first, "marker" in first) == (True, False)
    assert ("key-marker=runs/demo/blobs/a" in second, "upload-id-marker=1" in second) == (True, True)
    assert ("key-marker=runs/demo/blobs/b" in third, "upload-id-marker" in third) == (True, False)


@pytest.mark.parametrize("then", [("runs/k", "1"), ("", "")])
def test_pages_that_lead_in_a_circle_are_refused(front: FaultyFront, bucket: Abort, then: tuple[str, str]) -> None:
    front.add(Rule(page(("runs/k", "1"), then=then), times=None))
    with pytest.raises(CorruptError, match="in a circle"):
        list(bucket.unfinished(""))
    assert front.count() <= 2


def test_what_lies_outside_the_prefix_is_passed_over(front: FaultyFront, bucket: Abort) -> None:
    front.add(
        Rule(page(("runs/demo2/k", "1"), ("demo/k", "2"), ("other/demo/k", "3"), ("runs/demo/k", "4")), times=None)
    )
    assert [upload.upload for upload in bucket.unfinished("demo")] == ["4"]
    assert [upload.upload for upload in bucket.unfinished("")] == ["1", "4"]
    assert [upload.key for upload in opened("s3://bucket").unfinished("demo")] == ["demo/k"]


@pytest.mark.parametrize("started", ["", "0001-01-01T00:00:00Z", "1970-01-01T00:00:00.000Z"])
def test_a_date_that_says_nothing_is_none(front: FaultyFront, bucket: Abort, started: str) -> None:
    """Not an age at which all is aborted."""
    front.add(Rule(page(("runs/k", "1"), started=started)))
    assert [upload.started_s for upload in bucket.unfinished("")] == [None]


@pytest.mark.parametrize(
    "fault",
    [
        page(("runs/k", "1"), started="yesterday"),
        page(("runs/k", "1"), started="9" * 20),
        answer(b"<R><IsTruncated>false</IsTruncated><Upload><Key>runs/k</Key></Upload></R>"),
        answer(b"<R><IsTruncated>false</IsTruncated><Upload><UploadId>1</UploadId></Upload></R>"),
    ],
)
def test_a_page_that_can_not_be_right_is_refused(front: FaultyFront, bucket: Abort, fault: Fault) -> None:
    front.add(Rule(fault, times=None))
    with pytest.raises(UnavailableError, match="something else answered"):
        list(bucket.unfinished(""))


def test_an_abort_names_the_upload(front: FaultyFront, bucket: Abort) -> None:
    front.add(Rule(done, "DELETE"))
    bucket.abort(LEFT)
    (seen,) = front.seen
    assert (seen.request.path, seen.status) == ("/bucket/runs/demo/blobs/b?uploadId=id-1", 204)


def test_an_abort_of_what_has_ended_is_none(front: FaultyFront, bucket: Abort) -> None:
    front.add(Rule(refuse(404, "NoSuchUpload"), "DELETE"))
    bucket.abort(LEFT)
    assert front.count() == 1


@pytest.mark.parametrize("fault", [refuse(503, "SlowDown"), refuse(429), refuse(500, "InternalError"), hang_up()])
def test_what_may_pass_is_tried_again(front: FaultyFront, bucket: Abort, fault: Fault) -> None:
    front.add(Rule(fault, "GET", times=2), Rule(fault, "DELETE", times=2), Rule(done, "DELETE"))
    front.add(Rule(page(("runs/k", "1"))))
    (upload,) = bucket.unfinished("")
    bucket.abort(upload)
    assert (front.count("GET"), front.count("DELETE")) == (3, 3)


@pytest.mark.parametrize(
    ("fault", "error", "says"),
    [
        (refuse(403, "AccessDenied"), AuthError, "AccessDenied"),
        (refuse(403, "RequestTimeTooSkewed"), AuthError, "clock"),
        (refuse(404, "NoSuchBucket"), NotFoundError, "no such bucket"),
        (refuse(501, "NotImplemented"), UnsupportedError, "can't do this"),
        (refuse(503, "SlowDown"), UnavailableError, "SlowDown"),
        (hang_up(), UnavailableError, "did not answer"),
        (answer(b"<html>sign in</html>"), UnavailableError, "something else answered"),
        (answer(b"sign in <"), UnavailableError, "did not answer"),
        (answer(b"sign in <", status=403), AuthError, "refused the credentials"),
        (answer(b"sign in <", status=502), UnavailableError, "did not answer"),
        (answer(b""), UnavailableError, "something else answered"),
    ],
)
def test_errors_are_those_of_the_other_verbs(
    front: FaultyFront, bucket: Abort, fault: Fault, error: type[SlackwaterError], says: str
) -> None:
    front.add(Rule(fault, times=None))
    with pytest.raises(error, match=says):
        list(bucket.unfinished("demo"))
    assert front.count() <= HASTY.attempts


def test_no_secret_and_no_signature_is_told(front: FaultyFront, bucket: Abort, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "topsecret")
    front.add(Rule(refuse(403, "AccessDenied"), times=None))
    with pytest.raises(AuthError) as refused:
        list(bucket.unfinished("demo"))
    assert refused.value.__cause__ is None
    assert not {word for word in ("topsecret", "Signature", "X-Amz") if word in str(refused.value)}


def test_the_files_of_other_tools_are_not_read(
    front: FaultyFront, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in all other calls: a profile that names another key or endpoint changes nothing."""
    (tmp_path / "config").write_text("[default]\nregion = nowhere\nendpoint_url = http://127.0.0.1:1\n")
    (tmp_path / "credentials").write_text("[default]\naws_access_key_id = theirs\naws_secret_access_key = s\n")
    for name in ("config", "credentials"):
        monkeypatch.setenv({"config": "AWS_CONFIG_FILE"}.get(name, "AWS_SHARED_CREDENTIALS_FILE"), str(tmp_path / name))
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    monkeypatch.setenv("AWS_REGION", "eu-west-1")
    front.add(Rule(page()))
    assert list(opened().unfinished("")) == []
    signed = front.seen[0].request.header("authorization")
    assert signed is not None
    assert ("Credential=x/" in signed, "/eu-west-1/s3/" in signed) == (True, True)


def test_a_bucket_may_be_a_part_of_the_hosts_name(front: FaultyFront, monkeypatch: pytest.MonkeyPatch) -> None:
    """The front stands in as a proxy, for a host that isn't there."""
    monkeypatch.setenv("http_proxy", front.url)
    monkeypatch.setenv("AWS_VIRTUAL_HOSTED_STYLE_REQUEST", "true")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://bucket.store.example")
    front.add(Rule(page(("runs/k", "1"))))
    assert [upload.key for upload in opened().unfinished("")] == ["k"]
    assert front.seen[0].request.path.partition("?")[0] == "http://bucket.store.example/"


def test_settings_that_can_not_be_right_are_told(front: FaultyFront, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket = opened()
    monkeypatch.setenv("AWS_ENDPOINT_URL", "no url")
    with pytest.raises(InvalidInputError, match="settings in the environment"):
        bucket.unfinished("")
    monkeypatch.setenv("AWS_ENDPOINT_URL", front.url)
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(AuthError, match="no credentials"):
        bucket.unfinished("")


def test_without_any_credentials_that_is_told(front: FaultyFront, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(AuthError, match="no credentials"):
        list(opened().unfinished(""))
    assert front.count() == 0


def test_without_botocore_the_extra_and_the_rule_are_named(
    front: FaultyFront, bucket: Abort, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(cast("dict[str, object]", sys.modules), "botocore", None)
    for call in (lambda: bucket.unfinished(""), lambda: bucket.abort(LEFT)):
        with pytest.raises(UnsupportedError, match="without botocore") as refused:
            call()
        assert "pip install 'slackwater[gc]'" in refused.value.hint
        assert "AbortIncompleteMultipartUpload" in refused.value.hint
    assert front.count() == 0


@pytest.mark.parametrize(
    ("url", "settings", "hint"),
    [
        ("gs://bucket/runs", {"GOOGLE_BEARER_TOKEN": "t"}, "AbortIncompleteMultipartUpload"),
        ("az://container/runs", {"AZURE_STORAGE_ACCOUNT_NAME": "a", "AZURE_STORAGE_ACCOUNT_KEY": "aGk="}, "a week"),
    ],
)
def test_other_stores_say_what_removes_them(
    monkeypatch: pytest.MonkeyPatch, url: str, settings: dict[str, str], hint: str
) -> None:
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UnsupportedError, match=rf"unfinished uploads to {url}") as refused:
        opened(url).unfinished("demo")
    assert hint in refused.value.hint
