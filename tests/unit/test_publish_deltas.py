"""Deltas of every kind, published and rebuilt: levels, encodings, tiles by column, and memory that was written."""

from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from publish_rig import RUN, Tensors, all_bits, keys, listed, model_folder, restored, stepped, touched, trained, weights
from safetensors.torch import save_file

from slackwater.checkpoint.capture import Captured, capture
from slackwater.checkpoint.codec import Level
from slackwater.checkpoint.keys import manifest_key
from slackwater.checkpoint.manifest import encode_manifest
from slackwater.checkpoint.shards import cut_shards
from slackwater.checkpoint.sparse import contexts_of
from slackwater.checkpoint.tensor import TILE_BYTES, Bits, Tile
from slackwater.errors import CorruptError, InvalidInputError
from slackwater.ids import RunId, Version
from slackwater.publish.delta import DeltaEncoder, Effort, Encoded, bits_of, tell_nobody
from slackwater.publish.lineage import find_head, read_manifest
from slackwater.publish.publisher import Publisher
from slackwater.publish.restore import restore
from slackwater.testing.bucket import FaultyBucket, MemoryBucket
from slackwater.weights import image
from slackwater.weights.diff import hash_source
from slackwater.weights.source import INDEX_FILE, FolderSource
from slackwater.weights.state_dict import StateDictSource

ROWS = 64
SPLIT = "model.layers.0.self_attn.o_proj.weight"
"""Ranks hold columns of it."""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return model_folder(tmp_path / "model")


def layers(seed: int = 0) -> Tensors:
    """Enough weights of the usual size for every context of a body."""
    generator = torch.Generator().manual_seed(seed)
    return {
        f"model.layers.{layer}.mlp.up_proj.weight": (0.02 * torch.randn(128, 256, generator=generator)).bfloat16()
        for layer in range(3)
    }


def published(bucket: MemoryBucket, model: Path, states: list[Tensors], level: Level) -> list[int]:
    """Publish one version after another; the bytes of each."""
    publisher = Publisher(bucket, RUN, level=level, threads=1)
    sources = [StateDictSource(state) for state in states]
    return [
        publisher.publish(source, step=step, folder_files=model).uploaded_bytes for step, source in enumerate(sources)
    ]


# Levels


def test_a_wan_chain_restores_to_the_bits_with_fewer_bytes_than_a_fast_one(model: Path) -> None:
    states = [layers()]
    for seed in range(2):
        states.append(stepped(states[-1], seed, 2e-6))
    fast, wan = MemoryBucket(), MemoryBucket()
    fast_bytes, wan_bytes = published(fast, model, states, "fast"), published(wan, model, states, "wan")
    for version, state in enumerate(states):
        assert restored(fast, version) == restored(wan, version) == all_bits(StateDictSource(state))
    assert wan_bytes[0] == fast_bytes[0]
    assert all(few < many for few, many in zip(wan_bytes[1:], fast_bytes[1:], strict=True))
    pack = wan.get(read_manifest(wan, RUN, Version(1)).objects[0].key, max_bytes=1 << 20)
    bodies = listed(wan, 1)
    assert any(contexts_of(memoryview(pack)[body.offset : body.offset + body.length]) > 1 for body in bodies)


@pytest.mark.parametrize("room", [None, 0, 5000, 1 << 30])
@pytest.mark.parametrize("threads", [1, 3])
def test_a_delta_has_the_same_bytes_however_much_of_it_may_wait(room: int | None, threads: int) -> None:
    old, new = layers(), stepped(layers(), 1, 1e-3)
    held = hash_source(StateDictSource(old), threads=1)
    made = list[tuple[Encoded, dict[str, bytes]]]()
    for effort in (Effort(), Effort(room=room, threads=threads)):
        bodies = dict[str, bytes]()
        source = StateDictSource({name: tensor.clone() for name, tensor in new.items()})
        encoder = DeltaEncoder(
            RUN, source, held, bits_of(StateDictSource(old)), effort=effort, progress=tell_nobody,
            put=lambda ref, body, bodies=bodies: bodies.update({ref.key: body}),
        )  # fmt: skip
        encoder.read()
        for name in source.specs():
            source.bits(name)[:] = 0
        made.append((encoder.finish(), bodies))
    (whole, objects), (parted, same) = made
    assert objects == same
    assert whole.table.digest == parted.table.digest == hash_source(StateDictSource(new), threads=1).digest
    assert (whole.bodies, whole.tiles.number, whole.tiles.digests) == (
        parted.bodies, parted.tiles.number, parted.tiles.digests
    )  # fmt: skip


