"""The commands that compare, apply, fold, show and check, on folders and in buckets."""

import fcntl
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console
from safetensors.torch import save_file
from states_rig import FILE, RUN, WIDE, altered, bits, first_state, publish_states, stepped, write_state, write_states

from depth import examples
from slackwater.bucket.local import LocalBucket
from slackwater.checkpoint.codec import Level
from slackwater.checkpoint.digest import tile_digest
from slackwater.checkpoint.keys import fold_key, manifest_key
from slackwater.checkpoint.manifest import Tiles, encode_manifest
from slackwater.checkpoint.outline import Outline
from slackwater.cli.apply import apply_in_place, apply_to_copy
from slackwater.cli.attended import Attended
from slackwater.cli.diff import DiffSettings, diff_states
from slackwater.cli.fold import fold_folders, fold_in_bucket
from slackwater.cli.inspect import inspect_snapshot
from slackwater.cli.progress import PATIENCE_S, Bars
from slackwater.cli.scratch import Scratch
from slackwater.cli.snapshot import FoldName, Shelf, VersionName, parse_name
from slackwater.cli.summary import Summary
from slackwater.cli.tables import show_applied, show_report, show_summary
from slackwater.cli.verify import STATUSES, status_of, verify_snapshot
from slackwater.errors import ConflictError, CorruptError, InvalidInputError, NotFoundError, WrongBaseError
from slackwater.ids import Version
from slackwater.publish.damage import Damage, Depth, Report
from slackwater.publish.lineage import read_manifest
from slackwater.testing.clock import ManualClock
from slackwater.weights.delta_folder import DeltaFolder
from slackwater.weights.diff import hash_source
from slackwater.weights.patch import Delta, WritableFolder, apply_delta
from slackwater.weights.source import UNDO_FOLDER, FolderSource
from slackwater.weights.undo import UndoLog

SOURCE = Path(__file__).parents[2] / "src"


