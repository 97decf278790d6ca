"""Versions published by several ranks together: the same state as one would make, one commit, and all or none."""

import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar

import numpy as np
import publish_rig
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from publish_rig import RUN, Tensors, all_bits, keys, model_folder, restored, stepped, weights

from slackwater.bucket.local import LocalBucket
from slackwater.checkpoint.keys import manifest_key
from slackwater.checkpoint.tensor import Bits, TensorSpec
from slackwater.errors import CorruptError, InvalidInputError, LostRaceError, SlackwaterError, UnavailableError
from slackwater.ids import Version
from slackwater.publish.background import Handle
from slackwater.publish.exchange import ThreadExchange, thread_exchanges
from slackwater.publish.exchange_torch import TorchExchange
from slackwater.publish.lineage import find_head, read_manifest
from slackwater.publish.merge import check_shares, merge_deltas, share_out
from slackwater.publish.published import Published
from slackwater.publish.publisher import Publisher
from slackwater.publish.ranks import RankPublisher
from slackwater.publish.restore import restore
from slackwater.testing.bucket import Fault, FaultyBucket, Gate, MemoryBucket
from slackwater.weights.source import INDEX_FILE, FolderSource
from slackwater.weights.state_dict import StateDictSource

AWAY = UnavailableError("the store is away")
T = TypeVar("T")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return model_folder(tmp_path / "model")


def layers(count: int = 5, seed: int = 0) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    tensors = weights(seed)
    for layer in range(count):
        for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.down_proj"):
            tensors[f"model.layers.{layer}.{name}.weight"] = torch.randn(32, 32, generator=generator).bfloat16()
    return tensors


def specs_of(tensors: Tensors) -> list[TensorSpec]:
    return list(StateDictSource(tensors).specs().values())


def parted(tensors: Tensors, world: int) -> list[Tensors]:
    return [{name: tensors[name] for name in share} for share in share_out(specs_of(tensors), world)]


def together(calls: Sequence[Callable[[], T]]) -> list[T | Exception]:
    """Each rank in a thread of its own: what it returns or raises."""

    def tried(call: Callable[[], T]) -> T | Exception:
        try:
            return call()
        except (SlackwaterError, ZeroDivisionError) as error:
            return error

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(tried, calls))


class Trainer:
    """Several ranks and what they publish."""

    def __init__(
        self, buckets: Sequence[MemoryBucket | FaultyBucket], *, every: int = 50, folder: Path | None = None
    ) -> None:
        self.exchanges: list[ThreadExchange] = thread_exchanges(len(buckets), 60)
        self.ranks = [
            RankPublisher(bucket, RUN, rank, len(buckets), exchange, anchor_every=every, threads=1, baseline_dir=folder)
            for rank, (bucket, exchange) in enumerate(zip(buckets, self.exchanges, strict=True))
        ]

    def publish(self, parts: Sequence[Tensors], model: Path, step: int = 0, *, anchor: bool = False) -> list[object]:
        def call(rank: int) -> Callable[[], Published]:
            folder = model if rank == 0 else None
            source = StateDictSource(parts[rank])
            return lambda: self.ranks[rank].publish(source, step=step, folder_files=folder, anchor=anchor)

        return list(together([call(rank) for rank in range(len(self.ranks))]))


def versions(results: Sequence[object]) -> set[object]:
    return {result.version if isinstance(result, Published) else result for result in results}


@pytest.mark.parametrize("world", [1, 2, 3, 7])
def test_any_number_of_ranks_makes_the_states_of_one(model: Path, world: int) -> None:
    one, many = MemoryBucket(), MemoryBucket()
    alone, trainer = Publisher(one, RUN, anchor_every=3), Trainer([many] * world, every=3)
    state = layers()
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
        state = stepped(state, step, 1e-3)
    if world > 1:
        assert len({body.object for body in read_manifest(many, RUN, Version(1)).listed()}) == world


