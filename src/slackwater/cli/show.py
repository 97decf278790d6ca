"""Results of commands, for a terminal."""

from pathlib import Path

import msgspec

from slackwater.cli.text import console, counted, size_text, write_json
from slackwater.ids import snapshot_name
from slackwater.publish.published import Published


def show_published(item: Published, made: Path | None, *, as_json: bool) -> None:
    """One line about a committed version, or JSON.

    Args:
        item: The version.
        made: The directory that was made to be the bucket, if one was.
        as_json: One JSON object instead.
    """
    is_new = item.version == 0
    if as_json:
        more = {"is_new_run": is_new, "made_directory": None if made is None else str(made)}
        write_json({**msgspec.to_builtins(item), **more})
        return
    if made is not None:
        console().print(f"made directory {made}", soft_wrap=True)
    new = f", a new run of {counted(item.total, 'element')}" if is_new else ""
    changed = "" if item.kind == "anchor" else f", {item.changed:,} of {counted(item.total, 'element')} changed"
    console().print(
        f"published {snapshot_name(item.run, item.version)}, {item.kind}{new}: {size_text(item.uploaded_bytes)} with "
        f"its manifest, for a model of {size_text(item.full_bytes)}{changed}, encoded in {item.encode_s:.2f} s, "
        f"uploaded in {item.upload_s:.2f} s",
        soft_wrap=True,
    )
