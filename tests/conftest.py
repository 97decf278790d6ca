"""Fixtures of the whole suite: an S3 server that speaks over a real socket."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import boto3
import pytest
from hypothesis import HealthCheck, settings

# How long an example takes says more of the machine than of the code: no test fails by it.
settings.register_profile("slackwater", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("slackwater")

S3_ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_REGION": "us-east-1",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_ALLOW_HTTP": "true",
}


S3_PAGE = 20
"""Keys on a page of the server's listings: few, so that tests see several pages."""


@pytest.fixture(scope="session")
def s3_endpoint() -> Iterator[str]:
    """URL of a moto server of its own process."""
    port = _free_port()
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "MOTO_S3_DEFAULT_MAX_KEYS": str(S3_PAGE)},
    )
    try:
        _await_listener(server, port)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait(10)


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
    name = f"slackwater-{uuid4().hex[:12]}"
    s3_client.create_bucket(Bucket=name)
    return name


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _await_listener(server: subprocess.Popen[bytes], port: int) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise RuntimeError(f"the S3 server ended with {server.returncode}")
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            time.sleep(0.05)  # a process of another program: nothing but its socket tells that it is up
        else:
            return
    raise RuntimeError("the S3 server did not come up")
