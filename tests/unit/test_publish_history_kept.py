"""A run's history is never rewritten in silence: whatever is lost, set back or late, no number is used twice."""

from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Final

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from publish_rig import RUN, Tensors, all_bits, keys, model_folder, restored, trained, weights

from slackwater.bucket.base import ObjectInfo
from slackwater.checkpoint.keys import head_key, manifest_key
from slackwater.checkpoint.manifest import encode_manifest
from slackwater.clock import SystemClock
from slackwater.delivery.fetcher import Fetcher
from slackwater.errors import (
    AuthError,
    ConflictError,
    CorruptError,
    LostRaceError,
    NotFoundError,
    SlackwaterError,
    UnavailableError,
    UnsupportedError,
)
from slackwater.ids import StateDigest, Version
from slackwater.publish.audit import Auditor
from slackwater.publish.baseline import Baseline, MemoryStore
from slackwater.publish.commit import Committer, commit, encode_checked
from slackwater.publish.damage import Report
from slackwater.publish.delta import tell_nobody
from slackwater.publish.draft import Draft, Label, draft_anchor
from slackwater.publish.hint import HINT_EVERY_S, HintWriter
from slackwater.publish.history import read_history, read_numbers
from slackwater.publish.lineage import Tip, find_head, read_manifest
from slackwater.publish.publisher import Publisher
from slackwater.testing.bucket import Fault, FaultyBucket, MemoryBucket
from slackwater.weights.image import take_image
from slackwater.weights.state_dict import StateDictSource

CAP: Final = 1 << 20
REFUSED: Final = AuthError("these credentials may not list")
AWAY: Final = UnavailableError("the store is away")


class Turned(SystemClock):
    """A clock that a test sets."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now


class Shelf(FaultyBucket):
    """A bucket whose listing is made by the test."""

    shown: list[ObjectInfo] | None = None
    """What a listing shows; None: all that is there."""
    may_list = True

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        found = super().list(prefix)
        if not self.may_list:
            raise REFUSED
        return found if self.shown is None else iter([item for item in self.shown if item.key.startswith(prefix)])


class Careless(FaultyBucket):
    """A store that takes a conditional create for a plain one."""

    def put_if_absent(self, key: str, body: bytes) -> bool:
        super().put_if_absent(key, body)
        self.put(key, body)
        return True


class Trainer:
    """A publisher, reduced to what decides a run's history: each version is an anchor of one number."""

    def __init__(self, bucket: FaultyBucket, model: Path, *, clock: Turned | None = None) -> None:
        self.baseline = Baseline(bucket, RUN, MemoryStore(bucket, RUN))
        self._committer = Committer(bucket)
        self._hints = HintWriter(bucket, RUN, clock or Turned())
        self._model = model
        self.baseline.sync(with_bits=False)

    def publish(self, step: int) -> Version:
        self.baseline.sync(with_bits=False)
        held = self.baseline.held
        draft, body = drafted(self._model, 0 if held is None else held.version + 1, step)
        with self.baseline.committing():
            self._committer.commit(draft.manifest, body, after=None if held is None else held.tip)
        self.baseline.replace(draft.manifest, draft.table, {})
        self._hints.wrote(draft.manifest.version)
        return draft.manifest.version


def drafted(model: Path, version: int, step: int) -> tuple[Draft, bytes]:
    tensors = {"model.norm.bias": weights()["model.norm.bias"] + step}
    label = Label(run=RUN, version=Version(version), step=step, created_at=f"step {step}")
    draft = draft_anchor(label, take_image(StateDictSource(tensors), model), threads=1)
    return draft, encode_checked(draft.manifest)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return model_folder(tmp_path / "model")


def states(count: int) -> list[Tensors]:
    found = [weights()]
    for step in range(1, count):
        found.append(trained(found[-1], step))
    return found


@pytest.fixture
def memory(model: Path) -> MemoryBucket:
    """Anchors 0 and 6, ten versions."""
    bucket = MemoryBucket()
    publisher = Publisher(bucket, RUN, anchor_every=6, threads=1)
    for step, tensors in enumerate(states(10)):
        publisher.publish(StateDictSource(tensors), step=step, folder_files=model)
    publisher.close()
    return bucket


