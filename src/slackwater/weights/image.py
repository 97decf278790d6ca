"""A whole model folder held in memory: what an anchor uploads, and a frozen copy of its source."""

from collections.abc import Mapping
from typing import Final

from slackwater.checkpoint.shards import build_index, build_shard, cut_shards
from slackwater.weights.source import INDEX_FILE, FolderSource, ShardSource, TensorSource

CONFIG: Final = "config.json"
"""The file without which a folder is no model."""


class FolderImage(ShardSource):
    """A model folder's bytes by file name. Holds O(model) memory; its tensors are writable views of it.

    Args:
        shards: The safetensors files.
        others: Config, tokenizer, chat template, index.

    Attributes:
        files: All of them.
    """

    def __init__(self, *, shards: Mapping[str, bytearray], others: Mapping[str, bytes]) -> None:
        super().__init__(shards)
        self.files: Final[Mapping[str, bytes | bytearray]] = {**others, **shards}


def take_image(source: TensorSource, files: Mapping[str, bytes]) -> FolderImage:
    """Read a source into memory as a folder that any Hugging Face loader takes.

    Args:
        source: A `FolderSource`'s shards and index are taken as they are; other sources are written as safetensors.
        files: Config, tokenizer and chat template, by name.
    """
    if isinstance(source, FolderSource):
        own = {INDEX_FILE: source.files[INDEX_FILE].read_bytes()} if INDEX_FILE in source.files else {}
        shards = {file: bytearray(path.read_bytes()) for file, path in source.shards.items()}
        return FolderImage(shards=shards, others={**files, **own})
    plan = cut_shards(list(source.specs().values()))
    index = {INDEX_FILE: build_index(plan)} if len(plan) > 1 else {}
    return FolderImage(shards={shard.file: build_shard(shard, source) for shard in plan}, others={**files, **index})
