import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from publish_rig import RUN, all_bits, keys, model_folder, restored, touched, trained, weights

from slackwater.bucket.local import LocalBucket
from slackwater.checkpoint.keys import head_key, manifest_key
from slackwater.checkpoint.shards import build_shard, cut_shards
from slackwater.checkpoint.tensor import Bits, TensorSpec
from slackwater.cli.publish import publish_folder
from slackwater.errors import (
    CorruptError,
    InvalidInputError,
    LostRaceError,
    NotFoundError,
    UnavailableError,
)
from slackwater.ids import RunId, Version
from slackwater.publish.lineage import find_head, read_manifest
from slackwater.publish.plan import Anchors, Since, check_fits, decide
from slackwater.publish.publisher import Publisher
from slackwater.publish.restore import restore
from slackwater.testing.bucket import Fault, FaultyBucket, MemoryBucket
from slackwater.testing.clock import ManualClock
from slackwater.weights.source import FolderSource
from slackwater.weights.state_dict import StateDictSource

AWAY = UnavailableError("the store is away")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return model_folder(tmp_path / "model")


def test_every_version_restores_to_the_bits_that_were_published(model: Path) -> None:
    bucket = MemoryBucket()
    publisher = Publisher(bucket, RUN, anchor_every=3, clock=ManualClock())
    states: list[dict[str, bytes]] = []
    kinds: list[str] = []
    tensors = weights()
    for step in range(7):
        published = publisher.publish(StateDictSource(tensors), step=step, folder_files=model)
        states.append(all_bits(StateDictSource(tensors)))
        kinds.append(published.kind)
        assert (published.version, published.state) == (
            step,
            restore(bucket, RUN, Version(step)).table.digest,
        )
        tensors = trained(tensors, step)
    assert kinds == ["anchor", "delta", "delta", "anchor", "delta", "delta", "anchor"]
    assert [restored(bucket, version) for version in range(7)] == states


def test_a_delta_tells_what_changed_and_what_it_cost(model: Path) -> None:
    bucket = MemoryBucket()
    publisher = Publisher(bucket, RUN)
    first = publisher.publish(StateDictSource(weights()), step=1, folder_files=model)
    assert (first.kind, first.changed, first.total, first.full_bytes) == ("anchor", 1282, 1282, 2568)
    changed = weights()
    changed["model.norm.bias"][1] = float("nan")
    second = publisher.publish(StateDictSource(changed), step=2)
    assert (second.kind, second.changed, second.total, second.version) == ("delta", 1, 1282, 1)
    manifest = read_manifest(bucket, RUN, Version(1))
    assert touched(bucket, 1) == ["model.norm.bias tile 0"]
    assert manifest.num_changed == 1
    assert (manifest.step, second.state) == (2, manifest.state)
    body = bucket.get(manifest_key(RUN, Version(1)), max_bytes=10_000)
    assert second.uploaded_bytes == manifest.num_bytes + len(body)
    assert second.ratio == second.uploaded_bytes / 2568


def test_nothing_changed_is_a_version_all_the_same(model: Path) -> None:
    bucket = MemoryBucket()
    publisher = Publisher(bucket, RUN)
    first = publisher.publish(StateDictSource(weights()), step=0, folder_files=model)
    second = publisher.publish(StateDictSource(weights()), step=1)
    assert (second.version, second.changed, second.state) == (1, 0, first.state)
    assert keys(bucket, "/blobs/") == []
    assert restored(bucket, 1) == restored(bucket, 0)


def test_tensors_absent_from_a_delta_stay_as_they_were(model: Path) -> None:
    bucket = MemoryBucket()
    publisher = Publisher(bucket, RUN)
    publisher.publish(StateDictSource(weights()), step=0, folder_files=model)
    publisher.publish(StateDictSource({"model.norm.bias": torch.tensor([1.0, 2.0])}), step=1)
    assert restored(bucket, 1) == all_bits(StateDictSource({**weights(), "model.norm.bias": torch.tensor([1.0, 2.0])}))


