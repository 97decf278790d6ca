"""Publishers killed with SIGKILL, or by the kernel in the middle of a write, at each call of a bucket that writes.

F01 is a death at the first call, F02 one during a call, F03 one between objects, F04 one before the manifest is made,
F05 one after it, F06 one before or during the hint's. Half of the publishers keep their baseline on the disk,
and half of those lose it (F09). Readers see the version before or this one, whole; the next
publisher resumes the lineage and sends what is missing, and no object twice.
"""

import os
import shutil
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from publishing_child import RUN, Moment, Nursery, Outcome, Report, Task
from safetensors.numpy import save_file

from slackwater.bucket.local import LocalBucket
from slackwater.checkpoint.digest import object_digest
from slackwater.checkpoint.keys import head_key, manifest_key
from slackwater.delivery.fetcher import Fetcher
from slackwater.ids import RunId, Version, run_id
from slackwater.publish.lineage import read_manifest
from slackwater.publish.publisher import Publisher
from slackwater.publish.restore import restore
from slackwater.weights.source import FolderSource

RUN_ID: Final[RunId] = run_id(RUN)
KILLS: Final[tuple[Moment, ...]] = ("before", "during", "after")
POINTS: Final = int(os.environ.get("SLACKWATER_CRASH_POINTS", "60"))
"""Deaths to look at; a bench looks at more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """A lineage at the moment of the death: versions that are there, and what comes next."""

    committed: int
    anchor_every: int
    objects: int
    """Calls that write an object of the next version; then come its manifest, that once more, and the hint."""


SHAPES: Final = (
    Shape(committed=0, anchor_every=50, objects=5),
    Shape(committed=2, anchor_every=50, objects=1),
    Shape(committed=1, anchor_every=1, objects=2),
)
"""The first anchor, a delta on a delta, and a later anchor, which links what isn't weights."""
PLACES: Final[tuple[tuple[Shape, int, Moment], ...]] = tuple(
    (shape, call, moment) for shape in SHAPES for call in range(shape.objects + 3) for moment in KILLS
)


Arrays = dict[str, npt.NDArray[np.generic]]


def first_state(seed: int) -> Arrays:
    """A few hundred random bits patterns, NaNs with payloads among them."""
    generator = np.random.default_rng(seed)
    return {
        "model.embed_tokens.weight": generator.integers(0, 1 << 16, (48, 16), dtype=np.uint16).view(np.float16),
        "model.layers.0.weight": generator.standard_normal((16, 16)).astype(np.float16),
        "model.norm.bias": generator.standard_normal(3).astype(np.float32),
    }