def test_an_anchor_of_several_ranks_is_an_ordinary_folder(model: Path, tmp_path: Path) -> None:
    bucket, state = MemoryBucket(), layers()
    Trainer([bucket] * 3).publish(parted(state, 3), model)
    manifest = read_manifest(bucket, RUN, Version(0))
    copy = tmp_path / "copy"
    copy.mkdir()
    for file, index in manifest.files.items():
        (copy / file).write_bytes(bucket.get(manifest.objects[index].key, max_bytes=1 << 20))
    assert all_bits(FolderSource(copy)) == all_bits(StateDictSource(state))
    assert {INDEX_FILE, "config.json", "chat_template.jinja"} <= manifest.files.keys()
    assert Publisher.open(bucket, RUN).publish(StateDictSource(state), step=1).changed == 0


def test_no_rank_reads_or_sends_what_is_anothers(model: Path) -> None:
    state = layers()
    memory = MemoryBucket()
    buckets = [FaultyBucket(memory) for _ in range(3)]
    trainer = Trainer(buckets)
    trainer.publish(parted(state, 3), model)
    assert [bucket.count("put_if_absent") for bucket in buckets] == [2, 0, 0]  # the first is proved
    after = stepped(state, 1, 1e-2)
    trainer.publish(parted(after, 3), model, 1)
    assert [bucket.count("put", "/blobs/") for bucket in buckets] == [1, 1, 1]
    for rank, part in zip(trainer.ranks, parted(after, 3), strict=True):
        for name, bits in all_bits(StateDictSource(part)).items():
            assert rank.held_bits(name).tobytes() == bits


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("other", [1, 2, 4])
def test_a_trainer_that_starts_anew_goes_on_with_any_number_of_ranks(model: Path, world: int, other: int) -> None:
    bucket, state = MemoryBucket(), layers()
    first = Trainer([bucket] * world)
    for step in range(3):
        first.publish(parted(state, world), model, step)
        state = stepped(state, step, 1e-3)
    again = Trainer([bucket] * other)
    assert versions(again.publish(parted(state, other), model, 3)) == {3}
    assert read_manifest(bucket, RUN, Version(3)).kind == "delta"
    assert restored(bucket, 3) == all_bits(StateDictSource(state))


@pytest.mark.parametrize("verb", ["put", "get"])
@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("is_anchor", [True, False])
def test_where_a_rank_fails_nobody_commits_and_all_raise(model: Path, verb: str, rank: int, is_anchor: bool) -> None:
    memory, state = MemoryBucket(), layers()
    buckets = [FaultyBucket(memory) for _ in range(3)]
    trainer = Trainer(buckets)
    if not is_anchor:
        trainer.publish(parted(state, 3), model)
        state = stepped(state, 1, 1e-2)
    head = find_head(memory, RUN)
    where = "anchors/" if is_anchor else "/blobs/"
    buckets[rank].add(Fault(verb="put" if verb == "put" else "get", key=where, before=AWAY))
    results = trainer.publish(parted(state, 3), model, 1)
    assert all(isinstance(result, UnavailableError) for result in results), results
    assert all(f"rank {rank} failed" in str(results[other]) for other in range(3) if other != rank)
    assert find_head(memory, RUN) == head
    expected = 0 if is_anchor else 1
    assert versions(trainer.publish(parted(state, 3), model, 2)) == {expected}
    assert restored(memory, expected) == all_bits(StateDictSource(state))


class Broken(StateDictSource):
    """A source with a fault of its own."""

    def bits(self, name: str) -> Bits:
        raise ZeroDivisionError(name)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_fails_of_something_unforeseen_does_not_leave_the_others_waiting(model: Path, rank: int) -> None:
    bucket, state = MemoryBucket(), layers()
    trainer = Trainer([bucket] * 2)
    trainer.publish(parted(state, 2), model)
    sources = [StateDictSource(part) for part in parted(state, 2)]
    sources[rank] = Broken(parted(state, 2)[rank])
    calls = [
        lambda place=place: trainer.ranks[place].publish(sources[place], step=1, folder_files=model)
        for place in range(2)
    ]
    results = together(calls)
    assert isinstance(results[rank], ZeroDivisionError)
    assert f"rank {rank} failed" in str(results[1 - rank])
    assert find_head(bucket, RUN) == 0
    assert versions(trainer.publish(parted(state, 2), model, 1)) == {1}


