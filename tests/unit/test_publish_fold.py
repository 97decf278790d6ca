from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec
import pytest
from bucket_rig import copied
from hypothesis import given
from hypothesis import strategies as st
from states_rig import RUN, WIDE, bits, publish_states, tell_nobody, write_states

from slackwater.bucket.base import Bucket, ObjectInfo
from slackwater.checkpoint.chain import plan_path
from slackwater.checkpoint.codec import Level
from slackwater.checkpoint.digest import object_digest
from slackwater.checkpoint.keys import anchor_key, fold_key, manifest_key, parse_fold_key
from slackwater.checkpoint.manifest import Manifest
from slackwater.errors import AuthError, CorruptError, InvalidInputError, NotFoundError, UnavailableError
from slackwater.ids import Version
from slackwater.publish.delta import Packer, bits_of, encode_delta
from slackwater.publish.fold import Folded, fold
from slackwater.publish.lineage import read_manifest
from slackwater.publish.path import along, read_fold, read_path
from slackwater.publish.publisher import Publisher
from slackwater.publish.rebuild import Rebuilt, rebuild
from slackwater.publish.restore import restore
from slackwater.testing.bucket import Fault, FaultyBucket, MemoryBucket
from slackwater.weights.diff import hash_source
from slackwater.weights.source import FolderSource


