"""Uploads that never end, on an S3 server on a real socket: what is left of them, and what ``gc`` does about it."""

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from s3_rig import HASTY, MIB, acting, body_of, fronting, url_of

from slackwater.bucket.base import Abort, Bucket
from slackwater.bucket.open import open_bucket
from slackwater.checkpoint.digest import object_digest
from slackwater.checkpoint.keys import blob_key
from slackwater.cli.attended import Attended
from slackwater.cli.gc import LEAST_AGE_S, collect_garbage
from slackwater.cli.publish import publish_folder
from slackwater.cli.scratch import Scratch
from slackwater.errors import NotFoundError, UnavailableError
from slackwater.ids import RunId
from slackwater.publish.retention import Policy
from slackwater.testing.bucket import Gate
from slackwater.testing.faulty_front import FaultyFront, Rule
from slackwater.testing.http_faults import Fault, Forward, Reply, Request, hold, refuse
from slackwater.testing.tiny_model import write_tiny_model


@pytest.fixture
def front(s3_client: Any, s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyFront]:
    assert s3_client is not None
    with fronting(s3_endpoint, monkeypatch) as front:
        yield front


@pytest.fixture
def gate(front: FaultyFront) -> Iterator[Gate]:
    """Opened before the front ends."""
    assert front.count() == 0
    gate = Gate()
    yield gate
    gate.open()


@pytest.fixture
def bucket(front: FaultyFront, s3_bucket_name: str) -> Bucket:
    assert front.count() == 0
    return open_bucket(url_of(s3_bucket_name), patience=HASTY)


@pytest.fixture
def work() -> Iterator[Attended]:
    with Scratch() as scratch:
        yield Attended(scratch=scratch, tell=lambda _stage, _done, _total: None)


def dated(key: str, began: datetime) -> Fault:
    """The server dates every upload alike, years ago: this one's is set."""

    def meet(request: Request, forward: Forward) -> Reply | None:
        reply = forward(request)
        date = began.strftime("%Y-%m-%dT%H:%M:%S.000Z").encode()

        def set_date(found: re.Match[bytes]) -> bytes:
            mine = f"<Key>{key}</Key>".encode() in found[0]
            return re.sub(rb"(<Initiated>)[^<]*", rb"\g<1>" + date, found[0]) if mine else found[0]

        return reply and replace(reply, body=re.sub(rb"(?s)<Upload>.*?</Upload>", set_date, reply.body))

    return meet


def begin(s3_client: Any, name: str, key: str) -> None:
    """What boto3 leaves of an upload that never ends."""
    upload = s3_client.create_multipart_upload(Bucket=name, Key=key)["UploadId"]
    s3_client.upload_part(Bucket=name, Key=key, UploadId=upload, PartNumber=1, Body=bytes(1000))


def left_over(s3_client: Any, name: str) -> list[str]:
    return sorted(item["Key"] for item in s3_client.list_multipart_uploads(Bucket=name).get("Uploads", ()))


def test_f02_an_upload_that_fails_for_good_is_aborted_and_shows_nothing(
    s3_client: Any, s3_bucket_name: str, front: FaultyFront, bucket: Bucket
) -> None:
    front.add(Rule(refuse(503), "PUT", "partNumber=2", times=None))
    with pytest.raises(UnavailableError):
        bucket.put("k", bytes(20 * MIB))
    assert front.count("DELETE", "?uploadId") == 1
    assert "Contents" not in s3_client.list_objects_v2(Bucket=s3_bucket_name)


def test_f02_gc_lists_unfinished_uploads_and_aborts_the_old_ones_of_its_run(
    s3_client: Any, s3_bucket_name: str, front: FaultyFront, tmp_path: Path, work: Attended
) -> None:
    url, run = url_of(s3_bucket_name), RunId("demo")
    publish_folder(write_tiny_model(tmp_path / "model"), url, run, step=0)
    old, young = (blob_key(run, object_digest(body)) for body in (b"old", b"young"))
    others = [
        f"runs/demo2/blobs/{'0' * 64}", f"demo/blobs/{'0' * 64}", "runs/demo/notes.txt", f"runs/other/blobs/{'0' * 64}",
    ]  # fmt: skip
    for key in (f"runs/{old}", f"runs/{young}", *others):
        begin(s3_client, s3_bucket_name, key)
    front.add(Rule(dated(f"runs/{young}", datetime.now(UTC) - timedelta(hours=23)), "GET", "?uploads", times=None))
    before = left_over(s3_client, s3_bucket_name)
    dry = collect_garbage(url, run, Policy(), delete=False, work=work)
    assert ([item.key for item in dry.plan.abort], [item.key for item in dry.plan.underway]) == ([old], [young])
    assert (dry.blind, left_over(s3_client, s3_bucket_name)) == (None, before)
    done = collect_garbage(url, run, Policy(), delete=True, work=work)
    assert done.collected is not None
    assert (done.collected.num_aborted, front.count("DELETE")) == (1, 1)
    assert left_over(s3_client, s3_bucket_name) == sorted([f"runs/{young}", *others])


