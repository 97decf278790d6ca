import base64
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from states_rig import FILE, RUN, WIDE, altered, publish_states, tell_nobody, write_states

from slackwater.checkpoint.columns import from_column, to_column
from slackwater.checkpoint.digest import object_digest
from slackwater.checkpoint.keys import fold_key, manifest_key
from slackwater.checkpoint.manifest import Manifest, Parent, Tiles
from slackwater.checkpoint.state import StateTable
from slackwater.checkpoint.tensor import tile_count
from slackwater.errors import AuthError, InvalidInputError, UnavailableError
from slackwater.ids import StateDigest, Version
from slackwater.publish.audit import Auditor
from slackwater.publish.damage import MAX_FINDINGS, Damage, Depth, Report
from slackwater.publish.delta import bits_of, encode_delta
from slackwater.publish.fold import fold, fold_manifest
from slackwater.publish.lineage import read_manifest
from slackwater.publish.path import Reads
from slackwater.testing.bucket import Fault, FaultyBucket, MemoryBucket
from slackwater.weights.delta_folder import RUN as DIFF
from slackwater.weights.delta_folder import write_delta, write_object
from slackwater.weights.diff import hash_source
from slackwater.weights.source import FolderSource

NO_STATE = StateDigest("0" * 64)
LAST = Version(3)
DEPTHS: tuple[Depth, ...] = ("manifest", "objects", "tensors")


