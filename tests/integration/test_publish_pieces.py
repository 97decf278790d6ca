"""Tensors published in pieces: the states of a single publisher, by ranks that hold and read their pieces alone."""

import tempfile
from collections.abc import Generator, Sequence
from itertools import pairwise
from math import inf
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pieces_rig import (
    DOWN,
    NORM,
    UP,
    Trainer,
    big_model,
    check_held,
    cut,
    edges_of,
    parted,
    pieces_for,
    small_tiles,
    specs_of,
    versions,
    with_pieces,
)
from publish_rig import RUN, Tensors, all_bits, model_folder, restored, stepped

from depth import examples
from slackwater.checkpoint.bundles import Batch
from slackwater.checkpoint.groups import group_key
from slackwater.checkpoint.outline import Outline
from slackwater.checkpoint.pieces import Piece, Pieces, num_lines
from slackwater.checkpoint.tensor import tile_count
from slackwater.ids import Version
from slackwater.publish import gather, part
from slackwater.publish.background import Handle
from slackwater.publish.baseline import MemoryStore
from slackwater.publish.lineage import read_manifest
from slackwater.publish.merge import share_out
from slackwater.publish.part import PartStore
from slackwater.publish.published import Published
from slackwater.publish.publisher import Publisher
from slackwater.testing.bucket import FaultyBucket, MemoryBucket
from slackwater.weights import diff
from slackwater.weights.source import FolderSource, TensorSource
from slackwater.weights.state_dict import StateDictSource

WORLDS = [1, 2, 3, 4]


@pytest.fixture(autouse=True)
def tiles_are_small() -> Generator[None]:
    with small_tiles():
        yield


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return model_folder(tmp_path / "model")


@pytest.mark.parametrize("world", WORLDS)
def test_pieces_make_the_states_of_a_single_publisher(model: Path, world: int) -> None:
    one, many = MemoryBucket(), MemoryBucket()
    alone, trainer = Publisher(one, RUN, anchor_every=3), Trainer([many] * world, every=3)
    state = big_model()
    for step in range(5):
        published = alone.publish(StateDictSource(state), step=step, folder_files=model)
        results = trainer.publish(parted(state, world), model, step)
        assert versions(results) == {step}
        for result in results:
            assert isinstance(result, Published)
            assert (result.state, result.kind, result.changed, result.total) == (
                published.state, published.kind, published.changed, published.total
            )  # fmt: skip
        assert restored(many, step) == restored(one, step) == all_bits(StateDictSource(state))
        check_held(trainer, parted(state, world))
        state = stepped(state, step, 1e-3)
    table = read_manifest(many, RUN, Version(1)).tiles
    other = read_manifest(one, RUN, Version(1)).tiles
    assert table is not None
    assert other is not None
    assert (sorted(table.number), table.sums) == (sorted(other.number), other.sums)


def test_no_rank_sends_reads_or_encodes_tiles_of_anothers_piece(model: Path) -> None:
    memory, state = MemoryBucket(), big_model()
    Publisher(memory, RUN).publish(StateDictSource(state), step=0, folder_files=model)
    trainer = Trainer(buckets := [FaultyBucket(memory) for _ in range(4)])
    state = stepped(state, 1, 1e-2)
    assert versions(trainer.publish(parted(state, 4), model, 1)) == {1}
    assert [bucket.count("put", "/blobs/") for bucket in buckets] == [1] * 4
    manifest = read_manifest(memory, RUN, Version(1))
    outline = read_manifest(memory, RUN, Version(0)).outline
    owners: dict[int, list[int]] = {}
    for body in manifest.listed():
        for tile in body.tiles:
            if outline.place(tile.number)[0].name == UP:
                owners.setdefault(body.object, []).append(tile.number)
    numbers = range(*outline.first_tiles[outline.by_name[UP] : outline.by_name[UP] + 2])
    assert sorted(number for held in owners.values() for number in held) == list(numbers)
    assert len(owners) == 4
    assert max(map(max, (exchange.sent for exchange in trainer.exchanges))) < 16_000  # manifests
    check_held(trainer, parted(state, 4))