def test_f02_gc_never_aborts_the_upload_of_a_live_publisher(
    s3_client: Any, s3_bucket_name: str, front: FaultyFront, bucket: Bucket, gate: Gate, tmp_path: Path, work: Attended
) -> None:
    """First in the middle of the run's first version, then of a later one."""
    url, run = url_of(s3_bucket_name), RunId("demo")
    body = bytes(range(256)) * (80 * 1024)
    key = blob_key(run, object_digest(body))
    front.add(
        Rule(hold(gate), "PUT", "partNumber=2"),
        Rule(dated(f"runs/{key}", datetime.now(UTC)), "GET", "?uploads", times=None),
    )
    with ThreadPoolExecutor(1) as pool:
        upload = pool.submit(bucket.put, key, body)
        assert gate.reached.wait(30)
        with pytest.raises(NotFoundError, match="there is no run"):
            collect_garbage(url, run, Policy(min_age_s=LEAST_AGE_S), delete=True, work=work)
        publish_folder(write_tiny_model(tmp_path / "model"), url, run, step=0)
        done = collect_garbage(url, run, Policy(min_age_s=LEAST_AGE_S), delete=True, work=work)
        assert [item.key for item in done.plan.underway] == [key]
        assert left_over(s3_client, s3_bucket_name) == [f"runs/{key}"]
        gate.open()
        upload.result(30)
    assert (front.count("DELETE"), front.count("POST", "?uploads")) == (0, 1)
    assert body_of(s3_client, s3_bucket_name, key) == body


def test_f02_an_upload_that_is_aborted_under_its_writer_is_made_anew(
    s3_client: Any, s3_bucket_name: str, front: FaultyFront, bucket: Bucket, gate: Gate
) -> None:
    """Whoever takes too short a minimum age costs a publisher time, and nothing else."""
    assert isinstance(bucket, Abort)
    body = bytes(range(256)) * (80 * 1024)
    front.add(Rule(hold(gate), "PUT", "partNumber=2"))
    with ThreadPoolExecutor(1) as pool:
        writer = pool.submit(bucket.put, "demo/k", body)
        assert gate.reached.wait(30)
        (upload,) = bucket.unfinished("demo")
        bucket.abort(upload)
        gate.open()
        writer.result(30)
    assert front.count("POST", "?uploads") == 2
    assert body_of(s3_client, s3_bucket_name, "demo/k") == body
    assert left_over(s3_client, s3_bucket_name) == []


def test_gc_without_the_right_to_list_uploads_says_so_and_collects(
    s3_bucket_name: str, front: FaultyFront, tmp_path: Path, work: Attended
) -> None:
    url, run = url_of(s3_bucket_name), RunId("demo")
    publish_folder(write_tiny_model(tmp_path / "model"), url, run, step=0)
    front.add(Rule(refuse(403, "AccessDenied"), "GET", "?uploads", times=None))
    done = collect_garbage(url, run, Policy(), delete=True, work=work)
    assert done.collected is not None
    assert done.blind is not None
    assert "AccessDenied" in done.blind


def test_uploads_are_found_with_the_credentials_of_a_role(
    s3_client: Any, s3_bucket_name: str, front: FaultyFront, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(s3_client, s3_bucket_name, "runs/demo/k")
    with acting(monkeypatch) as role:
        bucket = open_bucket(url_of(s3_bucket_name), patience=HASTY)
        assert isinstance(bucket, Abort)
        assert [upload.key for upload in bucket.unfinished("demo")] == ["demo/k"]
    assert front.seen[-1].request.header("x-amz-security-token") == role.token
