"""Pieces that are none, ranks that fail of theirs: all ranks are told what is wrong, and nothing is visible."""

from collections.abc import Callable, Generator
from pathlib import Path

import pytest
import torch
from pieces_rig import (
    DOWN,
    NORM,
    UP,
    Trainer,
    Watched,
    big_model,
    check_held,
    cut,
    parted,
    pieces_for,
    small_tiles,
    specs_of,
    versions,
    with_pieces,
)
from publish_rig import RUN, Tensors, all_bits, keys, model_folder, restored, stepped

from slackwater.checkpoint.application import places_at, take
from slackwater.checkpoint.pieces import Piece, Pieces, num_lines
from slackwater.checkpoint.tensor import Bits, TensorSpec
from slackwater.errors import InvalidInputError, NotFoundError, SlackwaterError, UnavailableError, WrongBaseError
from slackwater.ids import Version
from slackwater.publish import gather
from slackwater.publish.exchange import thread_exchanges
from slackwater.publish.lineage import find_head
from slackwater.publish.merge import check_shares
from slackwater.publish.part import PartStore
from slackwater.publish.publisher import Publisher
from slackwater.publish.ranks import RankPublisher
from slackwater.testing.bucket import Fault, FaultyBucket, MemoryBucket
from slackwater.weights import diff
from slackwater.weights.parted import PartedSource
from slackwater.weights.source import Parted
from slackwater.weights.state_dict import StateDictSource

AWAY = UnavailableError("the store is away")


@pytest.fixture(autouse=True)
def tiles_are_small() -> Generator[None]:
    with small_tiles():
        yield


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return model_folder(tmp_path / "model")


def shared(state: Tensors, change: Callable[[list[dict[str, Piece]], list[list[str]]], object]) -> list[PartedSource]:
    """Two ranks' sources, of which a test has changed what each has."""
    specs = specs_of(state)
    large = [name for name, spec in specs.items() if num_lines(spec) > 1 and name != NORM and spec.num_bytes > 256]
    pieces = [{name: pieces_for(specs[name], 2)[rank] for name in large} for rank in range(2)]
    names = [[name for name in specs if name not in large], list[str]()]
    change(pieces, names)
    return [with_pieces(state, names[rank], pieces[rank]) for rank in range(2)]


Change = Callable[[list[dict[str, Piece]], list[list[str]]], object]
WRONG: list[tuple[Change, str]] = [
    (lambda pieces, _: pieces[1].update({UP: Piece(begin=42, end=96)}), f"line 42 of {UP} is published by rank 0 and"),
    (lambda pieces, _: pieces[0].update({UP: Piece(begin=0, end=42)}), f"no rank publishes lines 42 to 48 of {UP}"),
    (lambda pieces, _: pieces[1].pop(DOWN), f"no rank publishes lines 48 to 96 of {DOWN}"),
    (lambda pieces, _: pieces[0].pop(DOWN), f"no rank publishes lines 0 to 48 of {DOWN}"),
    (lambda pieces, _: (pieces[0].pop(UP), pieces[1].pop(UP)), f"no rank publishes {UP}"),
    (lambda pieces, names: (pieces[0].pop(UP), names[0].append(UP)), f"{UP} is published whole by rank 0, and in"),
    (lambda _, names: names[1].append(NORM), f"{NORM} is published by rank 0 and by rank 1"),
]  # fmt: skip


@pytest.mark.parametrize("is_anchor", [True, False])
@pytest.mark.parametrize(("change", "words"), WRONG)
def test_each_line_has_one_owner(model: Path, change: Change, words: str, is_anchor: bool) -> None:
    memory, state = MemoryBucket(), big_model()
    Publisher(memory, RUN).publish(StateDictSource(state), step=0, folder_files=model)
    buckets = [FaultyBucket(memory) for _ in range(2)]
    for result in Trainer(buckets).publish(shared(state, change), model, 1, anchor=is_anchor):
        assert isinstance(result, InvalidInputError)
        assert words in str(result)
        assert result.hint
    assert find_head(memory, RUN) == 0
    assert [bucket.count("put") for bucket in buckets] == [0, 0]  # told before anything is sent


