"""Model folders in a row, and a bucket with them: what the tests of folds, audits and commands share."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from slackwater.bucket.base import Bucket
from slackwater.ids import RunId, Version
from slackwater.publish.publisher import Publisher
from slackwater.testing.clock import ManualClock
from slackwater.weights.source import FolderSource, TensorSource

RUN: Final = RunId("run")
FILE: Final = "model.safetensors"
WIDE: Final = "model.layers.0.self_attn.o_proj.weight"
"""A tensor of 16 tiles, cut by column: none of them is contiguous."""

Change = Callable[[dict[str, torch.Tensor]], None]


def first_state() -> dict[str, torch.Tensor]:
    """Every kind of tensor: several dtypes, a scalar, an empty one, NaN payloads, and one of many tiles."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(torch.bfloat16)

    odd = torch.tensor([0x7FC1, -32768, 0x7F80, 0x0001], dtype=torch.int16).view(torch.bfloat16)
    return {
        "model.embed_tokens.weight": draw(64, 16),
        "model.layers.0.norm.weight": odd,
        WIDE: draw(2, 1).expand(2, 16 * 131_073).contiguous(),
        "model.steps": torch.tensor(7, dtype=torch.int32),
        "model.nothing": torch.empty(0, 3),
        "model.mask": torch.tensor([True, False, True]),
        "model.scale": torch.tensor([0.5, -0.25]),
        "model.codes": (torch.arange(48) % 7).to(torch.float8_e4m3fn),
    }


def write_state(folder: Path, tensors: Mapping[str, torch.Tensor]) -> Path:
    """A model folder."""
    folder.mkdir()
    save_file(dict(tensors), folder / FILE, metadata={"format": "pt"})
    (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    (folder / "tokenizer.json").write_text("{}")
    (folder / "chat_template.jinja").write_bytes(b"{{ messages }}\r\n")
    return folder


def stepped(tensors: Mapping[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
    """The next step: some elements of most tensors move to a neighbour."""
    generator = torch.Generator().manual_seed(seed)
    result = {name: tensor.clone() for name, tensor in tensors.items()}
    for name, share in (("model.embed_tokens.weight", 0.05), (WIDE, 0.001)):
        bits = result[name].view(torch.int16)
        bits += (torch.rand(bits.shape, generator=generator) < share).to(torch.int16)
    result["model.steps"] += 1
    result["model.scale"][seed % 2] = float("nan") if seed % 3 == 0 else float(seed)
    result["model.layers.0.norm.weight"].view(torch.int16)[0] ^= 1  # another NaN
    return result


def write_states(root: Path, count: int) -> list[Path]:
    """Folders of ``count`` states, each a step after the one before."""
    tensors = first_state()
    folders = [write_state(root / "state0", tensors)]
    for step in range(1, count):
        tensors = stepped(tensors, step)
        folders.append(write_state(root / f"state{step}", tensors))
    return folders


def altered(folder: Path, target: Path, change: Change) -> Path:
    """A copy of a state in which something is another."""
    tensors = load_file(folder / FILE)
    change(tensors)
    return write_state(target, tensors)


def publish_states(bucket: Bucket, folders: list[Path], *, anchor_every: int = 50) -> None:
    """Publish each folder as a version."""
    with Publisher(bucket, RUN, anchor_every=anchor_every, threads=1, clock=ManualClock()) as publisher:
        for step, folder in enumerate(folders):
            publisher.publish(FolderSource(folder), step=10 * step)


def bits(source: TensorSource | Path) -> dict[str, bytes]:
    """Every tensor's bytes."""
    source = FolderSource(source) if isinstance(source, Path) else source
    return {name: np.ascontiguousarray(source.bits(name)).tobytes() for name in source.specs()}


def tell_nobody(stage: str, done: int, total: int) -> None:
    """Progress, checked: it never goes past its end."""
    assert 0 <= done <= total, stage


def version(number: int) -> Version:
    return Version(number)