def test_one_tensor_alone_may_change_at_one_rank_alone(model: Path) -> None:
    one, many = MemoryBucket(), MemoryBucket()
    state = big_model()
    for bucket in (one, many):
        Publisher(bucket, RUN).publish(StateDictSource(state), step=0, folder_files=model)
    state[DOWN] = state[DOWN].clone()
    state[DOWN][3, 95] = 7.0
    published = Publisher(one, RUN).publish(StateDictSource(state), step=1)
    (first, *_) = Trainer([many] * 4).publish(parted(state, 4), model, 1)
    assert isinstance(first, Published)
    assert (first.state, first.changed) == (published.state, 1)
    assert restored(many, 1) == all_bits(StateDictSource(state))


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("other", WORLDS)
def test_a_trainer_that_starts_anew_holds_other_pieces(model: Path, world: int, other: int) -> None:
    bucket, state = MemoryBucket(), big_model()
    first = Trainer([bucket] * world)
    for step in range(3):
        first.publish(parted(state, world), model, step)
        state = stepped(state, step, 1e-3)
    again = Trainer([bucket] * other)
    assert versions(again.publish(parted(state, other), model, 3)) == {3}
    assert read_manifest(bucket, RUN, Version(3)).kind == "delta"
    assert restored(bucket, 3) == all_bits(StateDictSource(state))
    check_held(again, parted(state, other))


def whole(state: Tensors, world: int) -> list[TensorSource]:
    return [
        StateDictSource({name: state[name] for name in share}) for share in share_out(specs_of(state).values(), world)
    ]


def test_ranks_may_go_from_whole_tensors_to_pieces_and_back(model: Path) -> None:
    bucket, state = MemoryBucket(), big_model()
    trainer = Trainer([bucket] * 3)
    for step in range(6):
        parts = whole(state, 3) if step % 3 == 0 else parted(state, 3)
        assert versions(trainer.publish(parts, model, step)) == {step}
        assert restored(bucket, step) == all_bits(StateDictSource(state))
        check_held(trainer, parts)
        state = stepped(state, step, 1e-2)


def test_an_anchor_of_pieces_is_an_ordinary_folder(model: Path, tmp_path: Path) -> None:
    bucket, state = MemoryBucket(), big_model()
    Trainer([bucket] * 3).publish(parted(state, 3), model)
    manifest = read_manifest(bucket, RUN, Version(0))
    (copy := tmp_path / "copy").mkdir()
    for file, index in manifest.files.items():
        (copy / file).write_bytes(bucket.get(manifest.objects[index].key, max_bytes=1 << 20))
    assert all_bits(FolderSource(copy)) == all_bits(StateDictSource(state))
    assert Publisher.open(bucket, RUN).publish(StateDictSource(state), step=1).changed == 0


