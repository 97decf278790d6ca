"""Manifests that an attacker or a bad disk could send: each ends in a CorruptError that names the field."""

import base64
import contextlib
import copy
import json
import struct
import time
import tracemalloc
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from depth import examples
from slackwater.checkpoint import manifest as module
from slackwater.checkpoint.manifest import MAX_MANIFEST_BYTES
from slackwater.checkpoint.rules import decode_manifest
from slackwater.checkpoint.state import StateTable
from slackwater.errors import CorruptError, SlackwaterError

Json = dict[str, Any]
SHA, SHB = "a" * 64, "b" * 64
X, Y = f"r/blobs/{SHA}", f"r/blobs/{SHB}"
BIG = [16, 2**19]
"""Sixteen tiles of BF16."""


def column(*words: int) -> str:
    return base64.b64encode(struct.pack(f"<{len(words)}Q", *words)).decode()


DELTA: Json = {
    "format": "slackwater/2",
    "run": "r",
    "version": 7,
    "kind": "delta",
    "parent": {"version": 6, "state": SHA},
    "state": SHA,
    "step": 7,
    "created_at": "2026-01-01T00:00:00+00:00",
    "objects": [[X, 100, SHA], [Y, 7, SHB]],
    "bodies": {"object": [0, 0, 1], "length": [40, 60, 7], "encoding": "sdf", "tiles": [1, 2, 1]},
    "tiles": {
        "number": [5, 0, 9, 2],
        "changed": [1, 2, 3, 4],
        "digests": column(1, 2, 3, 4, 5, 6, 2**64 - 1, 8),
        "sums": column(1, 2, 3, 4),
    },
}
SIZE = 8 + 2**24 + 4
ANCHOR: Json = {
    **{name: DELTA[name] for name in ("format", "run", "version", "state", "step", "created_at")},
    "kind": "anchor",
    "parent": None,
    "objects": [["r/anchors/7/model.safetensors", 100 + SIZE, SHA], ["r/anchors/7/config.json", 2, SHA]],
    "tensors": [
        ["a", "BF16", [4], 0, 100, column(1, 2)],
        ["b.up_proj.weight", "BF16", BIG, 0, 108, column(*range(17))],
        ["c", "I8", [0, 5], 0, 108, column(3)],
        ["d", "F32", [], 0, 108 + 2**24, column(4, 5)],
    ],
    "files": {"model.safetensors": 0, "config.json": 1},
}
GONE = object()


def spoil(base: Json, *path: Any, value: Any) -> bytes:
    changed = copy.deepcopy(base)
    spot: Any = changed
    for step in path[:-1]:
        spot = spot[step]
    if value is GONE:
        del spot[path[-1]]
    else:
        spot[path[-1]] = value
    return json.dumps(changed).encode()


def refusal(body: bytes, *, fold: bool = False) -> str:
    with pytest.raises(CorruptError) as caught:
        decode_manifest(body, fold=fold)
    return caught.value.message


def test_the_good_ones_are_good() -> None:
    delta, anchor = (decode_manifest(json.dumps(good).encode()) for good in (DELTA, ANCHOR))
    assert (delta.version, delta.num_bytes, delta.num_changed) == (7, 107, 10)
    assert (anchor.num_bytes, anchor.num_changed, anchor.outline.num_tiles) == (102 + SIZE, 4 + 2**23 + 1, 18)


