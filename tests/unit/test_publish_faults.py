"""Faults by their numbers, as a publisher and a plain reader of its versions meet them: refused, or without effect.

Stores' own faults (status codes, sockets, tokens) are tested at the bucket; here a bucket's errors are final.
"""

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from publish_rig import RUN, Tensors, all_bits, keys, model_folder, restored, trained, weights

from depth import examples
from slackwater.bucket.base import ObjectInfo
from slackwater.checkpoint.keys import head_key, manifest_key
from slackwater.checkpoint.manifest import encode_manifest
from slackwater.errors import AuthError, CorruptError, NotFoundError, SlackwaterError, UnavailableError, WrongBaseError
from slackwater.ids import StateDigest, Version
from slackwater.publish.lineage import find_head, read_manifest
from slackwater.publish.publisher import Publisher
from slackwater.publish.restore import restore
from slackwater.testing.bucket import Fault, FaultyBucket, MemoryBucket, Verb
from slackwater.testing.clock import ManualClock
from slackwater.weights.state_dict import StateDictSource

LAST: Final = Version(3)
CAP: Final = 1 << 20
AWAY: Final = UnavailableError("the store is away")
FULL: Final = UnavailableError("No space left on device")
READ_ONLY: Final = AuthError("Read-only file system")
REVOKED: Final = AuthError("the token was revoked")

Spoil = Callable[[bytes], bytes | None]


def flip(place: float) -> Spoil:
    """Flip a bit of the first byte (0), the middle one (0.5) or the last one (1)."""

    def spoil(body: bytes) -> bytes:
        spoilt = bytearray(body)
        spoilt[round(place * (len(body) - 1))] ^= 1
        return bytes(spoilt)

    return spoil