@pytest.fixture
def bucket(memory: MemoryBucket) -> Shelf:
    return Shelf(memory)


def lose(bucket: MemoryBucket, *versions: int) -> None:
    for version in versions:
        bucket.delete(manifest_key(RUN, Version(version)))


def hint_at(bucket: MemoryBucket, version: int | None) -> None:
    if version is None:
        bucket.delete(head_key(RUN))
    else:
        bucket.put(head_key(RUN), b'{"version":%d}' % version)


def tip(bucket: MemoryBucket, version: int) -> Tip:
    return Tip(version=Version(version), state=read_manifest(bucket, RUN, Version(version)).state)


# The head at the open


@pytest.mark.parametrize("hint", [None, 0, 3, 4, 5, 9, 77])
def test_an_old_hint_below_a_gap_makes_no_lost_number_the_next(
    memory: MemoryBucket, bucket: Shelf, model: Path, hint: int | None
) -> None:
    lose(memory, 4)
    hint_at(memory, hint)
    assert find_head(bucket, RUN) == 9
    published = Publisher(bucket, RUN, threads=1).publish(
        StateDictSource(weights()), step=10, folder_files=model, anchor=True
    )
    assert published.version == 10


@pytest.mark.parametrize("shown", [0, 1, 5])
def test_a6_10_a_listing_that_lags_changes_nothing(memory: MemoryBucket, bucket: Shelf, shown: int) -> None:
    bucket.shown = sorted(memory.list(f"{RUN}/manifests"), key=lambda item: item.key)[:shown]
    for hint in (None, 0, 5, 9):
        hint_at(memory, hint)
        assert find_head(bucket, RUN) == 9


def test_a6_10_a_listing_that_is_refused_is_told_and_changes_nothing(
    bucket: Shelf, caplog: pytest.LogCaptureFixture
) -> None:
    bucket.may_list = False
    assert find_head(bucket, RUN) == 9
    assert "may not list" in caplog.text
    assert Publisher(bucket, RUN, threads=1).publish(StateDictSource(weights()), step=10).version == 10


def test_without_a_hint_and_a_listing_an_empty_run_is_never_guessed(memory: MemoryBucket, bucket: Shelf) -> None:
    bucket.may_list = False
    hint_at(memory, None)
    with pytest.raises(AuthError):
        find_head(bucket, RUN)
    assert find_head(bucket, RUN, at_least=Version(5)) == 9


def test_a_number_that_is_only_listed_does_not_count(memory: MemoryBucket, bucket: Shelf) -> None:
    there = list(memory.list(f"{RUN}/manifests"))
    bucket.shown = [*there, ObjectInfo(key=manifest_key(RUN, Version(50)), size=1)]
    hint_at(memory, 3)
    assert find_head(bucket, RUN) == 9


def test_a_number_under_which_an_empty_manifest_lies_was_used(memory: MemoryBucket) -> None:
    memory.put(manifest_key(RUN, Version(10)), b"")
    assert find_head(memory, RUN) == 10
    assert max(read_numbers(memory, RUN).written_s) == 10


# The version before, at the commit


def test_f16_a_bucket_that_is_set_back_under_a_publisher_gets_no_version_over_a_hole(
    memory: MemoryBucket, bucket: Shelf, model: Path
) -> None:
    trainer = Trainer(bucket, model)
    assert trainer.publish(10) == 10
    kept = {key: memory.get(key, max_bytes=CAP) for key in keys(memory, "/manifests/")}
    lose(memory, *range(6, 11))
    hint_at(memory, 5)
    for _ in range(3):
        with pytest.raises(
            ConflictError, match=r"version 10 of demo.* is gone, and version 5 .*set back.*new run"
        ) as told:
            trainer.publish(11)
        assert not isinstance(told.value, LostRaceError)
    assert find_head(memory, RUN) == 5
    for key, body in kept.items():
        memory.put(key, body)
    assert trainer.publish(11) == 11
    assert memory.get(manifest_key(RUN, Version(10)), max_bytes=CAP) == kept[manifest_key(RUN, Version(10))]


