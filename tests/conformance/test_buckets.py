"""Every bucket keeps the same promises, also behind a front that fails in ways that must be survived."""

import secrets
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from slackwater.bucket.base import Bucket
from slackwater.bucket.local import LocalBucket
from slackwater.bucket.open import open_bucket
from slackwater.bucket.patience import Patience
from slackwater.testing.bucket import FaultyBucket, MemoryBucket
from slackwater.testing.conformance_bucket import (
    AbortTests,
    Begin,
    BucketTests,
    DeleteTests,
    SwapTests,
    UploadTests,
)
from slackwater.testing.faulty_front import FaultyFront, Rule
from slackwater.testing.http_faults import cut, hang_up, refuse, sometimes

STUBBORN = Patience(attempts=12, first_wait_s=0.001, longest_wait_s=0.02)
SURVIVABLE = [
    refuse(503, "SlowDown"),
    refuse(503),
    refuse(429, "SlowDown"),
    refuse(500, "InternalError"),
    hang_up(),
    cut(0),
    cut(7),
]
"""What a caller never notices, whatever the verb: the store did nothing, or what it read arrived in part."""


def trouble(*, seed: int) -> tuple[Rule, ...]:
    """A third of the calls fail; a third of the writes meet another writer."""
    reads, writes = sometimes(0.3, SURVIVABLE, seed=seed), sometimes(0.3, SURVIVABLE[:5], seed=seed)
    conflict = sometimes(0.3, [refuse(409, "OperationAborted")], seed=seed)
    return (
        Rule(reads, "GET", times=None),
        Rule(reads, "HEAD", times=None),
        Rule(conflict, "PUT", times=None),
        Rule(writes, "PUT", times=None),
        Rule(writes, "POST", times=None),
        Rule(writes, "DELETE", times=None),
    )


class TestMemoryBucket(BucketTests, AbortTests):
    @pytest.fixture
    def bucket(self) -> Bucket:
        return MemoryBucket()

    @pytest.fixture
    def begin(self, bucket: MemoryBucket) -> Begin:
        return lambda key: bucket.begin(key) and None


class TestFaultyBucketWithoutFaults(BucketTests):
    @pytest.fixture
    def bucket(self) -> Bucket:
        return FaultyBucket(MemoryBucket())


class TestLocalBucket(BucketTests, DeleteTests, AbortTests):
    @pytest.fixture
    def bucket(self, tmp_path: Path) -> Bucket:
        return LocalBucket(tmp_path / "bucket", create=True)

    @pytest.fixture
    def begin(self, tmp_path: Path) -> Begin:
        def begin(key: str) -> None:
            path = tmp_path / "bucket" / key
            path.parent.mkdir(parents=True, exist_ok=True)
            path.with_name(f".put-{secrets.token_hex(8)}-{path.name}").write_bytes(b"half")

        return begin


def begin_on_s3(s3_client: Any, name: str, key: str) -> None:
    """By boto3, past any front."""
    where = {"Bucket": name, "Key": f"team/runs/{key}"}
    upload = s3_client.create_multipart_upload(**where)["UploadId"]
    s3_client.upload_part(**where, UploadId=upload, PartNumber=1, Body=b"half")


class TestS3Bucket(BucketTests, DeleteTests, AbortTests, SwapTests, UploadTests):
    @pytest.fixture
    def bucket(self, s3_bucket_name: str) -> Bucket:
        return open_bucket(f"s3://{s3_bucket_name}/team/runs")

    @pytest.fixture
    def begin(self, s3_client: Any, s3_bucket_name: str) -> Begin:
        return partial(begin_on_s3, s3_client, s3_bucket_name)


class TestS3BucketInTrouble(BucketTests, AbortTests):
    @pytest.fixture
    def bucket(self, s3_bucket_name: str, s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
        with FaultyFront(s3_endpoint, *trouble(seed=1)) as front:
            monkeypatch.setenv("AWS_ENDPOINT_URL", front.url)
            yield open_bucket(f"s3://{s3_bucket_name}/team/runs", patience=STUBBORN)

    @pytest.fixture
    def begin(self, s3_client: Any, s3_bucket_name: str) -> Begin:
        return partial(begin_on_s3, s3_client, s3_bucket_name)


class TestGcsBucket(BucketTests, DeleteTests, SwapTests, UploadTests):
    @pytest.fixture
    def bucket(self, gcs_bucket_name: str) -> Bucket:
        return open_bucket(f"gs://{gcs_bucket_name}/team/runs")


class TestGcsBucketInTrouble(BucketTests):
    @pytest.fixture
    def bucket(self, gcs_bucket_name: str, gcs_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
        with FaultyFront(gcs_endpoint, *trouble(seed=2)) as front:
            monkeypatch.setenv("GOOGLE_BASE_URL", front.url)
            yield open_bucket(f"gs://{gcs_bucket_name}/team/runs", patience=STUBBORN)


@pytest.mark.system
class TestAzureBucket(BucketTests, DeleteTests, SwapTests, UploadTests):
    @pytest.fixture
    def bucket(self, azure_container_name: str) -> Bucket:
        return open_bucket(f"az://{azure_container_name}/team/runs")


@pytest.mark.system
class TestAzureBucketInTrouble(BucketTests):
    @pytest.fixture
    def bucket(
        self, azure_container_name: str, azure_endpoint: str, monkeypatch: pytest.MonkeyPatch
    ) -> Iterator[Bucket]:
        server, _, account = azure_endpoint.rpartition("/")
        with FaultyFront(server, *trouble(seed=3)) as front:
            monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", f"{front.url}/{account}")
            yield open_bucket(f"az://{azure_container_name}/team/runs", patience=STUBBORN)