SPOILT: Final[dict[str, Spoil]] = {
    "first byte": flip(0),
    "middle byte": flip(0.5),
    "last byte": flip(1),
    "a byte cut": lambda body: body[:-1],
    "empty": lambda _: b"",
    "a byte more": lambda body: body + b"\0",
    "deleted": lambda _: None,
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return model_folder(tmp_path / "model")


def states(count: int) -> list[Tensors]:
    found = [weights()]
    for step in range(1, count):
        found.append(trained(found[-1], step))
    return found


def published(model: Path, *, anchor_every: int = 50, count: int = LAST + 1) -> MemoryBucket:
    """A bucket with versions of `states`."""
    bucket = MemoryBucket()
    publisher = Publisher(bucket, RUN, anchor_every=anchor_every, threads=1, clock=ManualClock())
    for step, tensors in enumerate(states(count)):
        publisher.publish(StateDictSource(tensors), step=step, folder_files=model)
    return bucket


@pytest.fixture
def bucket(model: Path) -> MemoryBucket:
    """An anchor and three deltas."""
    return published(model)


def needed_keys(bucket: MemoryBucket) -> list[str]:
    """What the last version's bits depend on: every manifest and pack, and the anchor's weights."""
    return [key for key in keys(bucket) if any(part in key for part in ("/manifests/", "/blobs/", ".safetensors"))]


def replace_object(bucket: MemoryBucket, key: str, body: bytes | None) -> None:
    if body is None:
        bucket.delete(key)
    else:
        bucket.put(key, body)


# F10, F11: bits, lengths, and objects that are gone


@pytest.mark.parametrize("damage", SPOILT)
def test_f10_f11_whatever_is_spoilt_no_version_is_built_on_it(bucket: MemoryBucket, damage: str) -> None:
    good = restored(bucket, LAST)
    for key in needed_keys(bucket):
        body = bucket.get(key, max_bytes=CAP)
        replace_object(bucket, key, SPOILT[damage](body))
        with pytest.raises((CorruptError, NotFoundError)):
            restore(bucket, RUN, LAST)
        bucket.put(key, body)
    assert restored(bucket, LAST) == good


@pytest.mark.parametrize("damage", SPOILT)
def test_f10_f11_an_object_that_is_wrong_is_named(bucket: MemoryBucket, damage: str) -> None:
    for key in (key for key in needed_keys(bucket) if "/manifests/" not in key):
        body = bucket.get(key, max_bytes=CAP)
        replace_object(bucket, key, SPOILT[damage](body))
        with pytest.raises((CorruptError, NotFoundError), match=key):
            restore(bucket, RUN, LAST)
        bucket.put(key, body)


@pytest.mark.parametrize("damage", SPOILT)
def test_f10_f11_a_spoilt_hint_costs_a_search_and_nothing_else(bucket: MemoryBucket, damage: str) -> None:
    replace_object(bucket, head_key(RUN), SPOILT[damage](bucket.get(head_key(RUN), max_bytes=CAP)))
    assert find_head(bucket, RUN) == LAST
    publisher = Publisher.open(bucket, RUN, threads=1)
    assert publisher.publish(StateDictSource(weights()), step=9).version == LAST + 1
    assert bucket.get(head_key(RUN), max_bytes=CAP) == b'{"version":%d}' % (LAST + 1)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> MemoryBucket:
    """Like ``bucket``, made once: each test puts back what it changes."""
    return published(model_folder(tmp_path_factory.mktemp("whole") / "model"))


@given(st.integers(0, LAST), st.floats(0, 1, exclude_max=True), st.integers(0, 7))
@settings(deadline=None, max_examples=examples(200))
def test_f10_any_bit_of_any_manifest_is_refused_or_changes_no_weight(
    whole: MemoryBucket, version: int, place: float, bit: int
) -> None:
    """The step and the time are for people and have no digest; whatever leads to weights has."""
    key = manifest_key(RUN, Version(version))
    body = whole.get(key, max_bytes=CAP)
    good = restored(whole, LAST)
    spoilt = bytearray(body)
    spoilt[int(place * len(body))] ^= 1 << bit
    whole.put(key, bytes(spoilt))
    try:
        found = restored(whole, LAST)
    except (CorruptError, NotFoundError, WrongBaseError):
        found = good
    finally:
        whole.put(key, body)
    assert found == good


@pytest.mark.parametrize("damage", SPOILT)
def test_f10_f11_a_publisher_goes_no_further_on_a_spoilt_chain_and_shows_nothing(
    bucket: MemoryBucket, damage: str
) -> None:
    for key in needed_keys(bucket):
        body = bucket.get(key, max_bytes=CAP)
        if key == manifest_key(RUN, LAST) and damage == "deleted":
            continue  # that is a bucket that was set back
        replace_object(bucket, key, SPOILT[damage](body))
        counted = FaultyBucket(bucket)
        with pytest.raises((CorruptError, NotFoundError)):
            Publisher(counted, RUN, threads=1).publish(StateDictSource(weights()), step=9)
        assert counted.count("put") == counted.count("put_if_absent") == 0
        bucket.put(key, body)
    assert find_head(bucket, RUN) == LAST


# F12: things exchanged


def test_f12_a_delta_under_a_later_number_is_refused(model: Path) -> None:
    bucket = published(model, count=6)
    third = bucket.get(manifest_key(RUN, Version(3)), max_bytes=CAP)
    bucket.put(manifest_key(RUN, Version(5)), third)
    with pytest.raises(CorruptError, match="is the manifest of version 3"):
        restore(bucket, RUN, Version(5))
    assert restored(bucket, 4) == all_bits(StateDictSource(states(5)[4]))


def test_f12_a_delta_that_claims_another_number_is_refused_by_its_parent(model: Path) -> None:
    bucket = published(model, count=6)
    third = read_manifest(bucket, RUN, Version(3))
    assert third.parent is not None
    for parent in (third.parent, msgspec.structs.replace(third.parent, version=Version(4))):
        forged = msgspec.structs.replace(third, version=Version(5), parent=parent)
        bucket.put(manifest_key(RUN, Version(5)), encode_manifest(forged))
        with pytest.raises((CorruptError, WrongBaseError)):
            restore(bucket, RUN, Version(5))


def test_f12_a_delta_whose_parent_has_another_state_is_refused(bucket: MemoryBucket) -> None:
    last = read_manifest(bucket, RUN, LAST)
    assert last.parent is not None
    parent = msgspec.structs.replace(last.parent, state=StateDigest("0" * 64))
    bucket.put(manifest_key(RUN, LAST), encode_manifest(msgspec.structs.replace(last, parent=parent)))
    with pytest.raises(WrongBaseError):
        restore(bucket, RUN, LAST)


def test_f12_exchanged_packs_are_refused_by_digest(bucket: MemoryBucket) -> None:
    first, second, *_ = keys(bucket, "/blobs/")
    bodies = {key: bucket.get(key, max_bytes=CAP) for key in (first, second)}
    size = min(map(len, bodies.values()))
    bucket.put(first, bodies[second][:size].ljust(len(bodies[first]), b"\0"))
    bucket.put(second, bodies[first][:size].ljust(len(bodies[second]), b"\0"))
    with pytest.raises(CorruptError, match="/blobs/"):
        restore(bucket, RUN, LAST)


# F13, F14, F16: things late, gone, and set back


def test_f13_a_pack_that_comes_late_is_missing_by_name_until_it_is_there(bucket: MemoryBucket) -> None:
    pack = read_manifest(bucket, RUN, LAST).objects[0].key
    body = bucket.get(pack, max_bytes=CAP)
    bucket.delete(pack)
    with pytest.raises(NotFoundError, match=pack):
        restore(bucket, RUN, LAST)
    bucket.put(pack, body)
    assert restored(bucket, LAST) == all_bits(StateDictSource(states(4)[3]))


def test_f14_a_gap_below_an_anchor_harms_nobody(model: Path) -> None:
    bucket = published(model, anchor_every=4, count=6)
    bucket.delete(manifest_key(RUN, Version(3)))
    assert restored(bucket, 5) == all_bits(StateDictSource(states(6)[5]))
    assert Publisher.open(bucket, RUN, anchor_every=4).publish(StateDictSource(weights()), step=6).version == 6
    assert restored(bucket, 6) == all_bits(StateDictSource(weights()))


def test_f14_a_gap_above_the_last_anchor_is_told_and_lower_versions_stay(model: Path) -> None:
    bucket = published(model, count=6)
    bucket.delete(manifest_key(RUN, Version(3)))
    with pytest.raises(NotFoundError, match="version 3"):
        restore(bucket, RUN, Version(5))
    with pytest.raises(NotFoundError, match="version 3"):
        Publisher.open(bucket, RUN)
    assert restored(bucket, 2) == all_bits(StateDictSource(states(3)[2]))


@pytest.mark.parametrize("hint", [None, b"{", b'{"version":99}'])
@pytest.mark.parametrize("gone", [(3,), (0, 1, 2)], ids=["a gap", "the first by retention"])
def test_f14_no_number_is_used_again_though_the_hint_is_lost(
    model: Path, hint: bytes | None, gone: tuple[int, ...]
) -> None:
    bucket = published(model, anchor_every=4, count=6)
    for version in gone:
        bucket.delete(manifest_key(RUN, Version(version)))
    replace_object(bucket, head_key(RUN), hint)
    assert find_head(bucket, RUN) == 5
    assert Publisher.open(bucket, RUN, threads=1).publish(StateDictSource(weights()), step=9).version == 6
    assert restored(bucket, 6) == all_bits(StateDictSource(weights()))


def test_f16_a_version_made_after_the_bucket_was_set_back_never_fits_the_one_that_was_lost(model: Path) -> None:
    bucket = published(model, count=6)
    lost = read_manifest(bucket, RUN, Version(5))
    for version in (4, 5):
        bucket.delete(manifest_key(RUN, Version(version)))
    bucket.put(head_key(RUN), b'{"version":3}')
    publisher = Publisher.open(bucket, RUN)
    for step in (4, 5, 6):
        publisher.publish(StateDictSource(trained(weights(), 70 + step)), step=step)
    again = read_manifest(bucket, RUN, Version(6))
    assert again.parent is not None
    assert (again.parent.version, again.parent.state != lost.state) == (5, True)


# F18, F25, F26, F27, F29: a publisher whose bucket fails


def flaky(seed: int, share: float, calls: int) -> Iterator[Fault]:
    """For each verb's calls in turn: a share of them fails, before or after it is carried out."""
    generator = random.Random(seed)
    verbs: tuple[Verb, ...] = ("get", "get_range", "put", "put_if_absent", "list")
    for verb in verbs:
        for _ in range(calls):
            fails = generator.random() < share
            lost = generator.random() < 0.5
            yield Fault(verb=verb, before=AWAY if fails and not lost else None, after=AWAY if fails and lost else None)


@pytest.mark.parametrize("seed", range(10))
def test_f18_a_publisher_that_is_asked_again_until_it_is_done_leaves_one_whole_chain(model: Path, seed: int) -> None:
    memory = MemoryBucket()
    carried_out = FaultyBucket(memory)
    publisher = Publisher(FaultyBucket(carried_out, *flaky(seed, 0.3, 300)), RUN, anchor_every=4, threads=1)
    committed: dict[int, Tensors] = {}
    for step, tensors in enumerate(states(8)):
        for _ in range(200):
            try:
                version = publisher.publish(StateDictSource(tensors), step=step, folder_files=model).version
            except UnavailableError:
                continue
            committed[version] = tensors
            break
    assert len(committed) == 8
    head = find_head(memory, RUN)
    assert head is not None
    assert head == max(committed)
    for version in range(head + 1):  # a commit without an answer is a version too, of the same state
        manifest = read_manifest(memory, RUN, Version(version))
        assert restored(memory, version) == all_bits(StateDictSource(states(8)[manifest.step]))
    assert all(
        restored(memory, version) == all_bits(StateDictSource(tensors)) for version, tensors in committed.items()
    )
    assert {carried_out.count("put", key) for key in keys(memory) if key != head_key(RUN)} <= {0, 1}


class Lying(FaultyBucket):
    """Says once that a name is taken, and nothing is there: a stale answer."""

    lies = 1

    def put_if_absent(self, key: str, body: bytes) -> bool:
        if self.lies:
            self.lies -= 1
            return False
        return super().put_if_absent(key, body)


def test_f25_a_conflict_with_nothing_there_is_told_and_the_next_call_commits(model: Path) -> None:
    memory = MemoryBucket()
    publisher = Publisher(Lying(memory), RUN, threads=1)
    with pytest.raises(SlackwaterError):
        publisher.publish(StateDictSource(weights()), step=0, folder_files=model)
    assert find_head(memory, RUN) is None
    assert publisher.publish(StateDictSource(weights()), step=0, folder_files=model).version == 0
    assert restored(memory, 0) == all_bits(StateDictSource(weights()))


def writes(model: Path, kind: str) -> list[tuple[str, str]]:
    """The calls that write, of a clean run: verb and key."""
    calls: list[tuple[str, str]] = []

    class Noting(FaultyBucket):
        def put(self, key: str, body: bytes | memoryview) -> None:
            calls.append(("put", key))
            super().put(key, body)

        def put_if_absent(self, key: str, body: bytes) -> bool:
            calls.append(("put_if_absent", key))
            return super().put_if_absent(key, body)

    memory = MemoryBucket() if kind == "anchor" else published(model, count=1)
    tensors = states(2)[0 if kind == "anchor" else 1]
    Publisher(Noting(memory), RUN, threads=1).publish(StateDictSource(tensors), step=1, folder_files=model)
    return calls[:-1]  # the hint may fail


@pytest.mark.parametrize("kind", ["anchor", "delta"])
@pytest.mark.parametrize("error", [FULL, READ_ONLY, REVOKED], ids=["full", "read-only", "revoked"])
def test_f26_f29_a_write_that_is_refused_shows_nothing_and_the_publisher_goes_on_when_it_may(
    model: Path, kind: str, error: SlackwaterError
) -> None:
    for verb, key in writes(model, kind):
        memory = MemoryBucket() if kind == "anchor" else published(model, count=1)
        head = find_head(memory, RUN)
        tensors = states(2)[0 if kind == "anchor" else 1]
        fault = Fault(verb="put" if verb == "put" else "put_if_absent", key=key.rpartition("/")[2], before=error)
        bucket = FaultyBucket(memory, fault)
        publisher = Publisher(bucket, RUN, threads=1)
        with pytest.raises(type(error)) as raised:
            publisher.publish(StateDictSource(tensors), step=1, folder_files=model)
        assert raised.value.message == error.message
        assert find_head(memory, RUN) == head
        sent = keys(memory)
        before = {name: bucket.count("put", name) for name in sent}
        version = publisher.publish(StateDictSource(tensors), step=1, folder_files=model).version
        assert restored(memory, version) == all_bits(StateDictSource(tensors))
        again = [name for name in sent if bucket.count("put", name) > before[name] and name != head_key(RUN)]
        assert again == []


@pytest.mark.parametrize("jumps", [(1200.0, -2400.0, 1200.0), (-3600.0, -3600.0, 7200.0)])
def test_f27_the_order_comes_from_numbers_whatever_the_clock_says(model: Path, jumps: tuple[float, ...]) -> None:
    class Jumping(ManualClock):
        offset = 1.8e9

        def wall(self) -> float:
            return self.offset

    bucket, clock = MemoryBucket(), Jumping()
    publisher = Publisher(bucket, RUN, threads=1, clock=clock)
    times: list[str] = []
    for step, tensors in enumerate(states(len(jumps) + 1)):
        published = publisher.publish(StateDictSource(tensors), step=step, folder_files=model)
        assert published.version == step
        assert min(published.encode_s, published.upload_s) >= 0
        times.append(read_manifest(bucket, RUN, published.version).created_at)
        clock.offset += jumps[step % len(jumps)]
    assert times != sorted(times)
    assert find_head(bucket, RUN) == len(jumps)
    assert restored(bucket, len(jumps)) == all_bits(StateDictSource(states(len(jumps) + 1)[-1]))


# A6: object stores


class Unlisted(FaultyBucket):
    """A store whose listing shows nothing yet."""

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        super().list(prefix)
        return iter(())


def test_a6_10_nothing_rests_on_a_listing(model: Path) -> None:
    memory = MemoryBucket()
    for step, tensors in enumerate(states(4)):
        Publisher(Unlisted(memory), RUN, threads=1).publish(StateDictSource(tensors), step=step, folder_files=model)
    assert find_head(Unlisted(memory), RUN) == LAST
    assert restored(Unlisted(memory), LAST) == all_bits(StateDictSource(states(4)[3]))


def test_a6_01_a_hint_that_may_not_be_written_often_never_fails_a_publish(model: Path) -> None:
    memory = MemoryBucket()
    bucket = FaultyBucket(memory, Fault(verb="put", key="head.json", times=4, before=UnavailableError("429")))
    publisher = Publisher(bucket, RUN, threads=1, clock=ManualClock())
    versions = [
        publisher.publish(StateDictSource(tensors), step=step, folder_files=model).version
        for step, tensors in enumerate(states(5))
    ]
    assert versions == [0, 1, 2, 3, 4]
    assert find_head(memory, RUN) == 4
