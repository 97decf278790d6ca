"""A whole model folder held in memory: what an anchor uploads, and a frozen copy of its source."""

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from slackwater.checkpoint.shards import build_index, build_shard, cut_shards
from slackwater.errors import InvalidInputError
from slackwater.weights.source import INDEX_FILE, FolderSource, ShardSource, TensorSource, side_files

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


def take_image(source: TensorSource, folder: Path | None) -> FolderImage:
    """Read a source into memory as a folder that any Hugging Face loader takes.

    Args:
        source: A `FolderSource`'s files are taken as they are; other sources are written as safetensors.
        folder: Where config, tokenizer and chat template come from; None takes a `FolderSource`'s own.

    Raises:
        InvalidInputError: No folder for a source that isn't one, or a folder without ``config.json``.
    """
    if isinstance(source, FolderSource):
        others = source.files if folder is None else _with_index(source, side_files(folder))
        shards = {file: bytearray(path.read_bytes()) for file, path in source.shards.items()}
        return _image(shards, {file: path.read_bytes() for file, path in others.items()})
    if folder is None:
        raise InvalidInputError(
            "an anchor needs a config and a tokenizer, and the tensors come without a folder",
            hint="pass folder_files=<a folder with config.json and the tokenizer>",
        )
    plan = cut_shards(list(source.specs().values()))
    index = {INDEX_FILE: build_index(plan)} if len(plan) > 1 else {}
    others = {file: path.read_bytes() for file, path in side_files(folder).items()}
    return _image({shard.file: build_shard(shard, source) for shard in plan}, {**others, **index})


def _with_index(source: FolderSource, files: Mapping[str, Path]) -> Mapping[str, Path]:
    index = {INDEX_FILE: source.files[INDEX_FILE]} if INDEX_FILE in source.files else {}
    return {**files, **index}


def _image(shards: Mapping[str, bytearray], others: Mapping[str, bytes]) -> FolderImage:
    if CONFIG not in others:
        raise InvalidInputError(f"an anchor needs a {CONFIG}", hint="name a whole Hugging Face model folder")
    return FolderImage(shards=shards, others=others)