@pytest.fixture(scope="module")
def states(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return write_states(tmp_path_factory.mktemp("states"), 6)


@pytest.fixture(scope="module")
def published(states: list[Path]) -> MemoryBucket:
    """Anchors at 0 and 4."""
    bucket = MemoryBucket()
    publish_states(bucket, states, anchor_every=4)
    return bucket


@pytest.fixture
def bucket(published: MemoryBucket) -> MemoryBucket:
    """A copy, to be written."""
    return copied(published)


def folded(bucket: Bucket, start: int, end: int, scratch: Path, level: Level = "fast") -> Folded:
    scratch.mkdir()
    return fold(
        bucket, RUN, Version(start), Version(end), scratch=scratch, level=level, threads=1, progress=tell_nobody
    )  # fmt: skip


def restored(bucket: Bucket, number: int) -> dict[str, bytes]:
    return {name: item.tobytes() for name, item in restore(bucket, RUN, Version(number)).bits.items()}


def rebuilt(bucket: Bucket, number: int, folder: Path, start: Rebuilt | None = None) -> Rebuilt:
    folder.mkdir()
    return rebuild(bucket, RUN, Version(number), folder, threads=2, progress=tell_nobody, start=start)


class Unlisting(MemoryBucket):
    """Another bucket's objects, of which a listing lacks some."""

    def __init__(self, bucket: MemoryBucket, lacks: str) -> None:
        super().__init__()
        self._whole, self._lacks = bucket, lacks

    def get(self, key: str, *, max_bytes: int) -> bytes:
        return self._whole.get(key, max_bytes=max_bytes)

    def get_range(self, key: str, start: int, length: int) -> bytes:
        return self._whole.get_range(key, start, length)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        return (item for item in self._whole.list(prefix) if self._lacks not in item.key)


def spoil(bucket: MemoryBucket, key: str, place: int = -1) -> None:
    body = bytearray(bucket.get(key, max_bytes=2**30))
    body[place] ^= 1
    bucket.put(key, bytes(body))


@pytest.mark.parametrize("level", ["fast", "wan"])
@pytest.mark.parametrize(("start", "end"), [(0, 1), (0, 3), (1, 3), (3, 4), (2, 5), (0, 5)])
def test_a_fold_makes_the_later_versions_bits_out_of_the_earlier_ones(
    bucket: MemoryBucket, states: list[Path], tmp_path: Path, start: int, end: int, level: Level
) -> None:
    made = folded(bucket, start, end, tmp_path / "fold", level)
    manifest = read_fold(bucket, RUN, Version(start), Version(end))
    assert (made.is_new, made.manifest) == (True, manifest)
    assert (manifest.version, manifest.parent and manifest.parent.version) == (end, start)
    last = read_manifest(bucket, RUN, Version(end))
    assert (manifest.state, manifest.step, manifest.created_at) == (last.state, 10 * end, last.created_at)
    assert bits(rebuilt(bucket, end, tmp_path / "end").folder) == bits(states[end])
    assert restored(bucket, end) == bits(states[end])


def test_a_fold_is_smaller_than_its_deltas(bucket: MemoryBucket, tmp_path: Path) -> None:
    deltas = [read_manifest(bucket, RUN, Version(number)) for number in (1, 2, 3)]
    manifest = folded(bucket, 0, 3, tmp_path / "fold").manifest
    assert 0 < manifest.num_bytes < sum(delta.num_bytes for delta in deltas)
    assert 0 < manifest.num_changed <= sum(delta.num_changed for delta in deltas)


def test_a_fold_made_again_changes_nothing(bucket: MemoryBucket, tmp_path: Path) -> None:
    folded(bucket, 0, 2, tmp_path / "first")
    before = {item.key: bucket.get(item.key, max_bytes=item.size) for item in bucket.list("")}
    assert not folded(bucket, 0, 2, tmp_path / "second", "wan").is_new
    assert {item.key: bucket.get(item.key, max_bytes=item.size) for item in bucket.list("")} == before


def test_a_fold_appears_after_its_objects(bucket: MemoryBucket, tmp_path: Path) -> None:
    refused = FaultyBucket(bucket, Fault(verb="put", key="/blobs/", before=UnavailableError("away")))
    with pytest.raises(UnavailableError):
        folded(refused, 0, 2, tmp_path / "first")
    with pytest.raises(NotFoundError):
        read_fold(bucket, RUN, Version(0), Version(2))
    watched = FaultyBucket(bucket, Fault(verb="put_if_absent", before=UnavailableError("away")))
    with pytest.raises(UnavailableError):
        folded(watched, 0, 2, tmp_path / "second")
    with pytest.raises(NotFoundError):
        read_fold(bucket, RUN, Version(0), Version(2))
    assert folded(bucket, 0, 2, tmp_path / "third").is_new


@pytest.mark.parametrize(("start", "end"), [(2, 2), (3, 1)])
def test_a_fold_leads_forwards(bucket: MemoryBucket, tmp_path: Path, start: int, end: int) -> None:
    with pytest.raises(InvalidInputError, match=f"not from {start} to {end}"):
        folded(bucket, start, end, tmp_path / "fold")


def test_a_fold_of_versions_that_are_not_there_is_refused(bucket: MemoryBucket, tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="00000009"):
        folded(bucket, 1, 9, tmp_path / "fold")


def test_a_fold_that_makes_another_state_is_refused_by_name(bucket: MemoryBucket, tmp_path: Path) -> None:
    manifest = folded(bucket, 0, 2, tmp_path / "first").manifest
    wrong = msgspec.structs.replace(manifest, state=read_manifest(bucket, RUN, Version(1)).state)
    bucket.put(fold_key(RUN, Version(0), Version(2)), msgspec.json.encode(wrong))
    with pytest.raises(CorruptError, match="the fold to version 2 of run"):
        folded(bucket, 0, 2, tmp_path / "second")
    bucket.put(fold_key(RUN, Version(0), Version(1)), bucket.get(fold_key(RUN, Version(0), Version(2)), max_bytes=9**9))
    with pytest.raises(CorruptError, match="leads to version 2 of run"):
        read_fold(bucket, RUN, Version(0), Version(1))


# Encoding as a stream


@given(st.lists(st.lists(st.binary(min_size=1, max_size=9), min_size=1, max_size=4), max_size=9), st.integers(1, 20))
def test_packs_hold_every_body_in_order_and_part_no_batch(batches: list[list[bytes]], limit: int) -> None:
    packs: list[bytes] = []
    packer = Packer(RUN, lambda _ref, body: packs.append(body), limit)
    places = [packer.add(batch) for batch in batches]
    refs = packer.close()
    assert places == sorted(places)
    assert packs == [
        b"".join(body for batch, place in zip(batches, places, strict=True) if place == number for body in batch)
        for number in range(len(packs))
    ]
    assert [(ref.key, ref.size) for ref in refs] == [(f"run/blobs/{object_digest(p)}", len(p)) for p in packs]
    whole = {b"".join(batch) for batch in batches}
    assert all(len(pack) <= limit or pack in whole for pack in packs)
    for number in range(1, len(packs)):
        first = b"".join(batches[places.index(number)])
        assert len(packs[number - 1]) + len(first) > limit


def test_a_pack_is_let_go_before_the_next_one_is_full() -> None:
    packs: list[bytes] = []
    packer = Packer(RUN, lambda _ref, body: packs.append(body), limit=5)
    seen = [(packer.add(batch), list(packs)) for batch in ([b"ab", b"c"], [b"de"], [b"f"], [b"ghijklm"], [b"n"])]
    assert [place for place, _ in seen] == [0, 0, 1, 2, 3]
    assert [done for _, done in seen] == [[], [], [b"abcde"], [b"abcde", b"f"], [b"abcde", b"f", b"ghijklm"]]
    packer.close()
    assert packs[-1] == b"n"


@pytest.mark.parametrize("level", ["fast", "wan"])
def test_a_stream_says_what_the_publisher_says(states: list[Path], published: MemoryBucket, level: Level) -> None:
    before, after = (FolderSource(folder) for folder in states[:2])
    held = hash_source(before, threads=1)
    objects: dict[str, bytes] = {}
    encoded = encode_delta(
        RUN, after, held, bits_of(before), level=level, threads=2, progress=tell_nobody,
        put=lambda ref, body: objects.update({ref.key: body}),
    )  # fmt: skip
    manifest = read_manifest(published, RUN, Version(1))
    assert encoded.table.digest == manifest.state
    assert encoded.tiles == manifest.tiles
    if level == "fast":
        assert (encoded.objects, encoded.bodies) == (manifest.objects, manifest.bodies)
        assert objects == {ref.key: published.get(ref.key, max_bytes=ref.size) for ref in manifest.objects}


def test_a_baseline_that_is_not_the_state_is_refused_by_tile(states: list[Path]) -> None:
    before, after = (FolderSource(folder) for folder in states[:2])
    baseline = {name: item.copy() for name, item in bits_of(before).items()}
    baseline[WIDE][0] ^= 1
    with pytest.raises(CorruptError, match=f"{WIDE} tile 0 of the baseline"):
        encode_delta(
            RUN, after, hash_source(before, threads=1), baseline, level="fast", threads=1, progress=tell_nobody,
            put=lambda _ref, _body: None,
        )  # fmt: skip


# Reading along folds


def path_of(bucket: Bucket, number: int, held: int | None = None) -> list[tuple[int, int | None]]:
    """Version and parent of each manifest on the way."""

    def use(path: list[Manifest]) -> list[tuple[int, int | None]]:
        return [(item.version, None if item.parent is None else item.parent.version) for item in path]

    return along(bucket, RUN, Version(number), use, held=None if held is None else Version(held))


def test_a_late_joiner_reads_one_anchor_and_few_folds(bucket: MemoryBucket, states: list[Path], tmp_path: Path) -> None:
    assert path_of(bucket, 3) == [(0, None), (1, 0), (2, 1), (3, 2)]
    folded(bucket, 0, 2, tmp_path / "02")
    assert path_of(bucket, 3) == [(0, None), (2, 0), (3, 2)]
    assert path_of(bucket, 2) == [(0, None), (2, 0)]
    assert path_of(bucket, 1) == [(0, None), (1, 0)]
    folded(bucket, 0, 3, tmp_path / "03")
    assert path_of(bucket, 3) == [(0, None), (3, 0)]
    watched = FaultyBucket(bucket)
    assert restored(watched, 3) == bits(states[3])
    deltas = [ref.key for number in (1, 2, 3) for ref in read_manifest(bucket, RUN, Version(number)).objects]
    assert [watched.count("get", key) for key in deltas] == [0] * len(deltas)


def test_a_fold_never_leads_past_a_newer_anchor_but_from_what_is_held(bucket: MemoryBucket, tmp_path: Path) -> None:
    folded(bucket, 0, 5, tmp_path / "05")
    assert path_of(bucket, 5) == [(4, None), (5, 4)]
    assert restore(bucket, RUN, Version(5)).anchor == 4
    assert path_of(bucket, 5, held=0) == [(5, 0)]
    assert path_of(bucket, 5, held=3) == [(4, None), (5, 4)]
    folded(bucket, 3, 4, tmp_path / "34")
    assert path_of(bucket, 5, held=3) == [(4, 3), (5, 4)]
    assert path_of(bucket, 5, held=2) == [(3, 2), (4, 3), (5, 4)]
    assert path_of(bucket, 4) == [(4, None)]


@pytest.mark.parametrize(("number", "held", "lists"), [(4, None, 0), (0, None, 0), (3, 3, 0), (5, None, 2), (4, 3, 2)])
def test_listings_are_asked_for_where_steps_are_needed_alone(
    bucket: MemoryBucket, tmp_path: Path, number: int, held: int | None, lists: int
) -> None:
    folded(bucket, 0, 3, tmp_path / "03")
    watched = FaultyBucket(bucket)
    path_of(watched, number, held)
    assert watched.count("list") == lists


def test_only_the_manifests_of_the_path_are_read(bucket: MemoryBucket, tmp_path: Path) -> None:
    folded(bucket, 0, 3, tmp_path / "03")
    bucket.delete(manifest_key(RUN, Version(2)))
    watched = FaultyBucket(bucket)
    assert path_of(watched, 3) == [(0, None), (3, 0)]
    assert (watched.count("get", "/manifests/"), watched.count("get", "/folds/")) == (2, 1)
    with pytest.raises(NotFoundError, match="version 2 isn't there"):
        read_path(bucket, RUN, Version(3))


def test_files_of_an_anchor_that_lost_its_race_hide_no_fold(bucket: MemoryBucket, tmp_path: Path) -> None:
    folded(bucket, 0, 3, tmp_path / "03")
    for key in (anchor_key(RUN, Version(2), "0" * 16, "config.json"), "run/anchors/00000001-0/config.json"):
        bucket.put(key, b"{}")
    assert path_of(bucket, 3) == [(0, None), (3, 0)]


def test_an_anchor_that_a_listing_lacks_is_passed_by_a_fold_alone(
    bucket: MemoryBucket, states: list[Path], tmp_path: Path
) -> None:
    unlisted = Unlisting(bucket, "/anchors/00000004-")
    folded(bucket, 3, 5, tmp_path / "35")
    assert path_of(unlisted, 5) == [(0, None), (1, 0), (2, 1), (3, 2), (5, 3)]
    assert restored(unlisted, 5) == bits(states[5])
    bucket.delete(fold_key(RUN, Version(3), Version(5)))
    folded(bucket, 0, 3, tmp_path / "03")
    assert path_of(unlisted, 5) == [(4, None), (5, 4)]
    assert path_of(Unlisting(bucket, "/anchors/"), 3) == [(0, None), (1, 0), (2, 1), (3, 2)]


def test_a_fold_on_another_state_is_left_aside(
    bucket: MemoryBucket, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    manifest = folded(bucket, 0, 2, tmp_path / "02").manifest
    wrong = msgspec.structs.replace(manifest, state=read_manifest(bucket, RUN, Version(1)).state)
    bucket.put(fold_key(RUN, Version(0), Version(2)), msgspec.json.encode(wrong))
    assert path_of(bucket, 3) == [(0, None), (1, 0), (2, 1), (3, 2)]
    assert "version 2 of run doesn't make the state that version 3 is made on" in caplog.text


@pytest.mark.parametrize("part", ["manifest", "state", "object", "gone"])
def test_a_damaged_fold_is_left_aside(
    bucket: MemoryBucket, states: list[Path], tmp_path: Path, caplog: pytest.LogCaptureFixture, part: str
) -> None:
    manifest = folded(bucket, 0, 3, tmp_path / "fold").manifest
    key = fold_key(RUN, Version(0), Version(3))
    if part == "manifest":
        bucket.put(key, b"{")
    elif part == "state":
        bucket.put(key, msgspec.json.encode(msgspec.structs.replace(manifest, state="0" * 64)))
    elif part == "object":
        spoil(bucket, manifest.objects[0].key)
    else:
        bucket.delete(manifest.objects[0].key)
    assert restored(bucket, 3) == bits(states[3])
    assert bits(rebuilt(bucket, 3, tmp_path / "end").folder) == bits(states[3])
    assert "going without folds to version 3 of run" in caplog.text


@pytest.mark.parametrize("error", [AuthError("no"), UnavailableError("away")])
def test_a_listing_that_fails_costs_nothing_but_the_folds(
    bucket: MemoryBucket, states: list[Path], tmp_path: Path, error: Exception
) -> None:
    folded(bucket, 0, 3, tmp_path / "fold")
    blind = FaultyBucket(bucket, Fault(verb="list", before=error, times=9))
    assert path_of(blind, 3) == [(0, None), (1, 0), (2, 1), (3, 2)]
    assert restored(blind, 3) == bits(states[3])


def test_a_publisher_goes_on_from_a_fold(bucket: MemoryBucket, states: list[Path], tmp_path: Path) -> None:
    for number in (5, 4):
        bucket.delete(manifest_key(RUN, Version(number)))
    folded(bucket, 0, 3, tmp_path / "fold")
    publisher = Publisher.open(bucket, RUN, anchor_every=9)
    assert (publisher.version, publisher.publish(FolderSource(states[4]), step=4).kind) == (3, "delta")
    assert restored(bucket, 4) == bits(states[4])


_Kind = Literal["anchor", "delta"] | None
_KINDS: st.SearchStrategy[_Kind] = st.sampled_from(["anchor", "delta", None])


@given(st.data())
def test_a_path_along_folds_is_shortest_and_unbroken(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 9))
    kinds: dict[int, _Kind] = {number: data.draw(_KINDS) for number in range(1, count + 1)}
    kinds[0] = "anchor"
    versions = st.integers(0, count)
    folds = data.draw(st.sets(st.tuples(versions, versions).filter(lambda pair: pair[0] < pair[1]), max_size=6))
    held = data.draw(st.one_of(st.none(), versions))
    target = data.draw(versions)
    steps: dict[int, set[int]] = {end: {start for start, to in folds if to == end} for end in range(count + 1)}
    for number, kind in kinds.items():
        steps[number] |= {number - 1} if kind == "delta" else set()

    def length(starts: set[int]) -> int | None:
        seen, now, far = {target}, {target}, 0
        while now:
            if now & starts:
                return far
            now = {start for end in now if kinds[end] for start in steps[end]} - seen
            seen |= now
            far += 1
        return None

    def folds_to(end: Version) -> list[Version]:
        return [Version(start) for start, to in folds if to == end]

    on_held = None if held is None else length({held})
    on_anchor = length({number for number, kind in kinds.items() if kind == "anchor"})
    try:
        path = plan_path(
            None if held is None else Version(held), Version(target), lambda number: kinds[number], folds_to
        )
    except NotFoundError:
        assert on_held is None
        assert on_anchor is None
        return
    wanted = on_held if on_held is not None else on_anchor
    assert (len(path.deltas), path.anchor is None) == (wanted, on_held is not None)
    start = held if path.anchor is None else path.anchor
    for end in path.deltas:
        assert start in steps[end]
        start = end
    assert start == target


def test_keys_of_folds_are_read_back() -> None:
    key = fold_key(RUN, Version(3), Version(49))
    assert key == "run/folds/00000003-00000049.json"
    assert parse_fold_key(RUN, key) == (3, 49)
    for other in ("run/folds/3-49.json", "run/folds/00000003-00000049.json.part", "other/folds/00000003-00000049.json"):
        assert parse_fold_key(RUN, other) is None


# Rebuilding on the disk


def test_a_version_is_rebuilt_as_a_folder_of_the_anchors_files(
    published: MemoryBucket, states: list[Path], tmp_path: Path
) -> None:
    made = rebuilt(published, 3, tmp_path / "three")
    assert sorted(path.name for path in made.folder.iterdir()) == sorted(path.name for path in states[0].iterdir())
    assert bits(made.folder) == bits(states[3])
    assert made.table.digest == read_manifest(published, RUN, Version(3)).state
    assert (made.folder / "chat_template.jinja").read_bytes() == b"{{ messages }}\r\n"
    assert WIDE in FolderSource(made.folder).specs()


def test_a_rebuilt_version_leads_on_without_its_anchor(
    published: MemoryBucket, states: list[Path], tmp_path: Path
) -> None:
    first = rebuilt(published, 1, tmp_path / "one")
    watched = FaultyBucket(published)
    assert bits(rebuilt(watched, 3, tmp_path / "three", first).folder) == bits(states[3])
    assert bits(rebuilt(watched, 1, tmp_path / "same", first).folder) == bits(states[1])
    assert watched.count("get", "/anchors/") == watched.count("get_range", "/anchors/") == 0
    assert bits(rebuilt(watched, 5, tmp_path / "five", first).folder) == bits(states[5])
    assert bits(first.folder) == bits(states[1])


@pytest.mark.parametrize("part", ["/anchors/", "/blobs/"])
def test_a_version_with_a_spoilt_object_is_not_rebuilt(bucket: MemoryBucket, tmp_path: Path, part: str) -> None:
    keys = [item.key for item in bucket.list(RUN) if part in item.key]
    objects = {ref.key for path in (read_path(bucket, RUN, Version(3)),) for item in path for ref in item.objects}
    spoil(bucket, next(key for key in keys if key in objects))
    with pytest.raises(CorruptError, match="SHA-256"):
        rebuilt(bucket, 3, tmp_path / "three")
