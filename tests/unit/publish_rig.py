"""Small models to publish, and what a bucket says of them."""

from pathlib import Path
from typing import Final

import torch

from slackwater.bucket.base import Bucket
from slackwater.checkpoint.manifest import BodyEntry
from slackwater.ids import RunId, Version
from slackwater.publish.lineage import read_manifest
from slackwater.publish.restore import restore
from slackwater.testing.bucket import MemoryBucket
from slackwater.weights.source import TensorSource

RUN: Final = RunId("demo")

Tensors = dict[str, torch.Tensor]


def model_folder(folder: Path) -> Path:
    """A folder with all that an anchor needs but weights."""
    folder.mkdir()
    (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    (folder / "tokenizer.json").write_text("{}")
    (folder / "chat_template.jinja").write_bytes(b"{{ messages }}\r\n")
    return folder


def weights(seed: int = 0) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    return {
        "model.embed_tokens.weight": torch.randn(64, 16, generator=generator).to(torch.bfloat16),
        "model.layers.0.weight": torch.randn(16, 16, generator=generator).to(torch.bfloat16),
        "model.norm.bias": torch.tensor([0.5, -0.25]),
    }


def trained(tensors: Tensors, seed: int) -> Tensors:
    """The next step: some weights move by one unit in the last place."""
    generator = torch.Generator().manual_seed(seed)
    embedding = tensors["model.embed_tokens.weight"].view(torch.int16).clone()
    embedding[torch.rand(embedding.shape, generator=generator) < 0.05] += 1
    return {**tensors, "model.embed_tokens.weight": embedding.view(torch.bfloat16)}


def stepped(tensors: Tensors, seed: int, rate: float = 1e-5) -> Tensors:
    """An optimizer's step on every weight: small ones move by many units in the last place, most large ones by none."""
    generator = torch.Generator().manual_seed(1000 + seed)
    return {
        name: (tensor.float() + rate * torch.randn(tensor.shape, generator=generator)).to(tensor.dtype)
        for name, tensor in tensors.items()
    }


def all_bits(source: TensorSource) -> dict[str, bytes]:
    return {name: source.bits(name).tobytes() for name in source.specs()}


def restored(bucket: Bucket, version: int) -> dict[str, bytes]:
    return {name: bits.tobytes() for name, bits in restore(bucket, RUN, Version(version)).bits.items()}


def listed(bucket: Bucket, version: int) -> list[BodyEntry]:
    """A delta's bodies."""
    return list(read_manifest(bucket, RUN, Version(version)).listed())


def touched(bucket: Bucket, version: int, anchor: int = 0) -> list[str]:
    """The tiles that a delta changes, by number, as ``name tile index``."""
    outline = read_manifest(bucket, RUN, Version(anchor)).outline
    numbers = sorted(tile.number for body in listed(bucket, version) for tile in body.tiles)
    return [f"{spec.name} tile {tile.index}" for spec, tile in map(outline.place, numbers)]


def keys(bucket: MemoryBucket, part: str = "") -> list[str]:
    return sorted(item.key for item in bucket.list(str(RUN)) if part in item.key)
