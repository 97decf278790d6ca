"""A chain under any order of publishing, applying, dying half-way, catching up and rolling back: the bits are right."""

import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from depth import examples
from slackwater.checkpoint import bundles, tensor
from slackwater.checkpoint.codec import Level, Place, apply_body
from slackwater.checkpoint.digest import tile_digest
from slackwater.checkpoint.element_sum import element_sum, seed_of
from slackwater.checkpoint.manifest import BodyEntry, Manifest
from slackwater.checkpoint.sparse import contexts_of
from slackwater.checkpoint.tensor import Bits, TensorSpec
from slackwater.errors import CorruptError, InvalidInputError, NotFoundError, WrongBaseError
from slackwater.ids import RunId, Version
from slackwater.publish.lineage import read_manifest
from slackwater.publish.publisher import Publisher
from slackwater.publish.restore import restore
from slackwater.testing.bucket import MemoryBucket

RUN: Final = RunId("chain")
TILE_BYTES: Final = 1024
"""Small, so that small tensors have several tiles, by row and by column."""
SPECS: Final = {
    spec.name: spec
    for spec in (
        TensorSpec(name="l.0.mlp.down_proj.weight", dtype="BF16", shape=(24, 64)),
        TensorSpec(name="l.0.mlp.experts.1.w1.weight", dtype="F8_E4M3", shape=(40, 40)),
        TensorSpec(name="l.0.mlp.up_proj.weight", dtype="BF16", shape=(64, 24)),
        TensorSpec(name="l.0.norm.bias", dtype="F64", shape=(7,)),
        TensorSpec(name="l.0.norm.weight", dtype="BF16", shape=(24,)),
        TensorSpec(name="steps", dtype="I64", shape=()),
        TensorSpec(name="unused", dtype="U8", shape=(0, 4)),
    )
}
State = Mapping[str, Bits]
Part = tuple[list[Place], BodyEntry, memoryview]
LEVELS = st.sampled_from(["fast", "wan"])
SEEDS = st.integers(0, 2**32 - 1)
DENSITIES = st.sampled_from([0.0, 0.01, 0.05, 0.4, 1.0])


class ArraySource:
    """A trainer's weights, or some of them."""

    def __init__(self, state: State) -> None:
        self._state = state

    def specs(self) -> Mapping[str, TensorSpec]:
        return {name: SPECS[name] for name in sorted(self._state)}

    def bits(self, name: str) -> Bits:
        return self._state[name]


def random_state(seed: int) -> State:
    rng = np.random.default_rng(seed)
    return {
        spec.name: rng.integers(0, 256, spec.num_bytes, dtype=np.uint8).view(spec.bits_dtype) for spec in SPECS.values()
    }


def trained(state: State, seed: int, density: float, names: frozenset[str]) -> State:
    """A step later: most of what moves goes to a neighbour."""
    rng = np.random.default_rng(seed)
    result = dict(state)
    for name in sorted(names):
        old = state[name]
        step = np.where(rng.random(old.size) < 0.9, rng.choice([1, -1], old.size), rng.integers(2, 200, old.size))
        result[name] = np.where(rng.random(old.size) < density, old + step.astype(old.dtype), old).astype(old.dtype)
    return result


def copied(state: State) -> dict[str, Bits]:
    return {name: bits.copy() for name, bits in state.items()}


def frozen(state: State) -> dict[str, bytes]:
    return {name: bits.tobytes() for name, bits in state.items()}


