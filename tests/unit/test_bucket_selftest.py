"""The self-test against buckets that are well, deny things, or lie."""

import os
import threading
from collections.abc import Callable
from math import floor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slackwater.bucket.base import Bucket
from slackwater.bucket.local import LocalBucket
from slackwater.bucket.selftest import FOLDER, Examination, examine, skew_s
from slackwater.bucket.verdict import Mode, Outcome, Probe, judge
from slackwater.clock import SystemClock
from slackwater.errors import AuthError, NotFoundError, UnavailableError
from slackwater.testing.bucket import Fault, FaultyBucket, MemoryBucket, Verb
from slackwater.testing.clock import ManualClock

DENIED = AuthError("no right to it")
FOR_EVER = 10_000


class Overwriting(MemoryBucket):
    """Takes the condition and does nothing about it."""

    def put_if_absent(self, key: str, body: bytes) -> bool:
        self.put(key, body)
        return True


class LookingFirst(MemoryBucket):
    """Checks, and writes later: each creator alone is told the truth, several at once are not."""

    def __init__(self) -> None:
        super().__init__()
        self._looked = threading.Barrier(8)

    def put_if_absent(self, key: str, body: bytes) -> bool:
        try:
            self.get(key, max_bytes=1_000_000)
        except NotFoundError:
            self._looked.wait(10)
            self.put(key, body)
            return True
        return False


class Silent(MemoryBucket):
    """Says that it refused, and overwrites all the same."""

    def put_if_absent(self, key: str, body: bytes) -> bool:
        made = super().put_if_absent(key, body)
        if not made:
            self.put(key, body)
        return made


class Stale(MemoryBucket):
    """Reads what was there at first."""

    def __init__(self) -> None:
        super().__init__()
        self._first: dict[str, bytes] = {}

    def get(self, key: str, *, max_bytes: int) -> bytes:
        return self._first.setdefault(key, super().get(key, max_bytes=max_bytes))


class Padding(MemoryBucket):
    """Fills a range up to its length."""

    def get_range(self, key: str, start: int, length: int) -> bytes:
        body = self.get(key, max_bytes=1_000_000)
        return body[start : start + length].ljust(length, b"\0")


class Unlisted(MemoryBucket):
    """Its listings lag."""

    def list(self, prefix: str) -> Any:
        del prefix
        return iter(())


def outcomes(examination: Examination) -> dict[Probe, Outcome]:
    return {finding.probe: finding.outcome for finding in examination.findings}


def carried(bucket: Bucket) -> tuple[dict[Probe, Outcome], set[Mode]]:
    examination = examine(bucket, ManualClock())
    verdict = judge(examination.findings)
    return outcomes(examination), {mode for mode in Mode if verdict.carries(mode)}


def deny(*verbs: Verb, inner: Bucket | None = None) -> FaultyBucket:
    faults = [Fault(verb=verb, before=DENIED, times=FOR_EVER) for verb in verbs]
    return FaultyBucket(inner or MemoryBucket(), *faults)


def test_a_good_bucket_carries_everything_and_is_left_as_it_was() -> None:
    bucket = MemoryBucket()
    bucket.put("run/head.json", b"{}")
    found, modes = carried(bucket)
    assert modes == set(Mode)
    assert set(found.values()) == {Outcome.OK, Outcome.UNSUPPORTED}
    assert found[Probe.SWAP] is Outcome.UNSUPPORTED
    assert [info.key for info in bucket.list("")] == ["run/head.json"]


def test_a_directory_carries_everything_and_keeps_no_file(tmp_path: Path) -> None:
    examination = examine(LocalBucket(tmp_path), SystemClock())
    assert judge(examination.findings).carries(Mode.PUBLISH)
    assert outcomes(examination)[Probe.CLOCK] is Outcome.OK
    assert examination.left is None
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


@pytest.mark.parametrize(
    ("make", "wrong", "modes"),
    [
        (LookingFirst, {Probe.CREATE}, {Mode.READ}),
        (Overwriting, {Probe.CREATE, Probe.REFUSE}, {Mode.READ}),
        (Silent, {Probe.READ}, {Mode.READ}),
        (Stale, {Probe.REPLACE}, set(Mode)),
        (Padding, {Probe.RANGE_END}, set[Mode]()),
        (Unlisted, {Probe.SHOWN}, set(Mode)),
    ],
)
def test_a_store_that_lies_is_found_out(make: Callable[[], Bucket], wrong: set[Probe], modes: set[Mode]) -> None:
    found, carries = carried(make())
    assert {probe for probe, outcome in found.items() if outcome is Outcome.WRONG} >= wrong
    assert carries == modes


def test_a_replicas_key_reads_and_nothing_is_written() -> None:
    inner = MemoryBucket()
    inner.put("run/blobs/b", bytes(range(200)))
    bucket = deny("put", "put_if_absent", inner=inner)
    found, modes = carried(bucket)
    assert modes == {Mode.READ}
    assert found[Probe.CREATE] is Outcome.DENIED
    assert found[Probe.RANGE] is Outcome.OK
    assert [info.key for info in inner.list("")] == ["run/blobs/b"]


