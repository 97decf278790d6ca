"""Comparing on the device gives the same delta as comparing on the host. The device here is the CPU."""

from pathlib import Path

import numpy as np
import pytest
import torch

from slackwater.checkpoint.tensor import Bits
from slackwater.errors import InvalidInputError, NotFoundError
from slackwater.publish.publisher import Publisher
from slackwater.testing.bucket import MemoryBucket
from slackwater.weights.device import DeviceSource, committed_copies
from slackwater.weights.state_dict import StateDictSource

CONFIG = '{"dtype": "bfloat16"}'


def weights() -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    return {
        "a.weight": torch.randn(33, 17, generator=random).to(torch.bfloat16),
        "b.scale": torch.randn((), generator=random),
        "c.flags": torch.tensor([True, False, True]),
        "d.codes": torch.randint(0, 255, (5, 7), dtype=torch.uint8, generator=random),
        "e.none": torch.empty(0, 4, dtype=torch.bfloat16),
    }


def step(tensors: dict[str, torch.Tensor]) -> None:
    tensors["a.weight"].view(torch.int16)[::3, 1] ^= 1
    tensors["a.weight"][2, 2] = float("nan")
    tensors["b.scale"] *= -0.0
    tensors["c.flags"][1] = True


def test_patched_copies_have_the_bits_of_the_device() -> None:
    tensors = weights()
    held = {name: StateDictSource(tensors).bits(name).copy() for name in tensors}
    source = DeviceSource(tensors, committed_copies(tensors), held.__getitem__)
    step(tensors)
    plain = StateDictSource(tensors)
    assert source.specs() == plain.specs()
    for name in tensors:
        np.testing.assert_array_equal(source.bits(name), plain.bits(name))
    source.advance()
    changed = [name for name in tensors if not np.array_equal(source.bits(name), held[name])]
    assert changed == [], "after advance() nothing differs from the copy on the device"


def test_a_publisher_takes_the_same_delta_from_either_side(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(CONFIG)
    states: list[str] = []
    for on_device in (False, True):
        tensors, bucket = weights(), MemoryBucket()
        publisher = Publisher(bucket, "run")
        publisher.publish(StateDictSource(tensors), step=0, folder_files=tmp_path)
        source = DeviceSource(tensors, committed_copies(tensors), publisher.held_bits)
        step(tensors)
        published = publisher.publish(source if on_device else StateDictSource(tensors), step=1)
        source.advance()
        states.append(published.state)
        assert publisher.publish(source, step=2).changed == 0
    assert states[0] == states[1]


@pytest.mark.parametrize(
    "other", [torch.zeros(33, 17), torch.zeros(33, 16, dtype=torch.bfloat16), None], ids=["dtype", "shape", "absent"]
)
def test_a_copy_that_isnt_one_is_refused_by_name(other: torch.Tensor | None) -> None:
    tensors = weights()
    committed = committed_copies(tensors)
    committed.pop("a.weight")
    if other is not None:
        committed["a.weight"] = other
    with pytest.raises(InvalidInputError, match=r"a\.weight"):
        DeviceSource(tensors, committed, _nothing)


def test_an_unknown_tensor_is_named() -> None:
    source = DeviceSource(weights(), committed_copies(weights()), _nothing)
    with pytest.raises(NotFoundError, match="nobody"):
        source.bits("nobody")


def _nothing(name: str) -> Bits:
    raise AssertionError(f"{name} was read")