class ChainMachine(RuleBasedStateMachine):
    """Keeps every version's arrays beside the bucket, and one replica that applies bodies in place."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        for module in (tensor, bundles):
            self.patch.setattr(module, "TILE_BYTES", TILE_BYTES)
        self.folder = tempfile.TemporaryDirectory()
        (Path(self.folder.name) / "config.json").write_text("{}")
        self.bucket = MemoryBucket()
        self.states: list[State] = []
        self.kinds: list[str] = []

    def teardown(self) -> None:
        self.patch.undo()
        self.folder.cleanup()

    @initialize(seed=SEEDS, level=LEVELS)
    def begin(self, seed: int, level: Level) -> None:
        self.publisher = Publisher(self.bucket, RUN, anchor_every=4, level=level, threads=1)
        self._publish(random_state(seed), random_state(seed), anchor=False)
        self._load(0)

    def _publish(self, state: State, given: State, *, anchor: bool) -> None:
        version = len(self.states)
        published = self.publisher.publish(
            ArraySource(given), step=version, folder_files=Path(self.folder.name), anchor=anchor
        )
        assert published.version == version
        assert published.kind == "anchor" or version > 0
        if published.kind == "delta":
            before = self.states[-1]
            assert published.changed == sum(int((before[name] != state[name]).sum()) for name in SPECS)
        self.states.append(state)
        self.kinds.append(published.kind)

    def _load(self, version: int) -> None:
        """A replica starts, or is rolled back, on an anchor."""
        restored = restore(self.bucket, RUN, Version(version))
        self.held, self.table = dict(restored.bits), restored.table
        self.version = version
        self.is_whole = True
        """Whether the replica holds ``version``, and not a part of the next one."""

    # The trainer.

    @rule(seed=SEEDS, density=DENSITIES, names=st.frozensets(st.sampled_from(sorted(SPECS))))
    def train(self, seed: int, density: float, names: frozenset[str]) -> None:
        state = trained(self.states[-1], seed, density, names)
        whole = self.publisher.version is None or (len(self.states) - self._newest_anchor()) % 4 == 0
        given = state if whole else {name: state[name] for name in names}
        self._publish(state, given, anchor=False)

    @rule(seed=SEEDS, density=DENSITIES)
    def publish_an_anchor(self, seed: int, density: float) -> None:
        state = trained(self.states[-1], seed, density, frozenset(SPECS))
        self._publish(state, state, anchor=True)

    @rule(back=st.integers(0, 3))
    def publish_an_older_state_again(self, back: int) -> None:
        state = self.states[max(0, len(self.states) - 1 - back)]
        self._publish(state, state, anchor=False)

    @rule(level=LEVELS)
    def restart_the_trainer(self, level: Level) -> None:
        self.publisher = Publisher.open(self.bucket, RUN, anchor_every=4, level=level, threads=1)
        assert self.publisher.version == len(self.states) - 1

    @rule(name=st.sampled_from(sorted(SPECS)))
    def a1_10_an_anchor_without_a_tensor_is_refused(self, name: str) -> None:
        lacking = {other: bits for other, bits in self.states[-1].items() if other != name}
        with pytest.raises(InvalidInputError, match=f"{name} is missing"):
            self._publish(lacking, lacking, anchor=True)

    def _newest_anchor(self) -> int:
        return max(version for version, kind in enumerate(self.kinds) if kind == "anchor")

    # Readers.

    @rule(data=st.data())
    def any_version_restores(self, data: st.DataObject) -> None:
        version = data.draw(st.integers(0, len(self.states) - 1))
        restored = restore(self.bucket, RUN, Version(version))
        assert frozen(restored.bits) == frozen(self.states[version])
        assert restored.anchor == max(v for v in range(version + 1) if self.kinds[v] == "anchor")
        for index, spec in enumerate(restored.table.outline.specs):
            whole = tensor.Tile(index=0, start=0, cols=max(1, spec.num_elements))
            bits = self.states[version][spec.name]
            assert int(restored.table.sums[index]) == element_sum(seed_of(spec.name), whole, bits)

    @rule()
    def a_version_that_is_not_there_is_told(self) -> None:
        with pytest.raises(NotFoundError, match=f"version {len(self.states)} can't be reached"):
            restore(self.bucket, RUN, Version(len(self.states)))

    @rule(data=st.data())
    def roll_to_an_anchor(self, data: st.DataObject) -> None:
        self._load(data.draw(st.sampled_from([v for v, kind in enumerate(self.kinds) if kind == "anchor"])))

    def _manifest(self, version: int) -> Manifest:
        return read_manifest(self.bucket, RUN, Version(version))

    def _parts(self, manifest: Manifest) -> Iterator[Part]:
        for entry in manifest.listed():
            ref = manifest.objects[entry.object]
            pack = memoryview(self.bucket.get(ref.key, max_bytes=ref.size))
            pairs = (self.table.outline.place(listed.number) for listed in entry.tiles)
            places = [Place(spec=spec, tile=tile) for spec, tile in pairs]
            yield places, entry, pack[entry.offset : entry.offset + entry.length]

    def _apply(self, part: Part) -> int:
        places, entry, body = part
        held = [place.tile.take(self.held[place.spec.name]) for place in places]
        written = apply_body(places, entry, body, held)
        for place, bits in zip(places, held, strict=True):
            if place.tile.rows > 1:  # taken as a copy
                place.tile.put(self.held[place.spec.name], bits)
        return written

    def _has_next(self) -> bool:
        return self.version + 1 < len(self.states) and self.kinds[self.version + 1] == "delta"

    @precondition(_has_next)
    @rule()
    def apply_the_next_delta(self) -> None:
        manifest = self._manifest(self.version + 1)
        table = self.table.after(manifest)
        for part in self._parts(manifest):
            assert self._apply(part) <= len(part[1].tiles)
        self.table, self.version, self.is_whole = table, self.version + 1, True

    @precondition(_has_next)
    @rule(data=st.data())
    def die_while_applying(self, data: st.DataObject) -> None:
        parts = list(self._parts(self._manifest(self.version + 1)))
        for part in parts[: data.draw(st.integers(0, len(parts)))]:
            self._apply(part)
            self.is_whole = False

    @precondition(_has_next)
    @rule(data=st.data())
    def die_in_the_middle_of_a_body(self, data: st.DataObject) -> None:
        """Some tiles of a body have their new bits: it goes on from there, or it is refused as it stands."""
        parts = list(self._parts(self._manifest(self.version + 1)))
        if not parts:
            return
        part = data.draw(st.sampled_from(parts))
        before = copied(self.held)
        for place in part[0][: data.draw(st.integers(0, len(part[0])))]:
            place.tile.put(self.held[place.spec.name], place.tile.take(self.states[self.version + 1][place.spec.name]))
        half = frozen(self.held)
        done = [tile_digest(place.tile.take(self.held[place.spec.name])) for place in part[0]]
        is_half = len({digest == tile.post for digest, tile in zip(done, part[1].tiles, strict=True)}) == 2
        if is_half and part[1].encoding == "sparse" and contexts_of(part[2]) > 1:
            with pytest.raises(WrongBaseError, match="has its new bits"):
                self._apply(part)
            assert frozen(self.held) == half
            self.held = before
        else:
            self._apply(part)
            self.is_whole = False

    @precondition(_has_next)
    @rule(data=st.data())
    def apply_the_next_delta_twice(self, data: st.DataObject) -> None:
        self.apply_the_next_delta()
        parts = list(self._parts(self._manifest(self.version)))
        for part in data.draw(st.permutations(parts)):
            assert self._apply(part) == 0

    @precondition(_has_next)
    @rule(data=st.data())
    def a_spoilt_tile_stops_its_body(self, data: st.DataObject) -> None:
        """A1-08: a bit that flipped since is found before anything is written."""
        parts = list(self._parts(self._manifest(self.version + 1)))
        if not parts or not self.is_whole:
            return
        part = data.draw(st.sampled_from(parts))
        place = data.draw(st.sampled_from(part[0]))
        spoilt = place.tile.take(self.held[place.spec.name]).copy()
        before = copied(self.held)
        spoilt[data.draw(st.integers(0, spoilt.size - 1))] ^= spoilt.dtype.type(1 << data.draw(st.integers(0, 7)))
        place.tile.put(self.held[place.spec.name], spoilt)
        half = frozen(self.held)
        if spoilt.tobytes() != place.tile.take(self.states[self.version + 1][place.spec.name]).tobytes():
            with pytest.raises(WrongBaseError, match="isn't what the delta was made on"):
                self._apply(part)
            assert frozen(self.held) == half
        self.held = before

    @rule(data=st.data())
    def a1_09_a_version_that_does_not_follow_is_refused(self, data: st.DataObject) -> None:
        version = data.draw(st.integers(0, len(self.states) - 1))
        manifest = self._manifest(version)
        if manifest.parent is None:
            with pytest.raises(CorruptError, match="is an anchor"):
                self.table.after(manifest)
        elif manifest.parent.state != self.table.digest:
            with pytest.raises(WrongBaseError, match="was made on"):
                self.table.after(manifest)
        else:
            assert frozen(self.states[version - 1]) == frozen(self.states[self.version])

    @invariant()
    def the_replica_holds_its_version(self) -> None:
        if not self.states or not self.is_whole:
            return
        assert frozen(self.held) == frozen(self.states[self.version])
        assert self.table.digest == self._manifest(self.version).state


TestChain = ChainMachine.TestCase
TestChain.settings = settings(max_examples=examples(25), stateful_step_count=25, deadline=None)
