"""``slackwater publish``: a model folder becomes the next version of a run."""

from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

from slackwater.bucket.base import Bucket
from slackwater.bucket.local import LocalBucket
from slackwater.bucket.open import open_bucket
from slackwater.checkpoint.codec import Level
from slackwater.checkpoint.outline import Outline
from slackwater.errors import CorruptError, InvalidInputError, NotFoundError
from slackwater.ids import RunId, Version, run_id
from slackwater.publish.delta import Progress
from slackwater.publish.lineage import find_head, read_manifest
from slackwater.publish.path import read_path
from slackwater.publish.published import Published
from slackwater.publish.publisher import Publisher
from slackwater.weights.source import FolderSource

_NAMED: Final = 5
"""Tensors that a refusal names."""


def publish_folder(
    folder: Path,
    bucket_url: str,
    run: str,
    *,
    step: int,
    anchor: bool = False,
    partial: bool = False,
    level: Level = "fast",
    threads: int = 2,
    progress: Progress | None = None,
) -> Published:
    """Publish a Hugging Face folder: an anchor where the run is new or ``anchor`` is set, else a delta.

    Args:
        folder: safetensors in the serving dtype, with config and tokenizer.
        bucket_url: As `open_bucket` takes it; a local folder is made where it is missing.
        run: The run's name.
        step: The trainer's step, for people.
        anchor: Publish everything again.
        partial: In a delta, tensors that the folder lacks stay as they are; else they are refused.
        level: How much time to spend for how many bytes.
        threads: Threads that encode and upload.
        progress: Told how far it is.

    Raises:
        InvalidInputError: The folder, the URL or the run's name is wrong, or the folder doesn't fit the run.
        LostRaceError: Another publisher was faster.
    """
    source = FolderSource(folder)
    name = run_id(run)
    bucket = open_bucket(bucket_url, create=True)
    publisher = Publisher(bucket, name, level=level, threads=threads, progress=progress)
    if not partial and not anchor:  # an anchor that lacks some is refused anyway
        _check_whole(bucket, name, source)
    return publisher.publish(source, step=step, anchor=anchor)


def missing_directory(bucket_url: str) -> Path | None:
    """The directory that `publish_folder` is going to make; None where it is there, or in an object store.

    Raises:
        InvalidInputError: The URL is wrong.
    """
    bucket = open_bucket(bucket_url)
    if not isinstance(bucket, LocalBucket):
        return None
    path = Path(unquote(urlsplit(bucket.url).path))
    return None if path.is_dir() else path


def _check_whole(bucket: Bucket, run: RunId, source: FolderSource) -> None:
    held = _outline(bucket, run)
    missing = [] if held is None else sorted(held.by_name.keys() - source.specs().keys())
    if missing:
        more = f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
        raise InvalidInputError(
            f"{source.folder} lacks {', '.join(missing[:_NAMED])}{more} of run {run}",
            hint="save the whole model, or with --partial they stay as they are",
        )


def _outline(bucket: Bucket, run: RunId) -> Outline | None:
    """The tensors of a run, which all its versions have; None where there is no run."""
    try:
        return read_manifest(bucket, run, Version(0)).outline
    except (NotFoundError, CorruptError):
        head = find_head(bucket, run)
    return None if head is None else read_path(bucket, run, head)[0].outline
