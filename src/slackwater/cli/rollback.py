"""``slackwater rollback``: the state of an old version becomes the newest one."""

from slackwater.bucket.open import open_bucket
from slackwater.checkpoint.codec import Level
from slackwater.cli.attended import Attended
from slackwater.ids import RunId, Version
from slackwater.publish.published import Published
from slackwater.publish.rollback import rollback


def roll_back(
    url: str, run: RunId, to: Version, *, anchor: bool, level: Level, threads: int, work: Attended
) -> Published:
    """Publish an old version's state as the next version: see `slackwater.publish.rollback.rollback`.

    Args:
        url: The bucket's.
        run: The run.
        to: The version to go back to.
        anchor: Publish an anchor instead of a delta.
        level: How much time to spend for how many bytes.
        threads: Bodies decoded and encoded at once.
        work: The command's folders and bars.

    Raises:
        InvalidInputError: The newest version has that state already.
        NotFoundError: There is no such version.
        CorruptError: Something is damaged.
        LostRaceError: A publisher was faster.
    """
    return rollback(
        open_bucket(url), run, to,
        scratch=work.scratch.folder(), level=level, threads=threads, progress=work.tell, anchor=anchor,
    )  # fmt: skip
