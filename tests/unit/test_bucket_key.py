"""Keys: what the grammar lets through can't leave a directory or bend a URL."""

from pathlib import PurePosixPath
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slackwater.bucket.key import MAX_KEY, check_key, check_prefix, check_range
from slackwater.checkpoint.keys import anchor_key, blob_key, head_key, manifest_key
from slackwater.errors import InvalidInputError
from slackwater.ids import ObjectDigest, RunId, Version
from slackwater.testing.conformance_bucket import HOSTILE_KEYS

RUN = RunId("demo-1.b_2")


@pytest.mark.parametrize(
    "key",
    [
        manifest_key(RUN, Version(7)),
        anchor_key(RUN, Version(0), "0" * 16, "model-00001-of-00002.safetensors"),
        blob_key(RUN, ObjectDigest("a" * 64)),
        head_key(RUN),
    ],
)
def test_every_key_of_the_format_is_one(key: str) -> None:
    assert check_key(key) == key


@pytest.mark.parametrize("key", HOSTILE_KEYS)
def test_a8_04_hostile_names_are_refused(key: str) -> None:
    with pytest.raises(InvalidInputError):
        check_key(key)


@given(st.one_of(st.text(max_size=40), st.text(alphabet="a./-_%\\\0", max_size=40)))
def test_what_passes_stays_below_the_root_and_needs_no_quoting(key: str) -> None:
    try:
        check_key(key)
    except InvalidInputError:
        return
    path = PurePosixPath(key)
    assert not path.is_absolute()
    assert ".." not in path.parts
    assert path.as_posix() == key
    assert quote(key) == key


def test_a_long_key_is_cut_in_the_message() -> None:
    with pytest.raises(InvalidInputError) as refused:
        check_key("k/" * MAX_KEY)
    assert len(str(refused.value)) < 300


def test_a_prefix_may_be_empty_or_end_with_a_slash() -> None:
    assert check_prefix("") == ""
    assert check_prefix("a/b/") == "a/b"


@pytest.mark.parametrize("prefix", ["/", "a//", "..", "../"])
def test_a_hostile_prefix_is_refused(prefix: str) -> None:
    with pytest.raises(InvalidInputError):
        check_prefix(prefix)


@pytest.mark.parametrize(("start", "length"), [(-1, 0), (0, -1), (-5, -5)])
def test_a_range_counts_forward(start: int, length: int) -> None:
    with pytest.raises(InvalidInputError):
        check_range(start, length)
