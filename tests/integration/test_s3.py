"""Against an S3 server on a real socket, with boto3 as the independent reader and writer."""

from typing import Any

import pytest

from slackwater.bucket.open import open_bucket, probe
from slackwater.errors import NotFoundError

MIB = 1024 * 1024


def test_boto3_reads_what_we_write_below_the_prefix(s3_client: Any, s3_bucket_name: str) -> None:
    bucket = open_bucket(f"s3://{s3_bucket_name}/team/runs")
    body = bytes(range(256)) * (80 * 1024)
    bucket.put("demo/blobs/b", memoryview(body))
    bucket.put_if_absent("demo/manifests/00000000.json", b"{}")
    listed = s3_client.list_objects_v2(Bucket=s3_bucket_name)["Contents"]
    assert {item["Key"]: item["Size"] for item in listed} == {
        "team/runs/demo/blobs/b": 20 * MIB,
        "team/runs/demo/manifests/00000000.json": 2,
    }
    answer = s3_client.get_object(Bucket=s3_bucket_name, Key="team/runs/demo/blobs/b")
    assert answer["Body"].read() == body


def test_we_read_what_boto3_writes(s3_client: Any, s3_bucket_name: str) -> None:
    s3_client.put_object(Bucket=s3_bucket_name, Key="runs/demo/head.json", Body=b'{"version": 3}')
    bucket = open_bucket(f"s3://{s3_bucket_name}/runs")
    assert bucket.get("demo/head.json", max_bytes=100) == b'{"version": 3}'
    assert bucket.get_range("demo/head.json", 12, 1) == b"3"
    assert bucket.put_if_absent("demo/head.json", b"ours") is False


def test_a_listing_of_more_than_a_page_is_whole(s3_client: Any, s3_bucket_name: str) -> None:
    for number in range(45):
        s3_client.put_object(Bucket=s3_bucket_name, Key=f"runs/m/{number:08d}.json", Body=b"x")
    assert s3_client.list_objects_v2(Bucket=s3_bucket_name)["IsTruncated"] is True
    bucket = open_bucket(f"s3://{s3_bucket_name}/runs")
    assert [info.key for info in bucket.list("m")] == [f"m/{number:08d}.json" for number in range(45)]


def test_a_missing_bucket_is_told_by_every_verb(s3_client: Any) -> None:
    assert s3_client is not None
    bucket = open_bucket("s3://no-such-bucket-here/runs")
    with pytest.raises(NotFoundError, match="no such bucket"):
        probe(bucket)
    with pytest.raises(NotFoundError, match="no such bucket"):
        bucket.get("k", max_bytes=1)
    with pytest.raises(NotFoundError, match="no such bucket"):
        bucket.put("k", b"x")
    with pytest.raises(NotFoundError, match="no such bucket"):
        bucket.put_if_absent("k", b"x")


def test_probe_is_content_with_an_empty_bucket(s3_bucket_name: str) -> None:
    probe(open_bucket(f"s3://{s3_bucket_name}"))
