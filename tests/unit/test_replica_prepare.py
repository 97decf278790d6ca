from collections.abc import Iterator
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import pytest
from replica_rig import RUN, SPECS, BitsSource, Rig, weights_at

from slackwater.checkpoint.codec import Level
from slackwater.checkpoint.manifest import BodyEntry, Manifest
from slackwater.checkpoint.outline import Outline
from slackwater.checkpoint.shards import cut_shards
from slackwater.checkpoint.sparse import contexts_of
from slackwater.checkpoint.state import StateTable
from slackwater.checkpoint.tensor import TILE_BYTES, Bits, TensorSpec
from slackwater.delivery.fetcher import Fetcher
from slackwater.engine.base import Engine
from slackwater.errors import ConflictError, CorruptError, WrongBaseError
from slackwater.ids import Version
from slackwater.publish.publisher import Publisher
from slackwater.replica.boot import boot
from slackwater.replica.limits import ExchangeLimits
from slackwater.replica.overlay import Overlay
from slackwater.replica.prepare import (
    Prepared,
    all_tiles,
    first_difference,
    prepare_anchor,
    prepare_delta,
    read_state,
    state_after,
)
from slackwater.replica.race import Stop
from slackwater.replica.route import Route
from slackwater.testing.bucket import MemoryBucket
from slackwater.testing.engine import TableEngine
from slackwater.weights import image


@pytest.fixture(params=["fast", "wan"])
def rig(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Rig]:
    made = Rig(tmp_path, level=request.param)
    made.publish(3)
    yield made
    made.fetcher.close()


def engine_at(version: int) -> TableEngine:
    return TableEngine(weights_at(version), SPECS, Version(version))


def manifest(rig: Rig, version: int) -> Manifest:
    return rig.fetcher.manifest(Version(version))


def table(rig: Rig, version: int) -> StateTable:
    """The state that a chain of manifests makes."""
    made = StateTable.of_anchor(manifest(rig, 0))
    for number in range(1, version + 1):
        made = made.after(manifest(rig, number))
    return made


def prepared(
    rig: Rig, engine: TableEngine, version: int, stop: Stop | None = None, threads: int = 1
) -> Prepared | None:
    delta = manifest(rig, version)
    outline = manifest(rig, 0).outline
    return prepare_delta(engine, outline, delta, rig.fetcher.bodies(delta), threads, stop or Stop())


@pytest.mark.parametrize("threads", [1, 3])
def test_a_delta_becomes_writes_with_the_digests_of_both_sides(rig: Rig, threads: int) -> None:
    delta = manifest(rig, 1)
    made = prepared(rig, engine_at(0), 1, threads=threads)
    assert made is not None
    assert delta.tiles is not None
    places = [manifest(rig, 0).outline.place(number) for number in delta.tiles.number]
    assert {spec.name for spec, _ in places} == set(SPECS)
    assert [(write.name, write.tile) for write in made.writes] == [(spec.name, tile) for spec, tile in places]
    for checks, digests in ((made.after, delta.tiles.post), (made.before, delta.tiles.pre)):
        assert [(check.name, check.tile) for check in checks] == [(spec.name, tile) for spec, tile in places]
        assert [check.digest for check in checks] == digests.tolist()


def test_the_writes_of_a_delta_make_the_next_version(rig: Rig) -> None:
    made = prepared(rig, engine_at(1), 2)
    assert made is not None
    held = weights_at(1)
    for write in made.writes:
        write.put(held[write.name])
    assert all(np.array_equal(held[name], bits) for name, bits in weights_at(2).items())


def test_tiles_that_hold_their_new_bits_already_are_left_alone(rig: Rig) -> None:
    made = prepared(rig, engine_at(1), 1)
    assert made is not None
    assert (made.writes, made.after, made.before) == ((), (), ())


def test_of_tiles_in_one_body_only_those_with_old_bits_are_written(rig: Rig) -> None:
    halfway = {**weights_at(0), "b.weight": weights_at(1)["b.weight"]}
    made = prepared(rig, TableEngine(halfway, SPECS, Version(0)), 1)
    assert made is not None
    assert [write.name for write in made.writes] == ["a.weight", "c.bias"]


def test_bits_that_are_neither_old_nor_new_are_a_wrong_base(rig: Rig) -> None:
    engine = engine_at(0)
    engine.poke("b.weight", 77)
    with pytest.raises(WrongBaseError, match=r"b\.weight"):
        prepared(rig, engine, 1)


class _OtherBodies:
    """What a fetcher would never give: bodies of right length and wrong content."""

    def of(self, entry: BodyEntry) -> memoryview:
        return memoryview(bytes(entry.length))


