"""A run's history is never rewritten in silence: whatever is lost, set back or late, no number is used twice."""

from functools import partial
from pathlib import Path
from typing import Final

import msgspec
import pytest
from history_rig import AWAY, CAP, Careless, Shelf, Trainer, Turned, drafted, hint_at, lose, ten_versions, tip
from hypothesis import given, settings
from hypothesis import strategies as st
from publish_rig import RUN, all_bits, keys, model_folder, restored, weights

from depth import examples
from slackwater.bucket.base import ObjectInfo
from slackwater.checkpoint.keys import manifest_key
from slackwater.checkpoint.manifest import encode_manifest
from slackwater.errors import (
    AuthError,
    ConflictError,
    CorruptError,
    LostRaceError,
    UnavailableError,
    UnsupportedError,
)
from slackwater.ids import StateDigest, Version
from slackwater.publish.commit import Committer, commit
from slackwater.publish.history import read_numbers
from slackwater.publish.lineage import Tip, find_head, read_manifest
from slackwater.publish.publisher import Publisher
from slackwater.testing.bucket import Fault, FaultyBucket, MemoryBucket
from slackwater.weights.state_dict import StateDictSource


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return model_folder(tmp_path / "model")


@pytest.fixture
def memory(model: Path) -> MemoryBucket:
    return ten_versions(model)


@pytest.fixture
def bucket(memory: MemoryBucket) -> Shelf:
    return Shelf(memory)


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
@settings(deadline=None, max_examples=examples(200))
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
