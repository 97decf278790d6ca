"""URLs of buckets, theirs and hostile ones."""

import subprocess
import sys
from pathlib import Path

import pytest

from slackwater.bucket.open import open_bucket, probe
from slackwater.errors import AuthError, InvalidInputError, NotFoundError
from slackwater.testing.bucket import Fault, FaultyBucket, MemoryBucket


def test_a_path_and_a_file_url_open_one_directory(tmp_path: Path) -> None:
    folder = tmp_path / "with space"
    open_bucket(str(folder), create=True).put("k", b"x")
    bucket = open_bucket(folder.as_uri())
    assert bucket.get("k", max_bytes=1) == b"x"
    assert bucket.url == folder.as_uri()


def test_a_relative_path_is_made_absolute_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    bucket = open_bucket("runs", create=True)
    monkeypatch.chdir("/")
    bucket.put("k", b"x")
    assert (tmp_path / "runs" / "k").read_bytes() == b"x"


@pytest.mark.parametrize(
    "url",
    [
        "",
        "/",
        "file:///",
        "file://host/x",
        "file:///x%00y",
        "file:///x?y",
        "a\x00b",
        "http://169.254.169.254/",
        "https://bucket.s3.amazonaws.com/x",
        "memory:///",
        "s3://",
        "s3:///x",
        "s3://bucket/..",
        "s3://other/../x",
        "s3://bucket//x",
        "s3://bucket/.x",
        "s3://user:secret@bucket/x",
        "s3://bucket/x?sig=secret",
        "az://container/x#y",
        "s3://bucket:9000/x",
        "s3:/bucket/x",
        "gs:bucket",
        "s3://" + "b" * 2000,
    ],
)
def test_a8_04_a_hostile_url_opens_nothing(url: str) -> None:
    with pytest.raises(InvalidInputError) as refused:
        open_bucket(url, create=True)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize("url", ["s3://bucket", "s3://bucket/team/runs/", "gs://bucket_1/x"])
def test_a_cloud_url_opens_without_a_call(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    assert open_bucket(url).url == url.rstrip("/")


def test_azure_without_an_account_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME", raising=False)
    with pytest.raises(InvalidInputError, match=r"(?i)account"):
        open_bucket("az://container/x")


def test_a_directory_loads_no_cloud_client() -> None:
    code = "import sys, slackwater.bucket.open as o; o.open_bucket('/tmp'); sys.exit('obstore' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


def test_probe_tells_a_missing_bucket(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no such bucket"):
        probe(open_bucket(str(tmp_path / "absent")))
    probe(open_bucket(str(tmp_path)))


def test_probe_passes_on_a_refusal() -> None:
    with pytest.raises(AuthError):
        probe(FaultyBucket(MemoryBucket(), Fault(verb="list", before=AuthError("no key"))))
