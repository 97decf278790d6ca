"""The scripted bucket does what its script says, so that other tests may rest on it."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from slackwater.errors import UnavailableError
from slackwater.testing.bucket import Fault, FaultyBucket, Gate, MemoryBucket


def test_a_fault_before_a_write_leaves_nothing() -> None:
    bucket = FaultyBucket(MemoryBucket(), Fault(verb="put_if_absent", before=UnavailableError("away")))
    with pytest.raises(UnavailableError):
        bucket.put_if_absent("m/1", b"x")
    assert bucket.put_if_absent("m/1", b"x") is True


def test_a_lost_answer_leaves_the_write() -> None:
    bucket = FaultyBucket(MemoryBucket(), Fault(verb="put_if_absent", after=UnavailableError("lost")))
    with pytest.raises(UnavailableError):
        bucket.put_if_absent("m/1", b"x")
    assert bucket.put_if_absent("m/1", b"y") is False
    assert bucket.get("m/1", max_bytes=1) == b"x"


def test_faults_meet_their_verb_and_key_and_are_spent_in_order() -> None:
    memory = MemoryBucket()
    memory.put("a", b"0123")
    memory.put("b", b"0123")
    bucket = FaultyBucket(memory, Fault(verb="get", key="a", cut=2), Fault(verb="get", key="a", flip=0, times=2))
    assert bucket.get("b", max_bytes=9) == b"0123"
    assert [bucket.get("a", max_bytes=9) for _ in range(4)] == [b"01", b"1123", b"1123", b"0123"]
    assert bucket.get_range("a", 0, 4) == b"0123"
    assert (bucket.count("get"), bucket.count("get", "a"), bucket.count("put")) == (5, 4, 0)


def test_a_gate_holds_a_call_until_it_is_opened() -> None:
    gate = Gate()
    bucket = FaultyBucket(MemoryBucket(), Fault(verb="put", gate=gate))
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(bucket.put, "k", b"x")
        assert gate.reached.wait(10)
        assert list(bucket.list("")) == []
        gate.open()
        call.result()
    assert [info.key for info in bucket.list("")] == ["k"]


def test_a_forgotten_gate_fails() -> None:
    with pytest.raises(TimeoutError, match="never opened"):
        Gate().hold(seconds=0.0)