CANARY: Json = {"prompt": [1, 2, 3], "tokens": [4, 2**31 - 1], "logprobs": [-0.25, -7], "tolerance": 0.05}
CANARIES: list[tuple[Json, str]] = [
    ({"more": 1}, "more"),
    ({"prompt": []}, "canary.prompt: 0 token ids, and 1 to 512 are admitted"),
    ({"prompt": [1] * 513}, "canary.prompt: 513 token ids"),
    ({"prompt": [0, 2**31]}, "canary.prompt: number 1 is no token id"),
    ({"prompt": [0, -1]}, "canary.prompt: number 1"),
    ({"prompt": [10**4000]}, "canary.prompt: number 0"),
    ({"prompt": [True]}, "canary.prompt"),
    ({"prompt": [1.0]}, "canary.prompt"),
    ({"prompt": [None]}, "canary.prompt"),
    ({"prompt": "1"}, "canary.prompt"),
    ({"prompt": None}, "canary.prompt"),
    ({"tokens": [], "logprobs": []}, "canary.tokens: 0 token ids, and 1 to 64 are admitted"),
    ({"tokens": [1] * 65, "logprobs": [-1.0] * 65}, "canary.tokens: 65 token ids"),
    ({"tokens": [4, 2**31]}, "canary.tokens: number 1 is no token id"),
    ({"tokens": [4]}, "canary.logprobs: 2 for 1 tokens"),
    ({"logprobs": []}, "canary.logprobs: 0 for 2 tokens"),
    ({"logprobs": [-0.25, 0.001]}, "canary.logprobs: number 1 is no finite float of 0 or less"),
    ({"logprobs": [-0.25, float("nan")]}, "can't be read"),
    ({"logprobs": [-0.25, -float("inf")]}, "can't be read"),
    ({"logprobs": [-0.25, -(10**400)]}, "canary.logprobs"),
    ({"logprobs": [-0.25, False]}, "canary.logprobs"),
    ({"logprobs": [-0.25, "-1"]}, "canary.logprobs"),
    ({"logprobs": [-0.25, None]}, "canary.logprobs"),
    ({"logprobs": -0.25}, "canary.logprobs"),
    ({"tolerance": 0}, "canary.tolerance"),
    ({"tolerance": -0.0}, "canary.tolerance"),
    ({"tolerance": -0.05}, "canary.tolerance"),
    ({"tolerance": 100.001}, "canary.tolerance"),
    ({"tolerance": float("nan")}, "can't be read"),
    ({"tolerance": 10**400}, "canary.tolerance"),
    ({"tolerance": True}, "canary.tolerance"),
    ({"tolerance": "0.05"}, "canary.tolerance"),
    ({"tolerance": None}, "canary.tolerance"),
]
EVERYWHERE: list[tuple[tuple[Any, ...], Any, str]] = [
    (("format",), "slackwater/1", "format is 'slackwater/1', and this reader knows 'slackwater/2'"),
    (("format",), "slackwater/3", "format is 'slackwater/3'"),
    (("format",), "x" * 9999, "format is 'xxx"),
    (("format",), 2, "format"),
    (("format",), GONE, "format"),
    (("surprise",), 1, "surprise"),
    (("run",), "../x", "field run"),
    (("run",), "", "field run"),
    (("run",), "x" * 129, "field run"),
    (("run",), "a..b", "field run"),
    (("run",), "é", "field run"),
    (("run",), GONE, "run"),
    (("version",), -1, "version"),
    (("version",), 10**8, "version"),
    (("version",), 2**70, "version"),
    (("version",), 7.0, "version"),
    (("version",), 7.5, "version"),
    (("version",), "7", "version"),
    (("version",), True, "version"),
    (("version",), None, "version"),
    (("version",), GONE, "version"),
    (("kind",), "fold", "kind"),
    (("kind",), GONE, "kind"),
    (("state",), "A" * 64, "state"),
    (("state",), SHA + "\n", "state"),
    (("state",), SHA[:-1], "state"),
    (("state",), "", "state"),
    (("step",), -1, "step"),
    (("step",), 2**63, "step"),
    (("step",), 1e300, "step"),
    (("created_at",), "", "created_at"),
    (("created_at",), "x" * 513, "created_at"),
    (("quantizers",), [""], "quantizers"),
    (("quantizers",), "fp8", "quantizers"),
    (("nans",), [""], "nans"),
    (("nans",), "a", "nans"),
    (("nans",), ["b", "a"], "nans"),
    (("nans",), ["a", "a"], "nans"),
    (("nans",), [f"a{index:02}" for index in range(17)], "nans"),
    (("canary",), [], "canary"),
    (("canary",), {}, "canary"),
    (("canary",), True, "canary"),
    *((("canary",), {**CANARY, **changed}, field) for changed, field in CANARIES),
    *((("canary",), {name: CANARY[name] for name in CANARY if name != gone}, gone) for gone in list(CANARY)[:3]),
    (("objects", 0, 0), "other/blobs/x", "field objects"),
    (("objects", 0, 0), "r/../s/x", "field objects"),
    (("objects", 0, 0), "/r/x", "field objects"),
    (("objects", 0, 0), "r//x", "field objects"),
    (("objects", 0, 0), "r/x/", "field objects"),
    (("objects", 0, 0), "r/x\x00", "field objects"),
    (("objects", 0, 0), "r/a\\b", "field objects"),
    (("objects", 0, 0), "r/http://x", "field objects"),
    (("objects", 0, 0), "r/" + "x" * 600, "objects"),
    (("objects", 0, 0), "r/" + "x" * 200, "field objects"),
    (("objects", 0, 1), -1, "objects"),
    (("objects", 0, 1), 2**63, "objects"),
    (("objects", 0, 1), True, "objects"),
    (("objects", 0, 2), "g" * 64, "objects"),
    (("objects", 0), ["r/x", 1], "objects"),
    (("objects", 0), {"key": "r/x"}, "objects"),
    (("objects",), {}, "objects"),
    (("objects",), GONE, "objects"),
]


