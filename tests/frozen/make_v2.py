"""Makes the frozen bucket of `slackwater/2`: ``python tests/frozen/make_v2.py FOLDER``. Written once, then only read.

Every bit comes from a hash of its place, so the same versions can be made on any machine, by any numpy and torch.
"""

import hashlib
import json
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from slackwater.bucket.local import LocalBucket
from slackwater.checkpoint.codec import Level
from slackwater.checkpoint.keys import manifest_key
from slackwater.checkpoint.manifest import encode_manifest
from slackwater.checkpoint.rules import decode_manifest
from slackwater.checkpoint.tensor import WIDTHS, Bits
from slackwater.ids import RunId, Version
from slackwater.publish.lineage import read_manifest
from slackwater.publish.publisher import Publisher
from slackwater.testing.bucket import MemoryBucket
from slackwater.testing.clock import ManualClock
from slackwater.weights.state_dict import StateDictSource

RUN = RunId("frozen")
FOLD = 1, 4
"""A fold leads from the first of these versions to the second."""

Words = npt.NDArray[np.uint64]
State = Mapping[str, Bits]
"""Every tensor's bits, flat, by name."""

DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "U16": torch.uint16, "I16": torch.int16, "F16": torch.float16, "BF16": torch.bfloat16,
    "U32": torch.uint32, "I32": torch.int32, "F32": torch.float32,
    "U64": torch.uint64, "I64": torch.int64, "F64": torch.float64,
}  # fmt: skip

ATTENTION = "model.layers.0.self_attn"
EXPERT = "model.layers.1.mlp.experts.0.down_proj"
EMBEDDING = "model.embed_tokens.weight"
SHAPES: dict[str, tuple[str, tuple[int, ...]]] = {
    EMBEDDING: ("BF16", (64, 512)),
    f"{ATTENTION}.q_proj.weight": ("BF16", (16, 64)),
    f"{ATTENTION}.k_proj.weight": ("BF16", (8, 64)),
    f"{EXPERT}.weight": ("F8_E4M3", (16, 32)),
    f"{EXPERT}.weight_scale_inv": ("F32", (1, 1)),
    "model.norm.weight": ("F32", (40,)),
    "model.empty": ("BF16", (0, 4)),
    "model.scalar": ("F32", ()),
    **{f"model.of.{dtype}": (dtype, (13, 31)) for dtype in DTYPES},
}
"""Dtype and shape of each tensor."""

SPECIAL = (0x8000, 0x0000, 0x7F80, 0xFF80, 0x7FC0, 0x7FC1, 0xFFFF, 0x7F81, 0x0001, 0x807F)
"""bf16: both zeros, infinities, NaN with payloads, quiet and signalling, subnormals."""


def words(label: str, count: int) -> Words:
    """Hashes of places: SplitMix64's output function over a counter."""
    seed = np.uint64(int.from_bytes(hashlib.sha256(label.encode()).digest()[:8], "little"))
    z = seed + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def weights(label: str, count: int) -> Bits:
    """bf16 numbers as a model has them: either sign, exponents that get rarer downwards, a few special ones."""
    z = words(label, count)
    below = np.minimum(np.bitwise_count(~z & (z - np.uint64(1))), 12).astype(np.uint64)  # zeros below the lowest one
    bits = (z >> np.uint64(63)) << np.uint64(15) | (np.uint64(122) - below) << np.uint64(7) | (z >> np.uint64(40)) % 128
    bits[: len(SPECIAL)] = SPECIAL[:count]
    return bits.astype("<u2")


def first_state() -> dict[str, Bits]:
    state: dict[str, Bits] = {}
    for name, (dtype, shape) in SHAPES.items():
        count = int(np.prod(shape, dtype=np.int64))
        state[name] = weights(name, count) if dtype == "BF16" else words(name, count).astype(f"<u{WIDTHS[dtype]}")
    state["model.norm.weight"][: len(SPECIAL)] = np.array(SPECIAL, dtype="<u4") << 16 | 0x0BAD
    state["model.of.BOOL"] &= 1
    for name in ("model.of.I64", "model.of.F64", "model.of.U64"):
        state[name][:3] = 0, 2**63 - 1, 5
    return state


def few(state: State) -> dict[str, Bits]:
    """A hundredth of the elements moves, mostly by one place; signs of zero and payloads of NaN too; all dtypes."""
    moved = {name: bits.copy() for name, bits in state.items()}
    for name, bits in moved.items():
        z = words(f"few {name}", bits.size)
        chosen = np.flatnonzero(z % 97 == 0)
        bits[chosen] ^= np.where(z[chosen] >> np.uint64(60) == 0, 5, 1).astype(bits.dtype)
        bits[:3] ^= 1
    moved[EMBEDDING][:2] = 0x0000, 0x8000
    moved["model.norm.weight"][4:6] ^= 0x8000_00FF
    for name in ("model.of.I64", "model.of.F64", "model.of.U64"):
        moved[name][:3] = 2**64 - 1, 2**63, 2**64 - 5  # a step of half the line, and nearly so
    return moved


