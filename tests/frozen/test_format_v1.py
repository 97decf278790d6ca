"""Version 1 of the format, as bytes that never change: today's reader still reads them.

``v1`` is a bucket of one run with an anchor and a delta. `make` says how it was made; its zstd bytes may
differ under another zstd, so the files are read and never made again.
"""

import io
import json
import shutil
import struct
import sys
from pathlib import Path

import numpy as np
import torch
import zstandard

from slackwater.bucket.local import LocalBucket
from slackwater.checkpoint.manifest import decode_manifest, encode_manifest
from slackwater.ids import RunId, Version
from slackwater.publish.lineage import find_head, read_manifest
from slackwater.publish.publisher import Publisher
from slackwater.publish.restore import restore
from slackwater.testing.clock import ManualClock
from slackwater.weights.state_dict import StateDictSource

V1 = Path(__file__).parent / "v1"
RUN = RunId("frozen")

STATES = (
    "c5d8c129248e32ef2ea6e643f9d2e394bf1ddf49508242df4c2d8a7f0b0fc395",
    "ac13403d25d111b303acd4b5bbb7d462d51698c980908eb3d51cd56747e40d3a",
)
"""State digests of versions 0 and 1: what other readers have to find as well."""


def patterns() -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """256 bit patterns that hold every kind of number: NaN payloads, infinities, both zeros, subnormals."""
    return np.arange(256, dtype=np.int64) * 257 % 2**16


def old_bits() -> dict[str, np.ndarray[tuple[int], np.dtype[np.uint16]]]:
    return {"few": patterns().astype(np.uint16), "all": patterns()[::-1].astype(np.uint16)}


def new_bits() -> dict[str, np.ndarray[tuple[int], np.dtype[np.uint16]]]:
    few, everything = old_bits()["few"], old_bits()["all"]
    few[::17] ^= 0x8001
    everything[:] = 0x7FC1
    return {"few": few, "all": everything}


def make(root: Path) -> None:
    """Write the frozen bucket anew: ``python tests/frozen/test_format_v1.py FOLDER``."""
    model = root.parent / "frozen-model"
    model.mkdir()
    (model / "config.json").write_text("{}\n")
    publisher = Publisher(LocalBucket(root, create=True), RUN, clock=ManualClock())
    for step, state in enumerate((old_bits(), new_bits())):
        tensors = {n: torch.from_numpy(b.view(np.int16)).view(torch.bfloat16) for n, b in state.items()}
        publisher.publish(StateDictSource(tensors), step=step, folder_files=model)
    shutil.rmtree(model)


def test_the_frozen_bucket_gives_the_bits_it_was_made_of() -> None:
    bucket = LocalBucket(V1)
    assert find_head(bucket, RUN) == 1
    for version, expected in enumerate((old_bits(), new_bits())):
        found = restore(bucket, RUN, Version(version))
        assert {name: bits.tolist() for name, bits in found.bits.items()} == {
            name: bits.tolist() for name, bits in expected.items()
        }
        assert found.table.digest == STATES[version]


def test_the_frozen_delta_has_a_body_of_each_encoding() -> None:
    manifest = read_manifest(LocalBucket(V1), RUN, Version(1))
    assert [(entry.name, entry.tiles[0].encoding) for entry in manifest.tensors] == [
        ("all", "full"),
        ("few", "sparse"),
    ]


def inflate(body: bytes, at: int, sizes: int) -> list[bytes]:
    """Planes by docs/format.md, section 4."""
    lengths = struct.unpack_from(f"<{sizes}I", body, at)
    frames = io.BytesIO(body[at + 4 * sizes :])
    return [zstandard.ZstdDecompressor().decompress(frames.read(length)) for length in lengths]


def step(old: int, zigzag: int) -> int:
    """One element of 16 bits by docs/format.md, section 4.1."""
    line = old ^ (0xFFFF if old & 0x8000 else 0x8000)
    moved = (line + ((zigzag >> 1) ^ -(zigzag & 1))) & 0xFFFF
    return moved ^ (0x8000 if moved & 0x8000 else 0xFFFF)


def test_a_reader_written_from_the_page_alone_agrees() -> None:
    manifest = json.loads((V1 / RUN / "manifests" / "00000001.json").read_bytes())
    pack = (V1 / manifest["objects"][0][0]).read_bytes()
    bodies = {name: pack[t[3] : t[3] + t[4]] for name, _, _, (t,) in manifest["tensors"]}
    low, high = inflate(bodies["all"], 0, 2)
    assert [a | b << 8 for a, b in zip(low, high, strict=True)] == new_bits()["all"].tolist()
    count, gap_width, step_width, _ = struct.unpack_from("<IBBH", bodies["few"])
    assert (count, gap_width, step_width) == (16, 1, 2)
    gaps, low, high = inflate(bodies["few"], 8, 3)
    few, position = old_bits()["few"].tolist(), -1
    for gap, a, b in zip(gaps, low, high, strict=True):
        position += gap + 1
        few[position] = step(few[position], a | b << 8)
    assert few == new_bits()["few"].tolist()


def test_manifests_are_written_as_they_were() -> None:
    for path in (V1 / RUN / "manifests").iterdir():
        body = path.read_bytes()
        assert encode_manifest(decode_manifest(body)) == body


if __name__ == "__main__":
    make(Path(sys.argv[1]))