def test_a_chain_may_change_its_level_at_every_version(model: Path) -> None:
    bucket = MemoryBucket()
    state, states = layers(), list[Tensors]()
    for step in range(5):
        level: Level = "wan" if step % 2 else "fast"
        Publisher.open(bucket, RUN, level=level).publish(StateDictSource(state), step=step, folder_files=model)
        states.append(state)
        state = stepped(state, step)
    assert [restored(bucket, version) for version in range(5)] == [all_bits(StateDictSource(one)) for one in states]


@pytest.mark.parametrize("level", ["fast", "wan"])
def test_the_level_changes_neither_state_nor_tiles(model: Path, level: Level) -> None:
    bucket, states = MemoryBucket(), [layers(), stepped(layers(), 1)]
    published(bucket, model, states, level)
    fresh = MemoryBucket()
    Publisher(fresh, RUN).publish(StateDictSource(states[1]), step=0, folder_files=model)
    assert read_manifest(bucket, RUN, Version(1)).state == read_manifest(fresh, RUN, Version(0)).state


# Encodings


def _one_in(tensor: torch.Tensor, count: int) -> torch.Tensor:
    bits = tensor.view(torch.int16).clone().reshape(-1)
    bits[::count] += 1
    return bits.reshape(tensor.shape).view(tensor.dtype)


