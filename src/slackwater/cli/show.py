"""Results and progress of commands, for a terminal."""

import contextlib
from collections.abc import Callable, Generator

from rich.console import Console
from rich.progress import Progress, TaskID

from slackwater.ids import snapshot_name
from slackwater.publish.publisher import Published


@contextlib.contextmanager
def show_progress() -> Generator[Callable[[str, int, int], None]]:
    """A bar per stage on standard error; nothing where that is no terminal. Yields what to tell: stage, done, total."""
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bars:
        stages: dict[str, TaskID] = {}

        def tell(stage: str, done: int, total: int) -> None:
            """Move a stage's bar."""
            if stage not in stages:
                stages[stage] = bars.add_task(stage, total=total)
            bars.update(stages[stage], completed=done, total=total)

        yield tell


def show_published(item: Published) -> None:
    """One line about a committed version."""
    Console().print(
        f"published {snapshot_name(item.run, item.version)}, {item.kind}: {item.uploaded_bytes / 1e6:.2f} MB of "
        f"{item.full_bytes / 1e6:.2f} MB, {item.changed} of {item.total} elements changed, "
        f"encoded in {item.encode_s:.2f} s, uploaded in {item.upload_s:.2f} s",
        soft_wrap=True,
        highlight=False,
    )
