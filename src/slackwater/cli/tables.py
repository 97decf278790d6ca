"""Summaries and reports as text: a few lines, and a table of the tensors that change most."""

from collections.abc import Iterator, Sequence

import msgspec
from rich.table import Table

from slackwater.cli.apply import Applied
from slackwater.cli.canary import canary_text
from slackwater.cli.summary import ChangeSummary, Summary, TensorSummary
from slackwater.cli.text import console, counted, plain, size_text, write_json
from slackwater.cli.verify import status_of
from slackwater.publish.damage import MAX_FINDINGS, Finding, Report


def show_summary(summary: Summary, top: int, *, as_json: bool) -> None:
    """Print a summary, and its first ``top`` tensors; or all of it as JSON."""
    if as_json:
        write_json(summary)
        return
    out = console()
    for line in _lines(summary):
        out.print(plain(line), soft_wrap=True)
    listed = summary.listed[:top]
    if listed:
        out.print()
        out.print(_tensors(listed, is_delta=summary.change is not None))
    if len(listed) < len(summary.listed):
        out.print(f"… and {counted(len(summary.listed) - len(listed), 'more tensor')}")


def show_applied(applied: Applied) -> None:
    """Print one line about an application."""
    state = f"state {applied.state[:12]}"
    console().print(
        f"{applied.folder} is {state}, and so was the model before: nothing changed"
        if applied.was_after
        else f"{applied.folder} is {state}: {counted(applied.num_changed, 'element')} changed, from "
        f"{size_text(applied.num_bytes)}",
        soft_wrap=True,
    )


def show_report(name: str, report: Report, *, as_json: bool) -> None:
    """Print what an audit found: a line each, or JSON."""
    if as_json:
        write_json({"name": name, "status": status_of(report), **msgspec.to_builtins(report)})
        return
    out = console()
    for finding in report.findings:
        out.print(plain(f"{finding.damage}: {_told(finding)}"), soft_wrap=True)
    found = sum(report.counts.values())
    if found > MAX_FINDINGS:
        out.print(f"… and {found - MAX_FINDINGS} more")
    out.print(f"{name}: {_verdict(report)}", soft_wrap=True)


def _told(finding: Finding) -> str:
    """What was found and where, which is named once: a bucket's errors begin with the whole URL of the object."""
    is_named = finding.what.startswith(finding.where) or f"/{finding.where}: " in finding.what
    return finding.what if is_named else f"{finding.where}: {finding.what}"


def _verdict(report: Report) -> str:
    is_model = not report.num_manifests and not report.counts
    read = [
        *([counted(report.num_manifests, "manifest")] if report.num_manifests else []),
        *(
            [f"{counted(report.num_objects, 'file' if is_model else 'object')} of {size_text(report.num_bytes)}"]
            if report.num_objects
            else []
        ),
        *([counted(report.num_tiles, "tile")] if report.num_tiles else []),
    ]
    state = f"; state {report.state[:12]}" if report.state else ""
    if report.counts:
        damage = ", ".join(f"{count:,} {damage}" for damage, count in report.counts.items())
        return f"damaged: {damage} (whole: {', '.join(read) or 'nothing'}{state})"
    return f"good: checked {', '.join(read) or 'nothing'}{state}{_unread(report, is_model=is_model)}"


def _unread(report: Report, *, is_model: bool) -> str:
    """What a deeper look would read."""
    if report.depth == "tensors" or (is_model and report.depth == "objects"):
        return ""
    if is_model:
        return ". Headers alone were read; --depth objects reads the tensors"
    if report.depth == "manifest":
        return ". Neither objects nor tensors were read; --depth objects and --depth tensors do"
    return ". Tensors were not rebuilt; --depth tensors does"


def _lines(summary: Summary) -> Iterator[str]:
    is_version = summary.step is not None
    on = f" on version {summary.parent.version}" if is_version and summary.parent else ""
    step = f", step {summary.step}" if is_version else ""
    made = f", made {summary.created_at}" if summary.created_at else ""
    was_there = ", there already" if summary.is_new is False else ""
    yield f"{summary.name}: {summary.kind}{on}{step}{made}{was_there}"
    if summary.state:
        before = f", made on {summary.parent.state[:12]}" if summary.parent else ""
        yield f"state     {summary.state[:12]}{before}"
    dtypes = ", ".join(f"{item.tensors} {dtype}" for dtype, item in summary.dtypes.items())
    elements = f"{counted(summary.elements, 'element')}, {size_text(summary.bytes)}"
    yield f"tensors   {summary.tensors:,} of {elements}: {dtypes or 'none'}"
    if summary.change is not None:
        yield from _change_lines(summary.change)
    if summary.object_bytes is not None and summary.manifest_bytes is not None:
        manifest = f"manifest {size_text(summary.manifest_bytes)}"
        yield f"objects   {len(summary.objects)} of {size_text(summary.object_bytes)}, {manifest}"
    if summary.quantizers:
        yield f"quantised by {', '.join(summary.quantizers)}"
    if summary.nans:
        yield f"NaN       written in {', '.join(map(plain, summary.nans))}"
    if summary.canary is not None:
        yield f"canary    {canary_text(summary.canary)}"
    if summary.files:
        yield f"files     {', '.join(sorted(summary.files))}"
    if summary.other_files:
        yield f"differs   {', '.join(summary.other_files)}: a delta carries tensors alone"


def _change_lines(change: ChangeSummary) -> Iterator[str]:
    yield (
        f"changed   {counted(change.elements, 'element')}, {change.density:.3%}: in "
        f"{counted(change.tensors, 'tensor')}, {counted(change.groups, 'group')}, {counted(change.tiles, 'tile')}"
    )
    encodings = ", ".join(f"{item.bodies:,} {name}" for name, item in change.encodings.items() if item.bodies)
    yield (
        f"bodies    {size_text(change.body_bytes)}, {change.bits_per_element:.2f} bits per changed element: "
        f"{encodings or 'none'}, {change.bundles:,} of several tiles"
    )


def _tensors(listed: Sequence[TensorSummary], *, is_delta: bool) -> Table:
    has_distance = any(item.distance is not None for item in listed)
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("tensor", overflow="fold")
    for name in ("dtype", "shape"):
        table.add_column(name)
    for name in [
        *(("changed", "of", "density") if is_delta else ("elements",)),
        *(["sum of distances"] if has_distance else []),
    ]:
        table.add_column(name, justify="right")
    if any(item.sum is not None for item in listed):
        table.add_column("element sum")
    for item in listed:
        table.add_row(*_row(item, is_delta=is_delta, has_distance=has_distance))
    return table


def _row(item: TensorSummary, *, is_delta: bool, has_distance: bool) -> list[str]:
    shape = "×".join(map(str, item.shape)) or "scalar"
    counts = [f"{item.changed:,}", f"{item.elements:,}", f"{item.density:.3%}"] if is_delta else [f"{item.elements:,}"]
    moved = [f"{item.distance or 0:,}"] if has_distance else []
    return [plain(item.name), item.dtype, shape, *counts, *moved, *([item.sum] if item.sum else [])]
