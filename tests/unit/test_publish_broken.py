"""A forced anchor on a chain that is broken (F14)."""

from pathlib import Path
from typing import Final

import msgspec
import pytest
from history_rig import Shelf, drafted, hint_at, lose, ten_versions, tip
from publish_rig import RUN, all_bits, model_folder, restored, trained, weights

from slackwater.checkpoint.keys import manifest_key
from slackwater.checkpoint.manifest import encode_manifest
from slackwater.errors import (
    ConflictError,
    CorruptError,
    NotFoundError,
    SlackwaterError,
)
from slackwater.ids import StateDigest, Version
from slackwater.publish.baseline import Baseline, MemoryStore
from slackwater.publish.commit import commit
from slackwater.publish.lineage import Tip, find_head, read_manifest
from slackwater.publish.publisher import Publisher
from slackwater.testing.bucket import MemoryBucket
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
