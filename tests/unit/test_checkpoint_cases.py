"""Reports of people who ship weights, as tests of the chain in a bucket; each has its number in its name."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import pytest
from codec_rig import sent, step, weights
from msgspec.structs import replace

from slackwater.checkpoint import codec
from slackwater.checkpoint.keys import manifest_key
from slackwater.checkpoint.manifest import Manifest, encode_manifest
from slackwater.checkpoint.rules import decode_manifest
from slackwater.checkpoint.state import StateTable
from slackwater.checkpoint.tensor import Bits, TensorSpec
from slackwater.errors import CorruptError, InvalidInputError, SlackwaterError, WrongBaseError
from slackwater.ids import RunId, Version
from slackwater.publish.lineage import read_manifest
from slackwater.publish.publisher import Publisher
from slackwater.publish.restore import restore
from slackwater.testing.bucket import Fault, FaultyBucket, MemoryBucket

A, B = RunId("a"), RunId("b")
NAMES: Final = ("embed.weight", "l.0.up_proj.weight", "norm.weight")


class ArraySource:
    """BF16 tensors with rows of 8, in memory."""

    def __init__(self, state: Mapping[str, Bits]) -> None:
        self._state = state

    def specs(self) -> Mapping[str, TensorSpec]:
        return {
            name: TensorSpec(name=name, dtype="BF16", shape=(bits.size // 8, 8))
            for name, bits in sorted(self._state.items())
        }

    def bits(self, name: str) -> Bits:
        return self._state[name]


def state(version: int, size: int = 800) -> dict[str, Bits]:
    """Weights of which a few more moved with each version; `NAMES[2]` never does."""
    result = {name: weights(np.random.default_rng(index), "BF16", size) for index, name in enumerate(NAMES)}
    for name in NAMES[:2]:
        result[name][: 3 * version] += 1
    return result


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def published(folder: Path, versions: int, run: RunId = A, *, size: int = 800, anchor_every: int = 50) -> MemoryBucket:
    bucket = MemoryBucket()
    publish_into(bucket, folder, versions, run, size=size, anchor_every=anchor_every)
    return bucket


def publish_into(
    bucket: MemoryBucket, folder: Path, versions: int, run: RunId, *, size: int = 800, anchor_every: int = 50
) -> None:
    publisher = Publisher(bucket, run, anchor_every=anchor_every, threads=1)
    for version in range(versions):
        publisher.publish(ArraySource(state(version, size)), step=version, folder_files=folder)


def manifest_of(bucket: MemoryBucket, version: int, run: RunId = A) -> Manifest:
    return read_manifest(bucket, run, Version(version))


def restored(bucket: Any, version: int, run: RunId = A) -> dict[str, bytes]:
    return {name: bits.tobytes() for name, bits in restore(bucket, run, Version(version)).bits.items()}


def frozen(bits: Mapping[str, Bits]) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in bits.items()}


@pytest.mark.parametrize(("density", "culprit"), [(0.01, "scatter"), (1.0, "decode_dense")])
def test_a1_08_a_bit_that_flips_after_decoding_is_found_and_undone(
    monkeypatch: pytest.MonkeyPatch, density: float, culprit: str
) -> None:
    """The wire's checksum was right: the fault comes after it, and the digest of the result meets it."""
    old = weights(np.random.default_rng(1), "BF16", 800)
    made = sent(step("BF16", old, np.where(np.arange(800) < 800 * density, old + 1, old).astype("<u2")))
    held = [old.copy()]
    right, flips = getattr(codec, culprit), [0x40]

    def with_a_flip(*arguments: Any) -> Any:
        result = right(*arguments)
        (arguments[0] if result is None else result[0])[3] ^= flips.pop() if flips else 0
        return result

    monkeypatch.setattr(codec, culprit, with_a_flip)
    with pytest.raises(CorruptError, match=r"t0 tile 0: (post|changed)"):
        made.apply(held)
    assert held[0].tobytes() == old.tobytes()
    assert made.apply(held) == 1
    assert held[0].tobytes() == made.news[0].tobytes()


def test_a1_09_a_replica_that_missed_a_version_refuses_the_next_and_catches_up(folder: Path) -> None:
    bucket = published(folder, 7)
    four, five, six = (restore(bucket, A, Version(version)) for version in (4, 5, 6))
    with pytest.raises(WrongBaseError, match="catch up from an anchor"):
        four.table.after(manifest_of(bucket, 6))
    assert four.table.after(manifest_of(bucket, 5)).digest == five.table.digest
    assert five.table.after(manifest_of(bucket, 6)).digest == six.table.digest
    assert frozen(six.bits) == frozen(state(6))


def test_a1_10_an_anchor_is_whole_and_repairs_whatever_went_before(folder: Path) -> None:
    bucket = published(folder, 6, anchor_every=4)
    for item in list(bucket.list("a")):
        if "/blobs/" in item.key or any(f"/{version:08d}" in item.key for version in range(4)):
            bucket.delete(item.key)
    assert restored(bucket, 4) == frozen(state(4))
    publisher = Publisher(bucket, A, threads=1)
    lacking = {name: bits for name, bits in state(6).items() if name != NAMES[2]}
    with pytest.raises(InvalidInputError, match=f"{NAMES[2]} is missing"):
        publisher.publish(ArraySource(lacking), step=6, folder_files=folder, anchor=True)


