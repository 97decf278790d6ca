"""An anchor on its way: drafted, with what an earlier one has linked, and the rest uploaded."""

from slackwater.bucket.base import Get
from slackwater.publish.draft import Draft, Label, draft_anchor
from slackwater.publish.restore import Restored
from slackwater.publish.upload import Uploads, linkable
from slackwater.weights.image import FolderImage


def send_anchor(
    bucket: Get,
    label: Label,
    image: FolderImage,
    held: Restored | None,
    uploads: Uploads,
    *,
    is_forced: bool,
    threads: int,
) -> Draft:
    """Draft an anchor, or a rank's part of one, and have its objects uploaded.

    Args:
        bucket: Where the run lies.
        label: The version.
        image: Its folder.
        held: The version before, whose anchor's files are linked where they are equal; None for a first one.
        uploads: Take the other files.
        is_forced: Link nothing, for what is there isn't trusted.
        threads: Tiles hashed at once.
    """
    known = {} if held is None or is_forced else linkable(bucket, held.files)
    draft = draft_anchor(label, image, threads=threads, known=known)
    for ref in draft.manifest.objects:
        if ref.key in draft.bodies:
            uploads.put(ref, draft.bodies[ref.key])
    return draft
