"""The cloud bucket against a scripted HTTP server: what a store may answer, and what we make of it."""

import threading
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote

import pytest

from slackwater.bucket.cloud import CloudBucket
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

METHODS = ("GET", "HEAD", "POST", "PUT")
HASTY = Patience(deadline_s=5, attempts=4, idle_s=5, first_wait_s=0.001, longest_wait_s=0.002, renewal_s=0.001)


@dataclass
class Reply:
    """One answer. ``cut``: close the connection after so many bytes of the body."""

    status: int = 200
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict[str, str])
    cut: int | None = None
    dropped: bool = False


class Store:
    """Answers each method with its own script, then with 200."""

    def __init__(self) -> None:
        self.script: dict[str, list[Reply]] = defaultdict(list)
        self.calls: list[tuple[str, int | None, str | None]] = []
        self.targets: list[str] = []
        self.conditions: list[str | None] = []
        self.bucket = CloudBucket("s3://bucket/runs", patience=HASTY)

    def count(self, method: str) -> int:
        return sum(call[0] == method for call in self.calls)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    store: Store

    def log_message(self, *_: Any, **__: Any) -> None:
        pass

    def answer(self) -> None:
        self.rfile.read(int(self.headers.get("content-length") or 0))
        waiting = self.store.script[self.command]
        reply = waiting.pop(0) if waiting else Reply()
        self.store.calls.append((self.command, reply.status, self.headers.get("range")))
        self.store.targets.append(self.path)
        self.store.conditions.append(self.headers.get("if-none-match"))
        if reply.dropped:
            self.close_connection = True
            return
        self.send_response(reply.status)
        headers = {"content-length": str(len(reply.body)), "etag": '"e"', **reply.headers}
        for name, value in {"last-modified": "Mon, 01 Jan 2024 00:00:00 GMT", **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(reply.body[: reply.cut])
        if reply.cut is not None:
            self.close_connection = True


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    handler = type("Scripted", (Handler,), {f"do_{method}": Handler.answer for method in METHODS})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")
    for name, value in {"ACCESS_KEY_ID": "x", "SECRET_ACCESS_KEY": "y", "ALLOW_HTTP": "true"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setenv("AWS_CONDITIONAL_PUT", "disabled")
    handler.store = Store()
    serving = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    serving.start()
    yield handler.store
    server.shutdown()
    server.server_close()
    serving.join()


def error_body(code: str) -> bytes:
    return f"<Error><Code>{code}</Code><Message>words</Message></Error>".encode()


def listing(*keys: str, more: bool = False) -> bytes:
    """A page of an S3 listing; ``more``: another one follows."""
    items = "".join(
        f"<Contents><Key>runs/{key}</Key><Size>3</Size><LastModified>2024-01-01T00:00:00.000Z</LastModified></Contents>"
        for key in keys
    )
    token = "<NextContinuationToken>t</NextContinuationToken>" if more else ""
    return f"<ListBucketResult><IsTruncated>{str(more).lower()}</IsTruncated>{token}{items}</ListBucketResult>".encode()


def test_a6_03_conflicts_are_retried_until_the_creation_is_settled(store: Store) -> None:
    store.script["PUT"] = [Reply(409), Reply(409), Reply(200)]
    store.script["HEAD"] = [Reply(404), Reply(404)]
    assert store.bucket.put_if_absent("m/1", b"x") is True
    assert store.count("PUT") == 3


def test_a6_03_a_failed_precondition_means_it_exists_and_is_not_retried(store: Store) -> None:
    store.script["PUT"] = [Reply(412, error_body("PreconditionFailed"))]
    assert store.bucket.put_if_absent("m/1", b"x") is False
    assert store.calls == [("PUT", 412, None)]


def test_a_conflict_over_an_object_that_exists_is_azures_way_of_saying_so(store: Store) -> None:
    store.script["PUT"] = [Reply(409, error_body("BlobAlreadyExists"))]
    store.script["HEAD"] = [Reply(200)]
    assert store.bucket.put_if_absent("m/1", b"x") is False


def test_conflicts_without_end_are_unavailable(store: Store) -> None:
    store.script["PUT"] = [Reply(409)] * 20
    store.script["HEAD"] = [Reply(404)] * 20
    with pytest.raises(UnavailableError, match="other writers"):
        store.bucket.put_if_absent("m/1", b"x")
    assert store.count("PUT") == HASTY.attempts


def test_a_conflict_on_a_plain_put_is_retried(store: Store) -> None:
    store.script["PUT"] = [Reply(409), Reply(200)]
    store.bucket.put("k", b"x")
    assert store.count("PUT") == 2


def test_a_creation_whose_answer_was_lost_returns_false(store: Store) -> None:
    store.script["PUT"] = [Reply(dropped=True), Reply(412)]
    assert store.bucket.put_if_absent("m/1", b"x") is False


@pytest.mark.parametrize("status", [429, 500, 503])
def test_f18_transient_statuses_are_retried(store: Store, status: int) -> None:
    store.script["GET"] = [Reply(status), Reply(status), Reply(200, b"body")]
    assert store.bucket.get("k", max_bytes=10) == b"body"


def test_f19_a_store_that_stays_away_is_unavailable_after_bounded_attempts(store: Store) -> None:
    store.script["GET"] = [Reply(503, error_body("SlowDown"))] * 20
    with pytest.raises(UnavailableError, match="503"):
        store.bucket.get("k", max_bytes=10)
    assert store.count("GET") == HASTY.attempts


def test_a_store_that_nobody_serves_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"ENDPOINT_URL": "http://127.0.0.1:1", "ALLOW_HTTP": "true"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "y")
    with pytest.raises(UnavailableError, match="s3://bucket/runs/k"):
        CloudBucket("s3://bucket/runs", patience=HASTY).get("k", max_bytes=1)


def test_a6_07_a_body_cut_short_is_resumed_by_range(store: Store) -> None:
    rest = {"content-range": "bytes 7-9/10"}
    store.script["GET"] = [Reply(200, b"0123456789", cut=7), Reply(206, b"789", rest)]
    assert store.bucket.get("k", max_bytes=10) == b"0123456789"
    assert store.calls[1] == ("GET", 206, "bytes=7-9")


def test_a6_07_a_body_cut_short_for_good_is_unavailable(store: Store) -> None:
    store.script["GET"] = [Reply(200, b"0123456789", cut=7), *[Reply(dropped=True)] * 20]
    with pytest.raises(UnavailableError):
        store.bucket.get("k", max_bytes=10)


@pytest.mark.parametrize(
    "reply",
    [
        Reply(200, b"0123456789"),
        Reply(206, b"0123", {"content-range": "bytes 0-3/10"}),
        Reply(206, b"23", {"content-range": "bytes 2-3/4"}),
        Reply(416, error_body("InvalidRange")),
        Reply(200, b"<html>sign in</html>", {"content-type": "text/html"}),
    ],
    ids=["whole", "another range", "short", "past the end", "html"],
)
def test_f22_an_answer_that_is_not_the_range_is_corrupt(store: Store, reply: Reply) -> None:
    store.script["GET"] = [reply]
    with pytest.raises(CorruptError):
        store.bucket.get_range("k", 2, 4)


def test_an_object_over_the_cap_is_refused_by_its_header(store: Store) -> None:
    store.script["GET"] = [Reply(200, b"", {"content-length": str(2**40)}, cut=0)]
    with pytest.raises(CorruptError, match=str(2**40)):
        store.bucket.get("k", max_bytes=100)


@pytest.mark.parametrize(
    ("status", "code", "error", "says"),
    [
        (404, "NoSuchKey", NotFoundError, "no such object"),
        (404, "NoSuchBucket", NotFoundError, "no such bucket"),
        (403, "AccessDenied", AuthError, "list, get, put"),
        (403, "InvalidAccessKeyId", AuthError, "list, get, put"),
        (400, "AuthorizationHeaderMalformed", InvalidInputError, "AWS_REGION"),
        (400, "InvalidRequest", InvalidInputError, "InvalidRequest"),
        (405, "MethodNotAllowed", UnsupportedError, "can't do this"),
    ],
)
def test_a_refusal_says_what_to_do(
    store: Store, status: int, code: str, error: type[SlackwaterError], says: str
) -> None:
    store.script["GET"] = [Reply(status, error_body(code))]
    with pytest.raises(error, match=says) as refused:
        store.bucket.get("k", max_bytes=10)
    assert "s3://bucket/runs/k" in str(refused.value)
    assert refused.value.__cause__ is None
    assert store.count("GET") == 1


OUTDATED = [
    (401, "Unauthorized", "list, get, put"),
    (400, "ExpiredToken", "expiry"),
    (403, "ExpiredToken", "expiry"),
    (403, "RequestTimeTooSkewed", "clock"),
]


@pytest.mark.parametrize(("status", "code"), [case[:2] for case in OUTDATED])
def test_f26_an_outdated_signature_is_made_anew(store: Store, status: int, code: str) -> None:
    store.script["GET"] = [Reply(status, error_body(code)), Reply(200, b"body")]
    assert store.bucket.get("k", max_bytes=10) == b"body"


@pytest.mark.parametrize(("status", "code", "says"), OUTDATED)
def test_f26_what_stays_outdated_is_an_auth_error_soon(store: Store, status: int, code: str, says: str) -> None:
    store.script["PUT"] = [Reply(status, error_body(code))] * 20
    with pytest.raises(AuthError, match=says):
        store.bucket.put_if_absent("k", b"x")
    assert store.count("PUT") == 3


@pytest.mark.parametrize("code", ["RequestTimeout", "NoSuchUpload"])
def test_an_upload_that_the_store_broke_off_is_made_anew(store: Store, code: str) -> None:
    store.script["PUT"] = [Reply(400, error_body(code)), Reply(200)]
    store.bucket.put("k", b"x")
    assert store.count("PUT") == 2


def test_f22_a_page_in_the_stores_place_is_asked_again(store: Store) -> None:
    store.script["GET"] = [Reply(200, b"<html><br>sign in</html>"), Reply(200, listing("k"))]
    assert [info.key for info in store.bucket.list("")] == ["k"]


def test_f22_a_page_that_stays_in_the_stores_place_is_named(store: Store) -> None:
    store.script["GET"] = [Reply(200, b"<html><br>sign in</html>")] * 20
    with pytest.raises(UnavailableError, match="something else answered"):
        list(store.bucket.list(""))
    assert store.count("GET") == HASTY.attempts


def test_a_listing_that_is_cut_is_asked_again(store: Store) -> None:
    store.script["GET"] = [Reply(200, listing("k"), cut=50), Reply(200, listing("k"))]
    (info,) = store.bucket.list("")
    assert (info.key, info.size, info.modified_s) == ("k", 3, 1704067200.0)


def test_a_listing_goes_on_after_the_last_key_that_arrived(store: Store) -> None:
    first = [f"{number:04d}" for number in range(1000)]
    store.script["GET"] = [
        Reply(200, listing(*first, more=True)),
        Reply(200, listing("1000"), cut=50),
        Reply(200, listing("1000")),
    ]
    assert [info.key for info in store.bucket.list("")] == [*first, "1000"]
    assert "start-after=runs/0999" in unquote(store.targets[-1])


def test_a_deletion_that_is_denied_is_an_auth_error(store: Store) -> None:
    refused = (
        b"<DeleteResult><Error><Key>runs/k</Key><Code>AccessDenied</Code><Message>no</Message></Error></DeleteResult>"
    )
    store.script["POST"] = [Reply(200, refused)]
    with pytest.raises(AuthError, match="s3://bucket/runs/k"):
        store.bucket.delete("k")


def test_every_creation_is_conditional_whatever_the_environment_says(store: Store) -> None:
    store.bucket.put_if_absent("m/1", b"x")
    store.bucket.put("k", b"x")
    assert store.conditions == ["*", None]
