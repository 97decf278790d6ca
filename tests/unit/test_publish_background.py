"""Versions that are committed in the background: what the trainer may do meanwhile, and where failures are told."""

from concurrent.futures import CancelledError
from pathlib import Path

import pytest
from publish_rig import RUN, all_bits, model_folder, restored, stepped, trained, weights

from slackwater.errors import InvalidInputError, LostRaceError, UnavailableError
from slackwater.ids import Version
from slackwater.publish.background import Handle
from slackwater.publish.lineage import find_head, read_manifest
from slackwater.publish.publisher import Publisher
from slackwater.testing.bucket import Fault, FaultyBucket, Gate, MemoryBucket
from slackwater.weights.state_dict import StateDictSource

AWAY = UnavailableError("the store is away")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return model_folder(tmp_path / "model")


def test_the_trainer_writes_its_weights_while_versions_are_on_their_way(model: Path) -> None:
    bucket, tensors, states = MemoryBucket(), weights(), list[dict[str, bytes]]()
    source = StateDictSource(tensors)
    with Publisher(bucket, RUN, anchor_every=3) as publisher:
        handles = list[object]()
        for step in range(7):
            states.append(all_bits(source))
            handles.append(publisher.publish_async(source, step=step, folder_files=model))
            for name, tensor in stepped(tensors, step, 1e-2).items():
                tensors[name].copy_(tensor)
    assert publisher.version == 6
    assert [restored(bucket, version) for version in range(7)] == states


@pytest.mark.parametrize("kind", ["anchor", "delta"])
def test_the_call_returns_before_the_upload_and_what_is_written_then_is_not_published(model: Path, kind: str) -> None:
    memory, gate, tensors = MemoryBucket(), Gate(), weights()
    publisher = Publisher(bucket := FaultyBucket(memory), RUN)
    publisher.publish(StateDictSource(tensors), step=0, folder_files=model)
    tensors = trained(tensors, 1)
    bucket.add(Fault(verb="put", gate=gate))
    wanted = all_bits(StateDictSource(tensors))
    handle = publisher.publish_async(StateDictSource(tensors), step=1, folder_files=model, anchor=kind == "anchor")
    assert not handle.done()
    with pytest.raises(TimeoutError):
        handle.result(0)
    assert find_head(memory, RUN) == 0
    tensors["model.embed_tokens.weight"].zero_()
    gate.open()
    assert (handle.result(30).kind, handle.result().version, handle.done()) == (kind, 1, True)
    assert restored(memory, 1) == wanted
    assert {name: publisher.held_bits(name).tobytes() for name in wanted} == wanted
    assert publisher.publish(StateDictSource(tensors), step=2).kind == "delta"
    assert restored(memory, 2) == all_bits(StateDictSource(tensors))
    publisher.close()


def test_a_failure_is_told_by_its_handle_and_the_next_version_has_its_changes(model: Path) -> None:
    memory = MemoryBucket()
    publisher = Publisher(bucket := FaultyBucket(memory), RUN)
    publisher.publish(StateDictSource(weights()), step=0, folder_files=model)
    bucket.add(Fault(verb="put", key="/blobs/", before=AWAY))
    tensors = trained(weights(), 1)
    handle = publisher.publish_async(StateDictSource(tensors), step=1)
    with pytest.raises(UnavailableError):
        handle.result(30)
    assert find_head(memory, RUN) == 0
    assert publisher.publish_async(StateDictSource(tensors), step=2).result(30).version == 1
    assert restored(memory, 1) == all_bits(StateDictSource(tensors))
    publisher.close()


def test_a_failure_that_nobody_asked_for_is_told_by_the_next_call_once(model: Path) -> None:
    publisher = Publisher(bucket := FaultyBucket(MemoryBucket()), RUN)
    publisher.publish(StateDictSource(weights()), step=0, folder_files=model)
    for call in (publisher.publish, publisher.publish_async):
        bucket.add(Fault(verb="put", key="/blobs/", before=AWAY))
        publisher.publish_async(StateDictSource(trained(weights(), 1)), step=1)
        with pytest.raises(UnavailableError):
            call(StateDictSource(weights()), step=2)
    assert publisher.publish(StateDictSource(trained(weights(), 1)), step=3).version == 1


def test_a_failure_that_nobody_asked_for_is_told_by_closing(model: Path) -> None:
    publisher = Publisher(bucket := FaultyBucket(MemoryBucket()), RUN)
    publisher.publish(StateDictSource(weights()), step=0, folder_files=model)
    bucket.add(Fault(verb="put_if_absent", before=AWAY))
    publisher.publish_async(StateDictSource(weights()), step=1)
    with pytest.raises(UnavailableError):
        publisher.close()
    publisher.close()
    with pytest.raises(InvalidInputError, match="closed"):
        publisher.publish(StateDictSource(weights()), step=2)


def test_f05_a_commit_without_an_answer_in_the_background_is_found_by_the_next_call(model: Path) -> None:
    memory = MemoryBucket()
    publisher = Publisher(bucket := FaultyBucket(memory), RUN)
    publisher.publish(StateDictSource(weights()), step=0, folder_files=model)
    bucket.add(Fault(verb="put_if_absent", after=AWAY))
    one, two = trained(weights(), 1), trained(weights(), 2)
    with pytest.raises(UnavailableError):
        publisher.publish_async(StateDictSource(one), step=1).result(30)
    assert publisher.publish_async(StateDictSource(two), step=2).result(30).version == 2
    assert (restored(memory, 1), restored(memory, 2)) == tuple(all_bits(StateDictSource(s)) for s in (one, two))
    publisher.close()


