"""A real step of AdamW: two tensors of a small language model before and after it."""

from pathlib import Path

import pytest
from codec_rig import LEVELS, Step, sent, step, written

from slackwater.checkpoint.codec import Level
from slackwater.checkpoint.shards import read_slots
from slackwater.checkpoint.tensor import Bits

PAIR = Path(__file__).parents[1] / "data" / "adamw_pair.safetensors"
UP, VALUE = "model.layers.0.mlp.up_proj.weight", "model.layers.0.self_attn.v_proj.weight"


@pytest.fixture(scope="module")
def pair() -> dict[str, Bits]:
    body = PAIR.read_bytes()
    return {name: slot.bits(body) for name, slot in read_slots(PAIR.name, body).items()}


@pytest.mark.parametrize(
    ("name", "level", "bits_each"),
    [(UP, "fast", 10.4), (UP, "wan", 8.1), (VALUE, "fast", 8.0), (VALUE, "wan", 6.0)],
)
def test_a_real_step_arrives_in_few_bits_for_each_changed_element(
    pair: dict[str, Bits], name: str, level: Level, bits_each: float
) -> None:
    """1.3 % and 5.4 % of the elements change; a tensor as small as these pays dearly for its head."""
    old, new = pair[f"old.{name}"], pair[f"new.{name}"]
    made = sent(step("BF16", old, new), level)
    assert written(made.decode(), [old]) == [new.tobytes()]
    assert 8 * len(made.body) <= bits_each * int((old != new).sum())


@pytest.mark.parametrize("level", LEVELS)
def test_both_tensors_share_a_body_there_and_back(pair: dict[str, Bits], level: Level) -> None:
    before, after = (tuple(pair[f"{state}.{name}"] for name in (UP, VALUE)) for state in ("old", "new"))
    there, back = (sent(Step(dtype="BF16", olds=a, news=b), level) for a, b in ((before, after), (after, before)))
    held = [bits.copy() for bits in before]
    for made, wanted in ((there, after), (there, after), (back, before), (there, after)):
        made.apply(held)
        assert [bits.tobytes() for bits in held] == [bits.tobytes() for bits in wanted]