@pytest.fixture(scope="module")
def states(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return write_states(tmp_path_factory.mktemp("states"), 5)


@pytest.fixture(scope="module")
def bucket(states: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the states as versions, anchors at 0 and 3; and the fold from 1 to 3."""
    folder = tmp_path_factory.mktemp("bucket")
    publish_states(LocalBucket(folder), states, anchor_every=3)
    with Scratch() as scratch:
        work = Attended(scratch=scratch, tell=lambda _stage, _done, _total: None)
        name = FoldName(run=RUN, start=Version(1), end=Version(3))
        fold_in_bucket(name, DiffSettings(out=None, level="fast", threads=1), Shelf(str(folder), work, 1), work)
    return folder


@pytest.fixture
def work() -> Generator[Attended]:
    with Scratch() as scratch:
        yield Attended(scratch=scratch, tell=lambda _stage, _done, _total: None)


@pytest.fixture
def shelf(bucket: Path, work: Attended) -> Shelf:
    return Shelf(str(bucket), work, 1)


@pytest.fixture
def deltas(states: list[Path], tmp_path: Path, work: Attended) -> list[Path]:
    """Delta folders from each state to the next."""
    made = [tmp_path / f"delta{step}" for step in range(len(states) - 1)]
    for step, folder in enumerate(made):
        diff(states[step], states[step + 1], work, out=folder)
    return made


def diff(
    old: Path | str,
    new: Path | str,
    work: Attended,
    *,
    bucket: Path | None = None,
    out: Path | None = None,
    level: Level = "fast",
    partial: bool = False,
) -> Summary:
    settings = DiffSettings(out=out, level=level, threads=1, partial=partial)
    return diff_states(str(old), str(new), settings, Shelf(None if bucket is None else str(bucket), work, 1), work)


def delta_at(folder: Path) -> Delta:
    found = DeltaFolder(folder)
    return Delta(manifest=found.manifest, pack=found.pack)


def copy_of(folder: Path, target: Path) -> Path:
    return shutil.copytree(folder, target)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def leftovers(folder: Path) -> list[Path]:
    return list(folder.glob(".slackwater-*"))


# How snapshots are named


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("run/12", VersionName(run=RUN, version=Version(12))),
        ("run/3..7", FoldName(run=RUN, start=Version(3), end=Version(7))),
        ("./run/12", Path("run/12")),
        ("/run/12", Path("/run/12")),
        ("model", Path("model")),
        ("a/b/12", Path("a/b/12")),
        ("run/x", Path("run/x")),
        ("../12", Path("../12")),
    ],
)
def test_with_a_bucket_what_reads_like_a_name_is_one(text: str, name: object) -> None:
    assert parse_name(text, in_bucket=True) == name


def test_without_a_bucket_everything_is_a_folder_and_a_name_is_told_what_it_lacks(tmp_path: Path) -> None:
    assert parse_name("model", in_bucket=False) == Path("model")
    assert parse_name(str(tmp_path), in_bucket=False) == tmp_path
    for text in ("run/12", "run/3..7"):
        with pytest.raises(InvalidInputError, match=f"{re.escape(text)} is no folder .*--bucket"):
            parse_name(text, in_bucket=False)


def test_a_name_of_a_run_that_none_can_have_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="can't name a run"):
        parse_name("my run/12", in_bucket=True)


# diff


def test_a_diff_counts_what_changes(states: list[Path], work: Attended) -> None:
    found = diff(states[0], states[1], work)
    old, new = FolderSource(states[0]), FolderSource(states[1])
    changed = {name: int((old.bits(name) != new.bits(name)).sum()) for name in old.specs()}
    assert {item.name: item.changed for item in found.listed} == {name: n for name, n in changed.items() if n}
    assert [item.changed for item in found.listed] == sorted((n for n in changed.values() if n), reverse=True)
    total = sum(spec.num_elements for spec in old.specs().values())
    assert found.change is not None
    assert (found.elements, found.change.elements) == (total, sum(changed.values()))
    assert found.change.density == sum(changed.values()) / total
    assert found.change.bits_per_element == 8 * found.change.body_bytes / sum(changed.values())
    assert sum(item.bytes for item in found.change.encodings.values()) == found.change.body_bytes == found.object_bytes
    assert found.change.tensors == len(found.listed)


def test_equal_states_differ_in_nothing(states: list[Path], work: Attended, tmp_path: Path) -> None:
    found = diff(states[0], states[0], work, out=tmp_path / "delta")
    assert found.change is not None
    assert (found.change.elements, found.change.bits_per_element, found.listed) == (0, 0.0, ())
    assert delta_at(tmp_path / "delta").manifest.objects == ()
    made = apply_to_copy(FolderSource(states[0]), delta_at(tmp_path / "delta"), tmp_path / "new", threads=1, work=work)
    assert contents(made.folder) == contents(states[0])


def test_a_delta_folder_is_a_manifest_its_outline_and_its_packs(states: list[Path], deltas: list[Path]) -> None:
    folder = DeltaFolder(deltas[0])
    manifest, source = folder.manifest, FolderSource(states[0])
    assert sorted(path.name for path in deltas[0].iterdir()) == ["blobs", "delta.json", "outline.json"]
    assert sorted(path.name for path in (deltas[0] / "blobs").iterdir()) == sorted(r.sha256 for r in manifest.objects)
    assert (deltas[0] / "delta.json").read_bytes() == encode_manifest(manifest)
    assert manifest.parent is not None
    assert (manifest.run, manifest.version, manifest.parent.version) == ("diff", 1, 0)
    assert manifest.parent.state == hash_source(source, threads=1).digest
    assert manifest.state == hash_source(FolderSource(states[1]), threads=1).digest
    assert folder.outline == Outline(source.specs().values())


def test_versions_of_a_bucket_are_compared_like_folders(states: list[Path], bucket: Path, work: Attended) -> None:
    ours = diff("run/1", str(states[2]), work, bucket=bucket)
    assert ours.listed == diff(states[1], states[2], work).listed
    assert diff("run/4", str(states[4]), work, bucket=bucket).listed == ()
    with pytest.raises(InvalidInputError, match=r"run/1\.\.3 is a fold, not a state"):
        diff("run/1..3", "run/3", work, bucket=bucket)
    with pytest.raises(NotFoundError, match="version 9"):
        diff("run/0", "run/9", work, bucket=bucket)


def without_scale(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["model.scale"]


def test_tensors_that_one_state_has_alone_are_named(states: list[Path], tmp_path: Path, work: Attended) -> None:
    less = altered(states[1], tmp_path / "less", without_scale)
    with pytest.raises(InvalidInputError, match=r"only the first state has model\.scale .*--partial"):
        diff(states[0], less, work, out=tmp_path / "delta")
    for partial in (False, True):
        with pytest.raises(InvalidInputError, match=r"only the second state has model\.scale"):
            diff(less, states[0], work, partial=partial)
    assert not (tmp_path / "delta").exists()


def test_many_missing_tensors_are_counted(states: list[Path], tmp_path: Path, work: Attended) -> None:
    def keep_one(tensors: dict[str, torch.Tensor]) -> None:
        for name in sorted(tensors)[1:]:
            del tensors[name]

    one = altered(states[1], tmp_path / "one", keep_one)
    with pytest.raises(InvalidInputError, match=r"only the first state has (model\.[a-z0-9_.]+, ){4}\S+ and 2 more"):
        diff(states[0], one, work)


def test_a_partial_diff_leaves_absent_tensors_as_they_are(states: list[Path], tmp_path: Path, work: Attended) -> None:
    less = altered(states[1], tmp_path / "less", without_scale)
    diff(states[0], less, work, out=tmp_path / "delta", partial=True)
    made = apply_to_copy(FolderSource(states[0]), delta_at(tmp_path / "delta"), tmp_path / "new", threads=1, work=work)
    assert bits(made.folder) == {**bits(states[1]), "model.scale": bits(states[0])["model.scale"]}


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_another_dtype_is_refused_by_name(
    states: list[Path], tmp_path: Path, work: Attended, dtype: torch.dtype
) -> None:
    def cast(tensors: dict[str, torch.Tensor]) -> None:
        tensors[WIDE] = tensors[WIDE].to(dtype)

    other = altered(states[1], tmp_path / "other", cast)
    with pytest.raises(InvalidInputError, match=rf"{WIDE} goes from BF16 \[2, 2097168\] to F(16|32) \[2, 2097168\]"):
        diff(states[0], other, work)


def test_files_that_a_delta_does_not_carry_are_named(states: list[Path], tmp_path: Path, work: Attended) -> None:
    other = copy_of(states[1], tmp_path / "other")
    (other / "tokenizer.json").write_text('{"other": 1}')
    (other / "more.json").write_text("{}")
    assert diff(states[0], other, work).other_files == ("more.json", "tokenizer.json")
    assert diff(states[0], states[1], work).other_files == ()


def test_a_delta_folder_that_is_there_is_not_written(states: list[Path], tmp_path: Path, work: Attended) -> None:
    (tmp_path / "delta").mkdir()
    with pytest.raises(InvalidInputError, match="is there already"):
        diff(states[0], states[1], work, out=tmp_path / "delta")
    with pytest.raises(InvalidInputError, match="nowhere is no folder"):
        diff(states[0], states[1], work, out=tmp_path / "nowhere" / "delta")


_DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.int8, torch.bool, torch.float64, torch.float8_e5m2]


@settings(max_examples=examples(25), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_what_a_diff_keeps_an_application_makes_again(
    tmp_path_factory: pytest.TempPathFactory, work: Attended, data: st.DataObject
) -> None:
    root = tmp_path_factory.mktemp("pair")
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    pair: tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]] = ({}, {})
    for index in range(data.draw(st.integers(1, 4))):
        dtype = data.draw(st.sampled_from(_DTYPES))
        shape = data.draw(st.lists(st.integers(0, 9), max_size=3).map(tuple))
        raw = rng.integers(0, 2 if dtype == torch.bool else 256, (*shape, dtype.itemsize), dtype=np.uint8)
        flips = rng.random(raw.shape) < data.draw(st.sampled_from([0.0, 0.02, 0.5, 1.0]))
        for tensors, body in zip(pair, (raw, raw ^ flips.astype(np.uint8)), strict=True):
            tensors[f"t{index}"] = torch.from_numpy(body.copy()).reshape(-1).view(dtype).reshape(shape)
    old, new = (write_state(root / name, tensors) for name, tensors in zip("ab", pair, strict=True))
    diff(old, new, work, out=root / "delta", level=data.draw(st.sampled_from(["fast", "wan"])))
    made = apply_to_copy(FolderSource(old), delta_at(root / "delta"), root / "made", threads=2, work=work)
    assert bits(made.folder) == bits(new)
    apply_in_place(old, delta_at(root / "delta"), threads=2, work=work)
    assert bits(old) == bits(new)


# apply to a copy


@pytest.mark.parametrize("threads", [1, 3])
def test_a_copy_is_the_next_state_with_all_its_files(
    states: list[Path], deltas: list[Path], tmp_path: Path, work: Attended, threads: int
) -> None:
    before = contents(states[0])
    made = apply_to_copy(
        FolderSource(states[0]), delta_at(deltas[0]), tmp_path / "new", threads=threads, work=work
    )  # fmt: skip
    assert bits(made.folder) == bits(states[1])
    assert contents(made.folder).keys() == contents(states[1]).keys()
    assert (made.folder / "chat_template.jinja").read_bytes() == b"{{ messages }}\r\n"
    assert made.state == hash_source(FolderSource(states[1]), threads=1).digest
    assert contents(states[0]) == before
    assert leftovers(tmp_path) == []


def test_a_folder_of_several_files_stays_one(tmp_path: Path, work: Attended) -> None:
    def split(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
        write_state(folder, {})
        (folder / FILE).unlink()
        parts = {"a.safetensors": sorted(tensors)[:3], "b.safetensors": sorted(tensors)[3:]}
        for file, names in parts.items():
            save_file({name: tensors[name] for name in names}, folder / file)
        index = {"weight_map": {name: file for file, names in parts.items() for name in names}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        return folder

    old, new = split(tmp_path / "old", first_state()), split(tmp_path / "next", stepped(first_state(), 1))
    diff(old, new, work, out=tmp_path / "delta")
    made = apply_to_copy(FolderSource(old), delta_at(tmp_path / "delta"), tmp_path / "new", threads=1, work=work)
    assert contents(made.folder) == contents(new)


def test_deltas_and_folds_of_a_bucket_are_applied_to_folders(
    states: list[Path], shelf: Shelf, tmp_path: Path, work: Attended
) -> None:
    for start, name, end in ((0, "run/1", 1), (1, "run/2", 2), (1, "run/1..3", 3), (3, "run/4", 4)):
        out = tmp_path / f"new{end}"
        apply_to_copy(FolderSource(states[start]), shelf.delta(name), out, threads=1, work=work)
        assert bits(out) == bits(states[end])
    apply_to_copy(shelf.state("run/1"), shelf.delta("run/2"), tmp_path / "new", threads=1, work=work)
    assert bits(tmp_path / "new") == bits(states[2])
    with pytest.raises(InvalidInputError, match=r"run/3 is an anchor.*a fold that leads to it: run/2\.\.3"):
        shelf.delta("run/3")
    with pytest.raises(NotFoundError, match="is no delta folder"):
        shelf.delta(str(states[0]))


def test_a_wrong_base_is_refused_by_tensor_and_leaves_nothing(
    states: list[Path], deltas: list[Path], tmp_path: Path, work: Attended
) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.steps"] += 5

    other = altered(states[0], tmp_path / "other", change)
    with pytest.raises(
        WrongBaseError, match=r"made on state \w{12}; the model held is state \w{12}: model\.steps tile 0 differs"
    ):
        apply_to_copy(FolderSource(other), delta_at(deltas[0]), tmp_path / "new", threads=1, work=work)
    with pytest.raises(WrongBaseError, match=r"tile 0 and \d+ more differ"):
        apply_to_copy(FolderSource(states[2]), delta_at(deltas[0]), tmp_path / "new", threads=1, work=work)
    assert not (tmp_path / "new").exists()


def test_a_base_that_is_wrong_where_the_delta_changes_nothing_is_refused(
    states: list[Path], deltas: list[Path], tmp_path: Path, work: Attended
) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.mask"] = ~tensors["model.mask"]

    other = altered(states[0], tmp_path / "other", change)
    before = contents(other)
    with pytest.raises(WrongBaseError, match="another tile isn't"):
        apply_in_place(other, delta_at(deltas[0]), threads=1, work=work)
    assert contents(other) == before


def test_another_model_is_refused(deltas: list[Path], tmp_path: Path, work: Attended) -> None:
    small = write_state(tmp_path / "small", {"model.steps": torch.tensor(7, dtype=torch.int32)})
    with pytest.raises(WrongBaseError, match="the base has 1"):
        apply_to_copy(FolderSource(small), delta_at(deltas[0]), tmp_path / "new", threads=1, work=work)


@pytest.mark.parametrize("damage", ["flip", "cut", "gone", "swapped digests"])
def test_a_damaged_delta_makes_nothing(
    states: list[Path], deltas: list[Path], tmp_path: Path, work: Attended, damage: str
) -> None:
    folder, target = deltas[0], copy_of(states[0], tmp_path / "old")
    (blob,) = (folder / "blobs").iterdir()
    body = blob.read_bytes()
    if damage == "flip":
        blob.write_bytes(bytes([body[0] ^ 1]) + body[1:])
    elif damage == "cut":
        blob.write_bytes(body[:-1])
    elif damage == "gone":
        blob.unlink()
    else:
        text = (folder / "delta.json").read_text()
        tiles = DeltaFolder(folder).manifest.tiles
        assert isinstance(tiles, Tiles)
        (folder / "delta.json").write_text(text.replace(tiles.sums, tiles.sums[:3] + "AAAA" + tiles.sums[7:]))
    for attempt in (apply_to_new, apply_in_place_with):
        with pytest.raises((CorruptError, NotFoundError, WrongBaseError)):
            attempt(target, folder, tmp_path / "new", work)
    assert bits(target) == bits(states[0])
    assert not (tmp_path / "new").exists()


def apply_to_new(old: Path, delta: Path, out: Path, work: Attended) -> None:
    apply_to_copy(FolderSource(old), delta_at(delta), out, threads=1, work=work)


def apply_in_place_with(old: Path, delta: Path, _out: Path, work: Attended) -> None:
    apply_in_place(old, delta_at(delta), threads=1, work=work)


@pytest.mark.parametrize(
    ("file", "body", "error"),
    [
        ("delta.json", b"{", CorruptError),
        ("delta.json", None, NotFoundError),
        ("outline.json", b"[[1]]", CorruptError),
        ("outline.json", b'[["a", "F4", [2]]]', CorruptError),
        ("outline.json", b'[["a", "F32", [2]], ["a", "F32", [2]]]', CorruptError),
        ("outline.json", b"[" * 100_000, CorruptError),
        ("outline.json", b"[]", CorruptError),
        ("outline.json", None, NotFoundError),
    ],
)
def test_a_delta_folder_that_breaks_its_rules_is_refused(
    deltas: list[Path], file: str, body: bytes | None, error: type[Exception]
) -> None:
    if body is None:
        (deltas[0] / file).unlink()
    else:
        (deltas[0] / file).write_bytes(body)
    with pytest.raises(error):
        DeltaFolder(deltas[0])


# apply in place


def test_a_folder_is_changed_in_place_once_and_twice(
    states: list[Path], deltas: list[Path], tmp_path: Path, work: Attended
) -> None:
    folder = copy_of(states[0], tmp_path / "model")
    inode = (folder / FILE).stat().st_ino
    for delta, after in zip(deltas, states[1:], strict=True):
        for _ in range(2):
            apply_in_place(folder, delta_at(delta), threads=1, work=work)
            assert contents(folder) == contents(after)
    assert (folder / FILE).stat().st_ino == inode


def test_a_wrong_base_is_not_touched(states: list[Path], deltas: list[Path], tmp_path: Path, work: Attended) -> None:
    folder = copy_of(states[0], tmp_path / "model")
    before = contents(folder)
    with pytest.raises(WrongBaseError, match=r"tile 0 and \d+ more differ"):
        apply_in_place(folder, delta_at(deltas[2]), threads=1, work=work)
    assert contents(folder) == before


@pytest.mark.parametrize("done", [0, 1, 2, 5, 16, 17])
def test_half_an_application_goes_on(
    states: list[Path], deltas: list[Path], tmp_path: Path, work: Attended, done: int
) -> None:
    folder = copy_of(states[0], tmp_path / "model")
    target = WritableFolder(FolderSource(folder))
    outline = Outline(target.specs().values())
    steps = apply_delta(target, outline, delta_at(deltas[0]), threads=1)
    for _ in range(done):
        next(steps)
    steps.close()
    apply_in_place(folder, delta_at(deltas[0]), threads=1, work=work)
    assert contents(folder) == contents(states[1])


def test_half_an_application_of_another_delta_is_refused(
    states: list[Path], deltas: list[Path], tmp_path: Path, work: Attended
) -> None:
    folder = copy_of(states[0], tmp_path / "model")
    target = WritableFolder(FolderSource(folder))
    next(apply_delta(target, Outline(target.specs().values()), delta_at(deltas[0]), threads=1))
    half = contents(folder)
    with pytest.raises(WrongBaseError):
        apply_in_place(folder, delta_at(deltas[1]), threads=1, work=work)
    assert contents(folder) == half
    apply_in_place(folder, delta_at(deltas[0]), threads=1, work=work)
    apply_in_place(folder, delta_at(deltas[1]), threads=1, work=work)
    assert contents(folder) == contents(states[2])


KILLED = """
import os, signal, sys
from pathlib import Path
import slackwater.weights.patch as patch
from slackwater.checkpoint import application
from slackwater.cli.apply import apply_in_place
from slackwater.cli.attended import Attended
from slackwater.cli.scratch import Scratch
from slackwater.weights.delta_folder import DeltaFolder

after, torn = int(sys.argv[3]), sys.argv[4] == "torn"
apply_body, calls = application.apply_body, 0

def apply_and_die(places, entry, body, held):
    global calls
    calls += 1
    if calls <= after:
        return apply_body(places, entry, body, held)
    if torn:
        for place, bits in zip(places, held):
            bits[: bits.size // 2] ^= 1
            place.tile.put(source.bits(place.spec.name), bits)
    os.kill(os.getpid(), signal.SIGKILL)

application.apply_body = apply_and_die
writable = patch.WritableFolder
def remember(folder):
    global source
    source = writable(folder)
    return source
import slackwater.cli.apply as command
command.WritableFolder = remember
delta = DeltaFolder(Path(sys.argv[2]))
work = Attended(scratch=Scratch(), tell=lambda stage, done, total: None)
apply_in_place(Path(sys.argv[1]), patch.Delta(manifest=delta.manifest, pack=delta.pack), threads=1, work=work)
"""


@pytest.mark.parametrize(("after", "how"), [(0, "clean"), (3, "clean"), (0, "torn"), (2, "torn"), (9, "torn")])
def test_a8_09_an_application_that_is_killed_goes_on_with_the_tiles_that_were_torn(
    states: list[Path], deltas: list[Path], tmp_path: Path, work: Attended, after: int, how: str
) -> None:
    folder = copy_of(states[0], tmp_path / "model")
    command = [sys.executable, "-c", KILLED, str(folder), str(deltas[0]), str(after), how]
    assert subprocess.run(command, check=False, env=environment()).returncode == -signal.SIGKILL
    assert (folder / UNDO_FOLDER).is_dir()
    held = bits(FolderSource(folder, half_written=True))
    assert held not in (bits(states[0]), bits(states[1])) or how == "clean"
    apply_in_place(folder, delta_at(deltas[0]), threads=1, work=work)
    assert contents(folder) == contents(states[1])


def test_without_its_record_a_torn_tile_is_refused_by_name(
    states: list[Path], deltas: list[Path], tmp_path: Path, work: Attended
) -> None:
    folder = copy_of(states[0], tmp_path / "model")
    target = WritableFolder(FolderSource(folder))
    target.bits(WIDE)[77] ^= 1
    before = contents(folder)
    with pytest.raises(WrongBaseError, match=rf"{re.escape(WIDE)} tile 0"):
        apply_in_place(folder, delta_at(deltas[0]), threads=1, work=work)
    assert contents(folder) == before


@pytest.mark.parametrize("body", [b"", b"\x01", b"\xff" * 64, bytes(4096)])
def test_a_broken_record_is_forgotten(
    states: list[Path], deltas: list[Path], tmp_path: Path, work: Attended, body: bytes
) -> None:
    folder = copy_of(states[0], tmp_path / "model")
    (folder / UNDO_FOLDER).mkdir()
    (folder / UNDO_FOLDER / "3").write_bytes(body)
    (folder / UNDO_FOLDER / "4.part").write_bytes(b"half")
    apply_in_place(folder, delta_at(deltas[0]), threads=1, work=work)
    assert contents(folder) == contents(states[1])
    assert not (folder / UNDO_FOLDER).exists()


def test_a_record_whose_bits_are_spoilt_is_not_written(states: list[Path], tmp_path: Path) -> None:
    folder = copy_of(states[0], tmp_path / "model")
    target = WritableFolder(FolderSource(folder))
    outline = Outline(target.specs().values())
    undo, number = UndoLog(folder, outline), outline.number("model.scale", 0)
    kept, held = tmp_path / "record", tile_digest(target.bits("model.scale"))
    with undo.keeping([number], [target.bits("model.scale")]):
        shutil.copy(folder / UNDO_FOLDER / str(number), kept)
    assert list((folder / UNDO_FOLDER).iterdir()) == []
    for body, restored in ((kept.read_bytes(), True), (kept.read_bytes()[:-1] + b"\x99", False)):
        target.bits("model.scale")[:] = 0
        (folder / UNDO_FOLDER).mkdir(exist_ok=True)
        (folder / UNDO_FOLDER / str(number)).write_bytes(body)
        assert undo.put_back(target, {number: (held, 0)}) == 1
        assert (bits(target)["model.scale"] == bits(states[0])["model.scale"]) is restored


def test_files_with_another_name_are_left_alone(
    states: list[Path], deltas: list[Path], tmp_path: Path, work: Attended
) -> None:
    cache = copy_of(states[0], tmp_path / "cache")
    for number, link in enumerate((os.symlink, os.link)):
        folder = tmp_path / f"model{number}"
        folder.mkdir()
        link(cache / FILE, folder / FILE)
        with pytest.raises(InvalidInputError, match="another name too"):
            apply_in_place(folder, delta_at(deltas[0]), threads=1, work=work)
        (folder / FILE).unlink()
    assert contents(cache) == contents(states[0])


def test_two_applications_to_one_folder_do_not_meet(
    states: list[Path], deltas: list[Path], tmp_path: Path, work: Attended
) -> None:
    folder = copy_of(states[0], tmp_path / "model")
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        with pytest.raises(ConflictError, match="another process applies a delta"):
            apply_in_place(folder, delta_at(deltas[0]), threads=1, work=work)
    finally:
        os.close(handle)
    apply_in_place(folder, delta_at(deltas[0]), threads=1, work=work)
    with pytest.raises(InvalidInputError, match="is no folder"):
        apply_in_place(tmp_path / "missing", delta_at(deltas[0]), threads=1, work=work)


def test_a_model_that_is_already_the_result_is_told_to_be_so(
    states: list[Path], deltas: list[Path], tmp_path: Path, work: Attended, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = copy_of(states[0], tmp_path / "model")
    made = [
        apply_in_place(folder, delta_at(deltas[0]), threads=1, work=work),
        apply_in_place(folder, delta_at(deltas[0]), threads=1, work=work),
        apply_to_copy(FolderSource(folder), delta_at(deltas[0]), tmp_path / "new", threads=1, work=work),
    ]
    assert [item.was_after for item in made] == [False, True, True]
    assert [bool(item.num_changed) for item in made] == [True, False, False]
    for item in made:
        show_applied(item)
    first, *others = capsys.readouterr().out.splitlines()
    assert "elements changed, from" in first
    assert all("and so was the model before: nothing changed" in line for line in others)


# What isn't there


@pytest.mark.parametrize(
    ("text", "error", "says"),
    [
        ("run", InvalidInputError, r"run is a run, not a snapshot \(name RUN/VERSION; the newest is run/4\)"),
        ("rnu", NotFoundError, r"neither a folder rnu nor a run rnu in .*\(it has: run\)"),
        ("./rnu", InvalidInputError, r"rnu is no folder"),
        ("a b", InvalidInputError, r"a b is no folder"),
        ("rnu/1", NotFoundError, r"there is no run rnu in file://.*\(it has: run\)"),
        ("run/9", NotFoundError, r"run has no version 9 \(the newest is run/4\)"),
        ("run/0..2", NotFoundError, r"nobody made the fold run/0\.\.2 \(make it with `slackwater fold run/0\.\.2 "),
        ("run/0..9", NotFoundError, r"run has no version 9"),
        ("rnu/0..9", NotFoundError, r"there is no run rnu"),
        ("run/3..2", InvalidInputError, r"a fold leads to a later version"),
    ],
)
def test_a_slip_in_a_name_is_told_with_what_is_there(
    shelf: Shelf, work: Attended, text: str, error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        inspect_snapshot(text, None, 1, shelf, work)
    with pytest.raises(error, match=says):
        verify_snapshot(text, None, "objects", threads=1, shelf=shelf, work=work)


def test_a_bucket_tells_of_its_runs_up_to_a_bound(tmp_path: Path, work: Attended) -> None:
    shelf = Shelf(str(tmp_path), work, 1)
    with pytest.raises(NotFoundError, match="no run is found in it"):
        inspect_snapshot("run/1", None, 1, shelf, work)
    for number in range(7):
        LocalBucket(tmp_path).put(f"run{number}/manifests/00000000.json", b"{}")
    LocalBucket(tmp_path).put("other/thing.json", b"{}")
    with pytest.raises(NotFoundError, match="it has: run0, run1, run2, run3, run4 and more"):
        inspect_snapshot("run/1", None, 1, shelf, work)


@pytest.mark.parametrize("with_hint", [True, False])
def test_a_version_that_is_gone_below_the_newest_is_damage(
    bucket: Path, tmp_path: Path, work: Attended, *, with_hint: bool
) -> None:
    spoilt = copy_of(bucket, tmp_path / "bucket")
    (spoilt / manifest_key(RUN, Version(2))).unlink()
    if not with_hint:
        (spoilt / RUN / "head.json").unlink()
    shelf = Shelf(str(spoilt), work, 1)
    assert status_of(verify_snapshot("run/2", None, "objects", threads=1, shelf=shelf, work=work)) == 3
    with pytest.raises(NotFoundError, match=r"version 2 of run is gone.*the newest is run/4"):
        inspect_snapshot("run/2", None, 1, shelf, work)
    with pytest.raises(NotFoundError, match="run has no version 5"):
        verify_snapshot("run/5", None, "objects", threads=1, shelf=shelf, work=work)


def test_the_wrong_version_as_a_base_is_refused_by_manifests_alone(states: list[Path], shelf: Shelf) -> None:
    with pytest.raises(
        WrongBaseError, match=r"run/4 is made on .*\(version 3\); run/0 is .*name run/3, or make a fold"
    ):
        shelf.check_base("run/0", "run/4", may_be_after=True)
    with pytest.raises(WrongBaseError, match=r"run/1\.\.3 is made on .*\(version 1\); run/4 is .*\(name run/1\)"):
        shelf.check_base("run/4", "run/1..3", may_be_after=True)
    shelf.check_base("run/1", "run/1", may_be_after=True)
    shelf.check_base("run/0", "run/1", may_be_after=False)
    shelf.check_base(str(states[3]), "run/1", may_be_after=False)  # is compared when it is read


# fold


def fold(
    texts: Sequence[Path | str], base: Path | str, out: Path, shelf: Shelf, work: Attended, level: Level = "fast"
) -> Summary:
    settings = DiffSettings(out=out, level=level, threads=1)
    return fold_folders([str(text) for text in texts], str(base), settings, shelf, work)


@pytest.mark.parametrize("level", ["fast", "wan"])
@pytest.mark.parametrize(("start", "end"), [(0, 1), (0, 3), (1, 4)])
def test_deltas_in_a_row_become_one(
    states: list[Path], deltas: list[Path], tmp_path: Path, shelf: Shelf, work: Attended, start: int, end: int,
    level: Level,
) -> None:  # fmt: skip
    out = tmp_path / "fold"
    summary = fold(deltas[start:end], states[start], out, shelf, work, level)
    assert summary.listed == diff(states[start], states[end], work, level=level).listed
    made = apply_to_copy(FolderSource(states[start]), delta_at(out), tmp_path / "new", threads=1, work=work)
    assert bits(made.folder) == bits(states[end])


def test_deltas_of_a_bucket_fold_into_a_folder(
    states: list[Path], deltas: list[Path], tmp_path: Path, shelf: Shelf, work: Attended
) -> None:
    fold(["run/1", deltas[1], deltas[2], "run/4"], "run/0", tmp_path / "fold", shelf, work)
    made = apply_to_copy(FolderSource(states[0]), delta_at(tmp_path / "fold"), tmp_path / "new", threads=1, work=work)
    assert bits(made.folder) == bits(states[4])


def test_deltas_that_do_not_follow_are_refused_by_name(
    states: list[Path], deltas: list[Path], tmp_path: Path, shelf: Shelf, work: Attended
) -> None:
    with pytest.raises(WrongBaseError, match=r"delta2 was made on \w+, and .*delta0 leads to"):
        fold([deltas[0], deltas[2]], states[0], tmp_path / "fold", shelf, work)
    with pytest.raises(WrongBaseError, match=r"tile 0 and \d+ more differ"):
        fold(deltas[:2], states[2], tmp_path / "fold", shelf, work)
    with pytest.raises(WrongBaseError, match="has been applied to some of it"):
        fold(deltas[:2], states[1], tmp_path / "fold", shelf, work)
    assert not (tmp_path / "fold").exists()


# inspect


def inspect(text: Path | str, shelf: Shelf, work: Attended, base: Path | str | None = None) -> Summary:
    return inspect_snapshot(str(text), None if base is None else str(base), 1, shelf, work)


def test_an_anchor_tells_its_tensors_files_and_sums(
    states: list[Path], shelf: Shelf, work: Attended, bucket: Path
) -> None:
    found = inspect("run/3", shelf, work)
    source = FolderSource(states[3])
    table = hash_source(source, threads=1)
    assert (found.kind, found.step, found.state, found.change) == ("anchor", 30, table.digest, None)
    assert [item.name for item in found.listed] == list(source.specs())
    assert [item.sum for item in found.listed] == [f"{int(item):016x}" for item in table.sums]
    assert found.files == {path.name: path.stat().st_size for path in states[3].iterdir()}
    assert found.dtypes["BF16"].tensors == 3
    assert sum(item.bytes for item in found.dtypes.values()) == found.bytes
    assert found.manifest_bytes == (bucket / manifest_key(RUN, Version(3))).stat().st_size


def test_a_delta_and_a_fold_tell_what_they_change(
    states: list[Path], bucket: Path, shelf: Shelf, work: Attended
) -> None:
    found, made = inspect("run/2", shelf, work), diff(states[1], states[2], work)
    assert (found.kind, found.parent and found.parent.version, found.step) == ("delta", 1, 20)
    assert (found.listed, found.change) == (made.listed, made.change)
    fold_found = inspect("run/1..3", shelf, work)
    assert (fold_found.kind, fold_found.parent and fold_found.parent.version) == ("fold", 1)
    assert fold_found.listed == diff(states[1], states[3], work).listed
    sums = hash_source(FolderSource(states[3]), threads=1)
    names = [spec.name for spec in sums.outline.specs]
    assert all(item.sum == f"{int(sums.sums[names.index(item.name)]):016x}" for item in fold_found.listed)
    assert fold_found.manifest_bytes == (bucket / fold_key(RUN, Version(1), Version(3))).stat().st_size


def test_inspecting_reads_two_manifests_and_no_object(bucket: Path, shelf: Shelf, work: Attended) -> None:
    moved = bucket / RUN / "blobs-away"
    (bucket / RUN / "blobs").rename(moved)
    try:
        assert inspect("run/2", shelf, work).change is not None
    finally:
        moved.rename(bucket / RUN / "blobs")
    first = bucket / manifest_key(RUN, Version(0))
    first.rename(first.with_suffix(".away"))
    try:
        assert inspect("run/4", shelf, work).listed == inspect("run/4", shelf, work).listed != ()
        with pytest.raises(NotFoundError, match="version 0 isn't there"):
            inspect("run/2", shelf, work)
    finally:
        first.with_suffix(".away").rename(first)


def test_with_its_base_a_delta_tells_how_far_elements_move(
    states: list[Path], deltas: list[Path], shelf: Shelf, work: Attended
) -> None:
    for text, base in (("run/1", "run/0"), (deltas[0], states[0]), ("run/1", states[0])):
        moved = {item.name: item.distance for item in inspect(text, shelf, work, base).listed}
        plain = {item.name: item.changed for item in inspect(text, shelf, work).listed}
        assert moved["model.embed_tokens.weight"] == plain["model.embed_tokens.weight"]  # neighbours all
        assert moved[WIDE] == plain[WIDE]
        assert moved["model.steps"] == 1
        old, new = np.float32(-0.25).view(np.int32), np.float32(1.0).view(np.int32)
        assert moved["model.scale"] == int(new) + (int(old) & 0x7FFFFFFF) + 1  # over both zeros
    assert all(item.distance is None for item in inspect("run/1", shelf, work).listed)
    for base in ("run/1", "run/2"):
        with pytest.raises(
            WrongBaseError, match=rf"run/1 is made on state \w+ \(version 0\); {base} is .*\(name run/0\)"
        ):
            inspect("run/1", shelf, work, base)
    with pytest.raises(WrongBaseError, match=r"held is state \w+: .* is as after the delta .*, run/0\)"):
        inspect("run/1", shelf, work, states[1])
    with pytest.raises(WrongBaseError, match=r"held is state \w+: .* isn't what the delta was made on"):
        inspect("run/1", shelf, work, states[2])
    with pytest.raises(WrongBaseError, match=r"name run/1, or make a fold: `slackwater fold run/0\.\.2 --bucket …`"):
        inspect("run/2", shelf, work, "run/0")
    with pytest.raises(InvalidInputError, match="is no delta"):
        inspect(states[0], shelf, work, states[0])


def test_a_model_folder_tells_its_tensors(states: list[Path], shelf: Shelf, work: Attended) -> None:
    found = inspect(states[0], shelf, work)
    assert (found.kind, found.state, len(found.listed), found.tensors) == ("folder", None, 8, 8)
    assert found.files[FILE] == (states[0] / FILE).stat().st_size


def test_a_summary_prints_as_lines_and_a_table(
    states: list[Path], shelf: Shelf, work: Attended, capsys: pytest.CaptureFixture[str]
) -> None:
    found = inspect("run/2", shelf, work, "run/1")
    show_summary(found, 2, as_json=False)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("run/2: delta on version 1, step 20, made ")
    assert f"changed   {found.change.elements:,} elements" in lines[3] if found.change else False
    assert [line.split()[0] for line in lines[-3:]] == [found.listed[0].name, found.listed[1].name, "…"]
    show_summary(found, 0, as_json=True)
    read = json.loads(capsys.readouterr().out)
    assert [item["name"] for item in read["listed"]] == [item.name for item in found.listed]
    assert read["parent"] == {"version": 1, "state": found.parent.state if found.parent else None}
    show_summary(inspect(states[0], shelf, work), 99, as_json=False)
    assert "scalar" in capsys.readouterr().out


# verify


def test_the_status_is_the_lowest_of_what_was_found() -> None:
    assert sorted(STATUSES.values()) == [3, 4, 5, 6, 7, 8]
    report = Report(depth="tensors")
    assert status_of(report) == 0
    kinds: tuple[Damage, ...] = ("unavailable", "tensor", "object", "lineage", "manifest", "missing")
    for status, damage in zip(range(8, 2, -1), kinds, strict=True):
        report.note(damage, "here", "this")
        assert status_of(report) == status


def test_everything_that_can_be_named_can_be_verified(
    states: list[Path], deltas: list[Path], shelf: Shelf, work: Attended
) -> None:
    cases: list[tuple[Path | str, Path | str | None]] = [
        ("run/4", None), ("run/1..3", None), (deltas[0], states[0]), (deltas[0], "run/0"), (states[0], None),
    ]  # fmt: skip
    for text, base in cases:
        report = verify_snapshot(
            str(text), None if base is None else str(base), "tensors", threads=1, shelf=shelf, work=work
        )  # fmt: skip
        assert (status_of(report), report.num_tiles) == (0, 22)
    with pytest.raises(InvalidInputError, match="has no base"):
        verify_snapshot("run/4", "run/3", "tensors", threads=1, shelf=shelf, work=work)


@pytest.mark.parametrize("depth", ["manifest", "objects"])
def test_a_base_that_would_not_be_read_is_refused(
    states: list[Path], deltas: list[Path], shelf: Shelf, work: Attended, depth: Depth
) -> None:
    with pytest.raises(InvalidInputError, match=r"reads no base .*--depth tensors"):
        verify_snapshot(str(deltas[0]), str(states[0]), depth, threads=1, shelf=shelf, work=work)


def test_a_verdict_tells_what_was_checked_and_what_was_not(
    states: list[Path], deltas: list[Path], shelf: Shelf, work: Attended, capsys: pytest.CaptureFixture[str]
) -> None:
    def verdict(text: Path | str, depth: Depth) -> str:
        report = verify_snapshot(str(text), None, depth, threads=1, shelf=shelf, work=work)
        show_report("it", report, as_json=False)
        return capsys.readouterr().out

    assert re.match(
        r"it: good: checked 3 manifests; state \w{12}\. Neither objects nor tens", verdict("run/2", "manifest")
    )
    assert re.match(
        r"it: good: checked 3 manifests, 6 objects of 8\.\d+ MB; state \w{12}\. Tensors were not rebuilt; --depth t",
        verdict("run/2", "objects"),
    )
    assert re.fullmatch(
        r"it: good: checked 3 manifests, 6 objects of \S+ MB, 22 tiles; state \w{12}\n", verdict("run/2", "tensors")
    )
    assert re.match(r"it: good: checked 1 manifest, 1 object of .*Tensors were not", verdict(deltas[0], "objects"))
    assert "Headers alone were read; --depth objects" in verdict(states[0], "manifest")
    assert re.fullmatch(r"it: good: checked 1 file of \S+ MB, 22 tiles; state \w+\n", verdict(states[0], "objects"))
    (deltas[0] / "outline.json").unlink()
    assert verdict(deltas[0], "objects").startswith("missing: outline.json: it isn't there")


def test_a_report_prints_a_line_for_each_finding_and_a_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    report = Report(depth="tensors")
    show_report("run/4", report, as_json=False)
    for number in range(105):
        report.note("missing", f"run/{number}", "it isn't there")
    show_report("run/4", report, as_json=False)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "run/4: good: checked nothing"
    assert lines[1] == "missing: run/0: it isn't there"
    assert lines[-2] == "… and 5 more"
    assert lines[-1] == "run/4: damaged: 105 missing (whole: nothing)"
    show_report("run/4", report, as_json=True)
    read = json.loads(capsys.readouterr().out)
    assert (read["status"], read["counts"], len(read["findings"])) == (3, {"missing": 105}, 100)


# The whole command


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(SOURCE), "TERM": "dumb", "COLUMNS": "120"}


def slackwater(*words: Path | str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "slackwater.cli.main", *map(str, words)]
    return subprocess.run(command, check=False, capture_output=True, text=True, env=environment(), timeout=100)


def test_the_commands_work_one_after_the_other(states: list[Path], bucket: Path, tmp_path: Path) -> None:
    made = slackwater("diff", states[0], states[1], "--out", tmp_path / "delta", "--threads", "1", "--json")
    assert (made.returncode, made.stderr) == (0, "")
    assert json.loads(made.stdout)["change"]["tensors"] == 5
    shown = slackwater("inspect", "run/2", "--bucket", bucket, "--top", "1")
    assert (shown.returncode, shown.stderr, shown.stdout.startswith("run/2: delta")) == (0, "", True)
    applied = slackwater("apply", states[0], tmp_path / "delta", "--out", tmp_path / "new")
    assert (applied.returncode, applied.stderr) == (0, "")
    assert bits(tmp_path / "new") == bits(states[1])
    again = slackwater("apply", tmp_path / "new", "run/2", "--bucket", bucket, "--in-place")
    assert (again.returncode, bits(tmp_path / "new")) == (0, bits(states[2]))
    folded = slackwater("fold", "run/0..2", "--bucket", bucket, "--level", "wan")
    assert (folded.returncode, folded.stdout.startswith("run/0..2: fold on version 0")) == (0, True)
    assert (
        read_manifest(LocalBucket(bucket), RUN, Version(2)).state
        in (bucket / "run/folds/00000000-00000002.json").read_text()
    )
    assert slackwater("verify", "run/0..2", "--bucket", bucket, "--depth", "tensors").returncode == 0


def test_the_status_tells_the_damage(bucket: Path, tmp_path: Path) -> None:
    spoilt = copy_of(bucket, tmp_path / "bucket")
    manifest = read_manifest(LocalBucket(spoilt), RUN, Version(2))
    blob = spoilt / manifest.objects[0].key
    blob.write_bytes(b"x" + blob.read_bytes()[1:])
    found = slackwater("verify", "run/2", "--bucket", spoilt)
    assert (found.returncode, found.stderr) == (6, "")
    assert found.stdout.splitlines()[0].startswith(f"object: {manifest.objects[0].key} hasn't the SHA-256")
    assert slackwater("verify", "run/2", "--bucket", spoilt, "--depth", "manifest").returncode == 0
    blob.unlink()
    assert slackwater("verify", "run/2", "--bucket", spoilt).returncode == 3


@pytest.mark.parametrize(
    ("words", "status", "says"),
    [
        (["apply", "a", "b"], 2, "--in-place"),
        (["apply", "a", "b", "--out", "c", "--in-place"], 2, "--in-place"),
        (["fold", "a", "b", "--out", "c"], 2, "--base"),
        (["fold", "run/1..2"], 1, "--bucket"),
        (["diff", "nowhere", "nowhere"], 1, "nowhere is no folder"),
        (["inspect", "run/1"], 1, "--bucket"),
        (["verify", "run/1", "--bucket", "nowhere"], 1, "no such bucket"),
        (["diff", "a", "b", "--level", "wna"], 2, "did you mean wan?"),
        (["verify", "a", "--depth", "tensor"], 2, "none of manifest, objects, tensors"),
        (["publish", "a", "--bucket", "b", "--run", "r", "--level", "max"], 2, "'max' is none of fast, wan"),
    ],
)
def test_a_wrong_call_is_told(tmp_path: Path, words: list[str], status: int, says: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "slackwater.cli.main", *words], check=False, capture_output=True, text=True,
        env=environment(), cwd=tmp_path, timeout=100,
    )  # fmt: skip
    assert (done.returncode, says in done.stderr) == (status, True)
    assert list(tmp_path.iterdir()) == []


def test_a_publication_is_told_with_what_it_makes(states: list[Path], tmp_path: Path) -> None:
    where = ("--bucket", tmp_path / "new" / "bucket", "--run", "r", "--threads", "1")
    first = slackwater("publish", states[0], *where)
    made, line = first.stdout.splitlines()
    assert (first.returncode, made) == (0, f"made directory {tmp_path / 'new' / 'bucket'}")
    assert re.match(
        r"published r/0, anchor, a new run of 4,195,418 elements: 8\.\d+ MB with its manifest, for a model of 8\.39 MB",
        line,
    )
    second = slackwater("publish", states[1], *where, "--level", "wan")
    assert re.match(
        r"published r/1, delta: \S+ kB with its manifest, for a model of 8\.39 MB, [\d,]+ of 4,195", second.stdout
    )
    third = json.loads(slackwater("publish", states[2], *where, "--json").stdout)
    assert (third["version"], third["kind"], third["is_new_run"], third["made_directory"]) == (2, "delta", False, None)


def test_a_folder_that_lacks_tensors_is_published_on_request_alone(states: list[Path], tmp_path: Path) -> None:
    where = ("--bucket", tmp_path / "bucket", "--run", "r")
    assert slackwater("publish", states[0], *where).returncode == 0
    less = altered(states[1], tmp_path / "less", without_scale)
    refused = slackwater("publish", less, *where)
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "less lacks model.scale of run r (save the whole model, or with --partial they stay" in refused.stderr
    assert slackwater("publish", less, *where, "--anchor").returncode == 1
    done = slackwater("publish", less, *where, "--partial")
    assert (done.returncode, done.stdout.startswith("published r/1, delta: ")) == (0, True)


def test_a_folder_with_other_names_is_told_of_a_name_and_not_of_all_that_it_lacks(
    states: list[Path], tmp_path: Path
) -> None:
    def prefixed(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            tensors[f"module.{name}"] = tensors.pop(name)

    where = ("--bucket", tmp_path / "bucket", "--run", "r")
    assert slackwater("publish", states[0], *where).returncode == 0
    other = altered(states[1], tmp_path / "other", prefixed)
    refused = slackwater("publish", other, *where)
    assert (refused.returncode, refused.stdout, refused.stderr.count("\n")) == (1, "", 1)
    assert re.search(r"module\.\S+ isn't in this \w+ \(if module\.\S+ is what this \w+ calls", refused.stderr)
    assert "--partial" not in refused.stderr


def test_one_of_each_is_counted_as_one(tmp_path: Path, work: Attended, capsys: pytest.CaptureFixture[str]) -> None:
    old, new = (write_state(tmp_path / name, {"x": torch.tensor([float(name)])}) for name in "12")
    show_summary(diff(old, new, work), 10, as_json=False)
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].startswith("tensors   1 of 1 element, 4 bytes: ")
    assert lines[3] == "changed   1 element, 100.000%: in 1 tensor, 1 group, 1 tile"


def test_an_object_that_may_not_be_read_is_named_once(bucket: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = Report(depth="manifest")
    url = f"{bucket.as_uri()}/run/manifests/00000001.json"
    report.note("unavailable", manifest_key(RUN, Version(1)), f"{url}: Permission denied")
    show_report("run/2", report, as_json=False)
    first, verdict = capsys.readouterr().out.splitlines()
    assert first == f"unavailable: {url}: Permission denied"
    assert verdict == "run/2: damaged: 1 unavailable (whole: nothing)"


def test_the_version_and_an_example_of_each_verb_are_told() -> None:
    assert re.fullmatch(r"slackwater \d+\.\d+\.\d+\n", slackwater("--version").stdout)
    for verb, names in {
        "publish": ["FOLDER", "--partial", "--level", "--threads", "--json"], "diff": ["OLD", "NEW", "random"],
        "apply": ["OLD", "DELTA"], "fold": ["DELTA"], "inspect": ["SNAPSHOT"], "verify": ["SNAPSHOT"],
    }.items():  # fmt: skip
        shown = slackwater(verb, "--help").stdout
        assert f"Example: slackwater {verb} " in shown
        assert [name for name in names if name not in shown] == []


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_command_that_is_ended_leaves_no_folder(
    bucket: Path, states: list[Path], tmp_path: Path, number: signal.Signals, status: int
) -> None:
    """A pack that is a pipe without a writer holds the command where half of its folder is made."""
    held = copy_of(bucket, tmp_path / "bucket")
    blob = held / read_manifest(LocalBucket(held), RUN, Version(1)).objects[0].key
    blob.unlink()
    os.mkfifo(blob)
    command = ["apply", str(states[0]), "run/1", "--bucket", str(held), "--out", str(tmp_path / "new")]
    with subprocess.Popen(
        [sys.executable, "-m", "slackwater.cli.main", *command], stderr=subprocess.PIPE, text=True, env=environment()
    ) as process:
        until(lambda: list(tmp_path.glob(f".slackwater-*/{FILE}")))
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (status, f"slackwater: ended by {number.name}\n")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bucket"]


def until(look: Callable[[], object]) -> None:
    """Look until there is something to see: another process tells of its progress in no other way."""
    deadline = time.monotonic() + 60
    while not look():
        assert time.monotonic() < deadline
        time.sleep(0.01)


# Bars and folders


def bars(clock: ManualClock, *, terminal: bool) -> tuple[Bars, io.StringIO]:
    out = io.StringIO()
    return Bars(Console(file=out, force_terminal=terminal, width=80), clock), out


async def test_bars_come_after_a_second_on_a_terminal_alone() -> None:
    for terminal in (True, False):
        clock = ManualClock()
        shown, out = bars(clock, terminal=terminal)
        with shown:
            shown.tell("encode", 1, 10)
            assert out.getvalue() == ""
            await clock.advance(PATIENCE_S)
            shown.tell("encode", 5, 10)
            assert ("encode" in out.getvalue()) is terminal
        written = out.getvalue()
        shown.tell("encode", 6, 10)
        assert out.getvalue() == written


def test_temporary_folders_go_at_the_end_but_the_one_that_became_the_result(tmp_path: Path) -> None:
    with Scratch() as scratch:
        away, near = scratch.folder(), scratch.beside(tmp_path / "result")
        (near / "deep").mkdir()
        (near / "deep" / "file").write_text("x")
        scratch.appear(near, tmp_path / "result")
        lost = scratch.beside(tmp_path / "other")
    assert not away.exists()
    assert not lost.exists()
    assert contents(tmp_path) == {"result/deep/file": b"x"}
    with Scratch() as scratch:
        near = scratch.beside(tmp_path / "late")
        (tmp_path / "late").mkdir()
        with pytest.raises(InvalidInputError, match="has been made meanwhile"):
            scratch.appear(near, tmp_path / "late")


def test_after_the_end_nothing_appears(tmp_path: Path) -> None:
    scratch = Scratch()
    near = scratch.beside(tmp_path / "result")
    scratch.end()

    def finish() -> None:
        with scratch:
            scratch.appear(near, tmp_path / "result")

    late = threading.Thread(target=finish, daemon=True)
    late.start()
    late.join(0.1)
    assert late.is_alive()  # and stays so: the process is about to end
    assert list(tmp_path.iterdir()) == []


def test_records_are_ours_alone_and_of_this_delta(
    states: list[Path], deltas: list[Path], tmp_path: Path, work: Attended
) -> None:
    precious = tmp_path / "elsewhere"
    precious.mkdir()
    (precious / "3").write_text("mine")
    folder = copy_of(states[0], tmp_path / "linked")
    (folder / UNDO_FOLDER).symlink_to(precious)
    with pytest.raises(InvalidInputError, match="no folder of ours"):
        apply_in_place(folder, delta_at(deltas[0]), threads=1, work=work)
    assert (precious / "3").read_text() == "mine"

    folder = copy_of(states[0], tmp_path / "fifo")
    (folder / UNDO_FOLDER).mkdir()
    os.mkfifo(folder / UNDO_FOLDER / "5")
    (folder / UNDO_FOLDER / "note.txt").write_text("mine")
    apply_in_place(folder, delta_at(deltas[0]), threads=1, work=work)
    assert (folder / UNDO_FOLDER / "note.txt").read_text() == "mine"


def test_a_record_of_another_delta_writes_nothing_and_a_stale_one_spoils_nothing(
    states: list[Path], deltas: list[Path], tmp_path: Path, work: Attended
) -> None:
    outline = Outline(FolderSource(states[0]).specs().values())
    changed = delta_at(deltas[0]).manifest.tiles
    assert changed is not None
    number = changed.number[0]
    spec, tile = outline.place(number)
    for at, expected in ((0, None), (1, None), (2, ConflictError)):
        folder = copy_of(states[at], tmp_path / f"model{at}")
        undo = UndoLog(folder, outline)
        old = tile.take(FolderSource(states[0] if expected is None else states[2]).bits(spec.name))
        kept = tmp_path / f"kept{at}"
        with undo.keeping([number], [old]):
            shutil.copy(folder / UNDO_FOLDER / str(number), kept)
        (folder / UNDO_FOLDER).mkdir(exist_ok=True)
        shutil.copy(kept, folder / UNDO_FOLDER / str(number))
        before = contents(folder)
        if expected is None:
            apply_in_place(folder, delta_at(deltas[0]), threads=1, work=work)
            assert contents(folder) == contents(states[1])
        else:
            with pytest.raises(ConflictError, match="another delta was interrupted"):
                apply_in_place(folder, delta_at(deltas[0]), threads=1, work=work)
            assert contents(folder) == before


def test_a_half_written_folder_is_no_source(states: list[Path], tmp_path: Path) -> None:
    folder = copy_of(states[0], tmp_path / "model")
    (folder / UNDO_FOLDER).mkdir()
    with pytest.raises(ConflictError, match="half written"):
        FolderSource(folder)


def test_a_strangers_name_stays_in_its_line(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    save_file({"x\x1b[2J\nslackwater: all good": torch.zeros(2)}, folder / "model.safetensors")
    command = [sys.executable, "-m", "slackwater.cli.main", "inspect", str(folder)]
    ran = subprocess.run(command, check=True, capture_output=True, text=True, env=environment())
    assert "\x1b" not in ran.stdout
    assert r"x\x1b[2J\nslackwater: all good" in ran.stdout