def test_f07_a_race_that_is_lost_is_lost_by_all_ranks(model: Path) -> None:
    bucket, state = MemoryBucket(), layers()
    trainer = Trainer([bucket] * 2)
    trainer.publish(parted(state, 2), model)
    winner = stepped(state, 1, 1e-2)
    Publisher(bucket, RUN).publish(StateDictSource(winner), step=1)
    results = trainer.publish(parted(stepped(state, 2, 1e-2), 2), model, 1)
    assert all(isinstance(result, LostRaceError) for result in results)
    assert restored(bucket, 1) == all_bits(StateDictSource(winner))
    assert versions(Trainer([bucket] * 2).publish(parted(state, 2), model, 2)) == {2}


def test_f05_after_a_commit_without_an_answer_all_ranks_read_the_chain_again(model: Path) -> None:
    memory, state = MemoryBucket(), layers()
    buckets = [FaultyBucket(memory) for _ in range(2)]
    trainer = Trainer(buckets)
    trainer.publish(parted(state, 2), model)
    buckets[0].add(Fault(verb="put_if_absent", after=AWAY))
    one, two = stepped(state, 1, 1e-2), stepped(state, 2, 1e-2)
    assert all(isinstance(result, UnavailableError) for result in trainer.publish(parted(one, 2), model, 1))
    assert versions(trainer.publish(parted(two, 2), model, 2)) == {2}
    assert (restored(memory, 1), restored(memory, 2)) == tuple(all_bits(StateDictSource(each)) for each in (one, two))


def test_a_rank_that_is_gone_is_told_and_nothing_is_visible(model: Path) -> None:
    bucket, state = MemoryBucket(), layers()
    trainer = Trainer([bucket] * 2)
    trainer.publish(parted(state, 2), model)
    trainer.exchanges[1].leave()
    with pytest.raises(UnavailableError, match="gone"):
        trainer.ranks[0].publish(StateDictSource(parted(state, 2)[0]), step=1)
    assert find_head(bucket, RUN) == 0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda parts: parts[1].update(parts[0]), "is published by rank 0 and by rank 1"),
        (lambda parts: parts[1].popitem(), "no rank publishes"),
        (lambda parts: parts[1].update({"model.extra": torch.zeros(2)}), "model.extra isn't in this run"),
    ],
)  # fmt: skip
def test_tensors_have_one_owner_each(model: Path, change: Callable[[list[Tensors]], object], words: str) -> None:
    bucket, state = MemoryBucket(), layers()
    trainer = Trainer([bucket] * 2)
    trainer.publish(parted(state, 2), model)
    parts = parted(state, 2)
    change(parts)
    for result in trainer.publish(parts, model, 1):
        assert isinstance(result, InvalidInputError)
        assert words in str(result)
    assert find_head(bucket, RUN) == 0


def test_what_loads_together_has_one_owner() -> None:
    query, key, other = (f"model.layers.{layer}.self_attn.{kind}_proj.weight" for layer, kind in ("0q", "0k", "1q"))
    check_shares([[query, key], [other], []], None)
    with pytest.raises(InvalidInputError, match="of rank 1 loads together with tensors of rank 0"):
        check_shares([[query], [key]], None)


@given(st.lists(st.integers(0, 300), max_size=30), st.integers(1, 9))
def test_tensors_are_dealt_out_whole_and_about_evenly(sizes: list[int], world: int) -> None:
    specs = [TensorSpec(name=f"layers.{n}.thing.weight", dtype="U8", shape=(size,)) for n, size in enumerate(sizes)]
    shares = share_out(specs, world)
    check_shares(shares, [spec.name for spec in specs])
    loads = [sum(sizes[int(name.split(".")[1])] for name in share) for share in shares]
    assert max(loads) - min(loads) <= max(sizes, default=0)


