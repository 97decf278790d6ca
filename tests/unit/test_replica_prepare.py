from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from replica_rig import SPECS, Rig, weights_at

from slackwater.checkpoint.manifest import Manifest
from slackwater.checkpoint.state import StateTable
from slackwater.checkpoint.tensor import TensorSpec
from slackwater.errors import ConflictError, CorruptError, WrongBaseError
from slackwater.ids import Version
from slackwater.replica.prepare import (
    first_difference,
    listed,
    prepare_anchor,
    prepare_delta,
    read_state,
    state_after,
)
from slackwater.replica.race import Stop
from slackwater.testing.engine import TableEngine


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path)
    made.publish(3)
    yield made
    made.fetcher.close()


def engine_at(version: int) -> TableEngine:
    return TableEngine(weights_at(version), SPECS, Version(version))


def manifest(rig: Rig, version: int) -> Manifest:
    return rig.fetcher.manifest(Version(version))


def test_a_delta_becomes_writes_with_the_digests_of_both_sides(rig: Rig) -> None:
    delta = manifest(rig, 1)
    made = prepare_delta(engine_at(0), delta, rig.fetcher.bodies(delta), 2, Stop())
    assert made is not None
    assert {write.name for write in made.writes} == set(SPECS)
    assert [check.digest for check in made.after] == [tile.post for entry in delta.tensors for tile in entry.tiles]
    assert [check.digest for check in made.before] == [tile.pre for entry in delta.tensors for tile in entry.tiles]


def test_tiles_that_hold_their_new_bits_already_are_left_alone(rig: Rig) -> None:
    delta = manifest(rig, 1)
    made = prepare_delta(engine_at(1), delta, rig.fetcher.bodies(delta), 1, Stop())
    assert made is not None
    assert made.writes == ()


def test_bits_that_are_neither_old_nor_new_are_a_wrong_base(rig: Rig) -> None:
    delta, engine = manifest(rig, 1), engine_at(0)
    engine.poke("b.weight", 77)
    with pytest.raises(WrongBaseError, match=r"b\.weight"):
        prepare_delta(engine, delta, rig.fetcher.bodies(delta), 1, Stop())


def test_a_raised_stop_ends_the_work_without_a_result(rig: Rig) -> None:
    delta, stop = manifest(rig, 1), _raised()
    assert prepare_delta(engine_at(0), delta, rig.fetcher.bodies(delta), 1, stop) is None


def test_an_anchor_is_written_only_where_the_engine_differs(rig: Rig) -> None:
    anchor, engine = manifest(rig, 0), engine_at(0)
    folder = rig.fetcher.anchor(anchor)
    untouched = prepare_anchor(engine, anchor, folder, 1, Stop())
    engine.poke("c.bias", 4)
    repaired = prepare_anchor(engine, anchor, folder, 1, Stop())
    assert untouched is not None
    assert untouched.writes == ()
    assert repaired is not None
    assert [(write.name, write.positions) for write in repaired.writes] == [("c.bias", None)]


def test_a_folder_that_is_not_the_anchor_is_corrupt(rig: Rig) -> None:
    rig.publish(anchor=True)
    first, other = manifest(rig, 0), manifest(rig, 3)
    with pytest.raises(CorruptError, match="not that of anchor 0"):
        prepare_anchor(engine_at(3), first, rig.fetcher.anchor(other), 1, Stop())


def test_a1_16_an_unknown_tensor_is_refused_by_name(rig: Rig) -> None:
    delta = manifest(rig, 1)
    stranger = msgspec.structs.replace(delta.tensors[0], name="zz.weight")
    odd = msgspec.structs.replace(delta, tensors=(*delta.tensors, stranger))
    with pytest.raises(ConflictError, match=r"zz\.weight"):
        state_after(engine_at(0), StateTable.of_anchor(manifest(rig, 0)), odd)


def test_a1_16_a_tensor_missing_from_an_anchor_is_refused_by_name(rig: Rig) -> None:
    anchor = manifest(rig, 0)
    poor = msgspec.structs.replace(anchor, tensors=anchor.tensors[1:])
    with pytest.raises(ConflictError, match=r"lacks tensor 'a\.weight'"):
        state_after(engine_at(0), StateTable.of_anchor(anchor), poor)


@pytest.mark.parametrize(("dtype", "shape"), [("BF16", (4, 64)), ("F16", (64, 4)), ("BF16", (128, 4))])
def test_a1_13_another_shape_or_dtype_is_refused(rig: Rig, dtype: str, shape: tuple[int, ...]) -> None:
    held = {**SPECS, "a.weight": TensorSpec(name="a.weight", dtype=dtype, shape=shape)}
    engine = TableEngine(weights_at(0), held, Version(0))
    with pytest.raises(ConflictError, match=r"a\.weight"):
        state_after(engine, StateTable.of_anchor(manifest(rig, 0)), manifest(rig, 1))


def test_a_delta_on_another_state_is_refused_before_anything_is_fetched(rig: Rig) -> None:
    with pytest.raises(WrongBaseError):
        state_after(engine_at(0), StateTable.of_anchor(manifest(rig, 0)), manifest(rig, 2))


def test_the_first_difference_names_the_tile(rig: Rig) -> None:
    engine, checks = engine_at(0), listed(manifest(rig, 0))
    assert first_difference(engine, checks, 2, Stop()) is None
    engine.poke("b.weight", 9)
    wrong = first_difference(engine, checks, 2, Stop())
    assert wrong is not None
    assert wrong.name == "b.weight"
    assert first_difference(engine, checks, 2, _raised()) is None


def test_the_state_read_from_memory_is_the_manifests(rig: Rig) -> None:
    assert read_state(engine_at(0)).digest == manifest(rig, 0).state
    assert read_state(engine_at(2)).digest == manifest(rig, 2).state


def _raised() -> Stop:
    stop = Stop()
    stop.set()
    return stop
