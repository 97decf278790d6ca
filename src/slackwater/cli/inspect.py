"""``slackwater inspect``: what a snapshot holds, from its manifest alone."""

from collections import Counter
from functools import partial
from pathlib import Path

from slackwater.checkpoint.manifest import Manifest, encode_manifest
from slackwater.checkpoint.outline import Outline
from slackwater.cli.attended import Attended
from slackwater.cli.snapshot import FoldName, Shelf
from slackwater.cli.summary import Kind, Summary, summarize, summarize_outline
from slackwater.errors import InvalidInputError, WrongBaseError
from slackwater.weights.delta_folder import DeltaFolder, is_delta_folder
from slackwater.weights.diff import hash_source
from slackwater.weights.moved import distances
from slackwater.weights.patch import wrong_base
from slackwater.weights.source import FolderSource
from slackwater.weights.watched import Watched


def inspect_snapshot(text: str, base: str | None, threads: int, shelf: Shelf, work: Attended) -> Summary:
    """Summarise a model folder, a delta folder, a version or a fold.

    Args:
        text: Which one.
        base: The state before a delta; it and the delta's objects are read, to tell how far elements move.
        threads: Bodies decoded at once.
        shelf: Where things are found.
        work: The command's folders and bars.

    Raises:
        InvalidInputError: It is nothing of these, or has a base and is no delta.
        NotFoundError: It isn't there.
        CorruptError: It is damaged.
        WrongBaseError: ``base`` isn't the state before it.
    """
    name = shelf.name(text)
    if isinstance(name, Path) and not is_delta_folder(name):
        if base is not None:
            raise InvalidInputError(f"{text} is no delta and has no base", hint="leave --base out")
        return _summarize_folder(text, FolderSource(name))
    kind, manifest, outline = _look(text, shelf)
    moved = None if base is None else _moved(text, base, outline, threads, shelf, work)
    return summarize(text, kind, manifest, outline, manifest_bytes=len(encode_manifest(manifest)), distances=moved)


def _look(text: str, shelf: Shelf) -> tuple[Kind, Manifest, Outline]:
    name = shelf.name(text)
    if isinstance(name, Path):
        folder = DeltaFolder(name)
        return "delta", folder.manifest, folder.outline
    manifest = shelf.manifest(name)
    if manifest.kind == "anchor":
        return "anchor", manifest, manifest.outline
    return "fold" if isinstance(name, FoldName) else "delta", manifest, shelf.outline(name.run, manifest.version)


def _summarize_folder(text: str, source: FolderSource) -> Summary:
    files = {file: path.stat().st_size for file, path in {**source.shards, **source.files}.items()}
    return summarize_outline(text, Outline(source.specs().values()), files)


def _moved(text: str, base: str, outline: Outline, threads: int, shelf: Shelf, work: Attended) -> Counter[int]:
    shelf.check_base(base, text, may_be_after=False)
    delta, source = shelf.delta(text), shelf.state(base)
    if Outline(source.specs().values()) != outline:
        raise InvalidInputError(f"{base} hasn't the tensors that {text} was made on", hint="name the state before it")
    total = 0 if delta.manifest.bodies is None else len(delta.manifest.bodies.length)
    try:
        return distances(
            source, outline, delta, threads=threads, progress=lambda done: work.tell("decode", done, total)
        )
    except WrongBaseError as error:
        held = hash_source(Watched(source, partial(work.tell, "read")), threads=threads)
        raise wrong_base(delta.manifest, held.digest, error.message) from error
