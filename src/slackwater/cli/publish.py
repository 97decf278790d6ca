"""``slackwater publish``: a model folder becomes the next version of a run."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

from slackwater.bucket.base import Bucket
from slackwater.bucket.local import LocalBucket
from slackwater.bucket.open import open_bucket
from slackwater.checkpoint.codec import Level
from slackwater.checkpoint.outline import Outline
from slackwater.cli.attended import Attended
from slackwater.cli.canary import read_canary
from slackwater.cli.text import console, size_text
from slackwater.cli.trust import open_trusted, signer_of, warn_of_unsigned
from slackwater.errors import CorruptError, InvalidInputError, NotFoundError, SlackwaterError
from slackwater.ids import RunId, Version, run_id, snapshot_name
from slackwater.publish.delta import Progress
from slackwater.publish.fold import Folded
from slackwater.publish.folding import Folding
from slackwater.publish.lineage import find_head, read_manifest
from slackwater.publish.path import read_path
from slackwater.publish.plan import check_fits
from slackwater.publish.published import Published
from slackwater.publish.publisher import Publisher
from slackwater.weights.source import FolderSource

_LOG: Final = logging.getLogger(__name__)
_NAMED: Final = 5
"""Tensors that a refusal names."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishSettings:
    """How versions and folds are made."""

    level: Level = "fast"
    """How much time to spend for how many bytes."""
    threads: int = 2
    """Threads that encode and upload."""
    files: Path | None = None
    """A folder whose config and tokenizer are taken instead of the published folder's."""
    canary: Path | None = None
    """File of the published version's canary: see `slackwater.cli.canary.read_canary`."""
    sign_with: Path | None = None
    """File of the private key that signs what is committed."""
    trust: Sequence[Path] = ()
    """Files of the public keys whose versions are gone on from; none takes all."""


_USUAL: Final = PublishSettings()


def publish_folder(
    folder: Path,
    bucket_url: str,
    run: str,
    settings: PublishSettings = _USUAL,
    *,
    step: int,
    anchor: bool = False,
    partial: bool = False,
    progress: Progress | None = None,
) -> Published:
    """Publish a Hugging Face folder: an anchor where the run is new or ``anchor`` is set, else a delta.

    Args:
        folder: safetensors in the serving dtype, with config and tokenizer.
        bucket_url: As `open_bucket` takes it; a local folder is made where it is missing.
        run: The run's name.
        settings: How.
        step: The trainer's step, for people.
        anchor: Publish everything again.
        partial: In a delta, tensors that the folder lacks stay as they are; else they are refused.
        progress: Told how far it is.

    Raises:
        InvalidInputError: The folder, the URL, a key file, the canary or the run's name is wrong, no trusted key
            signs, or the folder doesn't fit the run.
        LostRaceError: Another publisher was faster.
        CorruptError: The run is damaged, or no trusted key signed it.
    """
    source, signer = FolderSource(folder), signer_of(settings.sign_with, settings.trust)
    canary = None if settings.canary is None else read_canary(settings.canary, settings.files or folder)
    name = run_id(run)
    bucket = open_trusted(bucket_url, settings.trust, create=True)
    if not partial and not anchor:  # an anchor that lacks some is refused anyway
        _check_whole(bucket, name, source)
    if signer is None:
        warn_of_unsigned(bucket, name)
    with Publisher(
        bucket, name, level=settings.level, threads=settings.threads, signer=signer, progress=progress
    ) as publisher:
        return publisher.publish(source, step=step, folder_files=settings.files, anchor=anchor, canary=canary)


def fold_after(
    published: Published, bucket_url: str, settings: PublishSettings, every: int, work: Attended, *, is_told: bool
) -> list[Folded]:
    """Make the folds that are due after a version, and print a line about each. One that fails is logged and left out.

    Args:
        published: The version, committed just now.
        bucket_url: Where the run lies.
        settings: How.
        every: See `slackwater.publish.folding.due_folds`.
        work: The command's folders and bars.
        is_told: Whether lines are printed.
    """
    bucket, run, version = open_trusted(bucket_url, settings.trust), published.run, published.version
    try:
        anchor = read_path(bucket, run, version)[0].version
    except SlackwaterError as error:
        _LOG.warning("no fold is made after %s: %s", snapshot_name(run, version), error)
        return []
    made: list[Folded] = []
    with Folding(
        bucket, run,
        every=every, level=settings.level, threads=settings.threads,
        signer=signer_of(settings.sign_with, settings.trust),
        scratch=work.scratch.folder(), progress=work.tell, made=made.append,
    ) as folding:  # fmt: skip
        folding.committed(version, anchor)
        folding.wait()
    for folded in made if is_told else ():
        _show(folded)
    return made


def _show(folded: Folded) -> None:
    manifest = folded.manifest
    if folded.is_new and manifest.parent is not None:
        name = f"{manifest.run}/{manifest.parent.version}..{manifest.version}"
        console().print(f"made the fold {name}: {size_text(manifest.num_bytes)}", soft_wrap=True)


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
    outline = _outline(bucket, run)
    held = {} if outline is None else {spec.name: spec for spec in outline.specs}
    if held:  # a name that is unknown tells more than all that are missing because of it
        check_fits("delta", held, source.specs())
    missing = sorted(held.keys() - source.specs().keys())
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