def by_exponent(state: State) -> dict[str, Bits]:
    """Of the embedding more elements move the smaller they are, as in training."""
    moved = {name: bits.copy() for name, bits in state.items()}
    for name in (EMBEDDING, f"{ATTENTION}.q_proj.weight"):
        bits, z = moved[name], words(f"by exponent {name}", moved[name].size)
        rarely = np.uint64(128) >> (np.uint64(122) - (bits >> 7 & 0xFF).clip(118, 122).astype(np.uint64))
        chosen = z % rarely == 0
        step = np.where(z >> np.uint64(32) & 1, 1, -1) * np.where(z >> np.uint64(33) & 15 == 0, 3, 1)
        bits[chosen] += step[chosen].astype(np.int16).view(np.uint16)
    return moved


def many(state: State) -> dict[str, Bits]:
    """Every third element of some tensors goes up or down one place, a few go far."""
    moved = {name: bits.copy() for name, bits in state.items()}
    for name in (EMBEDDING, "model.norm.weight", f"{EXPERT}.weight"):
        bits, z = moved[name], words(f"many {name}", moved[name].size)
        bits[z % 3 == 0] += 1
        bits[z % 101 == 0] ^= 0x55
    return moved


def everything(state: State) -> dict[str, Bits]:
    """The expert and one more tensor get new bits throughout."""
    fresh = {name: words(f"everything {name}", state[name].size) for name in (f"{EXPERT}.weight", "model.of.U8")}
    return {**state, **{name: z.astype(state[name].dtype) for name, z in fresh.items()}}


def nothing(state: State) -> dict[str, Bits]:
    return dict(state)


STEPS: tuple[tuple[Callable[[State], dict[str, Bits]], Level, bool], ...] = (
    (few, "fast", False),
    (by_exponent, "wan", False),
    (many, "fast", False),
    (everything, "fast", False),
    (nothing, "fast", False),
    (few, "fast", True),
    (by_exponent, "fast", False),
)
"""How each version after the first comes from the one before, at which level, and whether it is an anchor."""


def states() -> list[dict[str, Bits]]:
    """Every version's tensors."""
    found = [first_state()]
    for step, _, _ in STEPS:
        found.append(step(found[-1]))
    return found


def source(state: State) -> StateDictSource:
    tensors: dict[str, torch.Tensor] = {}
    for name, (dtype, shape) in SHAPES.items():
        raw = torch.from_numpy(state[name].copy().view(np.uint8))
        tensors[name] = raw.view(DTYPES[dtype]).reshape(shape)
    return StateDictSource(tensors)


def make(root: Path) -> None:
    """Write the bucket into a folder that isn't there yet."""
    bucket = LocalBucket(root, create=True)
    model = root.with_name(f"{root.name}-model")
    model.mkdir()
    (model / "config.json").write_text('{"dtype": "bfloat16"}\n')
    levels: list[tuple[Level, bool]] = [("fast", True), *((level, anchor) for _, level, anchor in STEPS)]
    for step, (state, (level, anchor)) in enumerate(zip(states(), levels, strict=True)):
        publisher = Publisher(bucket, RUN, level=level, clock=ManualClock())
        publisher.publish(source(state), step=step, folder_files=model, anchor=anchor)
    _fold(bucket, model)
    shutil.rmtree(model)


def _fold(bucket: LocalBucket, model: Path) -> None:
    """A delta between two versions of another run, under the name of a fold of this one."""
    scratch, (begin, end) = MemoryBucket(), FOLD
    publisher = Publisher(scratch, RUN, clock=ManualClock())
    for version in FOLD:
        publisher.publish(source(states()[version]), step=version, folder_files=model)
    delta = read_manifest(scratch, RUN, Version(1))
    for item in delta.objects:
        bucket.put(item.key, scratch.get(item.key, max_bytes=item.size))
    parent = msgspec.structs.replace(delta.parent, version=begin) if delta.parent is not None else None
    fold = msgspec.structs.replace(delta, version=Version(end), parent=parent)
    body = encode_manifest(fold)
    decode_manifest(body, fold=True)
    bucket.put_if_absent(f"{RUN}/folds/{begin:08d}-{end:08d}.json", body)


def expected(root: Path) -> dict[str, dict[str, dict[str, str] | str]]:
    """What readers have to find: each version's state, and the SHA-256 of each tensor's bytes."""
    bucket = LocalBucket(root)
    return {
        str(version): {
            "state": decode_manifest(bucket.get(manifest_key(RUN, Version(version)), max_bytes=1 << 20)).state,
            "tensors": {name: hashlib.sha256(bits.tobytes()).hexdigest() for name, bits in sorted(state.items())},
        }
        for version, state in enumerate(states())
    }


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    make(folder / "bucket")
    (folder / "expected.json").write_text(json.dumps(expected(folder / "bucket"), indent=1) + "\n")
