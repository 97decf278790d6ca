"""GCS's XML API before fake-gcs-server, which speaks the JSON API in full and the XML API for reading alone.

obstore speaks XML. Objects, generations, preconditions, ranges and listings are the server's own; only the shape of
writes is translated here, and uploads in parts are put together. XML API: cloud.google.com/storage/docs/xml-api.
"""

import json
import threading
from dataclasses import dataclass, field, replace
from urllib.parse import parse_qs, unquote, urlsplit
from uuid import uuid4

from slackwater.testing.http_faults import Forward, Reply, Request

_PUBLIC_HOST = "storage.googleapis.com"


@dataclass
class _Upload:
    parts: dict[int, bytes] = field(default_factory=dict[int, bytes])


class XmlWrites:
    """A fault that is none: translates each request that the server wouldn't understand."""

    def __init__(self) -> None:
        self._uploads: dict[str, _Upload] = {}
        self._lock = threading.Lock()

    def __call__(self, request: Request, forward: Forward) -> Reply | None:
        target = urlsplit(request.target)
        query = parse_qs(target.query, keep_blank_values=True)
        bucket, _, key = target.path.removeprefix("/").partition("/")
        if key and {"uploads", "uploadId"} & query.keys():
            return self._multipart(request, forward, bucket, unquote(key), query)
        if key and request.method == "PUT":
            return _write(forward, bucket, unquote(key), request.body, request.header("x-goog-if-generation-match"))
        # The server looks for a key's slashes in the path as it came, and tells XML from JSON by the host.
        headers = (*request.without(["host"]).headers, ("host", _PUBLIC_HOST))
        path = unquote(target.path) + ("?" + target.query if target.query else "")
        return forward(replace(request, target=path, headers=headers))

    def _multipart(
        self, request: Request, forward: Forward, bucket: str, key: str, query: dict[str, list[str]]
    ) -> Reply | None:
        if "uploads" in query:
            name = uuid4().hex
            with self._lock:
                self._uploads[name] = _Upload()
            return _xml(f"<InitiateMultipartUploadResult><UploadId>{name}</UploadId></InitiateMultipartUploadResult>")
        name = query["uploadId"][0]
        with self._lock:
            upload = self._uploads.get(name)
            if upload is None:
                return _xml("<Error><Code>NoSuchUpload</Code></Error>", status=404)
            if request.method == "PUT":
                upload.parts[int(query["partNumber"][0])] = request.body
                return Reply(headers=(("etag", f'"{query["partNumber"][0]}"'),))
            del self._uploads[name]
        if request.method == "DELETE":
            return Reply(status=204)
        body = b"".join(upload.parts[number] for number in sorted(upload.parts))
        made = _write(forward, bucket, key, body, None)
        if made is None or made.status != 200:
            return made
        etag = made.header("etag")
        return replace(
            _xml(f"<CompleteMultipartUploadResult><ETag>{etag}</ETag></CompleteMultipartUploadResult>"),
            headers=made.headers,
        )

    @property
    def open_uploads(self) -> int:
        """Uploads that were begun and neither completed nor aborted."""
        with self._lock:
            return len(self._uploads)


def _write(forward: Forward, bucket: str, key: str, body: bytes, generation: str | None) -> Reply | None:
    """As a multipart/related upload: the server heeds preconditions in no other kind."""
    boundary = uuid4().hex
    part = f"--{boundary}\r\ncontent-type: "
    meta = json.dumps({"name": key})
    head = f"{part}application/json\r\n\r\n{meta}\r\n{part}application/octet-stream\r\n\r\n"
    sent = head.encode() + body + f"\r\n--{boundary}--\r\n".encode()
    headers = {
        "host": _PUBLIC_HOST,
        "content-length": str(len(sent)),
        "content-type": f"multipart/related; boundary={boundary}",
    }
    condition = "" if generation is None else f"&ifGenerationMatch={generation}"
    target = f"/upload/storage/v1/b/{bucket}/o?uploadType=multipart{condition}"
    reply = forward(Request(method="POST", target=target, headers=tuple(headers.items()), body=sent))
    if reply is None or reply.status != 200:
        return reply
    made = json.loads(reply.body)
    return Reply(headers=(("etag", f'"{made["etag"]}"'), ("x-goog-generation", made["generation"])))


def _xml(body: str, *, status: int = 200) -> Reply:
    return Reply(status=status, headers=(("content-type", "application/xml"),), body=body.encode())