def next_state(state: Arrays, seed: int) -> Arrays:
    """Some bits of each tensor flip."""
    generator = np.random.default_rng(seed)
    moved: Arrays = {}
    for name, array in state.items():
        bits = array.copy().view(np.uint16).reshape(-1)
        bits[generator.integers(0, bits.size, 1 + bits.size // 20)] ^= np.uint16(1)
        moved[name] = bits.view(array.dtype).reshape(array.shape)
    return moved


def write_states(root: Path, seed: int, count: int) -> tuple[str, ...]:
    """Model folders of two shards, each a step after the one before."""
    folders: list[str] = []
    state = first_state(seed)
    for step in range(count):
        folder = root / f"state{step}"
        folder.mkdir()
        embedding = {"model.embed_tokens.weight": state["model.embed_tokens.weight"]}
        save_file(embedding, folder / "model-00001-of-00002.safetensors")
        others = {name: array for name, array in state.items() if name not in embedding}
        save_file(others, folder / "model-00002-of-00002.safetensors")
        files = {name: f"model-0000{1 if name in embedding else 2}-of-00002.safetensors" for name in state}
        weight_map = ", ".join(f'"{name}": "{file}"' for name, file in sorted(files.items()))
        (folder / "model.safetensors.index.json").write_text(f'{{"metadata": {{}}, "weight_map": {{{weight_map}}}}}')
        (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
        (folder / "tokenizer.json").write_text("{}")
        folders.append(str(folder))
        state = next_state(state, 1000 * seed + step)
    return tuple(folders)


def all_bits(folder: str | Path) -> dict[str, bytes]:
    source = FolderSource(Path(folder))
    return {name: source.bits(name).tobytes() for name in source.specs()}


@dataclass(frozen=True, kw_only=True, slots=True)
class Lineage:
    """A bucket with some versions, the states that they were made of, and those to come."""

    bucket: LocalBucket
    root: Path
    states: tuple[str, ...]
    shape: Shape
    baseline: Path | None
    """Where its publishers keep what was committed; None: in their memory."""

    @property
    def next(self) -> int:
        """The version that a publisher dies on."""
        return self.shape.committed

    def task(self, call: int = -1, moment: Moment = "before", *, upto: int | None = None) -> Task:
        """Publish what is missing up to a version, by default the next one."""
        return Task(
            bucket=str(self.root / "bucket"),
            states=self.states[: (self.next if upto is None else upto) + 1],
            report=str(self.root / "report.json"),
            baseline=None if self.baseline is None else str(self.baseline),
            anchor_every=self.shape.anchor_every,
            call=call,
            moment=moment,
        )

    def check(self) -> Version | None:
        """Read the bucket as a replica does; returns its head, which is whole, as is everything that has a name."""
        fetcher = Fetcher(self.bucket, RUN_ID, self.root / "cache", threads=1)
        head = fetcher.head(None)
        listed = sorted(item.key for item in self.bucket.list(RUN))
        manifests = [key for key in listed if "/manifests/" in key]
        assert manifests == [manifest_key(RUN_ID, Version(n)) for n in range(0 if head is None else head + 1)]
        for key in (key for key in listed if "/blobs/" in key):
            assert object_digest(self.bucket.get(key, max_bytes=1 << 20)) == key.rpartition("/")[2]
        if head is not None:
            restored = restore(self.bucket, RUN_ID, head)
            assert {name: bits.tobytes() for name, bits in restored.bits.items()} == all_bits(self.states[head])
            manifest = fetcher.manifest(head)
            if manifest.kind == "anchor":
                assert all_bits(fetcher.anchor(manifest)) == all_bits(self.states[head])
            else:
                assert fetcher.bodies(manifest).num_bytes == manifest.num_bytes
        return head

    def needed(self, version: int) -> list[str]:
        """Every key of a version's that its publisher writes, but the hint."""
        manifest = read_manifest(self.bucket, RUN_ID, Version(version))
        return [*(ref.key for ref in manifest.objects), manifest_key(RUN_ID, Version(version))]


def there(lineage: Lineage) -> set[str]:
    return {item.key for item in lineage.bucket.list(RUN)} if (lineage.root / "bucket" / RUN).exists() else set()


def begun(root: Path, seed: int, shape: Shape, *, keeps: bool = False) -> Lineage:
    root.mkdir()
    baseline = root / "baseline" if keeps else None
    states = write_states(root, seed, shape.committed + 2)
    bucket = LocalBucket(root / "bucket", create=True)
    with Publisher(bucket, RUN, anchor_every=shape.anchor_every, threads=1, baseline_dir=baseline) as publisher:
        for step, folder in enumerate(states[: shape.committed]):
            publisher.publish(FolderSource(Path(folder)), step=step)
    return Lineage(bucket=bucket, root=root, states=states, shape=shape, baseline=baseline)


def ended(outcome: Outcome) -> Report:
    assert outcome.report is not None, outcome
    return outcome.report


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    with Nursery() as started:
        yield started


def test_a_run_without_a_death_makes_the_calls_that_the_matrix_counts(nursery: Nursery, tmp_path: Path) -> None:
    for number, shape in enumerate(SHAPES):
        lineage = begun(tmp_path / str(number), number, shape)
        report = ended(nursery.carry_out(lineage.task()))
        assert len(report.puts) == shape.objects + 3
        assert {key for key, _ in report.puts[-3:-1]} == {manifest_key(RUN_ID, Version(lineage.next))}
        assert report.puts[-1][0] == head_key(RUN_ID)
        assert lineage.check() == lineage.next


@pytest.mark.parametrize("part", range(4))
def test_f01_to_f06_a_publisher_killed_anywhere_leaves_a_whole_version_and_is_resumed(
    nursery: Nursery, tmp_path: Path, part: int
) -> None:
    for seed in range(part, POINTS, 4):
        die_and_resume(nursery, tmp_path / str(seed), seed)


def die_and_resume(nursery: Nursery, root: Path, seed: int) -> None:
    shape, call, moment = PLACES[seed % len(PLACES)]
    lineage = begun(root, seed, shape, keeps=seed % 2 == 1)
    ending = nursery.carry_out(lineage.task(call, moment)).ending
    assert ending.signal == (signal.SIGXFSZ if moment == "during" else signal.SIGKILL), (seed, ending)
    committed = call > shape.objects or (call == shape.objects and moment == "after")
    before = None if lineage.next == 0 else lineage.next - 1
    assert lineage.check() == (lineage.next if committed else before), seed

    if lineage.baseline is not None and seed % 4 == 3:  # F09: what the machine kept is lost with it
        shutil.rmtree(lineage.baseline, ignore_errors=True)
    kept = there(lineage)
    report = ended(nursery.carry_out(lineage.task()))
    assert (lineage.check(), report.errors) == (lineage.next, ()), seed
    sent = {key: size for key, size in report.puts if key != head_key(RUN_ID)}
    assert len(report.puts) - len(sent) <= 2, seed  # the hint, and a manifest that is created again
    assert sorted(sent) == sorted(set(lineage.needed(lineage.next)) - kept), seed
    missing = sum((lineage.root / "bucket" / key).stat().st_size for key in sent)
    assert sum(sent.values()) == missing

    after = ended(nursery.carry_out(lineage.task(upto=lineage.next + 1)))
    assert (lineage.check(), len(after.kinds)) == (lineage.next + 1, 1), seed
    assert lineage.bucket.get(head_key(RUN_ID), max_bytes=100) == b'{"version":%d}' % (lineage.next + 1)


@pytest.mark.parametrize("shape", SHAPES)
def test_f09_a_baseline_on_the_disk_is_right_or_left_aside_whenever_its_publisher_died(
    nursery: Nursery, tmp_path: Path, shape: Shape
) -> None:
    """From the commit on it moves to the new version; nothing in the bucket tells when."""
    for number in range(20):
        lineage = begun(tmp_path / str(number), number, shape, keeps=True)
        task = lineage.task(shape.objects, "soon")
        nursery.carry_out(msgspec.structs.replace(task, soon_s=0.0002 + 0.0008 * number))
        assert lineage.check() == lineage.next
        report = ended(nursery.carry_out(lineage.task(upto=lineage.next + 1)))
        assert (lineage.check(), report.errors) == (lineage.next + 1, ())


@pytest.mark.parametrize("shape", SHAPES)
def test_f29_a_disk_that_is_full_at_any_call_shows_nothing_and_the_same_publisher_goes_on(
    nursery: Nursery, tmp_path: Path, shape: Shape
) -> None:
    for call in range(shape.objects + 2):
        lineage = begun(tmp_path / str(call), call, shape)
        report = ended(nursery.carry_out(lineage.task(call, "full", upto=lineage.next + 1)))
        assert report.errors == (() if call > shape.objects else ("unavailable",))  # a hint may fail
        assert (lineage.check(), len(report.kinds)) == (lineage.next + 1, 2)
        assert not list((lineage.root / "bucket").rglob(".put-*"))


def test_f08_a_publisher_that_was_stopped_before_its_commit_finds_that_another_went_on(
    nursery: Nursery, tmp_path: Path
) -> None:
    for number, shape in enumerate(SHAPES):
        lineage = begun(tmp_path / str(number), number, shape)
        stopped = nursery.carry_out(lineage.task(shape.objects, "stop"))
        assert stopped.ending.signal == signal.SIGSTOP
        other = begun_elsewhere(lineage, tmp_path / f"other{number}")
        winner = ended(nursery.carry_out(other.task()))
        assert winner.errors == ()
        loser = ended(nursery.go_on(stopped.ending.pid))
        assert loser.errors == ("lost_race", "lost_race")
        assert other.check() == other.next


def begun_elsewhere(lineage: Lineage, root: Path) -> Lineage:
    """The same bucket, for a publisher whose next state is another."""
    root.mkdir()
    last = write_states(root, 77, 1)
    states = (*lineage.states[: lineage.next], *last)
    (root / "bucket").symlink_to(lineage.root / "bucket", target_is_directory=True)
    return Lineage(bucket=lineage.bucket, root=root, states=states, shape=lineage.shape, baseline=None)


def test_f07_publishers_of_two_processes_race_and_one_wins(tmp_path: Path) -> None:
    """Each in a process of its own, with nothing that makes them meet."""
    shape = SHAPES[1]
    with Nursery() as one, Nursery() as two, ThreadPoolExecutor(2) as pool:
        for race in range(5):
            lineage = begun(tmp_path / str(race), race, shape)
            other = begun_elsewhere(lineage, tmp_path / f"other{race}")
            tasks = pool.map(Nursery.carry_out, (one, two), (lineage.task(), other.task()))
            reports = [ended(outcome) for outcome in tasks]
            won = [report for report in reports if len(report.kinds) == 1 and not report.errors]
            assert len(won) == 1
            winner = (lineage, other)[reports.index(won[0])]
            assert winner.check() == winner.next
