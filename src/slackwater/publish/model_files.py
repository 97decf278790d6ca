"""What belongs to an anchor beside its tensors: config, tokenizer, chat template. A run has one set of them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import msgspec

from slackwater.bucket.base import Get
from slackwater.checkpoint.canary import Canary, first_unknown
from slackwater.checkpoint.digest import object_digest
from slackwater.checkpoint.manifest import is_side_file
from slackwater.errors import InvalidInputError
from slackwater.publish.objects import fetch_object
from slackwater.publish.plan import check_canary, check_side_files
from slackwater.publish.restore import Restored
from slackwater.weights.image import CONFIG
from slackwater.weights.source import FolderSource, TensorSource, side_files


class _Config(msgspec.Struct, frozen=True):
    """What is read of a config."""

    vocab_size: Annotated[int, msgspec.Meta(ge=1)] | None = None


def folder_of(source: TensorSource, folder: Path | str | None) -> Path | None:
    """The folder that was given, or else the source's own, if it has one."""
    if folder is not None:
        return Path(folder)
    return source.folder if isinstance(source, FolderSource) else None


def fitting_canary(canary: Canary | None, folder: Path | None) -> Canary | None:
    """The canary as a manifest holds it, with ids that the model has, as far as a folder tells.

    Args:
        canary: What was given.
        folder: The model's, with the config; None where none is at hand.

    Raises:
        InvalidInputError: It is something else, or has an id outside of the config's ``vocab_size``.
    """
    checked = check_canary(canary)
    vocabulary = None if checked is None or folder is None else _vocabulary(folder / CONFIG)
    if checked is None or folder is None or vocabulary is None:
        return checked
    unknown = first_unknown(checked, vocabulary)
    if unknown is not None:
        raise InvalidInputError(
            f"{unknown}: {folder / CONFIG} has vocab_size {vocabulary}",
            hint="take ids of this model's own tokenizer",
        )
    return checked


def _vocabulary(config: Path) -> int | None:
    """How many ids a model has; None where its config doesn't say so, or can't be read: that is told elsewhere."""
    try:
        return msgspec.json.decode(config.read_bytes(), type=_Config).vocab_size
    except (OSError, msgspec.MsgspecError, RecursionError):
        return None


def read_model_files(
    bucket: Get, source: TensorSource, folder: Path | str | None, held: Restored | None
) -> Mapping[str, bytes]:
    """The files of a folder, and those that it lacks as the run's last anchor has them.

    Args:
        bucket: Where the run lies.
        source: A `FolderSource` has a folder of its own.
        folder: Another folder; None takes that of the source, if any.
        held: The version before; None for a first one.

    Raises:
        InvalidInputError: There is no config, or a file isn't that of the run.
        CorruptError: A file in the bucket is damaged.
    """
    folder = folder_of(source, folder)
    own = {} if folder is None else {name: path.read_bytes() for name, path in side_files(folder).items()}
    if held is not None:
        check_side_files(held.side_files, {name: object_digest(body) for name, body in own.items()})
    kept = {} if held is None else {name: ref for name, ref in held.files.items() if is_side_file(name)}
    files = own | {name: fetch_object(bucket, ref) for name, ref in kept.items() if name not in own}
    if CONFIG in files:
        return files
    if folder is None:
        raise InvalidInputError(
            "a first anchor needs a config and a tokenizer, and the tensors come without a folder",
            hint="pass folder_files=<a folder with config.json and the tokenizer>, on rank 0 where there are ranks",
        )
    raise InvalidInputError(f"an anchor needs a {CONFIG}", hint="name a whole Hugging Face model folder")
