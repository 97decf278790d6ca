"""Manifests that an attacker or a bad disk could send: each ends in a CorruptError naming the field."""

import contextlib
import copy
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slackwater.checkpoint import manifest as module
from slackwater.checkpoint.manifest import decode_manifest, encode_manifest
from slackwater.errors import CorruptError, InvalidInputError

Json = dict[str, Any]
ONE, TWO, SHA = "1" * 32, "2" * 32, "a" * 64

DELTA: Json = {
    "format": "slackwater/1",
    "run": "r",
    "version": 7,
    "kind": "delta",
    "parent": {"version": 6, "state": SHA},
    "state": SHA,
    "step": 7,
    "created_at": "2026-01-01T00:00:00+00:00",
    "objects": [["r/blobs/x", 100, SHA]],
    "tensors": [
        ["a", "BF16", [4], [[0, "sparse", 0, 0, 10, 1, ONE, TWO]]],
        [
            "b",
            "BF16",
            [3, 2097152],
            [[0, "full", 0, 10, 10, 5, ONE, TWO], [1, "sparse", 0, 20, 80, 5, ONE, TWO]],
        ],
    ],
    "files": {},
}
ANCHOR: Json = {
    **DELTA,
    "kind": "anchor",
    "parent": None,
    "objects": [["r/anchors/7/model.safetensors", 100, SHA], ["r/anchors/7/config.json", 2, SHA]],
    "tensors": [["a", "BF16", [4], [[0, "raw", 0, 80, 8, 4, None, ONE]]]],
    "files": {"model.safetensors": 0, "config.json": 1},
}


def spoil(base: Json, *path: Any, value: Any) -> bytes:
    changed = copy.deepcopy(base)
    spot: Any = changed
    for step in path[:-1]:
        spot = spot[step]
    spot[path[-1]] = value
    return json.dumps(changed).encode()


def test_the_good_ones_are_good() -> None:
    assert decode_manifest(json.dumps(DELTA).encode()).version == 7
    assert decode_manifest(json.dumps(ANCHOR).encode()).num_bytes == 102