def test_a_publisher_that_reads_the_chain_again_never_falls_behind_what_it_knows(
    memory: MemoryBucket, bucket: Shelf, model: Path
) -> None:
    trainer = Trainer(bucket, model)
    trainer.publish(10)
    lose(memory, 4)
    hint_at(memory, 3)
    bucket.may_list = False
    bucket.add(Fault(verb="put_if_absent", before=AWAY))
    with pytest.raises(UnavailableError):
        trainer.publish(11)
    assert trainer.publish(11) == 11


def test_f16_a_publisher_refuses_a_history_that_another_wrote_anew(
    memory: MemoryBucket, bucket: Shelf, model: Path
) -> None:
    trainer = Trainer(bucket, model)
    trainer.publish(10)
    lose(memory, *range(6, 11))
    other = Trainer(bucket, model)
    for step in range(20, 26):
        other.publish(step)
    for _ in range(2):
        with pytest.raises(ConflictError, match=r"version 10 of demo has state .* written anew"):
            trainer.publish(11)
    assert other.publish(26) == 12
    assert Trainer(bucket, model).publish(27) == 13


def test_f16_a_bucket_that_is_emptied_under_a_publisher_gets_no_second_first_version(model: Path) -> None:
    memory = MemoryBucket()
    trainer = Trainer(FaultyBucket(memory), model)
    trainer.publish(0)
    for key in keys(memory):
        memory.delete(key)
    for _ in range(2):
        with pytest.raises(ConflictError, match="no version is there"):
            trainer.publish(1)
    assert keys(memory, "/manifests/") == []


@pytest.mark.parametrize("is_collected", [False, True])
def test_f08_a_publisher_that_slept_while_another_went_on_lost_the_race(
    memory: MemoryBucket, bucket: Shelf, model: Path, is_collected: bool
) -> None:
    slow, quick = Trainer(bucket, model), Trainer(bucket, model)
    slow.publish(10)
    with pytest.raises(LostRaceError):
        quick.publish(99)
    quick = Trainer(bucket, model)
    for step in range(11, 15):
        quick.publish(step)
    if is_collected:
        lose(memory, *range(14))
    for _ in range(2):
        with pytest.raises(LostRaceError, match="collected: others have gone on" if is_collected else "another publ"):
            slow.publish(98)
    assert quick.publish(15) == 15


def test_looking_at_the_version_before_costs_one_small_request(
    memory: MemoryBucket, bucket: Shelf, model: Path
) -> None:
    committer, after = Committer(bucket), tip(memory, 9)
    for number in range(10, 13):
        draft, body = drafted(model, number, number)
        before = [bucket.count(verb, f"{number - 1:08d}.json") for verb in ("get", "get_range")]
        committer.commit(draft.manifest, body, after=after)
        asked = [bucket.count(verb, f"{number - 1:08d}.json") for verb in ("get", "get_range")]
        assert [now - then for now, then in zip(asked, before, strict=True)] == ([1, 0] if number == 10 else [0, 1])
        after = Tip(version=Version(number), state=draft.manifest.state)
    assert bucket.count("put_if_absent") == 4


@pytest.mark.parametrize("by", ["commit", "committer"])
def test_a_version_before_that_is_gone_spoilt_or_another_stops_the_commit(
    memory: MemoryBucket, bucket: Shelf, model: Path, by: str
) -> None:
    commits = partial(commit, bucket) if by == "commit" else Committer(bucket).commit
    draft, body = drafted(model, 10, 10)
    key, after = manifest_key(RUN, Version(9)), tip(memory, 9)
    good = memory.get(key, max_bytes=CAP)
    another = msgspec.structs.replace(read_manifest(memory, RUN, Version(9)), state=StateDigest("0" * 64))
    for wrong, error in ((None, ConflictError), (encode_manifest(another), ConflictError), (b"{", CorruptError)):
        memory.put(key, wrong or b"")
        if wrong is None:
            memory.delete(key)
        with pytest.raises(error):
            commits(draft.manifest, body, after=after)
        assert (find_head(memory, RUN), bucket.count("put_if_absent")) == (8 if wrong is None else 9, 0)
    memory.put(key, good)
    commit(bucket, draft.manifest, body, after=after)
    commit(bucket, draft.manifest, body)  # its own, and nothing else is asked