@pytest.mark.parametrize("base", [pytest.param(DELTA, id="delta"), pytest.param(ANCHOR, id="anchor")])
@pytest.mark.parametrize(("path", "value", "field"), EVERYWHERE)
def test_a_rule_of_every_manifest_is_refused_by_field(
    base: Json, path: tuple[Any, ...], value: Any, field: str
) -> None:
    assert field in refusal(spoil(base, *path, value=value))


@pytest.mark.parametrize("spelling", ["-1e400", "-1E+309", "-1.8e308", "NaN", "-Infinity", "-.5", "-0x1", "-01", "-1e"])
@pytest.mark.parametrize("base", [DELTA, ANCHOR], ids=["delta", "anchor"])
def test_what_is_no_finite_json_number_is_no_log_probability(base: Json, spelling: str) -> None:
    body = spoil(base, "canary", value={**CANARY, "logprobs": [-0.25, "here"]})
    assert decode_manifest(body.replace(b'"here"', b"-1.7e308")).canary is not None
    assert "can't be read" in refusal(body.replace(b'"here"', spelling.encode()))


@pytest.mark.parametrize("base", [DELTA, ANCHOR], ids=["delta", "anchor"])
def test_a_canary_may_be_left_out_or_null_and_whole_numbers_are_numbers(base: Json) -> None:
    good = decode_manifest(spoil(base, "canary", value=CANARY)).canary
    assert good is not None
    assert (good.prompt, good.tokens, good.logprobs) == ((1, 2, 3), (4, 2**31 - 1), (-0.25, -7.0))
    assert decode_manifest(spoil(base, "canary", value=None)) == decode_manifest(json.dumps(base).encode())


