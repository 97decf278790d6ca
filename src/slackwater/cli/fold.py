"""``slackwater fold``: several deltas in a row become one, as a folder or in the bucket."""

from collections.abc import Sequence
from functools import partial
from itertools import pairwise

import msgspec

from slackwater.checkpoint.manifest import Manifest, encode_manifest
from slackwater.checkpoint.outline import Outline
from slackwater.cli.apply import write
from slackwater.cli.attended import Attended
from slackwater.cli.diff import DiffSettings, make_delta
from slackwater.cli.snapshot import FoldName, Shelf, VersionName
from slackwater.cli.summary import Kind, Summary, summarize
from slackwater.cli.trust import signer_of
from slackwater.errors import CorruptError, WrongBaseError
from slackwater.publish.fold import fold
from slackwater.weights.diff import hash_source
from slackwater.weights.patch import Delta, WritableFolder, copy_folder, folder_bytes, state_after
from slackwater.weights.source import FolderSource
from slackwater.weights.watched import Watched


def fold_in_bucket(name: FoldName, settings: DiffSettings, shelf: Shelf, work: Attended) -> Summary:
    """Make a fold in the bucket, beside the run's versions; where it is there already, nothing is done.

    Raises:
        InvalidInputError: It doesn't lead forwards, a key file is wrong, or no trusted key signs.
        NotFoundError: A version isn't there.
        CorruptError: The run is damaged, or no trusted key signed it, or the fold that is there.
    """
    signer = signer_of(settings.sign_with, settings.trust)
    for version in (name.start, name.end):
        shelf.manifest(VersionName(run=name.run, version=version))  # tells why it isn't there
    folded = fold(
        shelf.bucket, name.run, name.start, name.end,
        scratch=work.scratch.folder(), level=settings.level, threads=settings.threads, progress=work.tell,
        signer=signer,
    )  # fmt: skip
    outline = shelf.outline(name.run, name.end)
    summary = _summary(str(name), "fold", folded.manifest, outline)
    return msgspec.structs.replace(summary, is_new=folded.is_new)


def fold_folders(texts: Sequence[str], base: str, settings: DiffSettings, shelf: Shelf, work: Attended) -> Summary:
    """Make one delta folder out of deltas in a row.

    The state after them is made in a temporary folder, and compared with their base.

    Args:
        texts: What to call the deltas, in order.
        base: The state that the first one was made on.
        settings: Where to, and how.
        shelf: Where they are found.
        work: The command's folders and bars.

    Raises:
        WrongBaseError: One doesn't follow on the one before, or the first one not on ``base``.
        CorruptError: One is damaged.
        NotFoundError: A part of one is missing.
    """
    deltas = [shelf.delta(text) for text in texts]
    for (before, left), (after, right) in pairwise(zip(texts, deltas, strict=True)):
        _check_follows(before, left.manifest, after, right.manifest)
    shelf.check_base(base, texts[0], may_be_after=False)
    old = shelf.state(base)
    _check_base(old, deltas[0].manifest, settings.threads, work)
    new = _patched(old, deltas, settings.threads, work)
    made = make_delta(old, new, settings, work)
    if made.state != deltas[-1].manifest.state:
        raise CorruptError(
            f"the deltas make state {made.state[:12]}, and {texts[-1]} says {deltas[-1].manifest.state[:12]}"
        )
    return _summary(" + ".join(texts), "delta", made, Outline(old.specs().values()))


def _check_follows(before: str, left: Manifest, after: str, right: Manifest) -> None:
    if right.parent is None or right.parent.state != left.state:
        made_on = "nothing" if right.parent is None else right.parent.state[:12]
        raise WrongBaseError(
            f"{after} was made on {made_on}, and {before} leads to {left.state[:12]}",
            hint="name deltas in a row, the oldest first",
        )


def _check_base(old: FolderSource, first: Manifest, threads: int, work: Attended) -> None:
    table = hash_source(Watched(old, partial(work.tell, "read")), threads=threads)
    state_after(table, first)  # names a tensor that differs
    if first.parent is None or table.digest != first.parent.state:
        raise WrongBaseError(
            f"the base is {table.digest[:12]}: the first delta has been applied to some of it",
            hint="name the state before the first delta",
        )


def _patched(old: FolderSource, deltas: Sequence[Delta], threads: int, work: Attended) -> FolderSource:
    folder, total = work.scratch.folder(), folder_bytes(old)
    for done in copy_folder(old, folder):
        work.tell("copy", done, total)
    new = FolderSource(folder)
    target, outline = WritableFolder(new), Outline(new.specs().values())
    for delta in deltas:
        write(target, outline, delta, threads=threads, work=work)
    return new


def _summary(name: str, kind: Kind, manifest: Manifest, outline: Outline) -> Summary:
    return summarize(name, kind, manifest, outline, manifest_bytes=len(encode_manifest(manifest)))