def test_an_anchor_is_an_ordinary_folder_with_its_files_untouched(model: Path, tmp_path: Path) -> None:
    bucket = MemoryBucket()
    Publisher(bucket, RUN).publish(StateDictSource(weights()), step=0, folder_files=model)
    manifest = read_manifest(bucket, RUN, Version(0))
    copy = tmp_path / "copy"
    copy.mkdir()
    for file, index in manifest.files.items():
        ref = manifest.objects[index]
        (copy / file).write_bytes(bucket.get(ref.key, max_bytes=ref.size))
    assert sorted(manifest.files) == [
        "chat_template.jinja",
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    assert (copy / "chat_template.jinja").read_bytes() == b"{{ messages }}\r\n"
    assert all_bits(FolderSource(copy)) == all_bits(StateDictSource(weights()))


def test_a_folder_is_published_by_the_command_and_then_by_delta(model: Path, tmp_path: Path) -> None:
    def save(tensors: dict[str, torch.Tensor]) -> None:
        source = StateDictSource(tensors)
        (plan,) = cut_shards(list(source.specs().values()))
        (model / plan.file).write_bytes(build_shard(plan, source))

    url = str(tmp_path / "bucket")
    save(weights())
    assert publish_folder(model, url, RUN, step=0).kind == "anchor"
    after = trained(weights(), 1)
    save(after)
    assert publish_folder(model, url, RUN, step=1).kind == "delta"
    assert restored(LocalBucket(tmp_path / "bucket"), 1) == all_bits(StateDictSource(after))
    assert publish_folder(model, url, RUN, step=2, anchor=True).kind == "anchor"


def test_f09_a_publisher_that_starts_anew_goes_on_from_the_proved_head(model: Path) -> None:
    bucket = MemoryBucket()
    tensors = weights()
    Publisher(bucket, RUN).publish(StateDictSource(tensors), step=0, folder_files=model)
    for step in range(1, 4):
        tensors = trained(tensors, step)
        publisher = Publisher.open(bucket, RUN)
        assert publisher.version == step - 1
        assert publisher.publish(StateDictSource(tensors), step=step).kind == "delta"
    assert restored(bucket, 3) == all_bits(StateDictSource(tensors))


@pytest.mark.parametrize(
    "hint", [b"", b"{", b'{"version": 99}', b'{"version": -1}', b"[" * 3000, b'{"version": 0}', None]
)
def test_f06_the_head_is_found_whatever_the_hint_says(model: Path, hint: bytes | None) -> None:
    bucket = MemoryBucket()
    publisher = Publisher(bucket, RUN)
    for step in range(3):
        publisher.publish(StateDictSource(weights()), step=step, folder_files=model)
    bucket.delete(head_key(RUN))
    if hint is not None:
        bucket.put(head_key(RUN), hint)
    assert find_head(bucket, RUN) == 2


def test_an_empty_lineage_has_no_head() -> None:
    assert find_head(MemoryBucket(), RUN) is None
    with pytest.raises(NotFoundError, match="version 0"):
        restore(MemoryBucket(), RUN, Version(0))


def test_a_failing_hint_does_not_fail_the_publish(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    bucket = FaultyBucket(MemoryBucket(), Fault(verb="put", key="head.json", before=AWAY))
    published = Publisher(bucket, RUN).publish(StateDictSource(weights()), step=0, folder_files=model)
    assert published.version == find_head(bucket, RUN) == 0
    assert "head hint" in caplog.text


@pytest.mark.parametrize("failing", range(1, 5))
def test_f03_a_crash_between_uploads_shows_nothing_and_a_restart_reuses_them(model: Path, failing: int) -> None:
    memory = MemoryBucket()
    bucket = FaultyBucket(memory)
    passed = [Fault(verb="put", key="anchors/", gate=None)] * (failing - 1)
    for fault in (*passed, Fault(verb="put", key="anchors/", before=AWAY)):
        bucket.add(fault)
    with pytest.raises(UnavailableError):
        Publisher(bucket, RUN, threads=1).publish(StateDictSource(weights()), step=0, folder_files=model)
    assert find_head(memory, RUN) is None
    there = keys(memory, "/anchors/")
    again = FaultyBucket(memory)
    Publisher(again, RUN).publish(StateDictSource(weights()), step=0, folder_files=model)
    assert all(again.count("put", key) == 0 for key in there)
    assert restored(memory, 0) == all_bits(StateDictSource(weights()))


def test_f04_a_crash_before_the_manifest_shows_nothing_and_a_restart_uploads_nothing(model: Path) -> None:
    memory = MemoryBucket()
    tensors = trained(weights(), 1)
    Publisher(memory, RUN).publish(StateDictSource(weights()), step=0, folder_files=model)
    bucket = FaultyBucket(memory, Fault(verb="put_if_absent", before=AWAY))
    with pytest.raises(UnavailableError):
        Publisher(bucket, RUN).publish(StateDictSource(tensors), step=1)
    assert find_head(memory, RUN) == 0
    again = FaultyBucket(memory)
    assert Publisher(again, RUN).publish(StateDictSource(tensors), step=1).version == 1
    assert again.count("put", "/blobs/") == 0
    assert restored(memory, 1) == all_bits(StateDictSource(tensors))


class _Doubting(FaultyBucket):
    """Creates the object and says that it existed: what a retry inside a store sees after a lost answer."""

    def put_if_absent(self, key: str, body: bytes) -> bool:
        super().put_if_absent(key, body)
        return False


def test_f05_a_lost_answer_is_recognised_as_the_own_commit(model: Path) -> None:
    memory = MemoryBucket()
    publisher = Publisher(_Doubting(memory), RUN)
    publisher.publish(StateDictSource(weights()), step=0, folder_files=model)
    publisher.publish(StateDictSource(trained(weights(), 1)), step=1)
    assert keys(memory, "/manifests/") == [manifest_key(RUN, Version(version)) for version in (0, 1)]


def test_f05_after_a_commit_without_an_answer_the_chain_is_read_again(model: Path) -> None:
    memory = MemoryBucket()
    bucket = FaultyBucket(memory, Fault(verb="put_if_absent", key="00000001", after=AWAY))
    publisher = Publisher(bucket, RUN)
    publisher.publish(StateDictSource(weights()), step=0, folder_files=model)
    tensors = trained(weights(), 1)
    with pytest.raises(UnavailableError):
        publisher.publish(StateDictSource(tensors), step=1)
    last = trained(tensors, 2)
    assert publisher.publish(StateDictSource(last), step=2).version == 2
    assert restored(memory, 1) == all_bits(StateDictSource(tensors))
    assert restored(memory, 2) == all_bits(StateDictSource(last))


def test_f08_a_publisher_that_slept_loses_and_goes_on_losing(model: Path) -> None:
    bucket = MemoryBucket()
    sleeper = Publisher(bucket, RUN)
    sleeper.publish(StateDictSource(weights()), step=0, folder_files=model)
    second = Publisher(bucket, RUN).publish(StateDictSource(trained(weights(), 1)), step=1)
    for _ in range(2):
        with pytest.raises(LostRaceError, match=f"state {second.state[:12]}"):
            sleeper.publish(StateDictSource(trained(weights(), 2)), step=1)
    assert restored(bucket, 1) == all_bits(StateDictSource(trained(weights(), 1)))
    assert Publisher.open(bucket, RUN).publish(StateDictSource(weights()), step=2).version == 2


def test_f07_of_two_racing_publishers_one_wins_every_time(model: Path) -> None:
    for race in range(10):
        bucket = MemoryBucket()

        def publish(seed: int, bucket: MemoryBucket = bucket) -> str:
            try:
                Publisher(bucket, RUN, threads=1).publish(StateDictSource(weights(seed)), step=seed, folder_files=model)
            except LostRaceError:
                return "lost"
            return "won"

        with ThreadPoolExecutor(2) as pool:
            outcomes = sorted(pool.map(publish, (race, race + 100)))
        head = find_head(bucket, RUN)
        assert head is not None
        assert outcomes.count("won") == head + 1
        first = read_manifest(bucket, RUN, Version(0)).step
        assert restored(bucket, 0) == all_bits(StateDictSource(weights(first)))


def test_a1_21_another_run_in_the_same_bucket_is_another_lineage(model: Path) -> None:
    bucket = MemoryBucket()
    for step in range(3):
        Publisher(bucket, "run-a").publish(StateDictSource(weights(step)), step=step, folder_files=model)
    published = Publisher(bucket, "run-b").publish(StateDictSource(weights(9)), step=0, folder_files=model)
    assert (published.kind, published.version) == ("anchor", 0)
    bucket.put(manifest_key(RUN, Version(0)), bucket.get(manifest_key(RunId("run-b"), Version(0)), max_bytes=9999))
    with pytest.raises(CorruptError, match="version 0 of run-b"):
        read_manifest(bucket, RUN, Version(0))


@pytest.mark.parametrize("part", ["/anchors/", "/blobs/", "/manifests/"])
def test_f10_f11_a_spoilt_object_is_never_built_upon(model: Path, part: str) -> None:
    memory = MemoryBucket()
    publisher = Publisher(memory, RUN)
    publisher.publish(StateDictSource(weights()), step=0, folder_files=model)
    publisher.publish(StateDictSource(trained(weights(), 1)), step=1)
    for spoil in (
        Fault(verb="get", key=part, flip=40, times=9),
        Fault(verb="get", key=part, cut=40, times=9),
    ):
        with pytest.raises(CorruptError):
            Publisher.open(FaultyBucket(memory, spoil), RUN)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model.extra": torch.zeros(1)}, "model.extra isn't in this run"),
        ({"model.norm.bias": torch.zeros(3)}, r"model.norm.bias is F32 \[3\]"),
        ({"model.norm.bias": torch.zeros(2).half()}, r"model.norm.bias is F16 \[2\]"),
    ],
)
def test_a1_16_a_source_that_does_not_fit_is_refused_by_name(
    model: Path, change: dict[str, torch.Tensor], message: str
) -> None:
    bucket = FaultyBucket(MemoryBucket())
    publisher = Publisher(bucket, RUN)
    publisher.publish(StateDictSource(weights()), step=0, folder_files=model)
    before = bucket.count("put")
    with pytest.raises(InvalidInputError, match=message):
        publisher.publish(StateDictSource({**weights(), **change}), step=1)
    assert bucket.count("put") == before