def test_a_body_that_is_not_the_manifests_is_corrupt(rig: Rig) -> None:
    delta = manifest(rig, 1)
    with pytest.raises(CorruptError):
        prepare_delta(engine_at(0), manifest(rig, 0).outline, delta, _OtherBodies(), 1, Stop())


def test_a_raised_stop_ends_the_work_without_a_result(rig: Rig) -> None:
    assert prepared(rig, engine_at(0), 1, _raised()) is None
    folder = rig.fetcher.anchor(manifest(rig, 0))
    assert prepare_anchor(engine_at(1), table(rig, 1), table(rig, 0), folder, 1, _raised()) is None


def test_an_anchor_is_written_only_where_the_engine_differs(rig: Rig) -> None:
    anchor, engine = table(rig, 0), engine_at(0)
    folder = rig.fetcher.anchor(manifest(rig, 0))
    untouched = prepare_anchor(engine, anchor, anchor, folder, 1, Stop())
    assert untouched is not None
    assert untouched.writes == ()
    back = prepare_anchor(engine_at(1), table(rig, 1), anchor, folder, 1, Stop())
    assert back is not None
    assert [check.digest for check in back.before] == table(rig, 1).tiles.tolist()
    assert [check.digest for check in back.after] == anchor.tiles.tolist()
    engine.poke("c.bias", 4)
    with pytest.raises(WrongBaseError, match=r"c\.bias, tile 0"):
        prepare_anchor(engine, anchor, anchor, folder, 1, Stop())


def test_a_folder_that_is_not_the_anchor_is_corrupt(rig: Rig) -> None:
    rig.publish(anchor=True)
    other = rig.fetcher.anchor(manifest(rig, 3))
    held = StateTable.of_anchor(manifest(rig, 3))
    with pytest.raises(CorruptError, match="is not the anchor's"):
        prepare_anchor(engine_at(3), held, table(rig, 0), other, 1, Stop())


def test_a1_16_an_unknown_tensor_is_refused_by_name(rig: Rig) -> None:
    anchor = manifest(rig, 0)
    stranger = msgspec.structs.replace(anchor.tensors[0], name="zz.weight")
    odd = msgspec.structs.replace(anchor, tensors=(*anchor.tensors, stranger))
    with pytest.raises(ConflictError, match=r"zz\.weight"):
        state_after(engine_at(0), table(rig, 0), odd)


def test_a1_16_a_tile_that_no_tensor_has_is_refused_by_number(rig: Rig) -> None:
    delta = manifest(rig, 1)
    assert delta.tiles is not None
    first, *others = delta.tiles.number
    odd = msgspec.structs.replace(delta, tiles=msgspec.structs.replace(delta.tiles, number=(first + 3, *others)))
    with pytest.raises(CorruptError, match=f"names tile {first + 3}, and its parent has 3"):
        state_after(engine_at(0), table(rig, 0), odd)


def test_a1_16_a_tensor_missing_from_an_anchor_is_refused_by_name(rig: Rig) -> None:
    anchor = manifest(rig, 0)
    poor = msgspec.structs.replace(anchor, tensors=anchor.tensors[1:])
    with pytest.raises(ConflictError, match=r"lacks tensor 'a\.weight'"):
        state_after(engine_at(0), table(rig, 0), poor)


@pytest.mark.parametrize(("dtype", "shape"), [("BF16", (4, 64)), ("F16", (64, 4)), ("BF16", (128, 4))])
def test_a1_13_another_shape_or_dtype_is_refused(rig: Rig, dtype: str, shape: tuple[int, ...]) -> None:
    held = {**SPECS, "a.weight": TensorSpec(name="a.weight", dtype=dtype, shape=shape)}
    engine = TableEngine(weights_at(0), held, Version(0))
    with pytest.raises(ConflictError, match=r"a\.weight"):
        state_after(engine, table(rig, 0), manifest(rig, 0))


async def test_a1_13_an_engine_that_holds_more_than_the_anchor_is_closed(rig: Rig) -> None:
    async def open_more(folder: Path, version: Version) -> Engine:
        engine = await rig.open_engine(folder, version)
        rig.engine._specs["zz.bias"] = TensorSpec(name="zz.bias", dtype="F32", shape=(1,))
        return engine

    with pytest.raises(ConflictError, match=r"version 0 of 'demo' lacks tensor 'zz\.bias'"):
        await boot(rig.source, Route(rig.source), manifest(rig, 0), open_more, rig.clock, ExchangeLimits(threads=1))
    assert rig.engine.closed