@pytest.mark.parametrize(
    ("base", "path", "value", "field"),
    [
        (DELTA, ("format",), "slackwater/2", "format is 'slackwater/2'"),
        (DELTA, ("format",), 1, "format"),
        (DELTA, ("surprise",), 1, "surprise"),
        (DELTA, ("run",), "../x", "run"),
        (DELTA, ("run",), "", "run"),
        (DELTA, ("version",), -1, "version"),
        (DELTA, ("version",), 2**70, "version"),
        (DELTA, ("version",), 8, "parent"),
        (DELTA, ("version",), "7", "version"),
        (DELTA, ("kind",), "fold", "kind"),
        (DELTA, ("kind",), "anchor", "parent"),
        (DELTA, ("parent",), None, "parent"),
        (DELTA, ("parent", "state"), "A" * 64, "parent.state"),
        (DELTA, ("state",), SHA + "\n", "state"),
        (DELTA, ("state",), SHA[:-1], "state"),
        (DELTA, ("step",), -1, "step"),
        (DELTA, ("created_at",), "", "created_at"),
        (DELTA, ("files",), {"config.json": 0}, "files"),
        (DELTA, ("objects", 0, 0), "other/blobs/x", "objects"),
        (DELTA, ("objects", 0, 0), "r/../s/x", "objects"),
        (DELTA, ("objects", 0, 0), "/r/x", "objects"),
        (DELTA, ("objects", 0, 0), "r//x", "objects"),
        (DELTA, ("objects", 0, 0), "r/x\x00", "objects"),
        (DELTA, ("objects", 0, 0), "r/a\\b", "objects"),
        (DELTA, ("objects", 0, 0), "r/" + "x" * 600, "objects"),
        (DELTA, ("objects", 0, 1), -1, "objects"),
        (DELTA, ("objects", 0, 1), 99, "b tile 1: length"),
        (DELTA, ("objects", 0, 2), "g" * 64, "objects"),
        (
            DELTA,
            ("objects",),
            [["r/blobs/x", 100, SHA], ["r/blobs/x", 99, SHA]],
            "objects: a key is named twice",
        ),
        (DELTA, ("objects",), [], "a tile 0: object"),
        (DELTA, ("tensors", 0, 0), "b", "tensors: 'b' follows 'b'"),
        (DELTA, ("tensors", 0, 0), "c", "tensors: 'b' follows 'c'"),
        (DELTA, ("tensors", 0, 1), "BF17", "a: dtype"),
        (DELTA, ("tensors", 0, 2), [-4], "tensors"),
        (DELTA, ("tensors", 0, 2), [2**62, 2**62], "a: shape"),
        (DELTA, ("tensors", 0, 2), [1, 2**33], "a: shape"),
        (DELTA, ("tensors", 0, 2), [1] * 9, "tensors"),
        (DELTA, ("tensors", 0, 2), [0], "a: tiles"),
        (DELTA, ("tensors", 0, 3), [], "a: tiles"),
        (DELTA, ("tensors", 0, 3, 0, 0), 1, "a: tiles"),
        (DELTA, ("tensors", 0, 3, 0, 0), -1, "tensors"),
        (DELTA, ("tensors", 0, 3, 0, 1), "raw", "a tile 0: encoding"),
        (DELTA, ("tensors", 0, 3, 0, 1), "pickle", "tensors"),
        (DELTA, ("tensors", 0, 3, 0, 2), 1, "a tile 0: object"),
        (DELTA, ("tensors", 0, 3, 0, 3), 2**63 - 1, "a tile 0: length"),
        (DELTA, ("tensors", 0, 3, 0, 3), 2**64, "tensors"),
        (DELTA, ("tensors", 0, 3, 0, 4), 0, "tensors"),
        (DELTA, ("tensors", 0, 3, 0, 4), 11, "b tile 0: offset: its body overlaps that of a tile 0"),
        (DELTA, ("tensors", 0, 3, 0, 5), 0, "tensors"),
        (DELTA, ("tensors", 0, 3, 0, 5), 5, "a tile 0: changed"),
        (DELTA, ("tensors", 0, 3, 0, 6), None, "a tile 0: pre"),
        (DELTA, ("tensors", 0, 3, 0, 7), ONE[:-1], "tensors"),
        (DELTA, ("tensors", 1, 3, 1, 0), 0, "b: tiles: indexes rise"),
        (DELTA, ("tensors", 1, 3, 1, 0), 2, "b: tiles: there is no tile 2 of 2"),
        (ANCHOR, ("parent",), {"version": 6, "state": SHA}, "parent"),
        (ANCHOR, ("files", "../evil"), 0, "files"),
        (ANCHOR, ("files", "a/b"), 0, "files"),
        (ANCHOR, ("files", ".hidden"), 0, "files"),
        (ANCHOR, ("files", "tokenizer.json"), 2, "files"),
        (ANCHOR, ("files",), {"config.json": 1}, "files"),
        (ANCHOR, ("tensors", 0, 3), [], "a: tiles: an anchor lists all 1"),
        (ANCHOR, ("tensors", 0, 3, 0, 4), 7, "a tile 0: length"),
        (ANCHOR, ("tensors", 0, 3, 0, 5), 3, "a tile 0: length"),
        (ANCHOR, ("tensors", 0, 3, 0, 6), ONE, "a tile 0: pre"),
        (ANCHOR, ("tensors", 0, 3, 0, 1), "full", "a tile 0: encoding"),
    ],
)
def test_a_broken_rule_is_refused_by_field(base: Json, path: tuple[Any, ...], value: Any, field: str) -> None:
    with pytest.raises(CorruptError) as caught:
        decode_manifest(spoil(base, *path, value=value))
    assert field in caught.value.message


def test_every_truncation_is_refused() -> None:
    body = json.dumps(ANCHOR).encode()
    for end in range(len(body)):
        with pytest.raises(CorruptError):
            decode_manifest(body[:end])


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 200_000,
        b'{"format":"slackwater/1","x":' + b"[" * 200_000,
        b'{"format":' + b'{"a":' * 200_000,
        b"\xff\xfe",
        b'{"format":"\xff"}',
        b'{"format":"\\ud800"}',
        b"null",
        b"NaN",
        b"",
    ],
)
def test_deep_or_broken_json_is_refused_without_recursion(body: bytes) -> None:
    with pytest.raises(CorruptError, match="can't be read"):
        decode_manifest(body)


@given(st.data())
def test_noise_in_a_manifest_is_a_manifest_or_a_typed_refusal(data: st.DataObject) -> None:
    body = bytearray(json.dumps(data.draw(st.sampled_from([DELTA, ANCHOR]))).encode())
    for _ in range(data.draw(st.integers(1, 4))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(CorruptError):
        decode_manifest(bytes(body))


def test_a_manifest_too_large_is_refused_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    body = json.dumps(DELTA).encode()
    good = decode_manifest(body)
    monkeypatch.setattr(module, "MAX_MANIFEST_BYTES", 100)
    with pytest.raises(CorruptError, match="readers hold 100"):
        decode_manifest(body)
    with pytest.raises(InvalidInputError, match="readers hold 100"):
        encode_manifest(good)