def test_of_a_version_whose_manifest_can_not_be_read_it_is_asked_whether_it_is_there(
    memory: MemoryBucket, bucket: Shelf, model: Path
) -> None:
    draft, body = drafted(model, 10, 10)
    after = Tip(version=Version(9), state=None)
    lose(memory, 9)
    with pytest.raises(ConflictError, match="is gone"):
        commit(bucket, draft.manifest, body, after=after)
    memory.put(manifest_key(RUN, Version(9)), b"")
    commit(bucket, draft.manifest, body, after=after)
    assert find_head(memory, RUN) == 10


# A forced anchor on a chain that is broken


def broken(memory: MemoryBucket, how: str) -> None:
    """Nothing leads to version 9 any more."""
    last = read_manifest(memory, RUN, Version(9))
    match how:
        case "a gap":
            lose(memory, 7)
        case "the anchor is gone":
            lose(memory, 6)
        case "the anchor can't be read":
            memory.put(manifest_key(RUN, Version(6)), b"{")
        case "the head can't be read":
            memory.put(manifest_key(RUN, Version(9)), b"{")
        case "the head is empty":
            memory.put(manifest_key(RUN, Version(9)), b"")
        case _:
            assert last.parent is not None
            parent = msgspec.structs.replace(last.parent, state=StateDigest("0" * 64))
            memory.put(manifest_key(RUN, Version(9)), encode_manifest(msgspec.structs.replace(last, parent=parent)))


BREAKS: Final = (
    "a gap",
    "the anchor is gone",
    "the anchor can't be read",
    "the head can't be read",
    "the head is empty",
    "another parent",
)


@pytest.mark.parametrize("hint", [None, 3, 9])
@pytest.mark.parametrize("how", BREAKS)
def test_f14_a_forced_anchor_heals_a_broken_chain_and_deltas_go_on_from_it(
    memory: MemoryBucket, model: Path, caplog: pytest.LogCaptureFixture, how: str, hint: int | None
) -> None:
    broken(memory, how)
    hint_at(memory, hint)
    source, after = StateDictSource(weights(5)), StateDictSource(trained(weights(5), 1))
    publisher = Publisher(memory, RUN, threads=1)
    with pytest.raises((NotFoundError, CorruptError, ConflictError)):
        publisher.publish(source, step=10)
    healed = publisher.publish(source, step=10, folder_files=model, anchor=True)
    assert (healed.version, healed.kind) == (10, "anchor")
    assert "version 9 of demo can't be reached" in caplog.text
    following = publisher.publish(after, step=11)
    assert (following.version, following.kind) == (11, "delta")
    assert (restored(memory, 10), restored(memory, 11)) == (all_bits(source), all_bits(after))
    assert Publisher.open(memory, RUN, threads=1).publish(source, step=12).kind == "delta"


@pytest.mark.parametrize("how", BREAKS)
def test_f14_such_an_anchor_goes_on_from_the_head_as_it_lies_there(memory: MemoryBucket, model: Path, how: str) -> None:
    broken(memory, how)
    baseline = Baseline(memory, RUN, MemoryStore(memory, RUN))
    baseline.sync(with_bits=False)
    assert baseline.held is not None
    is_read = not how.startswith("the head")
    assert baseline.held.tip == (tip(memory, 9) if is_read else Tip(version=Version(9), state=None))
    assert baseline.held.anchor == (0 if how.startswith("the anchor") else 6)
    lose(memory, 9)
    draft, body = drafted(model, 10, 10)
    with pytest.raises(ConflictError, match="set back"):
        commit(memory, draft.manifest, body, after=baseline.held.tip)


def test_f14_a_fallen_anchor_makes_no_delta_on_what_it_fell_back_on(memory: MemoryBucket) -> None:
    lose(memory, 7)
    baseline = Baseline(memory, RUN, MemoryStore(memory, RUN))
    baseline.sync(with_bits=False)
    for names in (None, frozenset[str](), frozenset(["model.norm.bias"])):
        with pytest.raises(NotFoundError, match="version 7"):
            baseline.sync_to(Version(9), names, with_bits=True)


