"""Uploads that run while a delta is still encoded, and what is left where one of them fails."""

import threading
from pathlib import Path

import pytest
import torch
from publish_rig import RUN, all_bits, keys, model_folder, restored

from slackwater.checkpoint.digest import object_digest
from slackwater.checkpoint.keys import blob_key
from slackwater.checkpoint.manifest import ObjectRef
from slackwater.errors import UnavailableError
from slackwater.publish import delta
from slackwater.publish.lineage import find_head
from slackwater.publish.publisher import Publisher
from slackwater.publish.upload import Uploads, is_there
from slackwater.testing.bucket import Fault, FaultyBucket, Gate, MemoryBucket
from slackwater.weights.state_dict import StateDictSource

AWAY = UnavailableError("the store is away")


def no_check() -> None:
    """Nobody takes it back."""


def silent(_stage: str, _done: int, _total: int) -> None:
    """Nobody looks."""


def pack(content: bytes) -> tuple[ObjectRef, bytes]:
    digest = object_digest(content)
    return ObjectRef(key=blob_key(RUN, digest), size=len(content), sha256=digest), content


def uploads(bucket: FaultyBucket | MemoryBucket, threads: int = 2) -> Uploads:
    return Uploads(bucket, threads=threads, check=no_check)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return model_folder(tmp_path / "model")


@pytest.mark.parametrize("threads", [1, 3])
def test_all_objects_are_there_once_it_is_finished(threads: int) -> None:
    bucket, sent = MemoryBucket(), uploads(MemoryBucket())
    sent.stop()
    sent = uploads(bucket, threads)
    told: list[tuple[str, int, int]] = []
    for number in range(20):
        sent.put(*pack(bytes([number]) * (number + 1)))
    sent.finish(lambda *news: told.append(news))
    assert len(keys(bucket)) == 20
    assert told[-1] == ("upload", 210, 210)
    assert [news[1] for news in told] == sorted(news[1] for news in told)


def test_no_more_objects_are_taken_than_can_be_sent() -> None:
    gate = Gate()
    bucket = FaultyBucket(MemoryBucket(), Fault(verb="put", gate=gate, times=99))
    sent = uploads(bucket, 1)
    taken: list[int] = []

    def give() -> None:
        for number in range(6):
            sent.put(*pack(bytes([number])))
            taken.append(number)

    giver = threading.Thread(target=give)
    giver.start()
    assert gate.reached.wait(30)
    giver.join(0.05)
    assert len(taken) <= 2
    gate.open()
    giver.join(30)
    sent.finish(silent)
    assert len(taken) == 6


def test_the_first_failure_stops_the_rest() -> None:
    memory = MemoryBucket()
    bucket = FaultyBucket(memory, Fault(verb="put", before=AWAY))
    sent = uploads(bucket, 1)

    def give() -> None:
        with sent.or_stop():
            for number in range(50):
                sent.put(*pack(bytes([number])))
            sent.finish(silent)

    with pytest.raises(UnavailableError):
        give()
    assert bucket.count("put") < 10


def test_an_object_is_there_only_with_all_its_bytes() -> None:
    bucket = MemoryBucket()
    ref, body = pack(b"weights")
    assert not is_there(bucket, ref)
    for wrong in (b"", b"weight", b"weights!", b"weighty"):
        bucket.put(ref.key, wrong)
        assert not is_there(bucket, ref)
    bucket.put(ref.key, body)
    assert is_there(bucket, ref)


def test_an_object_that_is_there_is_not_sent_again_and_a_spoilt_one_is() -> None:
    bucket = FaultyBucket(MemoryBucket())
    (whole, body), (spoilt, other) = pack(b"whole"), pack(b"spoilt")
    bucket.put(whole.key, body)
    bucket.put(spoilt.key, b"SPOILT")
    sent = uploads(bucket)
    sent.put(whole, body)
    sent.put(spoilt, other)
    sent.finish(silent)
    assert (bucket.count("put", whole.key), bucket.count("put", spoilt.key)) == (1, 2)
    assert bucket.get(spoilt.key, max_bytes=99) == other


def experts(seed: int = 0) -> dict[str, torch.Tensor]:
    """Tensors that lie in objects of their own once packs are small."""
    generator = torch.Generator().manual_seed(seed)
    return {
        f"model.layers.0.mlp.experts.{number}.up_proj.weight": torch.randn(64, 64, generator=generator).bfloat16()
        for number in range(8)
    }


def test_packs_are_sent_while_later_tensors_are_still_read(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta.Packer.__init__, "__defaults__", (1,))
    arrived = threading.Event()

    class Watching(FaultyBucket):
        def put(self, key: str, body: bytes | memoryview) -> None:
            super().put(key, body)
            if "/blobs/" in key:
                arrived.set()

    class Last(StateDictSource):
        def bits(self, name: str):  # noqa: ANN202
            if ".experts.7." in name:
                assert arrived.wait(30), "nothing was sent before the last tensor was read"
            return super().bits(name)

    bucket = Watching(MemoryBucket())
    publisher = Publisher(bucket, RUN, threads=1)
    publisher.publish(StateDictSource(experts()), step=0, folder_files=model)
    publisher.publish(Last(experts(1)), step=1)
    assert restored(bucket, 1) == all_bits(StateDictSource(experts(1)))


@pytest.mark.parametrize("failing", range(8))
def test_f03_a_pack_that_fails_in_the_midst_shows_nothing_and_the_next_attempt_sends_the_rest(
    model: Path, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    monkeypatch.setattr(delta.Packer.__init__, "__defaults__", (1,))
    memory = MemoryBucket()
    Publisher(memory, RUN).publish(StateDictSource(experts()), step=0, folder_files=model)
    bucket = FaultyBucket(memory, *[Fault(verb="put", key="/blobs/")] * failing, Fault(verb="put", before=AWAY))
    publisher = Publisher(bucket, RUN, threads=1)
    with pytest.raises(UnavailableError):
        publisher.publish(StateDictSource(experts(1)), step=1)
    assert (find_head(memory, RUN), bucket.count("put_if_absent")) == (0, 0)
    there = keys(memory, "/blobs/")
    assert len(there) == failing
    again = FaultyBucket(memory)
    assert Publisher(again, RUN).publish(StateDictSource(experts(1)), step=1).version == 1
    assert again.count("put", "/blobs/") == 8 - failing
    assert restored(memory, 1) == all_bits(StateDictSource(experts(1)))
