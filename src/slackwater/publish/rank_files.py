"""The files of an anchor that several ranks publish: each writes its own tensors, and rank 0 the rest."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from slackwater.checkpoint.manifest import Manifest
from slackwater.checkpoint.shards import Shard, build_index, build_shard
from slackwater.errors import InvalidInputError
from slackwater.publish.gather import Gathering, files_of
from slackwater.weights.image import CONFIG, FolderImage
from slackwater.weights.source import FolderSource, TensorSource, side_files


def take_rank_image(
    source: TensorSource, names: Sequence[str], gathering: Gathering, rank: int, folder: Path | str | None
) -> FolderImage:
    """A rank's files; on rank 0 with those of tensors that ranks have in pieces, and with what belongs to the model.

    Args:
        source: What the rank has.
        names: The tensors that it has whole.
        gathering: Brings the others together.
        rank: This rank.
        folder: Where config, tokenizer and chat template come from; None takes a `FolderSource`'s own.

    Raises:
        InvalidInputError: Rank 0 has no folder, or one without ``config.json``.
    """
    specs = source.specs()
    own = files_of(f"model-rank{rank:05d}", [specs[name] for name in names])
    shards = {shard.file: build_shard(shard, source) for shard in own}
    others = _side_files(source, folder) if rank == 0 else {}
    return FolderImage(shards={**shards, **gathering.files("model-pieces")}, others=others)


def _side_files(source: TensorSource, folder: Path | str | None) -> Mapping[str, bytes]:
    folder = source.folder if folder is None and isinstance(source, FolderSource) else folder
    if folder is None:
        raise InvalidInputError(
            "an anchor needs a config and a tokenizer, and the tensors come without a folder",
            hint="pass folder_files=<a folder with config.json and the tokenizer> on rank 0",
        )
    others = {file: path.read_bytes() for file, path in side_files(Path(folder)).items()}
    if CONFIG not in others:
        raise InvalidInputError(f"an anchor needs a {CONFIG}", hint="name a whole Hugging Face model folder")
    return others


def index_of(anchors: Sequence[Manifest]) -> bytes:
    """The index of the files of all ranks.

    Args:
        anchors: Each rank's part.
    """
    return build_index([shard for anchor in anchors for shard in _shards(anchor)])


def _shards(anchor: Manifest) -> list[Shard]:
    """What a rank's files hold."""
    files = {index: file for file, index in anchor.files.items()}
    return [
        Shard(file=files[index], specs=tuple(t.spec for t in anchor.tensors if t.object == index))
        for index in sorted({tensor.object for tensor in anchor.tensors})
    ]