@pytest.mark.parametrize("shape", [(4, 64), (256,), (128, 2)])
def test_a1_13_a_delta_on_an_anchor_of_other_shapes_is_on_another_state(rig: Rig, shape: tuple[int, ...]) -> None:
    held = table(rig, 0)
    specs = [TensorSpec(name="a.weight", dtype="BF16", shape=shape), SPECS["b.weight"], SPECS["c.bias"]]
    other = StateTable(outline=Outline(specs), tiles=held.tiles, sums=held.sums)
    with pytest.raises(WrongBaseError, match="version 1 of demo was made on"):
        state_after(engine_at(0), other, manifest(rig, 1))


def test_a_delta_on_another_state_is_refused_before_anything_is_fetched(rig: Rig) -> None:
    with pytest.raises(WrongBaseError):
        state_after(engine_at(0), table(rig, 0), manifest(rig, 2))


def test_the_state_that_a_manifest_makes_is_known_before_its_bytes(rig: Rig) -> None:
    assert state_after(engine_at(0), table(rig, 0), manifest(rig, 1)).digest == manifest(rig, 1).state
    assert state_after(engine_at(1), table(rig, 1), manifest(rig, 0)).digest == manifest(rig, 0).state


def test_the_first_difference_names_the_tile(rig: Rig) -> None:
    engine, checks = engine_at(0), list(all_tiles(table(rig, 0)))
    assert [(check.name, check.tile.count) for check in checks] == [
        ("a.weight", 256),
        ("b.weight", 128),
        ("c.bias", 30),
    ]
    assert first_difference(engine, checks, 2, Stop()) is None
    engine.poke("b.weight", 9)
    wrong = first_difference(engine, checks, 2, Stop())
    assert wrong is not None
    assert wrong.name == "b.weight"
    assert first_difference(engine, checks, 2, _raised()) is None


def test_the_state_read_from_memory_is_the_manifests(rig: Rig) -> None:
    assert read_state(engine_at(0)).digest == manifest(rig, 0).state
    assert read_state(engine_at(2)).digest == manifest(rig, 2).state


# Tiles that are cut, and levels on weights of the usual size

COLUMNS = TILE_BYTES // (2 * 64) + 16
WIDE = TensorSpec(name="model.layers.0.self_attn.o_proj.weight", dtype="BF16", shape=(64, COLUMNS))
"""A little larger than a tile: cut by column, at sixteenths."""
TALL = TensorSpec(name="model.embed_tokens.weight", dtype="BF16", shape=(COLUMNS, 64))
"""The same by row."""


class Lineage:
    """One tensor in a bucket of its own, and the way to its versions."""

    def __init__(self, folder: Path, spec: TensorSpec, level: Level) -> None:
        self.specs = {spec.name: spec}
        (folder / "model").mkdir()
        (folder / "model" / "config.json").write_text("{}")
        self._model = folder / "model"
        self.bucket = MemoryBucket()
        self._publisher = Publisher(self.bucket, RUN, level=level, threads=1)
        self.fetcher = Fetcher(self.bucket, RUN, folder / "cache", threads=1)

    def publish(self, bits: Bits, *, anchor: bool = False) -> Manifest:
        (name,) = self.specs
        source = BitsSource({name: bits}, self.specs)
        made = self._publisher.publish(source, step=0, folder_files=self._model, anchor=anchor)
        return self.fetcher.manifest(made.version)

    def engine(self, bits: Bits) -> TableEngine:
        (name,) = self.specs
        return TableEngine({name: bits}, self.specs, Version(0))


