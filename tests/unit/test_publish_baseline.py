"""A baseline on the disk: kept over a restart, completed or made again after a crash, and never trusted."""

import errno
import runpy
import shutil
from collections.abc import Sequence
from math import inf
from pathlib import Path
from typing import NoReturn

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from publish_rig import RUN, Tensors, all_bits, model_folder, restored, stepped, weights
from safetensors.torch import save_file

from depth import examples
from slackwater.bucket.local import LocalBucket
from slackwater.checkpoint.codec import Level, Place, apply_body
from slackwater.checkpoint.keys import manifest_key
from slackwater.checkpoint.manifest import BodyEntry
from slackwater.checkpoint.tensor import Bits
from slackwater.errors import ConflictError, InvalidInputError
from slackwater.ids import Version
from slackwater.publish import mapped
from slackwater.publish.lineage import read_manifest
from slackwater.publish.publisher import Publisher
from slackwater.testing.bucket import FaultyBucket, MemoryBucket
from slackwater.weights.state_dict import StateDictSource


class KilledError(Exception):
    """Where the process ends."""


def kill(*_: object) -> NoReturn:
    raise KilledError


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return model_folder(tmp_path / "model")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "new" / "baseline"


def states(count: int) -> list[Tensors]:
    found = [weights()]
    for seed in range(count - 1):
        found.append(stepped(found[-1], seed, 1e-2))
    return found


def publish(
    bucket: MemoryBucket | FaultyBucket, folder: Path, model: Path, tensors: list[Tensors], level: Level = "fast"
) -> None:
    with Publisher(bucket, RUN, anchor_share=inf, level=level, threads=1, baseline_dir=folder) as publisher:
        for tensor in tensors:
            publisher.publish(StateDictSource(tensor), step=0, folder_files=model)


def objects_read(bucket: FaultyBucket) -> int:
    return sum(bucket.count(verb, part) for verb in ("get", "get_range") for part in ("/anchors/", "/blobs/"))


def goes_on(memory: MemoryBucket, folder: Path, version: int) -> int:
    """Start anew, publish one more version, and count the objects that were read for that."""
    bucket = FaultyBucket(memory)
    with Publisher.open(bucket, RUN, anchor_share=inf, threads=1, baseline_dir=folder) as publisher:
        read = objects_read(bucket)
        held = {name: publisher.held_bits(name).tobytes() for name in publisher.held_specs()}
        assert publisher.version == version
        assert held == restored(memory, version)
        last = stepped(weights(), 99, 1e-2)
        assert publisher.publish(StateDictSource(last), step=9).kind == "delta"
    assert restored(memory, version + 1) == all_bits(StateDictSource(last))
    return read


@pytest.mark.parametrize("count", [1, 2, 4])
def test_a_restarted_trainer_reads_no_weights_from_the_bucket(model: Path, folder: Path, count: int) -> None:
    memory = MemoryBucket()
    publish(memory, folder, model, states(count))
    assert goes_on(memory, folder, count - 1) == 0


def test_versions_are_the_same_wherever_the_baseline_lies(model: Path, folder: Path) -> None:
    on_disk, in_memory = MemoryBucket(), MemoryBucket()
    publish(on_disk, folder, model, states(4))
    publisher = Publisher(in_memory, RUN)
    for version, state in enumerate(states(4)):
        publisher.publish(StateDictSource(state), step=0, folder_files=model)
        assert restored(on_disk, version) == restored(in_memory, version)


@pytest.mark.parametrize("level", ["fast", "wan"])
def test_versions_that_others_committed_meanwhile_are_applied(model: Path, folder: Path, level: Level) -> None:
    memory, all_states = MemoryBucket(), states(5)
    publish(memory, folder, model, all_states[:2], level)
    other = Publisher(memory, RUN, anchor_share=inf, level=level)
    for state in all_states[2:]:
        other.publish(StateDictSource(state), step=0)
    bucket = FaultyBucket(memory)
    with Publisher.open(bucket, RUN, baseline_dir=folder):
        assert bucket.count("get", "/anchors/") == 0
    goes_on(memory, folder, 4)


def test_f09_an_anchor_that_others_committed_meanwhile_is_read(model: Path, folder: Path) -> None:
    memory, (one, two) = MemoryBucket(), states(2)
    publish(memory, folder, model, [one])
    Publisher(memory, RUN).publish(StateDictSource(two), step=0, folder_files=model, anchor=True)
    assert goes_on(memory, folder, 1) > 0


@pytest.mark.parametrize("crash", ["first body", "second body", "note"])
def test_f06_a_kill_while_the_baseline_moves_is_completed(
    model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, crash: str
) -> None:
    memory, (one, two) = MemoryBucket(), states(2)
    publish(memory, folder, model, [one])
    left = iter([0] if crash == "second body" else [])

    def until_killed(places: Sequence[Place], entry: BodyEntry, body: memoryview, held: Sequence[Bits]) -> int:
        if next(left, None) is None:
            kill()
        return apply_body(places, entry, body, held)

    with Publisher.open(memory, RUN, threads=1, baseline_dir=folder) as publisher, monkeypatch.context() as patch:
        if crash == "note":
            patch.setattr(mapped.MappedStore, "moved", kill)
        else:
            patch.setattr("slackwater.checkpoint.application.apply_body", until_killed)
        with pytest.raises(KilledError):
            publisher.publish(StateDictSource(two), step=1)
    assert goes_on(memory, folder, 1) == (0 if crash == "note" else 1)


