"""Fixtures of the whole suite: servers of object stores that speak over real sockets."""

from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import boto3
import pytest
from hypothesis import HealthCheck, settings

from depth import examples
from store_servers import (
    AZURE_ENVIRONMENT,
    GCS_ENVIRONMENT,
    S3_ENVIRONMENT,
    azure_server,
    azurite_binary,
    gcs_server,
    make_azure_container,
    make_gcs_bucket,
    s3_server,
)

# How long an example takes says more of the machine than of the code: no test fails by it.
settings.register_profile(
    "slackwater", deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=examples(100)
)
settings.load_profile("slackwater")


@pytest.fixture(scope="session")
def s3_endpoint() -> Iterator[str]:
    """URL of a moto server of its own process."""
    with s3_server() as endpoint:
        yield endpoint


@pytest.fixture
def s3_client(s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """boto3's client, our independent reader; the environment points at the server as long as it lives."""
    for name, value in {**S3_ENVIRONMENT, "AWS_ENDPOINT_URL": s3_endpoint}.items():
        monkeypatch.setenv(name, value)
    client = boto3.client("s3", endpoint_url=s3_endpoint)
    yield client
    client.close()


@pytest.fixture
def s3_bucket_name(s3_client: Any) -> str:
    """An empty S3 bucket, made for this test."""
    name = _fresh_name()
    s3_client.create_bucket(Bucket=name)
    return name


@pytest.fixture(scope="session")
def gcs_endpoint() -> Iterator[str]:
    """URL of a fake-gcs-server of its own process."""
    with gcs_server() as endpoint:
        yield endpoint


@pytest.fixture
def gcs_bucket_name(gcs_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """An empty GCS bucket, made for this test; the environment points at its server."""
    for name, value in {**GCS_ENVIRONMENT, "GOOGLE_BASE_URL": gcs_endpoint}.items():
        monkeypatch.setenv(name, value)
    made = _fresh_name()
    make_gcs_bucket(gcs_endpoint, made)
    return made


@pytest.fixture(scope="session")
def azure_endpoint() -> Iterator[str]:
    """URL of an Azurite of its own process, the account's path included."""
    binary = azurite_binary()
    if binary is None:
        pytest.skip("azurite isn't installed: `make test-system` does that, with npm")
    with azure_server(binary) as endpoint:
        yield endpoint


@pytest.fixture
def azure_container_name(azure_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """An empty Azure container, made for this test; the environment points at its server."""
    for name, value in {**AZURE_ENVIRONMENT, "AZURE_STORAGE_ENDPOINT": azure_endpoint}.items():
        monkeypatch.setenv(name, value)
    made = _fresh_name()
    make_azure_container(azure_endpoint, made)
    return made


def _fresh_name() -> str:
    return f"slackwater-{uuid4().hex[:12]}"