def test_pieces_of_a_first_anchor_are_of_one_tensor(model: Path) -> None:
    bucket, state = MemoryBucket(), big_model()
    parts = parted(state, 2)
    parts[1] = parted({**state, UP: torch.cat([state[UP], state[UP]])}, 2)[1]
    for result in Trainer([bucket] * 2).publish(parts, model):
        assert isinstance(result, InvalidInputError)
        assert f"{UP} is BF16 [192, 32] on rank 1, and BF16 [96, 32] on another" in str(result)
    assert keys(bucket) == []


class Holds(StateDictSource):
    """A source whose pieces nobody has checked."""

    def __init__(self, tensors: Tensors, held: Pieces) -> None:
        super().__init__(tensors)
        self._held = held

    def pieces(self) -> Pieces:
        return self._held


@pytest.mark.parametrize("is_anchor", [True, False])
@pytest.mark.parametrize(
    ("name", "piece", "words"),
    [
        (UP, Piece(begin=0, end=47), f"a piece of {UP} ends at line 47 of axis 0, inside a tile"),
        (DOWN, Piece(begin=1, end=48), f"a piece of {DOWN} ends at line 1 of axis 1, inside a tile"),
        (NORM, Piece(begin=0, end=16), f"lines 0 to 16 of axis 0 of {NORM} can't be published alone: it has a single"),
        (UP, Piece(begin=0, end=200), f"lines 0 to 200 of axis 0 of {UP} are no piece of it: it has 96"),
        ("model.other", Piece(begin=0, end=1), "there is a piece of model.other, and no such tensor"),
    ],
)
def test_a_piece_that_is_none_is_told_by_all_ranks(
    model: Path, name: str, piece: Piece, words: str, is_anchor: bool
) -> None:
    bucket, state = MemoryBucket(), big_model()
    Publisher(bucket, RUN).publish(StateDictSource(state), step=0, folder_files=model)
    sources = [parted(state, 2)[0], Holds(state, {name: piece})]
    for result in Trainer([bucket] * 2).publish(sources, model, 1, anchor=is_anchor):
        assert isinstance(result, InvalidInputError)
        assert words in str(result)
    assert find_head(bucket, RUN) == 0


class Faulty(PartedSource):
    """A rank's source that fails when one of its pieces is read."""

    fault: Exception | None = None

    def bits(self, name: str) -> Bits:
        if name != UP:
            return super().bits(name)
        if self.fault is None:
            return super().bits(name)[:-1]
        raise self.fault


def faulty(state: Tensors, world: int, rank: int, fault: Exception | None) -> list[PartedSource]:
    """What ranks have; one of them can't be read, or is too short."""
    specs, parts = specs_of(state), parted(state, world)
    pieces = parts[rank].pieces()
    names = [name for name in parts[rank].specs() if name not in pieces]
    tensors = {**{name: state[name] for name in names}, **{n: cut(state[n], specs[n], p) for n, p in pieces.items()}}
    parts[rank] = source = Faulty(tensors, pieces, {name: state[name].shape for name in pieces})
    source.fault = fault
    return parts


FAULTS = [ZeroDivisionError("oh"), NotFoundError("it is gone"), None]


@pytest.mark.parametrize("is_anchor", [True, False])
@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("fault", FAULTS, ids=repr)
def test_where_a_piece_cannot_be_read_nobody_commits_and_all_raise(
    model: Path, monkeypatch: pytest.MonkeyPatch, rank: int, fault: Exception | None, is_anchor: bool
) -> None:
    monkeypatch.setattr(gather, "GATHER_BYTES", 1000)
    bucket, state = MemoryBucket(), big_model()
    trainer = Trainer([bucket] * 3)
    trainer.publish(parted(state, 3), model)
    after, whole = stepped(state, 1, 1e-2), keys(bucket, "/model-pieces")
    results = trainer.publish(faulty(after, 3, rank, fault), model, 1, anchor=is_anchor)
    expected = InvalidInputError if fault is None else type(fault)
    for place, result in enumerate(results):
        assert isinstance(result, expected if place == rank else SlackwaterError)
        assert place == rank or f"rank {rank} failed" in str(result)
    assert find_head(bucket, RUN) == 0
    assert keys(bucket, "/model-pieces") == whole  # what lacks a piece is never sent
    assert versions(trainer.publish(parted(after, 3), model, 2, anchor=is_anchor)) == {1}
    assert restored(bucket, 1) == all_bits(StateDictSource(after))
    check_held(trainer, parted(after, 3))