def test_a_replicas_key_reads_in_an_empty_bucket_too() -> None:
    found, modes = carried(deny("put", "put_if_absent"))
    assert modes == {Mode.READ}
    assert Probe.RANGE not in found


@pytest.mark.parametrize(
    ("verbs", "probe", "modes"),
    [
        (("list",), Probe.LIST, set[Mode]()),
        (("get", "get_range"), Probe.ABSENT, set[Mode]()),
        (("put_if_absent",), Probe.CREATE, {Mode.READ}),
        (("put",), Probe.REPLACE, set(Mode)),
    ],
)
def test_a_missing_right_is_named(verbs: tuple[Verb, ...], probe: Probe, modes: set[Mode]) -> None:
    found, carries = carried(deny(*verbs))
    assert found[probe] is Outcome.DENIED
    assert carries == modes


def test_without_the_right_to_list_nothing_else_is_tried() -> None:
    bucket = deny("list")
    assert list(outcomes(examine(bucket, ManualClock()))) == [Probe.LIST]
    assert (bucket.count("put_if_absent"), bucket.count("get")) == (0, 0)


def test_without_the_right_to_delete_one_small_object_stays_that_says_what_it_is() -> None:
    inner = MemoryBucket()
    examination = examine(FaultyBucket(inner), ManualClock())
    (left,) = inner.list("")
    assert left.key == examination.left
    assert left.key.startswith(f"{FOLDER}/")
    assert left.size < 100
    assert b"slackwater doctor" in inner.get(left.key, max_bytes=100)
    assert judge(examination.findings).carries(Mode.PUBLISH)


def test_two_examinations_at_once_do_not_meet() -> None:
    bucket = MemoryBucket()
    assert {examine(FaultyBucket(bucket), ManualClock()).left for _ in range(8)} == {
        info.key for info in bucket.list(FOLDER)
    }


def test_a_missing_bucket_is_told_as_such(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no such bucket"):
        examine(LocalBucket(tmp_path / "absent"), SystemClock())


def test_a_store_that_is_away_is_told_as_such_and_nothing_is_written() -> None:
    bucket = FaultyBucket(MemoryBucket(), Fault(verb="list", before=UnavailableError("away")))
    with pytest.raises(UnavailableError):
        examine(bucket, ManualClock())
    assert bucket.count("put_if_absent") == 0


def test_an_answer_that_fails_in_between_is_a_finding() -> None:
    fault = Fault(verb="get_range", before=UnavailableError("away"), times=FOR_EVER)
    found, modes = carried(FaultyBucket(MemoryBucket(), fault))
    assert found[Probe.RANGE] is Outcome.WRONG
    assert modes == set()


def test_a_creator_whose_answer_was_lost_is_no_fault_of_the_store() -> None:
    class Forgetful(MemoryBucket):
        def put_if_absent(self, key: str, body: bytes) -> bool:
            super().put_if_absent(key, body)
            return False

    found, _ = carried(Forgetful())
    assert found[Probe.CREATE] is Outcome.OK


def test_an_interrupted_examination_cleans_up(monkeypatch: pytest.MonkeyPatch) -> None:
    bucket = MemoryBucket()

    def interrupt(*_: object) -> bytes:
        raise KeyboardInterrupt

    monkeypatch.setattr(bucket, "get_range", interrupt)
    with pytest.raises(KeyboardInterrupt):
        examine(bucket, ManualClock())
    assert list(bucket.list("")) == []


def test_a_file_system_without_hard_links_can_be_read_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    found, modes = carried(LocalBucket(tmp_path))
    assert found[Probe.CREATE] is Outcome.UNSUPPORTED
    assert modes == {Mode.READ}
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_f27_a_clock_that_differs_is_named_and_stops_nothing(tmp_path: Path) -> None:
    examination = examine(LocalBucket(tmp_path), ManualClock())
    (clock,) = (finding for finding in examination.findings if finding.probe is Probe.CLOCK)
    assert clock.outcome is Outcome.WRONG
    assert "s ahead" in clock.detail
    assert judge(examination.findings).carries(Mode.PUBLISH)


@given(
    began=st.floats(0, 1e9),
    took=st.floats(0, 100),
    share=st.floats(0, 1),
    skew=st.floats(-1e6, 1e6),
)
def test_f27_the_skew_is_never_overstated_and_misses_at_most_the_time_it_took(
    began: float, took: float, share: float, skew: float
) -> None:
    modified = float(floor(began + share * took + skew))
    told = skew_s(began, began + took, modified)
    assert abs(told) <= abs(skew) + 1e-6
    assert told == 0 or (told > 0) == (skew > 0)
    assert abs(told) >= abs(skew) - took - 1.001