def test_a1_13_a_delta_of_a_larger_model_is_refused_before_an_object_is_read(folder: Path) -> None:
    small, large = published(folder, 2), published(folder, 2, size=1600)
    held = restore(small, A, Version(0))
    before = frozen(held.bits)
    with pytest.raises(WrongBaseError):
        held.table.after(manifest_of(large, 1))
    assert frozen(held.bits) == before
    # Its manifest in the small one's chain:
    small.put(manifest_key(A, Version(1)), large.get(manifest_key(A, Version(1)), max_bytes=10**6))
    counting = FaultyBucket(small)
    with pytest.raises(WrongBaseError):
        restore(counting, A, Version(1))
    assert counting.count("get", "/blobs/") == counting.count("get", "/anchors/") == 0
    publisher = Publisher(published(folder, 1), A, threads=1)
    with pytest.raises(InvalidInputError, match=r"embed\.weight is BF16 \[200, 8\]"):
        publisher.publish(ArraySource(state(1, 1600)), step=1)


def test_a1_15_the_same_version_twice_and_after_a_restart_is_the_same(folder: Path) -> None:
    bucket = published(folder, 3)
    first = restored(bucket, 2)
    assert first == restored(bucket, 2) == frozen(state(2))
    publisher = Publisher.open(bucket, A, threads=1)
    again = publisher.publish(ArraySource(state(2)), step=3)
    assert (again.version, again.changed, again.state) == (3, 0, manifest_of(bucket, 2).state)


@pytest.mark.parametrize("lacking", range(3))
def test_a1_16_an_anchor_that_lacks_a_tensor_is_refused(folder: Path, lacking: int) -> None:
    """A manifest says all that a version has: one tensor less, or more, isn't the state that it names."""
    manifest = manifest_of(published(folder, 1), 0)
    fewer = replace(manifest, tensors=manifest.tensors[:lacking] + manifest.tensors[lacking + 1 :])
    with pytest.raises(CorruptError, match="make state"):
        StateTable.of_anchor(decode_manifest(encode_manifest(fewer)))


def test_a1_16_a_delta_of_an_unknown_tensor_is_refused_by_name_and_by_number(folder: Path) -> None:
    bucket = published(folder, 2)
    with pytest.raises(InvalidInputError, match="extra isn't in this run"):
        Publisher(bucket, A, threads=1).publish(ArraySource({**state(2), "extra": state(0)[NAMES[0]]}), step=2)
    manifest = manifest_of(bucket, 1)
    assert manifest.tiles is not None
    unknown = replace(manifest, tiles=replace(manifest.tiles, number=(0, 3)))
    with pytest.raises(CorruptError, match="names tile 3, and its parent has 3"):
        restore(bucket, A, Version(0)).table.after(decode_manifest(encode_manifest(unknown)))


@pytest.mark.parametrize("cut", [1, 700])
@pytest.mark.parametrize("part", ["/anchors/", "/blobs/"])
def test_a1_18_an_object_that_is_short_is_named_and_nothing_of_it_used(folder: Path, part: str, cut: int) -> None:
    bucket = published(folder, 2)
    key = next(item.key for item in bucket.list("a") if part in item.key and not item.key.endswith(".json"))
    body = bucket.get(key, max_bytes=10**6)
    bucket.put(key, body[:-cut])
    with pytest.raises(CorruptError, match=key):
        restore(bucket, A, Version(1))
    bucket.put(key, body + b"\0")
    with pytest.raises(CorruptError, match=key):
        restore(bucket, A, Version(1))
    bucket.put(key, bytes(len(body)))  # as long as it was: zeros, as a sparse file reads
    with pytest.raises(CorruptError, match=f"{key}.*SHA-256"):
        restore(bucket, A, Version(1))
    bucket.put(key, body)
    assert restored(bucket, 1) == frozen(state(1))


def test_a1_18_a_read_that_ends_early_is_refused(folder: Path) -> None:
    bucket = published(folder, 2)
    for fault in (Fault(verb="get", key="/blobs/", cut=-1), Fault(verb="get", key="/anchors/", cut=-1, times=3)):
        with pytest.raises(SlackwaterError, match=r"/anchors/|/blobs/"):
            restore(FaultyBucket(bucket, fault), A, Version(1))


def test_a1_21_another_run_in_the_same_bucket_is_never_loaded(folder: Path) -> None:
    bucket = published(folder, 4, A)
    publish_into(bucket, folder, 1, B)
    assert restored(bucket, 0, B) == frozen(state(0))
    for key, body in {
        manifest_key(B, Version(1)): bucket.get(manifest_key(A, Version(1)), max_bytes=10**6),
        manifest_key(B, Version(0)): bucket.get(manifest_key(A, Version(0)), max_bytes=10**6),
    }.items():
        bucket.put(key, body)
        with pytest.raises(CorruptError, match=r"of a$|no key of run b"):
            restore(bucket, B, Version(int(key[-6])))
    renamed = msgspec.json.decode(bucket.get(manifest_key(A, Version(0)), max_bytes=10**6))
    with pytest.raises(CorruptError, match="no key of run b"):
        decode_manifest(msgspec.json.encode({**renamed, "run": "b"}))
