"""Every bucket keeps the same promises."""

from pathlib import Path

import pytest

from slackwater.bucket.base import Bucket
from slackwater.bucket.local import LocalBucket
from slackwater.bucket.open import open_bucket
from slackwater.testing.bucket import FaultyBucket, MemoryBucket
from slackwater.testing.conformance_bucket import BucketTests


class TestMemoryBucket(BucketTests):
    @pytest.fixture
    def bucket(self) -> Bucket:
        return MemoryBucket()


class TestFaultyBucketWithoutFaults(BucketTests):
    @pytest.fixture
    def bucket(self) -> Bucket:
        return FaultyBucket(MemoryBucket())


class TestLocalBucket(BucketTests):
    @pytest.fixture
    def bucket(self, tmp_path: Path) -> Bucket:
        return LocalBucket(tmp_path / "bucket", create=True)


class TestS3Bucket(BucketTests):
    @pytest.fixture
    def bucket(self, s3_bucket_name: str) -> Bucket:
        return open_bucket(f"s3://{s3_bucket_name}/team/runs")