@pytest.mark.parametrize(
    ("path", "value", "field"),
    [
        (("kind",), "anchor", "parent: an anchor has none"),
        (("parent",), None, "parent: an anchor has none, and a delta has one"),
        (("parent",), GONE, "parent"),
        (("parent", "version"), 7, "parent: version 7 can't be a delta on version 7"),
        (("parent", "version"), 5, "parent: version 7 can't be a delta on version 5"),
        (("parent", "version"), -1, "parent"),
        (("parent", "state"), "A" * 64, "parent.state"),
        (("parent", "more"), 1, "more"),
        (("version",), 8, "parent: version 8 can't be a delta on version 6"),
        (("version",), 0, "parent: version 0"),
        (("files",), {"config.json": 0}, "tensors: a delta has neither"),
        (("tensors",), ANCHOR["tensors"], "tensors: a delta has neither"),
        (("bodies",), None, "bodies: a delta has bodies and tiles"),
        (("bodies",), GONE, "bodies: a delta has bodies and tiles"),
        (("tiles",), GONE, "bodies: a delta has bodies and tiles"),
        (("bodies", "more"), 1, "more"),
        (("bodies", "object"), GONE, "object"),
        (("bodies", "object"), [0, 1], "bodies: columns of [2, 3] entries"),
        (("bodies", "object"), [1, 0, 0], "bodies.object: it rises"),
        (("bodies", "object"), [0, 0, 2], "bodies.object: 2 of 2"),
        (("bodies", "object"), [0, 0, 0], f"bodies.length: bodies of 107 bytes in {X}, which has 100"),
        (("bodies", "object"), [0, 0, -1], "bodies.object"),
        (("bodies", "object"), [0, 0, 2**63], "bodies.object"),
        (("bodies", "object"), [0, 0, True], "bodies.object"),
        (("bodies", "length"), [40, 60, 6], f"bodies.length: bodies of 6 bytes in {Y}, which has 7"),
        (("bodies", "length"), [40, 60, 8], f"bodies.length: bodies of 8 bytes in {Y}"),
        (("bodies", "length"), [100, 0, 7], "bodies.length"),
        (("bodies", "length"), [2**63 - 1, 60, 7], "bodies.length: bodies of 9223372036854775867 bytes"),
        (("bodies", "length"), [41, 60, 7], f"bodies.length: bodies of 101 bytes in {X}"),
        (("bodies", "length"), [40.0, 60, 7], "bodies.length"),
        (("bodies", "length"), [40, 60], "bodies: columns of [2, 3]"),
        (("bodies", "encoding"), "sd", "bodies: columns of [2, 3]"),
        (("bodies", "encoding"), "sdx", "bodies.encoding: 'x' is none of sdf"),
        (("bodies", "encoding"), "sdé", "bodies.encoding: 'é'"),
        (("bodies", "encoding"), "sdF", "bodies.encoding: 'F'"),
        (("bodies", "encoding"), ["s", "d", "f"], "bodies.encoding"),
        (("bodies", "tiles"), [1, 2], "bodies: columns of [2, 3]"),
        (("bodies", "tiles"), [1, 2, 0], "bodies.tiles"),
        (("bodies", "tiles"), [1, 2, 2], "tiles: 4 numbers and 4 counts for 5 tiles of bodies"),
        (("bodies", "tiles"), [1, 1, 1], "tiles: 4 numbers and 4 counts for 3"),
        (("bodies", "tiles"), [1, 2, 2**62], "tiles: 4 numbers"),
        (
            ("objects",),
            [*DELTA["objects"], [f"r/blobs/{'c' * 64}", 1, "c" * 64]],
            "bodies.length: bodies of 0 bytes in r/blobs/cc",
        ),
        (("objects",), [DELTA["objects"][0]], "bodies.object: 1 of 1"),
        (("objects",), [[X, 100, SHA], [X, 7, SHA]], "objects: a key is named twice"),
        (("objects",), [[X, 100, SHA], [X, 100, SHB]], "objects: a key is named twice"),
        (("objects", 0, 0), f"r/blobs/{'c' * 64}", "isn't named by its SHA-256"),
        (("objects", 0, 0), "r/anchors/x", "objects: 'r/anchors/x' isn't named by its SHA-256"),
        (("tiles", "more"), 1, "more"),
        (("tiles", "number"), [5, 0, 9], "tiles: 3 numbers and 4 counts for 4"),
        (("tiles", "number"), [5, 0, 9, 5], "tiles.number: a tile is named twice"),
        (("tiles", "number"), [5, 0, 9, 2**32 - 1], "tiles.number: 4294967295 is no tile's"),
        (("tiles", "number"), [5, 0, 9, -1], "tiles.number"),
        (("tiles", "number"), [5, 0, 9, 2.0], "tiles.number"),
        (("tiles", "number"), [5, 0, 9, None], "tiles.number"),
        (("tiles", "changed"), [1, 2, 3], "tiles: 4 numbers and 3 counts"),
        (("tiles", "changed"), [1, 2, 3, 0], "tiles.changed"),
        (("tiles", "changed"), [1, 2, 3, 2**63], "tiles.changed"),
        (("tiles", "digests"), column(*range(7)), "tiles.digests: 56 bytes instead of 64"),
        (("tiles", "digests"), column(*range(9)), "tiles.digests: 72 bytes instead of 64"),
        (("tiles", "digests"), column(*range(8)) + "\n", "tiles.digests"),
        (("tiles", "digests"), column(*range(8)).replace("A", "-", 1), "tiles.digests: it is no base64"),
        (("tiles", "digests"), column(*range(8))[:-3] + "B==", "tiles.digests: its base64 isn't"),
        (("tiles", "digests"), column(1, 2, 3, 4, 5, 6, 7, 7), "tiles.digests: a listed tile stays as it was"),
        (("tiles", "digests"), list(range(8)), "tiles.digests"),
        (("tiles", "sums"), GONE, "sums"),
    ],
)
def test_a_rule_of_deltas_is_refused_by_field(path: tuple[Any, ...], value: Any, field: str) -> None:
    assert field in refusal(spoil(DELTA, *path, value=value))


