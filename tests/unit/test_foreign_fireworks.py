"""Fireworks' own package against ours, both ways: what it writes we read, and what we write it applies."""

from pathlib import Path

import fireworks_delta_compression as fireworks
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from safetensors.torch import save, save_file

from slackwater.checkpoint.foreign.delta import Change
from slackwater.checkpoint.foreign.layouts import read_delta, write_delta
from slackwater.checkpoint.tensor import Bits, TensorSpec
from slackwater.errors import CorruptError, UnsupportedError

FILE = "model.safetensors"
ARCS = ["arc_v1", "arc_v2"]
DTYPES = {
    "BF16": (torch.bfloat16, np.int16),
    "F8_E4M3": (torch.float8_e4m3fn, np.int8),
    "F32": (torch.float32, np.int32),
    "U8": (torch.uint8, np.uint8),
}


def tensor(spec: TensorSpec, bits: Bits) -> torch.Tensor:
    dtype, view = DTYPES[spec.dtype]
    return torch.from_numpy(bits.copy().view(view)).view(dtype).reshape(spec.shape)


def model(seed: int = 0) -> list[Change]:
    rng = np.random.default_rng(seed)
    changes: list[Change] = []
    for number, (dtype, shape) in enumerate(
        [("BF16", (40, 8)), ("F8_E4M3", (30, 5)), ("F32", (6,)), ("U8", (9,)), ("BF16", ()), ("BF16", (0, 3))]
    ):
        spec = TensorSpec(name=f"model.{number}", dtype=dtype, shape=shape)
        old = np.frombuffer(rng.bytes(spec.num_bytes), spec.bits_dtype)
        new = old.copy()
        new[::3] ^= 1
        changes.append(Change(spec=spec, old=old, new=new))
    still = TensorSpec(name="still", dtype="BF16", shape=(4,))
    return [*changes, Change(spec=still, old=np.zeros(4, "<u2"), new=np.zeros(4, "<u2"))]


@pytest.mark.parametrize("layout", ARCS)
def test_we_read_what_their_package_writes(layout: str, tmp_path: Path) -> None:
    changes = model()
    for name in ("old", "new"):
        save_file({c.spec.name: tensor(c.spec, getattr(c, name)) for c in changes}, tmp_path / name)
    fireworks.delta_compress_files_to_file(
        src=str(tmp_path / "old"), dst=str(tmp_path / "new"), diff_file=str(tmp_path / FILE), compression_format=layout
    )
    delta = read_delta(layout, {FILE: (tmp_path / FILE).read_bytes()})
    assert set(delta.tensors) == {change.spec.name for change in changes}
    for change in changes:
        assert delta.decode(change.spec, change.old).tobytes() == change.new.tobytes()


@pytest.mark.parametrize("layout", ARCS)
def test_their_package_applies_what_we_write(layout: str, tmp_path: Path) -> None:
    changes = model()
    files = write_delta(layout, changes, version="8", base_version="7")
    (tmp_path / "delta").write_bytes(files[FILE])
    (tmp_path / "base").write_bytes(save({c.spec.name: tensor(c.spec, c.old) for c in changes}))
    fireworks.delta_decompress_inplace(
        base_path=str(tmp_path / "base"), diff_path=str(tmp_path / "delta"), compression_format=layout
    )
    assert (tmp_path / "base").read_bytes() == save({c.spec.name: tensor(c.spec, c.new) for c in changes})


@given(pair=st.integers(1, 300).flatmap(lambda size: st.tuples(*[hnp.arrays(np.dtype("<u2"), size)] * 2)))
def test_any_bits_survive_their_writer(pair: tuple[Bits, Bits]) -> None:
    spec = TensorSpec(name="w", dtype="BF16", shape=pair[0].shape)
    old, new = (tensor(spec, bits) for bits in pair)
    body, checksum = fireworks.delta_compress(src=old, dst=new, compression_format="arc_v2")
    delta = read_delta("arc_v2", {FILE: save({"w": body}, metadata={"w": checksum})})
    assert delta.decode(spec, pair[0]).tobytes() == pair[1].tobytes()


def test_a8_06_what_their_package_writes_as_arc_v3_is_never_taken_for_arc_v2() -> None:
    change = model()[0]
    old, new = (tensor(change.spec, bits) for bits in (change.old, change.new))
    # Theirs picks a form by the clock: a pickle behind a mark of its own, or another safetensors file as the body.
    body, checksum = fireworks.delta_compress(src=old, dst=new, compression_format="arc_v3")
    files = {FILE: save({change.spec.name: body}, metadata={change.spec.name: checksum})}
    with pytest.raises((UnsupportedError, CorruptError)):
        read_delta("arc_v2", files).decode(change.spec, change.old)