def test_f14_the_tensors_and_side_files_of_a_run_are_kept_over_a_broken_chain(
    memory: MemoryBucket, model: Path
) -> None:
    lose(memory, 7)
    publisher = Publisher(memory, RUN, threads=1)
    other = {**weights(), "model.norm.bias": weights()["model.norm.bias"].half()}
    with pytest.raises(SlackwaterError, match=r"model\.norm\.bias is F16"):
        publisher.publish(StateDictSource(other), step=10, folder_files=model, anchor=True)
    (model / "tokenizer.json").write_text('{"another": true}')
    with pytest.raises(SlackwaterError, match=r"tokenizer\.json"):
        publisher.publish(StateDictSource(weights()), step=10, folder_files=model, anchor=True)
    assert find_head(memory, RUN) == 9


@pytest.mark.parametrize("spoilt", [None, b"", b"{"])
def test_f14_without_any_anchor_a_new_run_is_asked_for(memory: MemoryBucket, model: Path, spoilt: bytes | None) -> None:
    for version in (0, 6):
        key = manifest_key(RUN, Version(version))
        memory.put(key, spoilt or b"")
        if spoilt is None:
            memory.delete(key)
    with pytest.raises(NotFoundError, match="start a new run"):
        Publisher(memory, RUN, threads=1).publish(
            StateDictSource(weights()), step=10, folder_files=model, anchor=True
        )  # fmt: skip
    assert find_head(memory, RUN) == 9


def test_f14_an_anchor_far_below_is_found_where_a_listing_shows_it(
    memory: MemoryBucket, bucket: Shelf, model: Path
) -> None:
    head = manifest_key(RUN, Version(5000))
    memory.put(head, b"{")
    hint_at(memory, 5000)
    bucket.may_list = False
    with pytest.raises(NotFoundError, match="start a new run"):
        Baseline(bucket, RUN, MemoryStore(bucket, RUN)).sync(with_bits=False)
    bucket.may_list = True
    published = Publisher(bucket, RUN, threads=1).publish(
        StateDictSource(weights()), step=10, folder_files=model, anchor=True
    )
    assert published.version == 5001


# The publisher itself


def test_f16_a_publisher_whose_bucket_is_set_back_is_refused_until_it_is_mended(
    memory: MemoryBucket, model: Path
) -> None:
    publisher = Publisher(memory, RUN, threads=1)
    publisher.publish(StateDictSource(weights(1)), step=10)
    kept = {key: memory.get(key, max_bytes=CAP) for key in keys(memory, "/manifests/")}
    lose(memory, *range(6, 11))
    for anchor in (False, True, False):
        with pytest.raises(ConflictError, match="set back"):
            publisher.publish(StateDictSource(weights(2)), step=11, folder_files=model, anchor=anchor)
    assert find_head(memory, RUN) == 5
    for key, body in kept.items():
        memory.put(key, body)
    assert publisher.publish(StateDictSource(weights(2)), step=11).version == 11
    assert restored(memory, 11) == all_bits(StateDictSource(weights(2)))


def test_a_publisher_on_a_store_that_creates_twice_is_refused(model: Path) -> None:
    publisher = Publisher(Careless(memory := MemoryBucket()), RUN, threads=1)
    for told in ("version 0 of demo is committed and whole", "version 1 of demo isn't committed"):
        with pytest.raises(UnsupportedError, match=told):
            publisher.publish(StateDictSource(weights()), step=0, folder_files=model)
    assert restored(memory, 0) == all_bits(StateDictSource(weights()))


def test_a6_01_a_publisher_hints_a_burst_once_and_its_last_version_when_it_is_closed(model: Path) -> None:
    memory, clock = MemoryBucket(), Turned()
    with Publisher(memory, RUN, threads=1, clock=clock) as publisher:
        for step, tensors in enumerate(states(5)):
            publisher.publish(StateDictSource(tensors), step=step, folder_files=model)
            assert hinted(memory) == b'{"version":0}'
    assert hinted(memory) == b'{"version":4}'