@pytest.mark.parametrize(
    ("path", "value", "field"),
    [
        (("parent",), {"version": 6, "state": SHA}, "parent: an anchor has none"),
        (("bodies",), DELTA["bodies"], "bodies: an anchor has none"),
        (("tiles",), DELTA["tiles"], "bodies: an anchor has none"),
        (("files", "../evil"), 0, "files: '../evil' is no file name"),
        (("files", "a/b"), 0, "files: 'a/b'"),
        (("files", ".hidden"), 0, "files: '.hidden'"),
        (("files", "a..b"), 0, "files: 'a..b'"),
        (("files", ""), 0, "files: ''"),
        (("files", "x" * 200), 0, "files: 'xxx"),
        (("files", "tokenizer.json"), 2, "files: tokenizer.json is object 2 of 2"),
        (("files", "tokenizer.json"), -1, "files"),
        (("files",), {"config.json": 1}, "files: a doesn't lie in a safetensors file"),
        (("files",), {}, "files: a doesn't lie"),
        (("files",), {"config.json": 0, "model.safetensors": 1}, "files: a doesn't lie in a safetensors file"),
        (("files",), {"model.safetensors.index.json": 0}, "files: a doesn't lie in a safetensors file"),
        (("tensors", 0, 0), "c", "tensors: 'b.up_proj.weight' follows 'c'; names rise, each once"),
        (("tensors", 0, 0), "b.up_proj.weight", "follows 'b.up_proj.weight'; names rise, each once"),
        (("tensors", 0, 0), "", "tensors"),
        (("tensors", 0, 0), "x" * 513, "tensors"),
        (("tensors", 0, 1), "BF17", "a: dtype: 'BF17' is unknown"),
        (("tensors", 0, 1), "bf16", "a: dtype"),
        (("tensors", 0, 1), 16, "tensors"),
        (("tensors", 0, 2), [-4], "tensors"),
        (("tensors", 0, 2), [4.0], "tensors"),
        (("tensors", 0, 2), [True], "tensors"),
        (("tensors", 0, 2), [1] * 9, "tensors"),
        (("tensors", 0, 2), [2**63], "tensors"),
        (("tensors", 0, 2), [2**62, 2**62], "a: shape: [4611686018427387904, 4611686018427387904] is more than any"),
        (("tensors", 0, 2), [2**62], "a: shape"),
        (("tensors", 0, 2), [2**63 - 1] * 8, "a: shape"),
        (("tensors", 0, 2), [1, 2**33], "a: shape: a line of [1, 8589934592] is longer"),
        (("tensors", 0, 2), [2**31, 2**30], "a: offset: its bytes end at 4611686018427388004"),
        (("tensors", 0, 2), [5], "c: offset: its bytes overlap those of a"),
        (("tensors", 0, 2), [0], "a: digests: 16 bytes instead of 8"),
        (("tensors", 0, 3), 2, "a: object: 2 of 2"),
        (("tensors", 0, 3), 1, "a: offset: its bytes end at 108 of 2"),
        (("tensors", 0, 3), -1, "tensors"),
        (("tensors", 0, 4), 101, "c: offset: its bytes overlap those of a"),
        (("tensors", 1, 4), 109, "d: offset: its bytes overlap those of b.up_proj.weight"),
        (("tensors", 0, 4), 100 + SIZE - 7, "a: offset: its bytes end at"),
        (("tensors", 0, 4), 2**63 - 1, "a: offset: its bytes end at 9223372036854775815"),
        (("tensors", 0, 4), 2**64, "tensors"),
        (("tensors", 2, 4), 107, "c: offset: its bytes overlap those of a"),
        (("tensors", 2, 4), 101 + SIZE, "c: offset: its bytes end at"),
        (("tensors", 0, 5), column(1), "a: digests: 8 bytes instead of 16"),
        (("tensors", 1, 5), column(*range(16)), "b.up_proj.weight: digests: 128 bytes instead of 136"),
        (("tensors", 0, 5), "AAAA", "a: digests"),
        (("tensors", 0, 5), "?" * 24, "a: digests: it is no base64"),
        (("tensors", 0, 5), [1, 2], "tensors"),
        (("tensors", 0), ["a", "BF16", [4], 0, 100], "tensors"),
        (("objects", 0, 1), 99 + SIZE, "d: offset: its bytes end at"),
    ],
)
def test_a_rule_of_anchors_is_refused_by_field(path: tuple[Any, ...], value: Any, field: str) -> None:
    assert field in refusal(spoil(ANCHOR, *path, value=value))


def test_a_fold_is_a_delta_on_any_earlier_version() -> None:
    for parent in (0, 3, 6):
        assert decode_manifest(spoil(DELTA, "parent", "version", value=parent), fold=True).version == 7
    for parent in (7, 8):
        message = refusal(spoil(DELTA, "parent", "version", value=parent), fold=True)
        assert f"parent: version 7 can't be a fold on version {parent}" in message
    assert "kind: a fold is a delta" in refusal(json.dumps(ANCHOR).encode(), fold=True)