def test_a1_10_an_anchor_that_lacks_a_tensor_is_refused_by_name(model: Path) -> None:
    publisher = Publisher(MemoryBucket(), RUN)
    publisher.publish(StateDictSource(weights()), step=0, folder_files=model)
    partial = weights()
    del partial["model.norm.bias"]
    with pytest.raises(InvalidInputError, match=r"model\.norm\.bias is missing"):
        publisher.publish(StateDictSource(partial), step=1, folder_files=model, anchor=True)


class _Racing(StateDictSource):
    """A trainer that writes while it is published: the second reading differs from the first."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__(tensors)
        self._readings = 0

    def bits(self, name: str) -> Bits:
        self._readings += name == "model.norm.bias"
        bits = super().bits(name).copy()
        return bits + np.uint32(self._readings) if name == "model.norm.bias" else bits

    def shows(self, name: str) -> bool:
        return name == ""  # copies alone


def test_weights_written_after_they_were_encoded_leave_the_baseline_as_committed(model: Path) -> None:
    bucket = MemoryBucket()
    publisher = Publisher(bucket, RUN)
    publisher.publish(StateDictSource(weights()), step=0, folder_files=model)
    publisher.publish(_Racing(weights()), step=1)
    assert restored(bucket, 1) == all_bits(_Racing(weights()))  # as it was read first
    assert {name: publisher.held_bits(name).tobytes() for name in publisher.held_specs()} == restored(bucket, 1)
    last = trained(weights(), 3)
    assert publisher.publish(StateDictSource(last), step=2).version == 2
    assert restored(bucket, 2) == all_bits(StateDictSource(last))


class _Following(_Racing):
    """A source that goes on from what was committed, as one on a device does."""

    told: Version | None = None

    def committed(self, version: Version) -> None:
        self.told = version


def test_a_source_that_goes_on_from_the_commit_is_not_told_it_holds_what_was_written_since(model: Path) -> None:
    bucket = MemoryBucket()
    publisher = Publisher(bucket, RUN)
    publisher.publish(StateDictSource(weights()), step=0, folder_files=model)
    source = _Following(weights())
    with pytest.raises(InvalidInputError, match=r"model\.norm\.bias was written"):
        publisher.publish(source, step=1)
    assert source.told is None
    assert restored(bucket, 1) == all_bits(_Racing(weights()))
    last = trained(weights(), 3)
    assert publisher.publish(StateDictSource(last), step=2).version == 2
    assert restored(bucket, 2) == all_bits(StateDictSource(last))


def test_progress_counts_up_to_the_whole(model: Path) -> None:
    told: list[tuple[str, int, int]] = []
    publisher = Publisher(MemoryBucket(), RUN, progress=lambda *news: told.append(news))
    publisher.publish(StateDictSource(weights()), step=0, folder_files=model)
    publisher.publish(StateDictSource(trained(weights(), 1)), step=1)
    assert [news for news in told if news[0] == "encode"] == [("encode", 2568, 2568)]
    assert told[-1][0] == "upload"
    assert told[-1][1] == told[-1][2]


@pytest.mark.parametrize(("run", "every", "step"), [("../x", 50, 0), ("demo", 0, 0), ("demo", 50, -1)])
def test_numbers_and_names_out_of_range_are_refused(run: str, every: int, step: int) -> None:
    with pytest.raises(InvalidInputError):
        Publisher(MemoryBucket(), run, anchor_every=every).publish(StateDictSource(weights()), step=step)


def test_an_anchor_comes_first_when_forced_and_in_turn() -> None:
    anchors = Anchors(every=3, share=0.5)
    kinds = [
        decide(anchors, None if versions is None else Since(versions=versions, share=0.49), forced=False)
        for versions in (None, 0, 1, 2, 9)
    ]
    assert kinds == ["anchor", "delta", "delta", "anchor", "anchor"]
    assert decide(anchors, Since(versions=0, share=0.0), forced=True) == "anchor"
    assert decide(anchors, Since(versions=0, share=0.5), forced=False) == "anchor"


def test_a_delta_may_lack_tensors() -> None:
    spec = TensorSpec(name="a", dtype="U8", shape=(1,))
    check_fits("delta", {"a": spec}, {})
    with pytest.raises(InvalidInputError):
        check_fits("anchor", {"a": spec}, {})


def test_the_head_hint_is_small_json(model: Path) -> None:
    bucket = MemoryBucket()
    Publisher(bucket, RUN).publish(StateDictSource(weights()), step=0, folder_files=model)
    assert json.loads(bucket.get(head_key(RUN), max_bytes=100)) == {"version": 0}


def test_an_anchor_heals_a_chain_whose_objects_are_broken(model: Path) -> None:
    bucket = MemoryBucket()
    publisher = Publisher(bucket, RUN)
    publisher.publish(StateDictSource(weights()), step=0, folder_files=model)
    publisher.publish(StateDictSource(trained(weights(), 1)), step=1)
    (blob,) = keys(bucket, "/blobs/")
    bucket.put(blob, b"\xff" * len(bucket.get(blob, max_bytes=1 << 20)))
    with pytest.raises(CorruptError):
        Publisher(bucket, RUN).publish(StateDictSource(weights(2)), step=2, folder_files=model)
    healed = Publisher(bucket, RUN)
    published = healed.publish(StateDictSource(weights(2)), step=2, folder_files=model, anchor=True)
    assert (published.version, published.kind) == (2, "anchor")
    assert restored(bucket, 2) == all_bits(StateDictSource(weights(2)))
    assert healed.publish(StateDictSource(trained(weights(2), 3)), step=3).kind == "delta"
    assert restored(bucket, 3) == all_bits(StateDictSource(trained(weights(2), 3)))


def test_what_a_source_lacks_stays_as_it_is_and_is_told(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    bucket = MemoryBucket()
    publisher = Publisher(bucket, RUN)
    publisher.publish(StateDictSource(weights()), step=0, folder_files=model)
    part = {name: value for name, value in weights().items() if name != "model.norm.bias"}
    publisher.publish(StateDictSource(part), step=1)
    assert restored(bucket, 1) == restored(bucket, 0)
    assert "model.norm.bias" in caplog.text


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json", "chat_template.jinja", "generation_config.json"])
def test_an_anchor_with_another_config_or_tokenizer_is_another_model(model: Path, file: str) -> None:
    bucket = MemoryBucket()
    publisher = Publisher(bucket, RUN)
    publisher.publish(StateDictSource(weights()), step=0, folder_files=model)
    before = (model / file).read_bytes() if (model / file).exists() else None
    (model / file).write_text('{"rms_norm_eps": 0.5}')
    for opened in (publisher, Publisher(bucket, RUN)):
        with pytest.raises(InvalidInputError, match=file):
            opened.publish(StateDictSource(weights()), step=1, folder_files=model, anchor=True)
    assert find_head(bucket, RUN) == 0
    if before is None:
        (model / file).unlink()
    else:
        (model / file).write_bytes(before)
    assert publisher.publish(StateDictSource(weights()), step=1, folder_files=model, anchor=True).version == 1


def test_a_blob_that_was_spoilt_is_sent_again_when_its_bytes_come_back(model: Path) -> None:
    bucket = MemoryBucket()
    publisher = Publisher(bucket, RUN)
    one, two = weights(), trained(weights(), 1)
    publisher.publish(StateDictSource(one), step=0, folder_files=model)
    publisher.publish(StateDictSource(two), step=1)
    (blob,) = keys(bucket, "/blobs/")
    publisher.publish(StateDictSource(one), step=2)
    bucket.put(blob, b"\xff" * len(bucket.get(blob, max_bytes=1 << 20)))
    publisher.publish(StateDictSource(two), step=3)
    assert restored(bucket, 3) == all_bits(StateDictSource(two))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ('{"tie_word_embeddings": true}', "lm_head"),
        ('{"dtype": "float16"}', "no tensor is F16"),
        ('{"torch_dtype": "float16"}', "no tensor is F16"),
        ("{", "config.json can't be read"),
    ],
)
def test_an_anchor_that_no_engine_could_load_is_refused_before_it_is_visible(
    model: Path, config: str, words: str
) -> None:
    bucket = MemoryBucket()
    (model / "config.json").write_text(config)
    tensors = {**weights(), "lm_head.weight": weights()["model.embed_tokens.weight"].clone()}
    with pytest.raises(InvalidInputError, match=words):
        Publisher(bucket, RUN).publish(StateDictSource(tensors), step=0, folder_files=model)
    assert not keys(bucket)


def test_folders_may_be_named_by_strings(model: Path) -> None:
    published = Publisher(MemoryBucket(), RUN).publish(StateDictSource(weights()), step=0, folder_files=str(model))
    assert published.kind == "anchor"


def test_a_publisher_that_is_opened_on_no_bucket_says_so_at_once(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        Publisher.open(LocalBucket(tmp_path / "missing"), RUN)


def test_an_unknown_level_is_refused_before_anything_is_published() -> None:
    with pytest.raises(InvalidInputError, match="no level 'max'"):
        Publisher(MemoryBucket(), RUN, level="max")  # type: ignore[arg-type]
