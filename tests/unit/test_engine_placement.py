"""Placement: every tensor finds its parameter, or the error says which doesn't."""

import pytest

from slackwater.checkpoint.tensor import TensorSpec
from slackwater.engine.placement import Destination, place
from slackwater.errors import UnsupportedError


def specs(*names: str, shape: tuple[int, ...] = (4, 2), dtype: str = "BF16") -> dict[str, TensorSpec]:
    return {name: TensorSpec(name=name, dtype=dtype, shape=shape) for name in names}


def test_equal_tensors_lie_at_the_start_of_their_parameter() -> None:
    assert place(specs("a", "b"), specs("a", "b")) == {
        "a": Destination(parameter="a", offset=0),
        "b": Destination(parameter="b", offset=0),
    }


def test_a_tied_alias_in_the_checkpoint_is_dropped() -> None:
    assert list(place(specs("embed", "head"), specs("embed"), ties={"head": "embed"})) == ["embed"]


def test_a_checkpoint_without_the_alias_is_whole() -> None:
    assert list(place(specs("embed"), specs("embed"), ties={"head": "embed"})) == ["embed"]


def test_missing_tensors_are_named() -> None:
    with pytest.raises(UnsupportedError, match=r"lacks b, c .*publish every tensor"):
        place(specs("a"), specs("a", "b", "c"))


def test_unexpected_tensors_are_named_up_to_a_handful() -> None:
    many = [f"x{number}" for number in range(9)]
    with pytest.raises(UnsupportedError, match=r"unexpected x0, x1, x2, x3, x4 and 4 more"):
        place(specs("a", *many), specs("a"))


@pytest.mark.parametrize("other", [specs("a", shape=(2, 4)), specs("a", dtype="F16"), specs("a", shape=(8,))])
def test_another_shape_or_dtype_is_refused(other: dict[str, TensorSpec]) -> None:
    with pytest.raises(UnsupportedError, match="shape or dtype in a"):
        place(other, specs("a"))
