"""``slackwater pull``: any version of a run as an ordinary Hugging Face folder, proved before it appears."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from slackwater.cli.absent import check_there
from slackwater.cli.attended import Attended
from slackwater.cli.text import console, size_text
from slackwater.cli.trust import open_trusted
from slackwater.ids import StateDigest, parse_snapshot
from slackwater.publish.rebuild import rebuild


@dataclass(frozen=True, kw_only=True, slots=True)
class Pulled:
    """What was made."""

    name: str
    folder: Path
    state: StateDigest
    num_bytes: int
    """Bytes of all tensors."""


def pull_version(name: str, out: Path, url: str, *, threads: int, work: Attended, trust: Sequence[Path] = ()) -> Pulled:
    """Make a folder of a version. It appears whole and verified, or not at all.

    Args:
        name: The version: ``run/12``.
        out: The folder to make.
        url: The bucket's.
        threads: Bodies decoded at once.
        work: The command's folders and bars.
        trust: Files of the public keys whose versions are taken; none takes all.

    Raises:
        InvalidInputError: ``name`` is no version's, ``out`` is there already, or a key file is wrong.
        NotFoundError: The version isn't committed, or an object of it is missing.
        CorruptError: Something of it is damaged, or no trusted key signed it.
    """
    run, version = parse_snapshot(name)
    bucket = open_trusted(url, trust)
    check_there(bucket, run, version)
    folder = work.scratch.beside(out)
    table = rebuild(bucket, run, version, folder, threads=threads, progress=work.tell).table
    work.scratch.appear(folder, out)
    return Pulled(name=name, folder=out, state=table.digest, num_bytes=table.outline.num_bytes)


def show_pulled(pulled: Pulled) -> None:
    """Print one line about it."""
    console().print(
        f"{pulled.folder} is {pulled.name}, state {pulled.state[:12]}: {size_text(pulled.num_bytes)}",
        soft_wrap=True,
    )