@pytest.mark.parametrize("most", [1, 100, 1000])
def test_an_anchors_pieces_come_together_in_rounds_of_bounded_size(
    model: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    monkeypatch.setattr(gather, "GATHER_BYTES", most * 4)
    bucket, state = MemoryBucket(), big_model()
    trainer = Trainer([bucket] * 4)
    assert versions(trainer.publish(parted(state, 4), model)) == {0}
    assert restored(bucket, 0) == all_bits(StateDictSource(state))
    row = 96 * 2 // 4 + 64
    assert len({len(exchange.sent) for exchange in trainer.exchanges}) == 1
    for exchange in trainer.exchanges:
        assert len(exchange.sent) > 4
        assert max(exchange.sent[1:-1]) <= max(most, row)  # the first is what a rank has, the last its manifest


def test_a_rank_reads_pieces_of_an_anchor_in_ranges_of_bounded_size(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(part, "PIECE_BYTES", 200)
    memory, state = MemoryBucket(), big_model()
    Publisher(memory, RUN).publish(StateDictSource(state), step=0, folder_files=model)
    lengths: list[int] = []

    class Reads(MemoryBucket):
        def get_range(self, key: str, start: int, length: int) -> bytes:
            lengths.append(length)
            return memory.get_range(key, start, length)

        def get(self, key: str, *, max_bytes: int) -> bytes:
            return memory.get(key, max_bytes=max_bytes)

    specs = specs_of(state)
    pieces = {UP: pieces_for(specs[UP], 4)[2], DOWN: pieces_for(specs[DOWN], 4)[1]}
    held = PartStore(Reads(), RUN).load(Version(0), [UP, DOWN], pieces)
    assert max(lengths) <= 200
    assert sum(lengths) == specs[UP].num_bytes // 4 + specs[DOWN].num_bytes  # columns lie in all rows
    for name, piece in pieces.items():
        expected = StateDictSource({name: cut(state[name], specs[name], piece)}).bits(name)
        np.testing.assert_array_equal(held.bits[name], expected)
    same = MemoryStore(memory, RUN).load(Version(0), [UP, DOWN, "model.unknown"], pieces)
    assert same.bits.keys() == held.bits.keys()
    assert all(np.array_equal(same.bits[name], held.bits[name]) for name in pieces)


def test_a_body_that_joins_tiles_of_several_pieces_is_still_read(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket, state = MemoryBucket(), big_model()
    alone = Publisher(bucket, RUN)
    alone.publish(StateDictSource(state), step=0, folder_files=model)

    def joined(outline: Outline, names: Sequence[str], pieces: Pieces) -> Generator[Batch]:
        assert not pieces
        for name in names:
            first, end = outline.first_tiles[outline.by_name[name] : outline.by_name[name] + 2]
            numbers = list(range(first, end))
            yield tuple(tuple(numbers[begin : begin + 5]) for begin in range(0, len(numbers), 5))

    with monkeypatch.context() as patch:
        patch.setattr(diff, "batches", joined)
        state = stepped(state, 1, 1e-2)
        alone.publish(StateDictSource(state), step=1)
    assert max(len(body.tiles) for body in read_manifest(bucket, RUN, Version(1)).listed()) == 5
    state = stepped(state, 2, 1e-2)
    trainer = Trainer([bucket] * 4)
    assert versions(trainer.publish(parted(state, 4), model, 2)) == {2}
    assert restored(bucket, 2) == all_bits(StateDictSource(state))
    check_held(trainer, parted(state, 4))


def test_a_nan_in_a_piece_is_told(model: Path) -> None:
    bucket, state = MemoryBucket(), big_model()
    trainer = Trainer([bucket] * 4, every=3)
    for step, (name, place) in enumerate([(NORM, 3), (DOWN, (31, 90)), (UP, (70, 1))]):
        trainer.publish(parted(state, 4), model, step)
        assert read_manifest(bucket, RUN, Version(step)).nans == (() if step == 0 else (NORM, DOWN)[step - 1 : step])
        state[name] = state[name].clone()
        state[name][place] = float("nan")
    trainer.publish(parted(state, 4), model, 3)
    manifest = read_manifest(bucket, RUN, Version(3))
    assert (manifest.kind, manifest.nans) == ("anchor", (DOWN, UP, NORM))


@pytest.mark.parametrize("is_anchor", [True, False])
def test_pieces_are_published_in_the_background_as_they_were_when_called(model: Path, is_anchor: bool) -> None:
    bucket, state = MemoryBucket(), big_model()
    trainer = Trainer([bucket] * 3)
    trainer.publish(parted(state, 3), model)
    state = stepped(state, 1, 1e-2)
    expected = all_bits(StateDictSource(state))
    handles = trainer.publish_async(parted(state, 3), model, 1, anchor=is_anchor)
    for tensor in state.values():
        tensor.zero_()

    def result(rank: int) -> object:
        handle = handles[rank]
        assert isinstance(handle, Handle)
        return handle.result(60)

    assert versions(trainer.together(result)) == {1}
    assert restored(bucket, 1) == expected
    after = stepped(big_model(), 2, 1e-2)
    assert versions(trainer.publish(parted(after, 3), model, 2)) == {2}
    assert restored(bucket, 2) == all_bits(StateDictSource(after))


def test_mapped_baselines_hold_pieces_over_a_restart(model: Path, tmp_path: Path) -> None:
    memory, state = MemoryBucket(), big_model()
    folder = tmp_path / "baselines"
    trainer = Trainer([memory] * 4, folder=folder, every=3)
    for step in range(5):  # with an anchor among them
        trainer.publish(parted(state, 4), model, step)
        check_held(trainer, parted(state, 4))
        state = stepped(state, step, 1e-2)
    for rank in trainer.ranks:
        rank.close()
    sizes = [(folder / f"rank-{rank}" / "baseline.bin").stat().st_size for rank in range(4)]
    for source, size in zip(parted(state, 4), sizes, strict=True):
        assert size == sum(-(-source.bits(name).nbytes // 64) * 64 for name in source.specs())
    Publisher(memory, RUN, anchor_share=inf).publish(
        StateDictSource(state), step=5
    )  # a version that the files have missed
    state = stepped(state, 5, 1e-2)
    again = Trainer(buckets := [FaultyBucket(memory) for _ in range(4)], folder=folder)
    assert versions(again.publish(parted(state, 4), model, 6)) == {6}
    assert [bucket.count("get_range", "/anchors/") for bucket in buckets] == [0] * 4
    assert restored(memory, 6) == all_bits(StateDictSource(state))
    for rank in again.ranks:
        rank.close()
    for world in (4, 2):  # pieces of the same sizes on other ranks, then other pieces
        state = stepped(state, world, 1e-2)
        parts = list(reversed(parted(state, world)))
        other = Trainer([memory] * world, folder=folder)
        step = Version(7 if world == 4 else 8)
        assert versions(other.publish(parts, model, step)) == {step}
        assert restored(memory, step) == all_bits(StateDictSource(state))
        for rank in other.ranks:
            rank.close()


@given(st.data())
@settings(max_examples=examples(15), deadline=None)
def test_ranks_may_have_any_lines_that_are_whole_tiles(data: st.DataObject) -> None:
    state, world = big_model(), data.draw(st.integers(1, 4))
    specs = specs_of(state)
    pieces: list[dict[str, Piece]] = [{} for _ in range(world)]
    names: list[list[str]] = [[] for _ in range(world)]
    for name, spec in specs.items():
        order = data.draw(st.permutations(range(world)))
        if tile_count(spec) < 2 or data.draw(st.booleans()):
            names[len(group_key(name)) % world].append(name)
            continue
        edges = data.draw(st.lists(st.sampled_from(edges_of(spec)), min_size=world - 1, max_size=world - 1))
        for rank, (begin, end) in zip(order, pairwise([0, *sorted(edges), num_lines(spec)]), strict=True):
            pieces[rank][name] = Piece(begin=begin, end=end)
    after, bucket = stepped(state, 1, 1e-2), MemoryBucket()
    with tempfile.TemporaryDirectory() as home:
        alone = Publisher(bucket, RUN)
        alone.publish(StateDictSource(state), step=0, folder_files=model_folder(Path(home) / "model"))
    parts = [with_pieces(after, names[rank], pieces[rank]) for rank in range(world)]
    trainer = Trainer([bucket] * world)
    assert versions(trainer.publish(parts, Path("none"), 1)) == {1}
    assert restored(bucket, 1) == all_bits(StateDictSource(after))
    check_held(trainer, parts)
