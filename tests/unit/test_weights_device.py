"""Comparing on the device gives the same deltas as comparing on the host. The device here is the CPU."""

from pathlib import Path

import numpy as np
import pytest
import torch

from slackwater.errors import ConflictError, InvalidInputError, NotFoundError, UnavailableError
from slackwater.publish.publisher import Publisher
from slackwater.testing.bucket import Fault, FaultyBucket, MemoryBucket
from slackwater.weights.device import DeviceSource
from slackwater.weights.state_dict import StateDictSource

NAME = "a.weight"
Tensors = dict[str, torch.Tensor]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"dtype": "bfloat16"}')
    return tmp_path


def weights() -> Tensors:
    random = torch.Generator().manual_seed(0)
    return {
        NAME: torch.randn(33, 17, generator=random).to(torch.bfloat16),
        "b.scale": torch.randn((), generator=random),
        "c.flags": torch.tensor([True, False, True]),
        "d.codes": torch.randint(0, 255, (5, 7), dtype=torch.uint8, generator=random),
        "e.none": torch.empty(0, 4, dtype=torch.bfloat16),
    }


def step(tensors: Tensors) -> None:
    tensors[NAME].view(torch.int16)[::3, 1] ^= 1
    tensors[NAME][2, 2] = float("nan")
    tensors["b.scale"] *= -0.0
    tensors["c.flags"][1] = True


def anchored(tensors: Tensors, model: Path, bucket: MemoryBucket | FaultyBucket | None = None) -> Publisher:
    publisher = Publisher(bucket or MemoryBucket(), "run")
    publisher.publish(StateDictSource(tensors), step=0, folder_files=model)
    return publisher


def assert_held(publisher: Publisher, tensors: Tensors) -> None:
    plain = StateDictSource(tensors)
    for name in plain.specs():
        np.testing.assert_array_equal(publisher.held_bits(name), plain.bits(name))


def test_every_step_is_published_as_it_is_on_the_device(model: Path) -> None:
    tensors = weights()
    publisher = anchored(tensors, model)
    source = DeviceSource(tensors, publisher)
    assert source.specs() == StateDictSource(tensors).specs()
    for number in range(1, 4):
        step(tensors)
        assert publisher.publish(source, step=number).changed > 0
        assert_held(publisher, tensors)
    assert publisher.publish(source, step=4).changed == 0


def test_a_weight_that_returns_to_an_earlier_value_is_seen(model: Path) -> None:
    tensors = weights()
    publisher = anchored(tensors, model)
    source = DeviceSource(tensors, publisher)
    for number in (1, 2):
        tensors[NAME].view(torch.int16)[0, 0] ^= 1
        assert publisher.publish(source, step=number).changed == 1
        assert_held(publisher, tensors)


def test_a_failed_publish_loses_no_change(model: Path) -> None:
    tensors = weights()
    bucket = FaultyBucket(MemoryBucket(), Fault(verb="put_if_absent", key="00000001", before=UnavailableError("away")))
    publisher = anchored(tensors, model, bucket)
    source = DeviceSource(tensors, publisher)
    step(tensors)
    with pytest.raises(UnavailableError):
        publisher.publish(source, step=1)
    publisher.publish(source, step=1)
    assert_held(publisher, tensors)


def test_tensors_that_moved_since_the_anchor_are_refused_by_name(model: Path) -> None:
    tensors = weights()
    publisher = anchored(tensors, model)
    step(tensors)
    with pytest.raises(InvalidInputError, match=r"a\.weight on the device isn't what version 0 holds"):
        DeviceSource(tensors, publisher)


def test_before_the_first_anchor_it_says_what_to_publish() -> None:
    with pytest.raises(NotFoundError, match="publish an anchor first"):
        DeviceSource(weights(), Publisher(MemoryBucket(), "run"))


def test_copies_of_another_version_are_refused(model: Path) -> None:
    tensors = weights()
    publisher = anchored(tensors, model)
    source = DeviceSource(tensors, publisher)
    step(tensors)
    publisher.publish(StateDictSource(tensors), step=1)
    with pytest.raises(ConflictError, match="copies of version 0, and the publisher holds 1"):
        publisher.publish(source, step=2)


def test_an_unknown_tensor_is_named(model: Path) -> None:
    tensors = weights()
    with pytest.raises(NotFoundError, match="nobody"):
        DeviceSource(tensors, anchored(tensors, model)).bits("nobody")
