"""Between us and an S3 server on a real socket: a front that makes faults, and the role of a machine in the cloud."""

import json
from collections.abc import Generator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from slackwater.bucket.patience import Patience
from slackwater.testing.faulty_front import FaultyFront, Rule
from slackwater.testing.http_faults import Forward, Reply, Request

MIB = 1024 * 1024
HASTY = Patience(deadline_s=20, attempts=12, first_wait_s=0.002, longest_wait_s=0.02, renewal_s=0.002)


def url_of(name: str) -> str:
    """Where runs lie in an S3 bucket."""
    return f"s3://{name}/runs"


@contextmanager
def fronting(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Generator[FaultyFront]:
    """Our requests go through it; boto3's client goes past it."""
    with FaultyFront(endpoint) as front:
        monkeypatch.setenv("AWS_ENDPOINT_URL", front.url)
        yield front


def body_of(s3_client: Any, name: str, key: str) -> bytes:
    """What boto3 reads."""
    return s3_client.get_object(Bucket=name, Key=f"runs/{key}")["Body"].read()


class Role:
    """The service from which a machine in the cloud has its credentials: each reading gives the token of the moment."""

    def __init__(self) -> None:
        self.token = "old"

    def __call__(self, request: Request, forward: Forward) -> Reply:
        del forward
        if request.method == "PUT":
            return Reply(body=b"session")
        if request.target.endswith("/security-credentials/"):
            return Reply(body=b"role")
        soon = (datetime.now(UTC) + timedelta(seconds=60)).strftime("%Y-%m-%dT%H:%M:%SZ")
        keys = {"AccessKeyId": "k", "SecretAccessKey": "s", "Token": self.token, "Expiration": soon}
        words = {"Code": "Success", "Type": "AWS-HMAC", "LastUpdated": soon}
        return Reply(headers=(("content-type", "application/json"),), body=json.dumps({**keys, **words}).encode())


@contextmanager
def acting(monkeypatch: pytest.MonkeyPatch) -> Generator[Role]:
    """Our credentials come from a role."""
    role = Role()
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    with FaultyFront("http://127.0.0.1:1", Rule(role, times=None)) as service:
        monkeypatch.setenv("AWS_METADATA_ENDPOINT", service.url)
        yield role
