"""Going back as going on: an old version's bits, committed as the next version. History stays, replicas just follow."""

from pathlib import Path

from slackwater.bucket.base import Bucket
from slackwater.checkpoint.codec import Level
from slackwater.clock import Clock
from slackwater.errors import InvalidInputError, NotFoundError
from slackwater.ids import RunId, Version
from slackwater.publish.commit import Signs
from slackwater.publish.delta import Progress
from slackwater.publish.lineage import find_head, read_manifest
from slackwater.publish.published import Published
from slackwater.publish.publisher import Publisher
from slackwater.publish.rebuild import rebuild
from slackwater.weights.source import FolderSource


def rollback(
    bucket: Bucket,
    run: RunId,
    to: Version,
    *,
    scratch: Path,
    level: Level,
    threads: int,
    progress: Progress,
    anchor: bool = False,
    signer: Signs | None = None,
    clock: Clock | None = None,
) -> Published:
    """Publish the state of an old version once more, with its step and canary, as the version after the head.

    It is a commit like any other: a delta from the head, or an anchor, created if absent. Called again where the head
    has that state by now, it is refused, so that an answer that was lost makes no second version.

    Args:
        bucket: Where the run lies.
        run: The run.
        to: The version to go back to, below the head.
        scratch: An empty folder; it takes two models, and one where ``anchor`` is set.
        level: How much time to spend for how many bytes of a delta.
        threads: Bodies decoded and encoded at once.
        progress: Told how far it is.
        anchor: Publish an anchor, whatever is due. It needs no bits of the head, so it goes back from a broken one.
        signer: Signs the new version's manifest.
        clock: For the manifest's time.

    Raises:
        InvalidInputError: The head has the state of ``to`` already.
        NotFoundError: The run or the version isn't there, or an object of it isn't.
        CorruptError: Something of the version is damaged; or of the head, and ``anchor`` isn't set.
        LostRaceError: A publisher committed a version meanwhile.
    """
    head = find_head(bucket, run)
    if head is None:
        raise NotFoundError(f"{run} has no version in {bucket.url}", hint="check --bucket and --run")
    old = read_manifest(bucket, run, to)
    if to == head or read_manifest(bucket, run, head).state == old.state:
        raise InvalidInputError(f"version {head} of {run}, the newest, has the state of version {to} already")
    folder = scratch / "model"
    folder.mkdir()
    rebuild(bucket, run, to, folder, threads=threads, progress=progress)
    baseline = None if anchor else scratch / "baseline"
    with Publisher(
        bucket,
        run,
        level=level,
        threads=threads,
        baseline_dir=baseline,
        signer=signer,
        clock=clock,
        progress=progress,
    ) as publisher:
        return publisher.publish(FolderSource(folder), step=old.step, anchor=anchor, canary=old.canary)