def test_parts_of_other_states_are_never_merged(model: Path) -> None:
    bucket = MemoryBucket()
    publisher = Publisher(bucket, RUN)
    for step in range(3):
        publisher.publish(StateDictSource(stepped(weights(), step, 1e-2)), step=step, folder_files=model)
    table = restore(bucket, RUN, Version(0)).table
    first, second = (read_manifest(bucket, RUN, Version(version)) for version in (1, 2))
    assert merge_deltas(table, [first]).state == first.state
    for parts in ([first, second], [first, first], [read_manifest(bucket, RUN, Version(0))]):
        with pytest.raises(CorruptError):
            merge_deltas(table, parts)


# In the background


def started(
    trainer: Trainer, parts: Sequence[Tensors], model: Path, step: int, *, anchor: bool = False
) -> list[object]:
    """Every rank's handle, or what it raised."""

    def call(rank: int) -> Callable[[], object]:
        source = StateDictSource(parts[rank])
        return lambda: trainer.ranks[rank].publish_async(source, step=step, folder_files=model, anchor=anchor)

    return list(together([call(rank) for rank in range(len(trainer.ranks))]))


def ended(handles: Sequence[object]) -> list[object]:
    def wait(handle: object) -> Callable[[], object]:
        assert isinstance(handle, Handle), handle
        return lambda: handle.result(60)

    return list(together([wait(handle) for handle in handles]))


@pytest.mark.parametrize("is_anchor", [True, False])
def test_ranks_publish_in_the_background_what_they_held_when_they_were_called(model: Path, is_anchor: bool) -> None:
    memory, state = MemoryBucket(), layers()
    gate = Gate()
    buckets = [FaultyBucket(memory) for _ in range(2)]
    trainer = Trainer(buckets)
    trainer.publish(parted(state, 2), model)
    state = stepped(state, 1, 1e-2)
    expected = all_bits(StateDictSource(state))
    buckets[1].add(Fault(verb="put", gate=gate))
    handles = started(trainer, parted(state, 2), model, 1, anchor=is_anchor)
    assert gate.reached.wait(30)
    assert not any(isinstance(handle, Handle) and (handle.done() or handle.cancel()) for handle in handles)
    for tensor in state.values():
        tensor.zero_()
    gate.open()
    assert versions(ended(handles)) == {1}
    assert restored(memory, 1) == expected
    after = stepped(layers(), 2, 1e-2)
    assert versions(trainer.publish(parted(after, 2), model, 2)) == {2}
    assert restored(memory, 2) == all_bits(StateDictSource(after))
    for rank in trainer.ranks:
        rank.close()


@pytest.mark.parametrize("rank", [0, 1])
def test_what_a_rank_fails_of_in_the_background_is_told_by_all_handles(model: Path, rank: int) -> None:
    memory, state = MemoryBucket(), layers()
    buckets = [FaultyBucket(memory) for _ in range(2)]
    trainer = Trainer(buckets)
    trainer.publish(parted(state, 2), model)
    after = stepped(state, 1, 1e-2)
    buckets[rank].add(Fault(verb="put", key="/blobs/", before=AWAY))
    results = ended(started(trainer, parted(after, 2), model, 1))
    assert all(isinstance(result, UnavailableError) for result in results), results
    assert f"rank {rank} failed" in str(results[1 - rank])
    assert find_head(memory, RUN) == 0
    assert versions(ended(started(trainer, parted(after, 2), model, 1))) == {1}


def test_a_source_that_does_not_fit_is_told_by_all_handles(model: Path) -> None:
    bucket, state = MemoryBucket(), layers()
    trainer = Trainer([bucket] * 2)
    trainer.publish(parted(state, 2), model)
    parts = parted(state, 2)
    parts[1]["model.extra"] = torch.zeros(2)
    results = ended(started(trainer, parts, model, 1))
    assert all(isinstance(result, InvalidInputError) and "model.extra" in str(result) for result in results)