@pytest.mark.parametrize("is_anchor", [True, False])
@pytest.mark.parametrize("rank", [0, 2])
def test_where_the_store_fails_a_rank_nobody_commits_and_all_raise(model: Path, rank: int, is_anchor: bool) -> None:
    memory, state = MemoryBucket(), big_model()
    trainer = Trainer(buckets := [FaultyBucket(memory) for _ in range(3)])
    trainer.publish(parted(state, 3), model)
    state = stepped(state, 1, 1e-2)
    buckets[rank].add(Fault(verb="put", key="anchors/" if is_anchor else "/blobs/", before=AWAY))
    results = trainer.publish(parted(state, 3), model, 1, anchor=is_anchor)
    assert all(isinstance(result, UnavailableError) for result in results), results
    assert find_head(memory, RUN) == 0
    assert versions(trainer.publish(parted(state, 3), model, 1)) == {1}
    assert restored(memory, 1) == all_bits(StateDictSource(state))


def test_without_rank_0s_config_all_pieces_are_left_behind(model: Path, tmp_path: Path) -> None:
    bucket, state = MemoryBucket(), big_model()
    trainer = Trainer([bucket] * 3)
    for result in trainer.publish(parted(state, 3), tmp_path):
        assert isinstance(result, InvalidInputError)
        assert "config.json" in str(result)
    assert keys(bucket, "/manifests/") == []
    assert versions(trainer.publish(parted(state, 3), model)) == {0}


class Leaving(Watched):
    """A rank that is gone after so many gathers."""

    def gather(self, body: bytes) -> list[bytes] | None:
        if len(self.sent) == 4:
            self.exchange.leave()
        return super().gather(body)


def test_a_rank_that_goes_while_pieces_come_together_is_told_and_nothing_is_visible(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gather, "GATHER_BYTES", 1000)
    bucket, state = MemoryBucket(), big_model()
    exchanges = [kind(each) for kind, each in zip((Watched, Leaving), thread_exchanges(2, 60), strict=True)]
    trainer = Trainer([bucket] * 2)
    trainer.ranks = [RankPublisher(bucket, RUN, rank, 2, exchange) for rank, exchange in enumerate(exchanges)]
    results = trainer.publish(parted(state, 2), model)
    assert all(isinstance(result, UnavailableError) for result in results), results
    assert keys(bucket) == []


def test_a_single_publisher_refuses_a_piece(model: Path) -> None:
    bucket, state = MemoryBucket(), big_model()
    with pytest.raises(InvalidInputError, match="single publisher was given a piece of model"):
        Publisher(bucket, RUN).publish(parted(state, 2)[0], step=0, folder_files=model)
    assert keys(bucket) == []
    (alone,) = parted(state, 1)
    assert isinstance(alone, Parted)
    assert Publisher(bucket, RUN).publish(alone, step=0, folder_files=model).version == 0
    assert restored(bucket, 0) == all_bits(StateDictSource(state))


def test_whole_tensors_of_a_group_have_one_owner_and_its_pieces_lie_anywhere() -> None:
    layer = "model.layers.0.self_attn"
    query = TensorSpec(name=f"{layer}.q_proj.weight", dtype="BF16", shape=(64, 32))
    halves = [[(query, Piece(begin=0, end=32))], [(query, Piece(begin=32, end=64))]]
    check_shares([[], [f"{layer}.k_proj.weight", f"{layer}.v_proj.weight"]], None, halves)
    with pytest.raises(InvalidInputError, match="loads together with tensors of rank 0"):
        check_shares([[f"{layer}.k_proj.weight"], [f"{layer}.v_proj.weight"]], None, halves)


def test_bits_beside_a_piece_are_never_taken_for_its_own(model: Path) -> None:
    bucket, state = MemoryBucket(), big_model()
    Publisher(bucket, RUN).publish(StateDictSource(state), step=0, folder_files=model)
    specs = specs_of(state)
    held = PartStore(bucket, RUN).load(Version(0), [UP], {UP: pieces_for(specs[UP], 2)[0]})
    encoded = diff.compare(StateDictSource({UP: state[UP]}), held.table.outline, held.bits, threads=1)
    with pytest.raises(InvalidInputError, match="can't go from"):
        list(encoded)
    (place,) = places_at(held.table.outline, [held.table.outline.number(UP, 31)])
    with pytest.raises(WrongBaseError, match="isn't held: lines 0 to 48 are"):
        take([place], held.bits.__getitem__, held.pieces)