def _anew(tensor: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(9)
    return torch.randint(-(2**15), 2**15, tensor.shape, dtype=torch.int16, generator=generator).view(tensor.dtype)


@pytest.mark.parametrize("level", ["fast", "wan"])
@pytest.mark.parametrize(
    ("change", "encoding"),
    [(partial(_one_in, count=50), "sparse"), (partial(_one_in, count=1), "dense"), (_anew, "full")],
)
def test_every_encoding_restores_to_the_bits(model: Path, level: Level, change: Any, encoding: str) -> None:
    bucket, before = MemoryBucket(), layers()
    after = {name: change(tensor) for name, tensor in before.items()}
    published(bucket, model, [before, after, before], level)
    assert {body.encoding for body in listed(bucket, 1)} == {encoding}
    assert restored(bucket, 1) == all_bits(StateDictSource(after))
    assert restored(bucket, 2) == restored(bucket, 0)


def test_small_tensors_of_a_dtype_share_a_body_and_only_those_that_change_are_listed(model: Path) -> None:
    bucket = MemoryBucket()
    before: Tensors = {f"model.layers.{layer}.norm.weight": torch.zeros(8).bfloat16() for layer in range(6)}
    before |= {f"model.layers.{layer}.bias": torch.zeros(()) for layer in range(6)}
    before["model.none"] = torch.zeros(0, 8).bfloat16()
    changed = {"model.layers.1.norm.weight", "model.layers.4.norm.weight", "model.layers.4.bias"}
    after = {name: tensor + 1 if name in changed else tensor for name, tensor in before.items()}
    published(bucket, model, [before, after], "fast")
    assert touched(bucket, 1) == [f"{name} tile 0" for name in sorted(changed)]
    assert [[tile.changed for tile in body.tiles] for body in listed(bucket, 1)] in ([[8, 8], [1]], [[1], [8, 8]])
    assert len(keys(bucket, "/blobs/")) == 1
    assert restored(bucket, 1) == all_bits(StateDictSource(after))


# Tiles by column


def split(columns: int) -> Tensors:
    """The smallest weights that are cut by column are a little larger than a tile."""
    bits = torch.arange(ROWS * columns, dtype=torch.int32).to(torch.int16)
    return {SPLIT: bits.view(torch.bfloat16).reshape(ROWS, columns), "model.norm.bias": torch.zeros(2)}


def moved(tensors: Tensors, columns: list[int]) -> Tensors:
    """Other bits in some columns of every row."""
    bits = tensors[SPLIT].view(torch.int16).clone()
    bits[:, columns] ^= 1
    return {**tensors, SPLIT: bits.view(torch.bfloat16)}


@pytest.mark.parametrize("level", ["fast", "wan"])
@pytest.mark.parametrize(
    ("columns", "changed", "tiles"),
    [
        (TILE_BYTES // (2 * ROWS) + 16, [0, 4096, 4097, -1], [0, 1, 15]),
        (TILE_BYTES // (2 * ROWS) + 1, [32768, 32769], [0, 1]),
    ],
)
def test_a_tensor_cut_by_column_restores_and_lists_only_the_columns_that_change(
    model: Path, level: Level, columns: int, changed: list[int], tiles: list[int]
) -> None:
    bucket, before = MemoryBucket(), split(columns)
    states = [before, moved(before, changed), moved(before, list(range(columns // 16)))]
    published(bucket, model, states, level)
    assert touched(bucket, 1) == [f"{SPLIT} tile {index}" for index in tiles]
    assert read_manifest(bucket, RUN, Version(1)).num_changed == ROWS * len(changed)
    assert [restored(bucket, version) == all_bits(StateDictSource(one)) for version, one in enumerate(states)] == [
        True, True, True
    ]  # fmt: skip
    # The baseline that was moved on tile by tile is the one that is read back.
    publisher = Publisher.open(bucket, RUN, level=level)
    assert publisher.publish(StateDictSource(states[2]), step=3).changed == 0


# Anchors of several shards


def test_an_anchor_of_several_shards_keeps_them_and_takes_deltas(model: Path) -> None:
    bucket, tensors = MemoryBucket(), weights()
    names = sorted(tensors)
    files = {name: f"model-0000{number}-of-00002.safetensors" for name, number in zip(names, (2, 1, 2), strict=True)}
    for file in set(files.values()):
        save_file({name: tensors[name] for name in names if files[name] == file}, model / file)
    (model / INDEX_FILE).write_text('{"weight_map": ' + str(files).replace("'", '"') + "}")
    publisher = Publisher(bucket, RUN)
    publisher.publish(FolderSource(model), step=0)
    manifest = read_manifest(bucket, RUN, Version(0))
    held = {index: file for file, index in manifest.files.items()}
    assert {tensor.name: held[tensor.object] for tensor in manifest.tensors} == files
    assert INDEX_FILE in manifest.files
    after = trained(tensors, 1)
    publisher.publish(StateDictSource(after), step=1)
    assert restored(bucket, 0) == all_bits(StateDictSource(tensors))
    assert restored(bucket, 1) == all_bits(StateDictSource(after))
    for file, index in manifest.files.items():
        body = bucket.get(manifest.objects[index].key, max_bytes=1 << 20)
        assert body == (model / file).read_bytes()


def test_a_state_dict_beyond_a_shard_becomes_an_anchor_of_several(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image, "cut_shards", partial(cut_shards, limit=600))
    bucket, tensors = MemoryBucket(), weights()
    Publisher(bucket, RUN).publish(StateDictSource(tensors), step=0, folder_files=model)
    manifest = read_manifest(bucket, RUN, Version(0))
    assert len({tensor.object for tensor in manifest.tensors}) == 2
    assert restored(bucket, 0) == all_bits(StateDictSource(tensors))
    copy = tmp_path / "copy"
    copy.mkdir()
    for file, index in manifest.files.items():
        (copy / file).write_bytes(bucket.get(manifest.objects[index].key, max_bytes=1 << 20))
    assert all_bits(FolderSource(copy)) == all_bits(StateDictSource(tensors))


@pytest.mark.parametrize("shard", [1, 2])
def test_f12_two_exchanged_shards_of_an_anchor_are_refused(
    model: Path, monkeypatch: pytest.MonkeyPatch, shard: int
) -> None:
    monkeypatch.setattr(image, "cut_shards", partial(cut_shards, limit=600))
    bucket = MemoryBucket()
    Publisher(bucket, RUN).publish(StateDictSource(weights()), step=0, folder_files=model)
    shards = keys(bucket, "-of-00002")
    bodies = [bucket.get(key, max_bytes=1 << 20) for key in shards]
    bucket.put(shards[shard - 1], bodies[2 - shard])
    with pytest.raises(CorruptError):
        restore(bucket, RUN, Version(0))


def test_f12_an_anchor_of_another_runs_bytes_is_refused_though_every_object_verifies(model: Path) -> None:
    bucket = MemoryBucket()
    for run, state in ((RUN, weights()), (RunId("other"), weights(1))):
        Publisher(bucket, run).publish(StateDictSource(state), step=0, folder_files=model)
    ours, other = (read_manifest(bucket, run, Version(0)) for run in (RUN, RunId("other")))
    shard = ours.files["model.safetensors"]
    bytes_of_other = bucket.get(other.objects[shard].key, max_bytes=1 << 20)
    key = ours.objects[shard].key.replace("model.safetensors", "other.safetensors")
    bucket.put(key, bytes_of_other)
    exchanged = msgspec.structs.replace(other.objects[shard], key=key)
    objects = tuple(exchanged if index == shard else ref for index, ref in enumerate(ours.objects))
    bucket.put(manifest_key(RUN, Version(0)), encode_manifest(msgspec.structs.replace(ours, objects=objects)))
    with pytest.raises(CorruptError, match=r"model\.embed_tokens\.weight tile 0 isn't that of anchor 0"):
        restore(bucket, RUN, Version(0))


# Memory that was written


def test_weights_written_while_they_are_read_are_refused_before_the_commit(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = FaultyBucket(MemoryBucket())
    publisher = Publisher(bucket, RUN, threads=1)
    tensors = weights()
    publisher.publish(StateDictSource(tensors), step=0, folder_files=model)
    tensors["model.layers.0.weight"][0, 0] = 3.0
    puts, commits = bucket.count("put"), bucket.count("put_if_absent")

    def compare_and_step(tile: Tile, old: Bits, new: Bits) -> Captured | None:
        found = capture(tile, old, new)
        tensors["model.layers.0.weight"][0, 1] += 1  # the optimizer, between two readings of the same memory
        return found

    with monkeypatch.context() as patch:
        patch.setattr("slackwater.weights.diff.capture", compare_and_step)
        with pytest.raises(InvalidInputError, match="was written while it was read"):
            publisher.publish(StateDictSource(tensors), step=1)
    assert (bucket.count("put"), bucket.count("put_if_absent")) == (puts, commits)
    assert (find_head(bucket, RUN), publisher.version) == (0, 0)
    assert publisher.publish(StateDictSource(tensors), step=1).version == 1
    assert restored(bucket, 1) == all_bits(StateDictSource(tensors))


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "model.norm.bias"])
def test_a_baseline_that_was_written_is_refused_and_nothing_becomes_visible(model: Path, name: str) -> None:
    memory = MemoryBucket()
    bucket = FaultyBucket(memory)
    publisher = Publisher(bucket, RUN)
    publisher.publish(StateDictSource(weights()), step=0, folder_files=model)
    there, before = keys(memory), bucket.count("put")
    publisher.held_bits(name)[-1] ^= 1
    for state in (weights(), trained(weights(), 1)):
        with pytest.raises(CorruptError, match=rf"{name} tile 0 of the baseline .* its memory was written"):
            publisher.publish(StateDictSource(state), step=1)
    assert (keys(memory), bucket.count("put"), bucket.count("put_if_absent")) == (there, before, 2)
    after = trained(weights(), 1)
    assert Publisher.open(bucket, RUN).publish(StateDictSource(after), step=1).version == 1
    assert restored(memory, 1) == all_bits(StateDictSource(after))


def test_a_trainer_that_steps_in_place_is_compared_with_what_was_committed(model: Path) -> None:
    bucket, tensors, states = MemoryBucket(), layers(), list[dict[str, bytes]]()
    source, publisher = StateDictSource(tensors), Publisher(bucket, RUN)
    for step in range(3):
        states.append(all_bits(source))
        publisher.publish(source, step=step, folder_files=model)
        for name, tensor in stepped(tensors, step).items():
            tensors[name].copy_(tensor)
    assert [restored(bucket, version) for version in range(3)] == states
    assert np.unique([state[next(iter(state))] for state in states]).size == 3


# Progress


def test_encoding_tells_the_bytes_of_every_batch(model: Path) -> None:
    told: list[tuple[str, int, int]] = []
    publisher = Publisher(MemoryBucket(), RUN, progress=lambda *news: told.append(news))
    before = {**split(TILE_BYTES // (2 * ROWS) + 1), "model.a.weight": torch.zeros(4, 4).bfloat16()}
    publisher.publish(StateDictSource(before), step=0, folder_files=model)
    publisher.publish(StateDictSource(moved(before, [0])), step=1)
    total = sum(tensor.nbytes for tensor in before.values())
    encoding = [news for news in told if news[0] == "encode"]
    assert encoding == [("encode", 32, total), ("encode", total - 8, total), ("encode", total, total)]