@pytest.mark.parametrize("crash", ["copy", "note"])
def test_f06_a_kill_while_an_anchor_is_copied_is_made_good(
    model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, crash: str
) -> None:
    memory, (one, two) = MemoryBucket(), states(2)
    publish(memory, folder, model, [one])
    with Publisher.open(memory, RUN, threads=1, baseline_dir=folder) as publisher, monkeypatch.context() as patch:
        patch.setattr(*(mapped, "_map") if crash == "copy" else (mapped.MappedStore, "moved"), kill)
        with pytest.raises(KilledError):
            publisher.publish(StateDictSource(two), step=1, folder_files=model, anchor=True)
    goes_on(memory, folder, 1)


@given(st.data())
@settings(max_examples=examples(25), deadline=None)
def test_whatever_lies_in_the_folder_the_baseline_is_the_chains(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    home = tmp_path_factory.mktemp("home")
    folder, model, memory = home / "baseline", model_folder(home / "model"), MemoryBucket()
    publish(memory, folder, model, states(3))
    file = folder / data.draw(st.sampled_from(["baseline.bin", "baseline.json"]))
    body = bytearray(file.read_bytes())
    match data.draw(st.sampled_from(["flip", "cut", "grow", "lose", "empty"])):
        case "flip":
            body[data.draw(st.integers(0, len(body) - 1))] ^= data.draw(st.integers(1, 255))
            file.write_bytes(body)
        case "cut":
            file.write_bytes(body[: data.draw(st.integers(0, len(body)))])
        case "grow":
            file.write_bytes(body + b"\x00")
        case "lose":
            file.unlink()
        case _:
            file.write_bytes(b"")
    goes_on(memory, folder, 2)


def test_a_folder_of_another_run_is_made_anew(model: Path, folder: Path) -> None:
    memory = MemoryBucket()
    with Publisher(memory, "other", baseline_dir=folder) as other:
        other.publish(StateDictSource(weights(7)), step=0, folder_files=model)
    publish(memory, folder, model, states(2))
    goes_on(memory, folder, 1)


def test_two_publishers_never_share_a_folder(model: Path, folder: Path) -> None:
    first = Publisher(MemoryBucket(), RUN, baseline_dir=folder)
    with pytest.raises(InvalidInputError, match="a folder of its own"):
        Publisher(MemoryBucket(), RUN, baseline_dir=folder)
    first.close()
    Publisher(MemoryBucket(), RUN, baseline_dir=folder).close()
    with pytest.raises(InvalidInputError, match="can't hold a baseline"):
        Publisher(MemoryBucket(), RUN, baseline_dir=model / "config.json")


def test_f29_a_full_disk_is_told_and_the_run_goes_on_elsewhere(
    model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, (one, two) = MemoryBucket(), states(2)

    def full(*_: object) -> NoReturn:
        raise OSError(errno.ENOSPC, "No space left on device")

    with Publisher(memory, RUN, baseline_dir=folder) as publisher, monkeypatch.context() as patch:
        patch.setattr("os.posix_fallocate", full)
        for _ in range(2):
            with pytest.raises(InvalidInputError, match="No space left"):
                publisher.publish(StateDictSource(one), step=0, folder_files=model)
    assert restored(memory, 0) == all_bits(StateDictSource(one))
    publish(memory, folder, model, [two])
    goes_on(memory, folder, 1)


def test_f16_a_folder_that_tells_of_a_later_version_than_the_bucket_shows_that_it_was_set_back(
    model: Path, folder: Path
) -> None:
    memory = MemoryBucket()
    publish(memory, folder, model, states(3))
    memory.delete(manifest_key(RUN, Version(2)))
    with pytest.raises(ConflictError, match="tells of version 2 of demo, and version 1 is the newest"):
        Publisher.open(memory, RUN, baseline_dir=folder)
    shutil.rmtree(folder)
    with Publisher.open(memory, RUN, baseline_dir=folder) as publisher:
        assert publisher.version == 1


# The one file for people who want one


def one_file(*options: object) -> int:
    main = runpy.run_path(str(Path(__file__).parents[2] / "publish_checkpoint.py"))["main"]
    return main([str(option) for option in options])


def test_one_file_publishes_a_folder_and_tells(
    model: Path, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    there = ("--bucket", tmp_path / "bucket", "--run", RUN)
    for step, (state, options) in enumerate(
        zip(states(4), ([], ["--baseline-dir", folder], ["--level", "wan"], ["--anchor"]), strict=True)
    ):
        save_file(state, model / "model.safetensors")
        assert one_file(model, *there, "--step", step, *options) == 0
        kind = "delta" if step in {1, 2} else "anchor"
        assert capsys.readouterr().out.startswith(f"demo/{step} {kind} ")
        bucket = LocalBucket(tmp_path / "bucket")
        assert restored(bucket, step) == all_bits(StateDictSource(state))
        assert read_manifest(bucket, RUN, Version(step)).step == step


def test_one_file_tells_what_is_wrong_in_one_line(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert one_file(model, "--bucket", tmp_path / "bucket", "--run", RUN) == 1
    assert "without safetensors" in capsys.readouterr().err
    assert one_file(model, "--bucket", tmp_path / "bucket", "--run", "../other") == 1
    assert len(capsys.readouterr().err.splitlines()) == 1
    with pytest.raises(SystemExit) as ended:
        one_file(model)
    assert ended.value.code == 2
