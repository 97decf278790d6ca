"""Results of commands, for a terminal."""

from rich.console import Console

from slackwater.ids import snapshot_name
from slackwater.publish.publisher import Published


def show_published(item: Published) -> None:
    """One line about a committed version."""
    Console().print(
        f"published {snapshot_name(item.run, item.version)}, {item.kind}: {item.uploaded_bytes / 1e6:.2f} MB of "
        f"{item.full_bytes / 1e6:.2f} MB, {item.changed} of {item.total} elements changed, "
        f"encoded in {item.encode_s:.2f} s, uploaded in {item.upload_s:.2f} s",
        soft_wrap=True,
        highlight=False,
    )