def test_a_member_named_twice_is_read_as_its_last_and_checked_as_it_is_read() -> None:
    body = json.dumps(DELTA)
    twice = body.replace('"run": "r"', '"run": "other", "run": "r"')
    assert decode_manifest(twice.encode()) == decode_manifest(body.encode())
    assert "field run" in refusal(body.replace('"run": "r"', '"run": "r", "run": ".."').encode())
    assert "knows 'slackwater/2'" in refusal(body.replace('"run"', '"format": "slackwater/9", "run"').encode())


@pytest.mark.parametrize("base", [DELTA, ANCHOR], ids=["delta", "anchor"])
def test_every_truncation_is_refused(base: Json) -> None:
    body = json.dumps(base).encode()
    for end in range(len(body)):
        with pytest.raises(CorruptError):
            decode_manifest(body[:end])
    assert "can't be read" in refusal(body + b"x")


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 200_000,
        b'{"format":"slackwater/2","x":' + b"[" * 200_000,
        b'{"format":"slackwater/2","tensors":' + b"[" * 200_000,
        b'{"format":' + b'{"a":' * 200_000,
        b"\xff\xfe",
        b'{"format":"\xff"}',
        b'{"format":"\\ud800"}',
        b'{"format":"slackwater/2","run":"\\ud800"}',
        b"null",
        b"[]",
        b"NaN",
        b'{"format":NaN}',
        b"\xef\xbb\xbf" + json.dumps(DELTA).encode(),
        b"",
    ],
    ids=range(14),
)
def test_deep_or_broken_json_is_refused_without_recursion(body: bytes) -> None:
    assert "can't be read" in refusal(body)


@given(st.data())
def test_noise_in_a_manifest_is_a_manifest_or_a_typed_refusal(data: st.DataObject) -> None:
    base = data.draw(st.sampled_from([DELTA, ANCHOR]))
    body = bytearray(json.dumps(base).encode())
    for _ in range(data.draw(st.integers(1, 4))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(CorruptError):
        manifest = decode_manifest(bytes(body))
        list(manifest.listed())
        StateTable.of_anchor(manifest)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=9) | st.just(SHA),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=examples(300))
@given(st.sampled_from([DELTA, ANCHOR]), st.data())
def test_any_value_anywhere_is_a_manifest_or_a_typed_refusal(base: Json, data: st.DataObject) -> None:
    path: list[Any] = []
    spot: Any = base
    while isinstance(spot, (dict, list)) and spot and (not path or data.draw(st.booleans())):
        path.append(data.draw(st.sampled_from(sorted(spot) if isinstance(spot, dict) else range(len(spot)))))
        spot = spot[path[-1]]
    body = spoil(base, *path, value=data.draw(VALUES))
    with contextlib.suppress(SlackwaterError):
        manifest = decode_manifest(body)
        list(manifest.listed())
        StateTable.of_anchor(manifest)


def test_a_manifest_larger_than_readers_hold_is_refused_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    assert MAX_MANIFEST_BYTES == 256 * 2**20
    body = json.dumps(DELTA).encode()
    monkeypatch.setattr(module, "MAX_MANIFEST_BYTES", len(body))
    assert decode_manifest(body).version == 7
    assert f"readers hold {len(body)}" in refusal(body + b" ")


@pytest.mark.parametrize(
    "body",
    [
        spoil(ANCHOR, "tensors", 0, 2, value=[2**40, 2**22]),
        spoil(ANCHOR, "tensors", 0, 2, value=[2**63 - 1]),
        spoil(ANCHOR, "tensors", 0, 2, value=[2**63 - 1] * 8),
        spoil(ANCHOR, "tensors", 0, value=["a", "U8", [2**62], 0, 0, ""]),
        spoil(ANCHOR, "tensors", 0, value=["a", "U8", [2**20, 2**42], 0, 0, ""]),
        spoil(DELTA, "bodies", "tiles", value=[2**63 - 1] * 3),
        spoil(DELTA, "bodies", "length", value=[2**63 - 1] * 3),
        spoil(DELTA, "tiles", "number", value=[2**63 - 1] * 4),
    ],
    ids=range(8),
)
def test_a8_07_sizes_that_lie_are_refused_in_no_time_and_no_memory(body: bytes) -> None:
    tracemalloc.start()
    try:
        began = time.process_time()
        refusal(body)
        assert time.process_time() - began < 0.05
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()
    vast = json.loads(spoil(ANCHOR, "tensors", 0, value=["a", "U8", [2**20, 2**42], 0, 0, ""]))
    vast["objects"][0][1] = 2**63 - 1
    assert "a: shape: a line" in refusal(json.dumps(vast).encode())
