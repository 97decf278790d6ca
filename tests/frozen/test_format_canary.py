"""Manifests with a canary, as bytes that never change: the page's reader and the package take and refuse the same."""

import json
from pathlib import Path
from typing import Any

import pytest
import reader_v2

from slackwater.checkpoint.canary import Canary
from slackwater.checkpoint.manifest import encode_manifest
from slackwater.checkpoint.rules import decode_manifest
from slackwater.errors import CorruptError

SHA = "ab" * 32
FROZEN = (
    f'{{"format":"slackwater/2","run":"r","version":8,"kind":"delta","parent":{{"version":7,"state":"{SHA}"}},'
    f'"state":"{SHA}","step":8,"created_at":"2026-01-01T00:00:00+00:00","objects":[],'
    '"bodies":{"object":[],"length":[],"encoding":"","tiles":[]},'
    '"tiles":{"number":[],"changed":[],"digests":"","sums":""},'
    '"canary":{"prompt":[1,0,2147483647],"tokens":[5,6,7,8],"logprobs":[-0.25,0.0,-0.1,-1e-7],"tolerance":0.05}}'
)
CANARY = Canary(prompt=(1, 0, 2**31 - 1), tokens=(5, 6, 7, 8), logprobs=(-0.25, 0.0, -0.1, -1e-7), tolerance=0.05)
HERE = Path(__file__).parent


def with_canary(text: str) -> bytes:
    return (FROZEN[: FROZEN.index('{"prompt"')] + text + "}").encode()


def test_a_canary_is_read_by_both_and_written_as_it_was() -> None:
    manifest = decode_manifest(FROZEN.encode())
    assert manifest.canary == CANARY
    assert encode_manifest(manifest) == FROZEN.encode()
    read = reader_v2.read_manifest(FROZEN.encode())["canary"]
    assert tuple(read["logprobs"]) == CANARY.logprobs
    assert (read["prompt"], read["tokens"], read["tolerance"]) == ([1, 0, 2**31 - 1], [5, 6, 7, 8], 0.05)


def test_no_frozen_version_has_one_and_none_is_taken_for_one() -> None:
    for path in (HERE / "v2" / "bucket").rglob("*.json"):
        if path.parent.name in {"manifests", "folds"}:
            assert decode_manifest(path.read_bytes(), fold=path.parent.name == "folds").canary is None
    assert decode_manifest(with_canary("null")).canary is None
    assert reader_v2.read_manifest(with_canary("null"))["canary"] is None


def canary(**changed: Any) -> str:
    good = {"prompt": [1], "tokens": [5, 6], "logprobs": [-0.25, -1], "tolerance": 0.05}
    return json.dumps({**good, **changed})


GOOD = [
    canary(),
    canary(tolerance=100),
    canary(logprobs=[0, -0.0]),
    canary(logprobs=[-1, -2]),
    canary(prompt=[1] * 512),
    canary(tokens=[1] * 64, logprobs=[-1e-400] * 64),
    canary().replace("-0.25", "-1.7976931348623158079e308"),
    canary().replace("-0.25", "-2.5E-1"),
    canary().replace(', "tolerance": 0.05', ""),
]
BAD = [
    "{}",
    "[]",
    '"x"',
    "true",
    canary(more=1),
    canary(prompt=[]),
    canary(prompt=[1] * 513),
    canary(prompt=[2**31]),
    canary(prompt=[-1]),
    canary(prompt=[1.0]),
    canary(prompt=[True]),
    canary(prompt="1"),
    canary(tokens=[]),
    canary(tokens=[5]),
    canary(tokens=[1] * 65, logprobs=[-1.0] * 65),
    canary(logprobs=[-0.25, 0.1]),
    canary(logprobs=[-0.25, True]),
    canary(logprobs=[-0.25, "-1"]),
    canary(logprobs=[-0.25, -(10**400)]),
    canary(logprobs=[-0.25, float("nan")]),
    canary(logprobs=[-0.25, -float("inf")]),
    canary(tolerance=0),
    canary(tolerance=-1),
    canary(tolerance=100.5),
    canary(tolerance=True),
    canary(tolerance=None),
    canary().replace("-0.25", "-1e400"),
    canary().replace("-0.25", "-1.7976931348623159e308"),
]


@pytest.mark.parametrize("text", GOOD, ids=range(len(GOOD)))
def test_what_the_page_admits_both_take_as_the_same_numbers(text: str) -> None:
    found = decode_manifest(with_canary(text)).canary
    assert found is not None
    read = reader_v2.read_manifest(with_canary(text))["canary"]
    assert found.logprobs == tuple(map(float, read["logprobs"]))
    assert found.tolerance == read.get("tolerance", 0.25)


@pytest.mark.parametrize("text", BAD, ids=range(len(BAD)))
def test_what_the_page_refuses_both_refuse(text: str) -> None:
    with pytest.raises(CorruptError):
        decode_manifest(with_canary(text))
    with pytest.raises(ValueError, match=r"canary|token|no JSON|log-probability"):
        reader_v2.read_manifest(with_canary(text))
