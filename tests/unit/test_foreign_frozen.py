"""Deltas that other programs wrote, as frozen bytes: today's reader makes the states that their writers had.

``tests/frozen/foreign/README.md`` says which program and version wrote each folder.
"""

from pathlib import Path

import pytest

from slackwater.checkpoint.foreign.layouts import read_delta
from slackwater.checkpoint.shards import Slot, read_slots
from slackwater.checkpoint.tensor import Bits

FROZEN = Path(__file__).parents[1] / "frozen" / "foreign"
CASES = [
    ("coreweave", "coreweave", ("step-8", "step-7"), "adler32"),
    ("slime-xor", "slime", ("000008", "000007"), "xxh3-128"),
    ("slime-overwrite", "slime", ("000008", "000007"), "xxh3-128"),
    ("arc_v1", "arc_v1", (None, None), "adler32"),
    ("arc_v2", "arc_v2", (None, None), "adler32"),
    ("trl-5417", "trl", ("8", None), None),
    ("trl-5937-raw", "trl", ("8", None), None),
    ("trl-5937-gap_delta", "trl", ("8", None), None),
]
ALL_BUT_UNCHANGED = {
    "model.codes",
    "model.embed.weight",
    "model.experts.0.scale",
    "model.experts.0.weight",
    "model.mask",
    "model.norm.weight",
    "model.step",
}
LISTED = {
    "coreweave": ALL_BUT_UNCHANGED,
    "slime": ALL_BUT_UNCHANGED,
    "arc_v1": ALL_BUT_UNCHANGED | {"model.none", "model.frozen.weight"},
    "arc_v2": ALL_BUT_UNCHANGED | {"model.none", "model.frozen.weight"},
    "trl": {"model.embed.weight", "model.norm.weight"},
}


def state(name: str) -> dict[str, tuple[Slot, Bits]]:
    raw = (FROZEN / f"{name}.safetensors").read_bytes()
    return {tensor: (slot, slot.bits(raw)) for tensor, slot in read_slots(name, raw).items()}


OLD, NEW = state("old"), state("new")


@pytest.mark.parametrize(("folder", "layout", "versions", "checksum"), CASES, ids=[case[0] for case in CASES])
def test_a_frozen_delta_leads_from_the_old_state_to_the_new(
    folder: str, layout: str, versions: tuple[str | None, str | None], checksum: str | None
) -> None:
    delta = read_delta(layout, {path.name: path.read_bytes() for path in (FROZEN / folder).iterdir()})
    assert (delta.version, delta.base_version) == versions
    assert delta.checksum == checksum
    assert set(delta.tensors) == LISTED[layout]
    for name in delta.tensors:
        slot, old = OLD[name]
        once = delta.decode(slot.spec, old)
        assert once.tobytes() == NEW[name][1].tobytes()
        assert delta.decode(slot.spec, once).tobytes() == once.tobytes()


def test_the_frozen_states_hold_what_the_readme_says() -> None:
    assert {slot.spec.dtype for slot, _ in OLD.values()} == {"BF16", "F8_E4M3", "F32", "U8", "BOOL"}
    changed = {name for name, (_, bits) in OLD.items() if bits.tobytes() != NEW[name][1].tobytes()}
    assert changed == ALL_BUT_UNCHANGED
    assert OLD["model.step"][0].spec.shape == ()
    assert OLD["model.none"][0].spec.num_elements == 0
    norm = NEW["model.norm.weight"][1]
    assert (((norm & 0x7F80) == 0x7F80) & ((norm & 0x7F) != 0)).any()


def test_the_frozen_files_stay_small() -> None:
    assert sum(path.stat().st_size for path in FROZEN.rglob("*.*")) < 50_000
