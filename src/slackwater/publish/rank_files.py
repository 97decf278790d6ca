"""The files of an anchor that several ranks publish: each writes its own tensors, and rank 0 the rest."""

from collections.abc import Mapping, Sequence

from slackwater.checkpoint.manifest import Manifest
from slackwater.checkpoint.shards import Shard, build_index, build_shard
from slackwater.publish.gather import Gathering, files_of
from slackwater.weights.image import FolderImage
from slackwater.weights.source import TensorSource


def take_rank_image(
    source: TensorSource, names: Sequence[str], gathering: Gathering, rank: int, others: Mapping[str, bytes]
) -> FolderImage:
    """A rank's files; on rank 0 with those of tensors that ranks have in pieces, and with what belongs to the model.

    Args:
        source: What the rank has.
        names: The tensors that it has whole.
        gathering: Brings the others together.
        rank: This rank.
        others: On rank 0 config, tokenizer and chat template.
    """
    specs = source.specs()
    own = files_of(f"model-rank{rank:05d}", [specs[name] for name in names])
    shards = {shard.file: build_shard(shard, source) for shard in own}
    return FolderImage(shards={**shards, **gathering.files("model-pieces")}, others=others)


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