@pytest.fixture(scope="module")
def states(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return write_states(tmp_path_factory.mktemp("states"), 4)


@pytest.fixture(scope="module")
def published(states: list[Path]) -> MemoryBucket:
    bucket = MemoryBucket()
    publish_states(bucket, states)
    return bucket


@pytest.fixture
def bucket(published: MemoryBucket) -> MemoryBucket:
    """A copy, to be damaged."""
    copy = MemoryBucket()
    for item in published.list(""):
        copy.put(item.key, published.get(item.key, max_bytes=item.size))
    return copy


@pytest.fixture
def auditor(tmp_path: Path) -> Callable[[Depth], Auditor]:
    def make(depth: Depth) -> Auditor:
        scratch = tmp_path / f"scratch-{len(list(tmp_path.iterdir()))}"
        scratch.mkdir()
        return Auditor(depth=depth, scratch=scratch, threads=2, progress=tell_nobody)

    return make


Audits = Callable[[Depth], Auditor]


def audit(auditor: Audits, bucket: Reads, depth: Depth, number: int = 3) -> Report:
    return auditor(depth).version(bucket, RUN, Version(number))


def found(report: Report) -> list[tuple[Damage, str]]:
    assert len(report.findings) == min(sum(report.counts.values()), MAX_FINDINGS)
    return [(finding.damage, finding.where) for finding in report.findings]


def objects(bucket: MemoryBucket, number: int) -> list[str]:
    return [ref.key for ref in read_manifest(bucket, RUN, Version(number)).objects]


def shard(bucket: MemoryBucket) -> str:
    return next(key for key in objects(bucket, 0) if key.endswith(FILE))


def spoil(bucket: MemoryBucket, key: str) -> None:
    body = bytearray(bucket.get(key, max_bytes=2**30))
    body[-1] ^= 1
    bucket.put(key, bytes(body))


def rewritten(bucket: MemoryBucket, number: int, **members: Any) -> None:
    """A manifest with other members, as a wrong writer would have made it."""
    manifest = msgspec.structs.replace(read_manifest(bucket, RUN, Version(number)), **members)
    bucket.put(manifest_key(RUN, Version(number)), msgspec.json.encode(manifest))


def with_wrong_word(tiles: Tiles, member: str) -> Tiles:
    """The columns with another last word in one of them."""
    words = np.frombuffer(base64.b64decode(getattr(tiles, member)), dtype=np.uint64).copy()
    words[-1] ^= np.uint64(1)
    return msgspec.structs.replace(tiles, **{member: to_column(words)})


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("number", [0, 1, 3])
def test_a_whole_version_is_good(auditor: Audits, published: MemoryBucket, depth: Depth, number: int) -> None:
    report = audit(auditor, published, depth, number)
    manifest = read_manifest(published, RUN, Version(number))
    assert (found(report), report.state, report.num_manifests) == ([], manifest.state, number + 1)
    read = [ref for step in range(number + 1) for ref in read_manifest(published, RUN, Version(step)).objects]
    expected = (0, 0) if depth == "manifest" else (len(read), sum(ref.size for ref in read))
    assert (report.num_objects, report.num_bytes) == expected
    assert bool(report.num_tiles) is (depth == "tensors")


def test_an_audit_writes_nothing_to_the_bucket(auditor: Audits, published: MemoryBucket) -> None:
    watched = FaultyBucket(published)
    audit(auditor, watched, "tensors")
    assert [watched.count(verb) for verb in ("put", "put_if_absent", "list")] == [0, 0, 0]


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_version_that_is_not_there_is_missing_and_nothing_else(
    auditor: Audits, published: MemoryBucket, depth: Depth
) -> None:
    report = audit(auditor, published, depth, 9)
    assert (found(report), report.num_manifests) == ([("missing", manifest_key(RUN, Version(9)))], 0)


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_missing_manifest_hides_no_damage_below_it(auditor: Audits, bucket: MemoryBucket, depth: Depth) -> None:
    bucket.delete(manifest_key(RUN, Version(2)))
    lost = objects(bucket, 1)[0]
    bucket.delete(lost)
    expected: list[tuple[Damage, str]] = [("missing", manifest_key(RUN, Version(2)))]
    assert found(audit(auditor, bucket, depth)) == expected + ([] if depth == "manifest" else [("missing", lost)])


def test_a_run_without_an_anchor_is_told(auditor: Audits, bucket: MemoryBucket) -> None:
    bucket.delete(manifest_key(RUN, Version(0)))
    missing = ("missing", manifest_key(RUN, Version(0)))
    assert found(audit(auditor, bucket, "objects")) == [missing, missing]


def test_a_run_whose_anchor_can_not_be_read_lacks_nothing(auditor: Audits, bucket: MemoryBucket) -> None:
    """Neither an anchor, nor what may have been collected below it."""
    anchor = manifest_key(RUN, Version(0))
    bucket.put(anchor, b"{")
    report = audit(auditor, bucket, "objects")
    assert (found(report), report.num_manifests, report.state) == ([("manifest", anchor)], 3, None)
    bucket.delete(anchor)
    bucket.delete(manifest_key(RUN, Version(1)))
    bucket.put(manifest_key(RUN, Version(2)), b"{")
    assert found(audit(auditor, bucket, "objects")) == [("manifest", manifest_key(RUN, Version(2)))]


def test_a_gap_between_broken_and_whole_manifests_is_told_in_order(auditor: Audits, bucket: MemoryBucket) -> None:
    bucket.put(manifest_key(RUN, Version(3)), b"{")
    bucket.delete(manifest_key(RUN, Version(2)))
    bucket.put(manifest_key(RUN, Version(1)), b"{")
    expected: list[Damage] = ["manifest", "missing", "manifest"]
    assert found(audit(auditor, bucket, "manifest")) == [
        (damage, manifest_key(RUN, Version(number))) for damage, number in zip(expected, (3, 2, 1), strict=True)
    ]


def test_a_manifest_with_a_wrong_state_is_not_counted_as_whole(auditor: Audits, bucket: MemoryBucket) -> None:
    rewritten(bucket, 3, state=NO_STATE)
    report = audit(auditor, bucket, "manifest")
    assert (found(report), report.num_manifests, report.state) == ([("manifest", manifest_key(RUN, LAST))], 3, None)


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("body", [b"", b"{", b'{"format":"other/1"}', b"[" * 100_000])
def test_a_manifest_that_breaks_the_format_is_one_finding(
    auditor: Audits, bucket: MemoryBucket, depth: Depth, body: bytes
) -> None:
    bucket.put(manifest_key(RUN, Version(1)), body)
    assert found(audit(auditor, bucket, depth)) == [("manifest", manifest_key(RUN, Version(1)))]


def test_manifests_under_each_others_keys_are_found(auditor: Audits, bucket: MemoryBucket) -> None:
    one, two = manifest_key(RUN, Version(1)), manifest_key(RUN, Version(2))
    bodies = [bucket.get(key, max_bytes=2**20) for key in (two, one)]
    for key, body in zip((one, two), bodies, strict=True):
        bucket.put(key, body)
    assert found(audit(auditor, bucket, "manifest")) == [("manifest", two), ("manifest", one)]


def test_a_delta_on_another_state_breaks_the_lineage(auditor: Audits, bucket: MemoryBucket) -> None:
    rewritten(bucket, 2, parent=Parent(version=Version(1), state=NO_STATE))
    assert found(audit(auditor, bucket, "tensors")) == [("lineage", manifest_key(RUN, Version(2)))]


def test_links_are_followed_behind_a_manifest_that_is_gone(auditor: Audits, bucket: MemoryBucket) -> None:
    bucket.delete(manifest_key(RUN, Version(1)))
    rewritten(bucket, 3, parent=Parent(version=Version(2), state=NO_STATE))
    assert found(audit(auditor, bucket, "manifest")) == [
        ("missing", manifest_key(RUN, Version(1))),
        ("lineage", manifest_key(RUN, Version(3))),
    ]


@pytest.mark.parametrize("member", ["digests", "sums"])
def test_a_manifest_whose_digests_do_not_make_its_state_is_found(
    auditor: Audits, bucket: MemoryBucket, member: str
) -> None:
    tiles = read_manifest(bucket, RUN, Version(1)).tiles
    assert tiles is not None
    rewritten(bucket, 1, tiles=with_wrong_word(tiles, member))
    assert found(audit(auditor, bucket, "manifest")) == [("manifest", manifest_key(RUN, Version(1)))]


@pytest.mark.parametrize("depth", ["objects", "tensors"])
def test_every_damaged_object_is_listed(auditor: Audits, bucket: MemoryBucket, depth: Depth) -> None:
    flipped, cut, longer, gone = shard(bucket), objects(bucket, 1)[0], objects(bucket, 2)[0], objects(bucket, 3)[0]
    spoil(bucket, flipped)
    bucket.put(cut, bucket.get(cut, max_bytes=2**30)[:-1])
    bucket.put(longer, bucket.get(longer, max_bytes=2**30) + b"x")
    bucket.delete(gone)
    report = audit(auditor, bucket, depth)
    assert found(report) == [("object", flipped), ("object", cut), ("object", longer), ("missing", gone)]
    assert report.num_objects == len(objects(bucket, 0)) - 1
    assert found(audit(auditor, bucket, "manifest")) == []


@pytest.mark.parametrize("change", ["flip", "cut", "longer"])
def test_a_large_file_is_read_in_pieces_and_checked_to_its_end(
    auditor: Audits, bucket: MemoryBucket, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    monkeypatch.setattr("slackwater.publish.objects.PIECE_BYTES", 1_000_000)
    assert found(audit(auditor, bucket, "tensors")) == []
    key = shard(bucket)
    body = bucket.get(key, max_bytes=2**30)
    spoilt = {"flip": body[:-1] + bytes([body[-1] ^ 1]), "cut": body[:-1], "longer": body + b"x"}[change]
    bucket.put(key, spoilt)
    assert found(audit(auditor, bucket, "objects")) == [("object", key)]


def remade(bucket: MemoryBucket, number: int, table: StateTable, manifest: Manifest) -> None:
    """Commit a manifest anew, with the state that its own digests make."""
    state = table.after(msgspec.structs.replace(manifest, state=_state_after(table, manifest))).digest
    rewritten(bucket, number, tiles=manifest.tiles, state=state)


def _state_after(table: StateTable, manifest: Manifest) -> StateDigest:
    assert manifest.tiles is not None
    numbers = np.array(manifest.tiles.number, dtype=np.int64)
    tensors = np.unique(np.searchsorted(table.outline.first_tiles, numbers, side="right") - 1)
    tiles, sums = table.tiles.copy(), table.sums.copy()
    tiles[numbers] = manifest.tiles.post
    sums[tensors] = from_column(manifest.tiles.sums, tensors.size, "sums")
    return StateTable(outline=table.outline, tiles=tiles, sums=sums).digest


@pytest.mark.parametrize("member", ["digests", "sums", "changed"])
def test_what_only_the_tensors_tell_is_found_at_their_depth(auditor: Audits, bucket: MemoryBucket, member: str) -> None:
    """A writer that states a wrong digest, sum or count, with all else in harmony."""
    manifest = read_manifest(bucket, RUN, Version(1))
    table = StateTable.of_anchor(read_manifest(bucket, RUN, Version(0)))
    tiles = manifest.tiles
    assert tiles is not None
    if member == "changed":
        tiles = msgspec.structs.replace(tiles, changed=(tiles.changed[0] + 1, *tiles.changed[1:]))
    else:
        tiles = with_wrong_word(tiles, member)
    remade(bucket, 1, table, msgspec.structs.replace(manifest, tiles=tiles))
    assert found(audit(auditor, bucket, "objects", 1)) == []
    report = audit(auditor, bucket, "tensors", 1)
    assert report.counts == {"manifest" if member == "changed" else "tensor": 1}
    assert (report.num_manifests, report.num_tiles > 0) == (1 if member == "changed" else 2, True)
    assert "fetch the object again" not in report.findings[0].what  # it is whole
    where = report.findings[0].where
    assert where in (
        [manifest_key(RUN, Version(1))] if member != "sums" else [spec.name for spec in table.outline.specs]
    )


def test_an_anchor_whose_file_is_not_what_its_digests_say_is_found_by_tensor(
    auditor: Audits, bucket: MemoryBucket
) -> None:
    anchor = read_manifest(bucket, RUN, Version(0))
    key = shard(bucket)
    spoil(bucket, key)  # the last byte of the last tensor
    body = bucket.get(key, max_bytes=2**30)
    refs = tuple(
        msgspec.structs.replace(ref, sha256=object_digest(body)) if ref.key == key else ref for ref in anchor.objects
    )
    rewritten(bucket, 0, objects=refs)
    assert found(audit(auditor, bucket, "objects", 0)) == []
    report = audit(auditor, bucket, "tensors", 0)
    last = max(anchor.tensors, key=lambda tensor: tensor.offset)
    assert found(report) == [("tensor", f"{last.name} tile {tile_count(last.spec) - 1}")]


def test_damage_beyond_the_bound_is_counted(auditor: Audits, bucket: MemoryBucket) -> None:
    anchor = read_manifest(bucket, RUN, Version(0))
    gone = [msgspec.structs.replace(anchor.objects[0], key=f"run/gone/{number}") for number in range(MAX_FINDINGS + 5)]
    rewritten(bucket, 0, objects=(*anchor.objects, *gone))
    report = audit(auditor, bucket, "objects", 0)
    assert (len(report.findings), report.counts) == (MAX_FINDINGS, {"missing": MAX_FINDINGS + 5})


@pytest.mark.parametrize("error", [AuthError("refused"), UnavailableError("away")])
@pytest.mark.parametrize("key", ["00000003.json", "00000001.json", "/blobs/", FILE])
def test_a_bucket_that_can_not_be_asked_is_no_damage_of_the_version(
    auditor: Audits, bucket: MemoryBucket, error: Exception, key: str
) -> None:
    away = FaultyBucket(bucket, Fault(verb="get", key=key, before=error, times=99))
    report = audit(auditor, away, "tensors")
    assert report.counts == {"unavailable": 1}
    assert report.findings[0].what == str(error)
    assert key in report.findings[0].where


# Folds


def with_fold(bucket: MemoryBucket, scratch: Path) -> Manifest:
    scratch.mkdir()
    return fold(
        bucket, RUN, Version(1), Version(3), scratch=scratch, level="fast", threads=1, progress=tell_nobody
    ).manifest  # fmt: skip


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_whole_fold_is_good(auditor: Audits, bucket: MemoryBucket, tmp_path: Path, depth: Depth) -> None:
    manifest = with_fold(bucket, tmp_path / "fold")
    report = auditor(depth).fold(bucket, RUN, Version(1), Version(3))
    assert (found(report), report.state, report.num_manifests) == ([], manifest.state, 3)


def test_damage_of_a_fold_is_told_by_class(auditor: Audits, bucket: MemoryBucket, tmp_path: Path) -> None:
    manifest = with_fold(bucket, tmp_path / "fold")
    key = fold_key(RUN, Version(1), Version(3))
    spoil(bucket, manifest.objects[0].key)
    assert found(auditor("tensors").fold(bucket, RUN, Version(1), Version(3))) == [("object", manifest.objects[0].key)]
    rewritten(bucket, 3, state=NO_STATE)
    report = auditor("manifest").fold(bucket, RUN, Version(1), Version(3))
    assert (found(report), report.num_manifests, report.state) == ([("lineage", key)], 2, None)
    bucket.delete(key)
    assert found(auditor("objects").fold(bucket, RUN, Version(1), Version(3))) == [("missing", key)]


# Folders


def delta_folder(old: Path, new: Path, target: Path) -> Path:
    target.mkdir()
    before = FolderSource(old)
    held = hash_source(before, threads=1)
    encoded = encode_delta(
        DIFF, FolderSource(new), held, bits_of(before), level="fast", threads=1,
        put=lambda ref, body: write_object(target, ref, body), progress=tell_nobody,
    )  # fmt: skip
    last = Manifest(
        format="slackwater/2", run=DIFF, version=Version(1), kind="delta", state=encoded.table.digest, step=0,
        created_at="now", objects=(),
    )  # fmt: skip
    manifest = fold_manifest(last, encoded, Parent(version=Version(0), state=held.digest))
    write_delta(target, manifest, held.outline)
    return target


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_whole_delta_folder_is_good(auditor: Audits, states: list[Path], tmp_path: Path, depth: Depth) -> None:
    folder = delta_folder(states[0], states[1], tmp_path / "delta")
    report = auditor(depth).delta(folder, FolderSource(states[0]))
    assert (found(report), report.num_manifests) == ([], 1)
    assert bool(report.num_tiles) is (depth == "tensors")


def test_damage_of_a_delta_folder_is_told_by_class(auditor: Audits, states: list[Path], tmp_path: Path) -> None:
    folder = delta_folder(states[0], states[1], tmp_path / "delta")
    base, other = FolderSource(states[0]), FolderSource(states[1])
    with pytest.raises(InvalidInputError, match="without its base"):
        auditor("tensors").delta(folder, None)
    report = auditor("tensors").delta(folder, other)
    assert (found(report), report.num_manifests, report.state) == ([("lineage", "delta.json")], 0, None)
    (blob,) = (folder / "blobs").iterdir()
    body = bytearray(blob.read_bytes())
    body[0] ^= 1
    blob.write_bytes(body)
    assert [damage for damage, _ in found(auditor("tensors").delta(folder, base))] == ["object"]
    assert found(auditor("manifest").delta(folder, base)) == []
    blob.unlink()
    assert [damage for damage, _ in found(auditor("objects").delta(folder, None))] == ["missing"]
    (folder / "outline.json").write_text("[]")
    assert found(auditor("objects").delta(folder, None)) == [("manifest", "delta.json")]


def test_a_model_folder_tells_its_state_or_its_broken_file(auditor: Audits, states: list[Path], tmp_path: Path) -> None:
    assert auditor("manifest").folder(states[1]).state is None
    report = auditor("tensors").folder(states[1])
    assert (found(report), report.state) == ([], hash_source(FolderSource(states[1]), threads=1).digest)
    cut = shutil.copytree(states[1], tmp_path / "cut")
    (cut / FILE).write_bytes((cut / FILE).read_bytes()[:-1])
    assert [damage for damage, _ in found(auditor("objects").folder(cut))] == ["object"]


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_model_folder_whose_files_do_not_fit_together_is_damaged(
    auditor: Audits, states: list[Path], tmp_path: Path, depth: Depth
) -> None:
    with pytest.raises(InvalidInputError, match="is no folder"):
        auditor(depth).folder(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    assert found(auditor(depth).folder(tmp_path / "empty")) == [("missing", str(tmp_path / "empty"))]
    folder = shutil.copytree(states[0], tmp_path / "model")
    index = folder / "model.safetensors.index.json"
    cases: list[tuple[str, Damage]] = [
        ('{"weight_map": {"a": "gone.safetensors"}}', "missing"),
        ('{"weight_map": {}}', "missing"),
        (f'{{"weight_map": {{"a": "{FILE}"}}}}', "object"),
        (f'{{"weight_map": {{"{WIDE}": "{FILE}"}}}}', "object"),
        ("{", "object"),
    ]
    for body, damage in cases:
        index.write_text(body)
        assert found(auditor(depth).folder(folder)) == [(damage, str(folder))]


def test_a_delta_folder_without_its_outline_is_told_by_that_file(
    auditor: Audits, states: list[Path], tmp_path: Path
) -> None:
    folder = delta_folder(states[0], states[1], tmp_path / "delta")
    (folder / "outline.json").unlink()
    assert found(auditor("objects").delta(folder, None)) == [("missing", "outline.json")]


def test_another_bit_is_another_state(auditor: Audits, states: list[Path], tmp_path: Path) -> None:
    def flip(tensors: dict[str, torch.Tensor]) -> None:
        tensors[WIDE].view(torch.int16)[1, -1] ^= 1

    other = altered(states[1], tmp_path / "other", flip)
    assert auditor("tensors").folder(other).state != auditor("tensors").folder(states[1]).state