def test_ranks_out_of_range_are_refused() -> None:
    (exchange,) = thread_exchanges(1)
    for rank, world in ((1, 1), (-1, 1), (0, 0)):
        with pytest.raises(InvalidInputError):
            RankPublisher(MemoryBucket(), RUN, rank, world, exchange)


@pytest.mark.parametrize("step", [-1])
def test_a_step_below_zero_is_refused_by_all(model: Path, step: int) -> None:
    bucket = MemoryBucket()
    assert all(isinstance(result, InvalidInputError) for result in Trainer([bucket] * 2).publish([{}, {}], model, step))
    assert keys(bucket) == []


def test_an_anchor_needs_rank_0s_config(tmp_path: Path) -> None:
    bucket, state = MemoryBucket(), layers()
    results = Trainer([bucket] * 2).publish(parted(state, 2), tmp_path)
    assert all("config.json" in str(result) for result in results)
    assert keys(bucket, "/manifests/") == []


def test_ranks_keep_their_baselines_over_a_restart(model: Path, tmp_path: Path) -> None:
    memory, state = MemoryBucket(), layers()
    trainer = Trainer([memory] * 2, folder=tmp_path / "baselines")
    trainer.publish(parted(state, 2), model)
    for rank in trainer.ranks:
        rank.close()
    buckets = [FaultyBucket(memory) for _ in range(2)]
    again = Trainer(buckets, folder=tmp_path / "baselines")
    after = stepped(state, 1, 1e-2)
    assert versions(again.publish(parted(after, 2), model, 1)) == {1}
    assert [bucket.count("get_range", "/anchors/") for bucket in buckets] == [0, 0]
    assert restored(memory, 1) == all_bits(StateDictSource(after))


def test_bytes_travel_through_torch(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        exchange = TorchExchange()
        for body in (b"", b"\x00", b"manifest" * 1000):
            assert exchange.gather(body) == [body]
            assert exchange.broadcast(body) == body
    finally:
        dist.destroy_process_group()


def test_the_manifest_key_is_made_once(model: Path) -> None:
    bucket, state = MemoryBucket(), layers()
    Trainer([bucket] * 4).publish(parted(state, 4), model)
    assert keys(bucket, "/manifests/") == [manifest_key(RUN, Version(0))]
    np.testing.assert_equal(restored(bucket, 0), all_bits(StateDictSource(state)))


ONE_OF_TWO = """
import sys
import torch.distributed as dist
from publish_rig import RUN, stepped, weights
from slackwater.bucket.local import LocalBucket
from slackwater.publish.exchange_torch import TorchExchange
from slackwater.publish.merge import share_out
from slackwater.publish.ranks import RankPublisher
from slackwater.weights.state_dict import StateDictSource

rank, home = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{home}/store", rank=rank, world_size=2)
publisher = RankPublisher(LocalBucket(f"{home}/bucket"), RUN, rank, 2, TorchExchange(), threads=1)
for step, state in enumerate((weights(), stepped(weights(), 1, 1e-2))):
    mine = share_out(StateDictSource(state).specs().values(), 2)[rank]
    publisher.publish(StateDictSource({name: state[name] for name in mine}), step=step, folder_files=f"{home}/model")
dist.destroy_process_group()
"""


def test_two_processes_publish_together_through_torch(model: Path, tmp_path: Path) -> None:
    bucket = LocalBucket(tmp_path / "bucket", create=True)
    command = [sys.executable, "-c", ONE_OF_TWO]
    with ExitStack() as stack:
        ranks = [
            stack.enter_context(
                subprocess.Popen([*command, str(rank), str(model.parent)], cwd=Path(publish_rig.__file__).parent)
            )
            for rank in range(2)
        ]
        assert [rank.wait(120) for rank in ranks] == [0, 0]
    for version, state in enumerate((weights(), stepped(weights(), 1, 1e-2))):
        assert restored(bucket, version) == all_bits(StateDictSource(state))