def test_a_version_is_cancelled_until_its_commit_begins(model: Path) -> None:
    memory, gate = MemoryBucket(), Gate()
    publisher = Publisher(bucket := FaultyBucket(memory), RUN)
    publisher.publish(StateDictSource(weights()), step=0, folder_files=model)
    bucket.add(Fault(verb="put", key="/blobs/", gate=gate))
    tensors = trained(weights(), 1)
    handle = publisher.publish_async(StateDictSource(tensors), step=1)
    assert gate.reached.wait(30)
    assert handle.cancel()
    gate.open()
    with pytest.raises(CancelledError):
        handle.result(30)
    assert (find_head(memory, RUN), bucket.count("put_if_absent")) == (0, 2)  # the first was proved
    late = Gate()
    bucket.add(Fault(verb="put_if_absent", gate=late))
    handle = publisher.publish_async(StateDictSource(tensors), step=2)
    assert late.reached.wait(30)
    assert not handle.cancel()
    late.open()
    assert handle.result(30).version == 1
    assert not handle.cancel()
    assert restored(memory, 1) == all_bits(StateDictSource(tensors))
    publisher.close()


def test_a_cancelled_version_does_not_fail_the_next_call(model: Path) -> None:
    gate = Gate()
    publisher = Publisher(bucket := FaultyBucket(MemoryBucket()), RUN)
    publisher.publish(StateDictSource(weights()), step=0, folder_files=model)
    bucket.add(Fault(verb="put", key="/blobs/", gate=gate))
    handle = publisher.publish_async(StateDictSource(trained(weights(), 1)), step=1)
    assert handle.cancel()
    gate.open()
    assert publisher.publish(StateDictSource(weights()), step=2).version == 1
    publisher.close()


def test_f07_a_race_that_is_lost_in_the_background_is_told(model: Path) -> None:
    bucket = MemoryBucket()
    publisher = Publisher(bucket, RUN)
    publisher.publish(StateDictSource(weights()), step=0, folder_files=model)
    Publisher(bucket, RUN).publish(StateDictSource(trained(weights(), 1)), step=1)
    handle = publisher.publish_async(StateDictSource(trained(weights(), 2)), step=1)
    with pytest.raises(LostRaceError):
        handle.result(30)
    assert restored(bucket, 1) == all_bits(StateDictSource(trained(weights(), 1)))
    publisher.close()


def test_a_source_that_does_not_fit_is_refused_at_once(model: Path) -> None:
    publisher = Publisher(MemoryBucket(), RUN)
    publisher.publish_async(StateDictSource(weights()), step=0, folder_files=model).result(30)
    with pytest.raises(InvalidInputError, match="step -1"):
        publisher.publish_async(StateDictSource(weights()), step=-1)
    with pytest.raises(InvalidInputError, match="isn't in this run"):
        publisher.publish_async(StateDictSource({"model.extra": weights()["model.norm.bias"]}), step=1)
    publisher.close()


def test_a_call_that_is_interrupted_while_it_waits_forgets_nothing(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, gate = MemoryBucket(), Gate()
    publisher = Publisher(bucket := FaultyBucket(memory), RUN)
    publisher.publish(StateDictSource(weights()), step=0, folder_files=model)
    bucket.add(Fault(verb="put", key="/blobs/", gate=gate))
    one, two = trained(weights(), 1), trained(weights(), 2)
    handle = publisher.publish_async(StateDictSource(one), step=1)
    assert gate.reached.wait(30)

    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Handle, "wait", interrupt)
        with pytest.raises(KeyboardInterrupt):
            publisher.publish(StateDictSource(two), step=2)
    gate.open()
    assert publisher.publish(StateDictSource(two), step=2).version == 2
    assert handle.result(30).version == 1
    assert (restored(memory, 1), restored(memory, 2)) == tuple(all_bits(StateDictSource(s)) for s in (one, two))


def test_a_source_that_goes_on_from_the_commit_is_refused_in_the_background(model: Path) -> None:
    class Following(StateDictSource):
        def committed(self, version: Version) -> None:
            raise AssertionError(version)

    publisher = Publisher(MemoryBucket(), RUN)
    with pytest.raises(InvalidInputError, match="takes over what was committed"):
        publisher.publish_async(Following(weights()), step=0, folder_files=model)
    assert publisher.version is None


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "model.norm.bias"])
def test_weights_that_are_no_numbers_are_published_and_told(
    model: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    bucket, publisher = (memory := MemoryBucket()), Publisher(memory, RUN)
    infinite = weights()
    infinite[name][0] = float("-inf")
    publisher.publish(StateDictSource(infinite), step=0, folder_files=model)
    assert "NaN" not in caplog.text
    broken = weights()
    broken[name][0] = float("nan")
    publisher.publish(StateDictSource(broken), step=1)
    assert read_manifest(bucket, RUN, Version(1)).nans == (name,)
    assert f"NaN in {name}: published" in caplog.text
    caplog.clear()
    publisher.publish(StateDictSource(broken), step=2, folder_files=model, anchor=True)
    assert [read_manifest(bucket, RUN, Version(version)).nans for version in (0, 2)] == [(), (name,)]
    assert f"NaN in {name}: published" in caplog.text
    assert restored(bucket, 1) == restored(bucket, 2) == all_bits(StateDictSource(broken))
