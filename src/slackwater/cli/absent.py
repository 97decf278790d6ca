"""Why a bucket lacks what a command was told of: it has no such run, no such version, or nobody made the fold."""

from collections.abc import Generator
from contextlib import contextmanager
from itertools import islice
from typing import Final

from slackwater.bucket.base import Bucket
from slackwater.checkpoint.keys import manifest_key
from slackwater.errors import InvalidInputError, NotFoundError, SlackwaterError
from slackwater.ids import RunId, Version, run_id
from slackwater.publish.history import check_not_collected
from slackwater.publish.lineage import find_head, is_there

_LISTED: Final = 10_000
"""Objects of a bucket that are looked at for the names of its runs."""
_NAMED: Final = 5
"""Runs that a message names."""
_MANIFESTS: Final = "manifests"


def newest(bucket: Bucket, run: RunId) -> Version | None:
    """The newest version of a run, also where one before it is gone; None where there is no such run.

    Raises:
        NotFoundError: There is no such bucket.
        AuthError: It may not be listed.
        UnavailableError: It doesn't answer.
    """
    numbers = [int(stem) for item in bucket.list(f"{run}/{_MANIFESTS}") if (stem := _stem(item.key)).isdigit()]
    found = find_head(bucket, run)
    return Version(max(numbers + ([] if found is None else [found]))) if numbers or found is not None else None


def check_there(bucket: Bucket, run: RunId, version: Version) -> None:
    """Check that a version is there, readable or not: one small request where it is.

    Raises:
        NotFoundError: It isn't, or there is no such bucket; the message says why.
        AuthError: It may not be read or listed.
        UnavailableError: The bucket doesn't answer.
    """
    if not is_there(bucket, run, version):
        raise absent_version(bucket, run, version)


@contextmanager
def telling_absent(bucket: Bucket, run: RunId) -> Generator[None]:
    """Turn what the block doesn't find into `absent_run`, where there is no such run.

    Raises:
        NotFoundError: See above; or what the block raised.
    """
    try:
        yield
    except NotFoundError as error:
        if newest(bucket, run) is None:
            raise absent_run(bucket, run) from error
        raise


def absent_run(bucket: Bucket, run: RunId) -> NotFoundError:
    """The error that there is no such run; its hint names those that there are."""
    runs = _runs(bucket)
    return NotFoundError(f"there is no run {run} in {bucket.url}", hint=_choice(runs))


def absent_version(bucket: Bucket, run: RunId, version: Version) -> NotFoundError:
    """The error that a version isn't there, with the reason as far as it can be told.

    Raises:
        NotFoundError: There is no such bucket.
        AuthError: It may not be listed.
        UnavailableError: It doesn't answer.
    """
    head = newest(bucket, run)
    if head is None:
        return absent_run(bucket, run)
    if version > head:
        return NotFoundError(f"{run} has no version {version}", hint=f"the newest is {run}/{head}")
    try:
        check_not_collected(bucket, run, version)
    except NotFoundError as error:
        return error
    return NotFoundError(
        f"version {version} of {run} is gone: there is no {manifest_key(run, version)}",
        hint=f"name another one; the newest is {run}/{head}",
    )


def absent_fold(bucket: Bucket, run: RunId, start: Version, end: Version) -> SlackwaterError:
    """The error that a fold isn't there.

    Raises:
        NotFoundError: There is no such bucket.
        AuthError: It may not be listed.
        UnavailableError: It doesn't answer.
    """
    if not start < end:
        return InvalidInputError(f"a fold leads to a later version, not from {start} to {end}")
    head = newest(bucket, run)
    if head is None or end > head:
        return absent_version(bucket, run, end)
    name = f"{run}/{start}..{end}"
    return NotFoundError(f"nobody made the fold {name}", hint=f"make it with `slackwater fold {name} --bucket …`")


def no_snapshot(bucket: Bucket, text: str) -> SlackwaterError:
    """The error that a text is neither a folder nor the name of a snapshot: often it is a run's.

    Raises:
        NotFoundError: There is no such bucket.
        AuthError: It may not be listed.
        UnavailableError: It doesn't answer.
    """
    try:
        run = run_id(text)
    except InvalidInputError:
        return InvalidInputError(f"{text} is no folder", hint="name a folder, RUN/VERSION or RUN/FROM..TO")
    head = newest(bucket, run)
    if head is None:
        return NotFoundError(
            f"there is neither a folder {text} nor a run {text} in {bucket.url}", hint=_choice(_runs(bucket))
        )
    return InvalidInputError(f"{text} is a run, not a snapshot", hint=f"name RUN/VERSION; the newest is {run}/{head}")


def _runs(bucket: Bucket) -> list[str]:
    """Some of its runs, those among the first objects of a listing: a bucket may hold millions."""
    parts = (item.key.split("/") for item in islice(bucket.list(""), _LISTED))
    return sorted({part[0] for part in parts if len(part) == 3 and part[1] == _MANIFESTS})  # noqa: PLR2004 - run, folder, file


def _choice(runs: list[str]) -> str:
    if not runs:
        return "no run is found in it: publish one, or check the path"
    return f"it has: {', '.join(runs[:_NAMED])}{' and more' if len(runs) > _NAMED else ''}"


def _stem(key: str) -> str:
    return key.rpartition("/")[2].removesuffix(".json")