# A store that ignores create-if-absent


def test_a_store_that_creates_twice_is_refused_at_the_first_commit(model: Path) -> None:
    memory = MemoryBucket("careless")
    trainer = Trainer(Careless(memory), model)
    with pytest.raises(
        UnsupportedError, match=r"version 0 of demo is committed and whole: memory://careless ignores"
    ) as told:
        trainer.publish(0)
    assert "slackwater doctor memory://careless" in told.value.hint
    assert read_manifest(memory, RUN, Version(0)).step == 0
    for _ in range(2):
        with pytest.raises(UnsupportedError, match=r"version 1 of demo isn't committed"):
            trainer.publish(1)
    assert find_head(memory, RUN) == 0


def test_a_store_is_asked_once_by_each_publisher(bucket: Shelf, model: Path) -> None:
    trainer = Trainer(bucket, model)
    for step in range(10, 13):
        trainer.publish(step)
    assert bucket.count("put_if_absent") == 4


def test_a_store_that_does_not_answer_the_second_time_is_asked_at_the_next_commit(model: Path) -> None:
    bucket = Silent(MemoryBucket())
    trainer = Trainer(bucket, model)
    assert [trainer.publish(step) for step in range(3)] == [0, 1, 2]
    assert bucket.count("put_if_absent") == 5


class Silent(FaultyBucket):
    """Answers no second create of the first version."""

    def put_if_absent(self, key: str, body: bytes) -> bool:
        made = super().put_if_absent(key, body)
        if not made and key.endswith("0.json"):
            raise AWAY
        return made


class Lossy(FaultyBucket):
    """Loses the first answer, tries again by itself, and tells what it finds, as a bucket over a network does."""

    def put_if_absent(self, key: str, body: bytes) -> bool:
        made = super().put_if_absent(key, body)
        return made and not key.endswith("0.json")


def test_f05_an_answer_that_was_lost_shows_that_the_store_keeps_the_first(model: Path) -> None:
    bucket = Lossy(MemoryBucket())
    trainer = Trainer(bucket, model)
    assert [trainer.publish(step) for step in range(3)] == [0, 1, 2]
    assert bucket.count("put_if_absent") == 3


# The head hint


def hinted(bucket: MemoryBucket) -> bytes:
    return bucket.get(head_key(RUN), max_bytes=CAP)


def test_a6_01_of_a_burst_the_first_hint_is_written_and_the_last_at_the_end() -> None:
    bucket, clock = FaultyBucket(memory := MemoryBucket()), Turned()
    hints = HintWriter(bucket, RUN, clock)
    for version in range(5):
        hints.wrote(Version(version))
        clock.now += HINT_EVERY_S / 5
        assert hinted(memory) == b'{"version":0}'
    assert bucket.count("put") == 1
    for _ in range(2):
        hints.flush()
        assert (hinted(memory), bucket.count("put")) == (b'{"version":4}', 2)


def test_a6_01_versions_further_apart_are_all_hinted_and_nothing_is_left_for_the_end() -> None:
    bucket, clock = FaultyBucket(memory := MemoryBucket()), Turned()
    hints = HintWriter(bucket, RUN, clock)
    for version in range(5):
        hints.wrote(Version(version))
        assert hinted(memory) == b'{"version":%d}' % version
        clock.now += HINT_EVERY_S
    hints.flush()
    assert bucket.count("put") == 5


def test_a6_01_a_hint_that_fails_harms_nobody_and_is_written_later() -> None:
    memory, clock = MemoryBucket(), Turned()
    bucket = FaultyBucket(memory, Fault(verb="put", times=2, before=UnavailableError("429")))
    hints = HintWriter(bucket, RUN, clock)
    hints.wrote(Version(0))
    hints.wrote(Version(1))
    assert bucket.count("put") == 1
    clock.now += HINT_EVERY_S
    hints.wrote(Version(2))
    assert (keys(memory), bucket.count("put")) == ([], 2)
    hints.flush()
    assert hinted(memory) == b'{"version":2}'
    HintWriter(bucket, RUN, clock).flush()
    assert bucket.count("put") == 3


