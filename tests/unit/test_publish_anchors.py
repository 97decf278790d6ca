"""Anchors that follow others: what they link, what they take over, and the files that a run keeps."""

from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch
from publish_rig import RUN, Tensors, all_bits, keys, model_folder, restored, stepped, trained, weights
from safetensors.torch import save_file

from slackwater.checkpoint.keys import manifest_key
from slackwater.checkpoint.shards import cut_shards
from slackwater.errors import CorruptError, InvalidInputError
from slackwater.ids import Version
from slackwater.publish.exchange import thread_exchanges
from slackwater.publish.lineage import read_manifest
from slackwater.publish.publisher import Publisher
from slackwater.publish.ranks import RankPublisher
from slackwater.testing.bucket import FaultyBucket, MemoryBucket
from slackwater.weights import image
from slackwater.weights.source import FolderSource
from slackwater.weights.state_dict import StateDictSource

TABLE: Final = "model.embed_tokens.weight"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return model_folder(tmp_path / "model")


@pytest.fixture
def many_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each tensor in a file of its own."""
    monkeypatch.setattr(image, "cut_shards", partial(cut_shards, limit=1))


def but(tensors: Tensors, *names: str) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if name not in names}


@pytest.mark.usefixtures("many_files")
def test_an_anchor_in_turn_links_the_files_that_stay_and_uploads_the_others(model: Path) -> None:
    bucket = FaultyBucket(MemoryBucket())
    publisher = Publisher(bucket, RUN, anchor_every=2, threads=1)
    first = weights()
    publisher.publish(StateDictSource(first), step=0, folder_files=model)
    after = {**stepped(first, 1, 1e-2), TABLE: first[TABLE]}
    publisher.publish(StateDictSource(after), step=1)
    sent = bucket.count("put", "/anchors/")
    published = publisher.publish(StateDictSource(after), step=2, folder_files=model)
    old, new = (read_manifest(bucket, RUN, Version(version)) for version in (0, 2))
    assert (published.kind, bucket.count("put", "/anchors/") - sent) == ("anchor", len(first) - 1)
    assert {old.folder["config.json"], old.folder["chat_template.jinja"]} <= set(new.objects)
    assert len(set(old.objects) & set(new.objects)) == len(old.side_files) + 2  # the table and the index
    assert restored(bucket, 2) == all_bits(StateDictSource(after))
    assert Publisher.open(bucket, RUN).publish(StateDictSource(after), step=3).changed == 0


@pytest.mark.parametrize("loss", ["deleted", "cut"])
def test_what_is_gone_is_uploaded_again_instead_of_being_linked(model: Path, loss: str) -> None:
    bucket = MemoryBucket()
    publisher = Publisher(bucket, RUN, anchor_every=1)
    publisher.publish(StateDictSource(weights()), step=0, folder_files=model)
    (key,) = (key for key in keys(bucket, "/anchors/") if key.endswith(".safetensors"))
    whole = bucket.get(key, max_bytes=1 << 20)
    bucket.delete(key)
    if loss == "cut":
        bucket.put(key, whole[:-1])
    publisher.publish(StateDictSource(weights()), step=1, folder_files=model)
    assert restored(bucket, 1) == all_bits(StateDictSource(weights()))


def test_a_forced_anchor_links_nothing(model: Path) -> None:
    bucket = MemoryBucket()
    publisher = Publisher(bucket, RUN)
    for step in range(2):
        publisher.publish(StateDictSource(weights()), step=step, folder_files=model, anchor=True)
    old, new = (read_manifest(bucket, RUN, Version(version)) for version in (0, 1))
    assert old.state == new.state
    assert not set(old.objects) & set(new.objects)


def test_ranks_link_as_well(model: Path) -> None:
    bucket = FaultyBucket(MemoryBucket())
    (exchange,) = thread_exchanges(1)
    publisher = RankPublisher(bucket, RUN, 0, 1, exchange, anchor_every=1)
    for step in range(2):
        publisher.publish(StateDictSource(weights()), step=step, folder_files=model)
    assert bucket.count("put", ".safetensors") == 1 + 2  # an index for each
    assert restored(bucket, 1) == all_bits(StateDictSource(weights()))


def test_a1_10_an_anchor_in_turn_takes_over_what_the_source_lacks(
    model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bucket = MemoryBucket()
    publisher = Publisher(bucket, RUN, anchor_every=2)
    publisher.publish(StateDictSource(weights()), step=0, folder_files=model)
    one, two = trained(weights(), 1), trained(weights(), 2)
    publisher.publish(StateDictSource(one), step=1)
    published = publisher.publish(StateDictSource(but(two, TABLE)), step=2, folder_files=model)
    assert published.kind == "anchor"
    assert f"absent tensors stay as they are: 1, {TABLE} among them" in caplog.text
    assert restored(bucket, 2) == all_bits(StateDictSource({**two, TABLE: one[TABLE]}))


def test_a_folder_that_lacks_tensors_gives_its_own_files_to_an_anchor_in_turn(model: Path, tmp_path: Path) -> None:
    bucket = MemoryBucket()
    publisher = Publisher(bucket, RUN, anchor_every=1)
    publisher.publish(StateDictSource(weights()), step=0, folder_files=model)
    part = model_folder(tmp_path / "part")
    save_file(but(trained(weights(), 1), TABLE), part / "model.safetensors")
    publisher.publish(FolderSource(part), step=1)
    assert restored(bucket, 1) == all_bits(StateDictSource({**trained(weights(), 1), TABLE: weights()[TABLE]}))


@pytest.mark.parametrize("way", ["in its folder", "in another folder"])
def test_a_config_that_changed_is_refused_at_the_first_delta(model: Path, tmp_path: Path, way: str) -> None:
    bucket = FaultyBucket(MemoryBucket())
    publisher = Publisher(bucket, RUN)
    publisher.publish(StateDictSource(weights()), step=0, folder_files=model)
    saved = model_folder(tmp_path / "saved")
    save_file(trained(weights(), 1), saved / "model.safetensors")
    (saved / "config.json").write_text('{"architectures": ["Other"]}')
    before = bucket.count("put")
    source = FolderSource(saved) if way == "in its folder" else StateDictSource(trained(weights(), 1))
    with pytest.raises(InvalidInputError, match=r"config\.json isn't that of this run.*--files"):
        publisher.publish(source, step=1, folder_files=None if way == "in its folder" else saved)
    assert bucket.count("put") == before
    assert publisher.publish(FolderSource(saved), step=1, folder_files=model).version == 1
    (saved / "config.json").unlink()
    (saved / "chat_template.jinja").unlink()
    save_file({**weights(), TABLE: torch.zeros_like(weights()[TABLE])}, saved / "model.safetensors")
    assert publisher.publish(FolderSource(saved), step=2).version == 2  # a delta needs none of them


@pytest.mark.parametrize("is_forced", [False, True])
def test_later_anchors_have_the_files_of_the_first(model: Path, *, is_forced: bool) -> None:
    bucket = MemoryBucket()
    publisher = Publisher(bucket, RUN, anchor_every=1)
    publisher.publish(StateDictSource(weights()), step=0, folder_files=model)
    published = publisher.publish(StateDictSource(trained(weights(), 1)), step=1, anchor=is_forced)
    assert published.kind == "anchor"
    assert read_manifest(bucket, RUN, Version(1)).side_files == read_manifest(bucket, RUN, Version(0)).side_files
    (model / "chat_template.jinja").unlink()
    publisher.publish(StateDictSource(weights()), step=2, folder_files=model, anchor=is_forced)
    assert read_manifest(bucket, RUN, Version(2)).side_files == read_manifest(bucket, RUN, Version(0)).side_files


def test_a_first_anchor_has_a_folder_with_a_config(model: Path) -> None:
    publisher = Publisher(MemoryBucket(), RUN)
    with pytest.raises(InvalidInputError, match="a first anchor needs a config and a tokenizer"):
        publisher.publish(StateDictSource(weights()), step=0)
    (model / "config.json").unlink()
    with pytest.raises(InvalidInputError, match=r"an anchor needs a config\.json"):
        publisher.publish(StateDictSource(weights()), step=0, folder_files=model)


def test_a_file_that_is_written_again_is_read_again(model: Path) -> None:
    publisher = Publisher(MemoryBucket(), RUN)
    for step in range(2):
        publisher.publish(StateDictSource(trained(weights(), step)), step=step, folder_files=model)
    (model / "config.json").write_text('{"architectures": ["Another"]}')
    with pytest.raises(InvalidInputError, match=r"config\.json"):
        publisher.publish(StateDictSource(weights()), step=2, folder_files=model)


def test_a_publisher_makes_folds_for_late_joiners(model: Path) -> None:
    bucket = MemoryBucket()
    with Publisher(bucket, RUN, fold_every=2) as publisher:
        for step in range(5):
            publisher.publish(StateDictSource(trained(weights(), step)), step=step, folder_files=model)
            assert publisher._folding is not None
            publisher._folding.wait()
    assert [key.rpartition("/")[2] for key in keys(bucket, "/folds/")] == [
        "00000000-00000002.json", "00000000-00000004.json"
    ]  # fmt: skip
    assert restored(bucket, 4) == all_bits(StateDictSource(trained(weights(), 4)))


def test_a_first_anchor_without_a_tokenizer_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    bare = model_folder(tmp_path / "bare")
    for file in bare.glob("tokenizer*"):
        file.unlink()
    with Publisher(MemoryBucket(), RUN) as publisher:
        publisher.publish(StateDictSource(weights()), step=0, folder_files=bare)
        assert f"run {RUN} has no tokenizer" in caplog.text


@pytest.mark.parametrize("source", [weights(), None, "model"])
def test_what_is_no_source_is_told(source: Any) -> None:
    with pytest.raises(InvalidInputError, match="is no source of tensors"):
        Publisher(MemoryBucket(), RUN).publish(source, step=0)


@pytest.mark.parametrize("step", [-1, 2**63, 1.5, "3", True, None, np.float64(3)])
def test_a_step_that_is_no_whole_number_is_told_before_anything_is_read(step: Any) -> None:
    with pytest.raises(InvalidInputError, match="is no whole number from 0"):
        Publisher(MemoryBucket(), RUN).publish_async(StateDictSource(weights()), step=step)


@pytest.mark.parametrize("step", [0, 2**63 - 1, np.int64(3), torch.tensor(3)])
def test_any_whole_number_is_a_step(model: Path, step: Any) -> None:
    bucket = MemoryBucket()
    Publisher(bucket, RUN).publish(StateDictSource(weights()), step=step, folder_files=model)
    assert read_manifest(bucket, RUN, Version(0)).step == int(step)


def test_a_module_is_no_state_dict() -> None:
    module: Any = torch.nn.Linear(2, 2)
    with pytest.raises(InvalidInputError, match=r"Linear is no state dict \(give its tensors by name"):
        StateDictSource(module)


def test_a_forced_anchor_follows_a_last_version_whose_manifest_is_damaged_at_once(model: Path) -> None:
    bucket = MemoryBucket()
    publisher = Publisher(bucket, RUN)
    publisher.publish(StateDictSource(weights()), step=0, folder_files=model)
    publisher.publish(StateDictSource(trained(weights(), 1)), step=1)
    bucket.put(manifest_key(RUN, Version(1)), b"{")
    with pytest.raises(CorruptError):
        publisher.publish(StateDictSource(weights()), step=2)
    assert publisher.publish(StateDictSource(weights()), step=2, folder_files=model, anchor=True).version == 2
    assert restored(bucket, 2) == all_bits(StateDictSource(weights()))


@pytest.mark.parametrize("reopened", [False, True])
def test_deltas_of_so_many_bytes_bring_the_next_anchor(model: Path, *, reopened: bool) -> None:
    bucket, state = MemoryBucket(), weights()
    publisher = Publisher(bucket, RUN, anchor_share=1.5)
    kinds, share = list[str](), 0.0
    for step in range(9):
        publisher = Publisher(bucket, RUN, anchor_share=1.5) if reopened else publisher
        published = publisher.publish(StateDictSource(state), step=step, folder_files=model)
        kinds.append(published.kind)
        assert (published.kind == "anchor") == (step == 0 or share >= 1.5)
        full = published.full_bytes
        objects = read_manifest(bucket, RUN, published.version).num_bytes
        share = 0.0 if published.kind == "anchor" else share + objects / full
        state = stepped(state, step, 1e-2)
    assert kinds.count("anchor") > 1
