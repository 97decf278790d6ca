"""``slackwater rollback``: the state of an old version becomes the newest one."""

from slackwater.cli.absent import check_there
from slackwater.cli.attended import Attended
from slackwater.cli.publish import PublishSettings
from slackwater.cli.trust import open_trusted, signer_of, warn_of_unsigned
from slackwater.ids import RunId, Version
from slackwater.publish.published import Published
from slackwater.publish.rollback import rollback


def roll_back(
    url: str, run: RunId, to: Version, settings: PublishSettings, *, anchor: bool, work: Attended
) -> Published:
    """Publish an old version's state as the next version: see `slackwater.publish.rollback.rollback`.

    Args:
        url: The bucket's.
        run: The run.
        to: The version to go back to.
        settings: How.
        anchor: Publish an anchor instead of a delta.
        work: The command's folders and bars.

    Raises:
        InvalidInputError: The newest version has that state already, a key file is wrong, or no trusted key signs.
        NotFoundError: There is no such version.
        CorruptError: Something is damaged, or no trusted key signed it.
        LostRaceError: A publisher was faster.
    """
    signer = signer_of(settings.sign_with, settings.trust)
    bucket = open_trusted(url, settings.trust)
    check_there(bucket, run, to)
    if signer is None:
        warn_of_unsigned(bucket, run)
    return rollback(
        bucket, run, to,
        scratch=work.scratch.folder(), level=settings.level, threads=settings.threads, progress=work.tell,
        anchor=anchor, signer=signer,
    )  # fmt: skip