@given(st.lists(st.floats(0, 3), max_size=20))
def test_a6_01_no_two_hints_are_written_within_a_second_before_the_end(pauses: list[float]) -> None:
    clock, written = Turned(), list[float]()

    class Noting(FaultyBucket):
        def put(self, key: str, body: bytes | memoryview) -> None:
            written.append(clock.now)
            super().put(key, body)

    hints = HintWriter(Noting(memory := MemoryBucket()), RUN, clock)
    for version, pause in enumerate(pauses):
        hints.wrote(Version(version))
        clock.now += pause
    assert all(late - early >= HINT_EVERY_S for early, late in pairwise(written))
    hints.flush()
    assert not pauses or hinted(memory) == b'{"version":%d}' % (len(pauses) - 1)


# What retention took


def audited(bucket: MemoryBucket | FaultyBucket, version: int, scratch: Path) -> Report:
    auditor = Auditor(depth="manifest", scratch=scratch, threads=1, progress=tell_nobody)
    return auditor.version(bucket, RUN, Version(version))


def test_a_version_that_was_collected_is_told_and_is_no_damage(memory: MemoryBucket, tmp_path: Path) -> None:
    lose(memory, *range(6))
    for version in range(6):
        with pytest.raises(NotFoundError, match=f"version {version} of demo was collected: .* is anchor 6"):
            audited(memory, version, tmp_path)
    assert [audited(memory, version, tmp_path).counts for version in range(6, 10)] == [{}] * 4
    assert audited(memory, 10, tmp_path).counts == {"missing": 1}
    assert [entry.version for entry in read_history(memory, RUN)] == [6, 7, 8, 9]


@pytest.mark.parametrize("gone", [(7,), (0, 1, 2), (0, 1, 2, 3, 4, 5, 6), tuple(range(10))], ids=str)
def test_a_version_that_something_needs_is_damage(memory: MemoryBucket, tmp_path: Path, gone: tuple[int, ...]) -> None:
    lose(memory, *gone)
    for version in gone:
        assert audited(memory, version, tmp_path).counts == {"missing": 1}


def test_between_versions_that_are_there_a_lost_one_is_damage(memory: MemoryBucket, tmp_path: Path) -> None:
    lose(memory, 5)
    assert audited(memory, 5, tmp_path).counts == {"missing": 1}


@pytest.mark.parametrize("body", [b"", b"{"])
def test_below_an_anchor_that_can_not_be_read_nothing_is_called_collected(
    memory: MemoryBucket, tmp_path: Path, body: bytes
) -> None:
    lose(memory, *range(6))
    memory.put(manifest_key(RUN, Version(6)), body)
    assert audited(memory, 5, tmp_path).counts == {"missing": 1}


def test_a6_10_an_audit_rests_on_no_listing(memory: MemoryBucket, bucket: Shelf, tmp_path: Path) -> None:
    bucket.shown = list(memory.list(f"{RUN}/manifests"))
    lose(memory, *range(6))
    with pytest.raises(NotFoundError, match="was collected"):
        audited(bucket, 3, tmp_path)
    bucket.shown = []
    assert audited(bucket, 3, tmp_path).counts == {"missing": 1}
    bucket.may_list = False
    assert audited(bucket, 3, tmp_path).counts == {"missing": 1}
    assert audited(bucket, 9, tmp_path).counts == {}


@pytest.mark.parametrize("hint", [None, 0, 1])
@pytest.mark.parametrize("known", [2, 5])
def test_a_reader_whose_version_was_collected_goes_on_though_the_hint_is_lost(
    memory: MemoryBucket, bucket: Shelf, tmp_path: Path, hint: int | None, known: int
) -> None:
    fetcher = Fetcher(bucket, RUN, tmp_path / "cache")
    lose(memory, *range(6))
    hint_at(memory, hint)
    view = fetcher.look(Version(known))
    assert (view.version, view.receded) == (9, False)