@pytest.mark.parametrize("level", ["fast", "wan"])
@pytest.mark.parametrize("spec", [WIDE, TALL], ids=["by column", "by row"])
async def test_a_delta_of_cut_tiles_goes_through_an_engine_and_back(
    tmp_path: Path, spec: TensorSpec, level: Level
) -> None:
    lineage = Lineage(tmp_path, spec, level)
    old = np.arange(spec.num_elements, dtype=np.uint32).astype(np.uint16)
    new = old.copy()
    new[[0, 5, COLUMNS // 2, spec.num_elements // 2, -1]] ^= 1
    new[spec.num_elements // 3 : spec.num_elements // 3 + 40_000] ^= 3
    anchor, delta = lineage.publish(old), lineage.publish(new)
    engine, state = lineage.engine(old), StateTable.of_anchor(anchor)
    made = prepare_delta(engine, anchor.outline, delta, lineage.fetcher.bodies(delta), 2, Stop())
    assert made is not None
    assert delta.tiles is not None
    assert sorted(write.tile.index for write in made.writes) == sorted(delta.tiles.number)
    assert len(made.writes) > 1
    assert {write.tile.rows for write in made.writes} == ({64} if spec is WIDE else {1})
    staged = await engine.stage(made.writes)
    await engine.commit(staged, Version(1))
    assert np.array_equal(engine.weights[spec.name], new)
    assert read_state(engine).digest == delta.state == state.after(delta).digest
    assert first_difference(engine, made.after, 1, Stop()) is None
    await engine.undo(staged, Version(0))
    assert np.array_equal(engine.weights[spec.name], old)
    assert first_difference(engine, made.before, 1, Stop()) is None
    await engine.close()


@pytest.mark.parametrize("spec", [WIDE, TALL], ids=["by column", "by row"])
async def test_deltas_of_cut_tiles_are_put_together_and_undone_together(tmp_path: Path, spec: TensorSpec) -> None:
    lineage = Lineage(tmp_path, spec, "fast")
    states = [np.arange(spec.num_elements, dtype=np.uint32).astype(np.uint16)]
    for step in range(3):
        states.append(states[-1].copy())
        states[-1][[step, 5, COLUMNS // 2, -1]] ^= 1
    states[-1][spec.num_elements // 2 :][: 2 * COLUMNS] ^= 2
    anchor, *deltas = [lineage.publish(bits) for bits in states]
    engine = lineage.engine(states[0])
    overlay = Overlay(engine, 2)
    for delta in deltas:
        decoded = prepare_delta(overlay, anchor.outline, delta, lineage.fetcher.bodies(delta), 2, Stop())
        assert decoded is not None
        overlay.add(decoded, last=delta is deltas[-1])
    made = overlay.prepared()
    assert len({(write.name, write.tile) for write in made.writes}) == len(made.writes) > 1
    staged = await engine.stage(made.writes)
    await engine.commit(staged, Version(3))
    assert read_state(engine).digest == deltas[-1].state
    assert first_difference(engine, made.after, 1, Stop()) is None
    await engine.undo(staged, Version(0))
    assert np.array_equal(engine.weights[spec.name], states[0])
    assert first_difference(engine, made.before, 1, Stop()) is None
    await engine.close()


async def test_an_anchor_of_cut_tiles_writes_the_tile_that_differs(tmp_path: Path) -> None:
    lineage = Lineage(tmp_path, WIDE, "fast")
    bits = np.arange(WIDE.num_elements, dtype=np.uint32).astype(np.uint16)
    anchor = lineage.publish(bits)
    engine = lineage.engine(bits)
    engine.poke(WIDE.name, 3 * COLUMNS + COLUMNS - 1)
    folder = lineage.fetcher.anchor(anchor)
    made = prepare_anchor(engine, read_state(engine), StateTable.of_anchor(anchor), folder, 2, Stop())
    assert made is not None
    assert [(write.tile.index, write.tile.rows) for write in made.writes] == [(15, 64)]
    await engine.commit(await engine.stage(made.writes), Version(1))
    assert np.array_equal(engine.weights[WIDE.name], bits)
    await engine.close()


@pytest.mark.parametrize("level", ["fast", "wan"])
def test_a_delta_of_every_level_is_decoded_against_the_engines_bits(tmp_path: Path, level: Level) -> None:
    spec = TensorSpec(name="w", dtype="BF16", shape=(300, 301))
    lineage = Lineage(tmp_path, spec, level)
    random = np.random.default_rng(3)
    value = random.normal(0, 0.02, spec.num_elements).astype(np.float32)
    old, new = (
        (each.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
        for each in (value, value + np.float32(1e-6) * random.normal(0, 1, value.size).astype(np.float32))
    )
    anchor, delta = lineage.publish(old), lineage.publish(new)
    (entry,) = delta.listed()
    bodies = lineage.fetcher.bodies(delta)
    assert entry.encoding == "sparse"
    assert (contexts_of(bodies.of(entry)) > 1) == (level == "wan")
    made = prepare_delta(lineage.engine(old), anchor.outline, delta, bodies, 1, Stop())
    assert made is not None
    held = old.copy()
    for write in made.writes:
        write.put(held)
    assert np.array_equal(held, new)
    again = prepare_delta(lineage.engine(new), anchor.outline, delta, bodies, 1, Stop())
    assert again is not None
    assert again.writes == ()


def test_an_anchor_of_several_shards_boots_from_one_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image, "cut_shards", partial(cut_shards, limit=600))
    rig = Rig(tmp_path)
    rig.publish()
    anchor = manifest(rig, 0)
    assert len({tensor.object for tensor in anchor.tensors}) == 2
    folder = rig.fetcher.anchor(anchor)
    assert len(list(folder.glob("*.safetensors"))) == 2
    made = prepare_anchor(engine_at(2), read_state(engine_at(2)), table(rig, 0), folder, 2, Stop())
    assert made is not None
    held = weights_at(2)
    for write in made.writes:
        write.put(held[write.name])
    assert all(np.array_equal(held[name], bits) for name, bits in weights_at(0).items())
    rig.fetcher.close()


def _raised() -> Stop:
    stop = Stop()
    stop.set()
    return stop