def test_f16_a_reader_still_tells_a_bucket_that_was_set_back(
    memory: MemoryBucket, bucket: Shelf, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fetcher = Fetcher(bucket, RUN, tmp_path / "cache")
    lose(memory, *range(6, 10))
    for hint in (None, 0, 5):
        hint_at(memory, hint)
        view = fetcher.look(Version(9))
        assert (view.version, view.receded) == (9, True)
    bucket.may_list = False
    assert fetcher.look(Version(9)).receded
    assert "may not list" in caplog.text
    view = fetcher.look(Version(5))
    assert (view.version, view.receded) == (5, False)


# Any history


class Story:
    """One run's bucket, its trainer, and all that readers could have seen."""

    def __init__(self, model: Path) -> None:
        self.model = model
        self.memory = MemoryBucket()
        self.bucket = Shelf(self.memory)
        self.clock = Turned()
        self.lost: dict[str, bytes] = {}
        self.seen: dict[str, bytes] = {}
        self.steps = 0
        self.trainer: Trainer | None = None

    def publish(self) -> None:
        self.steps += 1
        try:
            if self.trainer is None:
                self.trainer = Trainer(self.bucket, self.model, clock=self.clock)
            self.trainer.publish(self.steps)
        except (ConflictError, UnavailableError, AuthError):
            return
        assert not self.lost

    def unanswered(self) -> None:
        self.bucket.add(Fault(verb="put_if_absent", after=AWAY))
        self.publish()

    def refused(self) -> None:
        self.bucket.add(Fault(verb="put_if_absent", before=AWAY))
        self.publish()

    def rival(self) -> None:
        """Another trainer commits. It begins now, so it can't know of what is lost now."""
        self.steps += 1
        if not self.lost:
            Trainer(FaultyBucket(self.memory), self.model).publish(self.steps)

    def reopen(self) -> None:
        """A trainer that begins where versions are lost knows of none: this isn't told here."""
        if not self.lost:
            self.trainer = None

    def set_back(self, share: float) -> None:
        """The newest versions go, if a trainer runs who knows of them."""
        if self.trainer is None or self.trainer.baseline.held is None:
            return
        there = keys(self.memory, "/manifests/")
        newest = self.trainer.baseline.held.version
        for key in there[int(share * (newest + 1)) :]:
            self.lost[key] = self.memory.get(key, max_bytes=CAP)
            self.memory.delete(key)

    def mend(self) -> None:
        for key, body in self.lost.items():
            self.memory.put(key, body)
        self.lost.clear()

    def hint(self, share: float | None) -> None:
        hint_at(self.memory, None if share is None else int(share * 1.5 * len(keys(self.memory, "/manifests/"))))

    def listing(self, kind: str) -> None:
        self.bucket.may_list = kind != "refused"
        self.bucket.shown = list(self.memory.list("")) if kind == "lags" else None

    def look(self) -> None:
        self.clock.now += 0.4
        for key in keys(self.memory, "/manifests/"):
            body = self.memory.get(key, max_bytes=CAP)
            assert self.seen.setdefault(key, body) == body, f"{key} was written twice"


SHARES: Final = st.floats(0, 1, exclude_max=True)
NAMES: Final = ("publish",) * 6 + ("unanswered", "refused", "rival", "rival", "reopen", "mend")
EVENTS: Final = st.one_of(
    st.tuples(st.sampled_from(NAMES)),
    st.tuples(st.just("set_back"), SHARES),
    st.tuples(st.sampled_from(NAMES)),
    st.tuples(st.just("hint"), st.none() | SHARES),
    st.tuples(st.just("listing"), st.sampled_from(["whole", "lags", "refused"])),
)


@given(st.lists(EVENTS, min_size=5, max_size=40))
@settings(deadline=None, max_examples=200)
def test_whatever_happens_no_number_ever_names_two_versions(
    tmp_path_factory: pytest.TempPathFactory, events: list[tuple[str] | tuple[str, object]]
) -> None:
    story = Story(model_folder(tmp_path_factory.mktemp("story") / "model"))
    for _ in range(3):
        story.publish()
    for name, *arguments in events:
        getattr(story, name)(*arguments)
        story.look()
    story.mend()
    story.listing("whole")
    story.look()
    story.reopen()
    story.publish()
    story.look()
    number = len(keys(story.memory, "/manifests/"))
    assert find_head(story.memory, RUN) == (number - 1 if number else None)
