"""``slackwater doctor``: what a bucket and these credentials can carry."""

import json
import sys
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from slackwater.bucket.open import open_bucket
from slackwater.bucket.patience import BRISK
from slackwater.bucket.selftest import Examination, examine
from slackwater.bucket.verdict import Mode, Outcome, Ruling, Verdict, judge
from slackwater.cli.ending import Ending
from slackwater.clock import SystemClock
from slackwater.telemetry import log

_COLORS: Final = {
    Outcome.OK: "green",
    Outcome.WRONG: "red",
    Outcome.DENIED: "yellow",
    Outcome.UNSUPPORTED: "yellow",
    Outcome.UNTRIED: "dim",
}


def doctor(
    url: Annotated[str, typer.Argument(metavar="URL", help="s3://bucket/prefix, gs://…, az://…, or a directory.")],
    mode: Annotated[Mode, typer.Option(help="What is wanted of the bucket; status 1 where it can't carry that.")] = (
        Mode.PUBLISH
    ),
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of a table.")] = False,
) -> None:
    """Ask a bucket what it and these credentials can carry, with one small object of its own."""
    Ending.watch()
    log.configure("doctor")
    report(url, mode=mode, as_json=as_json)


def report(url: str, *, mode: Mode, as_json: bool) -> None:
    """Examine a bucket and print what it can carry.

    Args:
        url: As `open_bucket` takes it; a missing directory is not made.
        mode: What is wanted of the bucket.
        as_json: Print one JSON object on one line instead of a table.

    Raises:
        InvalidInputError: The URL is none, or the environment's settings don't fit together.
        NotFoundError: No such bucket.
        UnavailableError: The store doesn't answer.
        AuthError: After the report: the credentials lack a right that ``mode`` needs.
        UnsupportedError: After the report: the store can't carry ``mode``.
    """
    bucket = open_bucket(url, patience=BRISK)
    examination = examine(bucket, SystemClock())
    verdict = judge(examination.findings)
    if as_json:
        sys.stdout.write(json.dumps(_as_json(bucket.url, verdict, examination)) + "\n")
    else:
        _show(bucket.url, verdict, examination)
    verdict.require(mode, bucket.url)


def _as_json(url: str, verdict: Verdict, examination: Examination) -> dict[str, object]:
    return {
        "url": url,
        **{mode.value: verdict.carries(mode) for mode in Mode},
        "left": examination.left,
        "probes": [
            {
                "probe": ruling.finding.probe,
                "outcome": ruling.finding.outcome,
                "detail": ruling.finding.detail,
                "stops": sorted(ruling.stops),
                "means": ruling.means,
                "advice": ruling.advice,
            }
            for ruling in verdict.rulings
        ],
    }


def _show(url: str, verdict: Verdict, examination: Examination) -> None:
    console = Console()
    table = Table(title=escape(url), title_justify="left", box=None, pad_edge=False)
    for column in ("probe", "outcome", "what it means"):
        table.add_column(column, overflow="fold")
    for ruling in verdict.rulings:
        outcome = ruling.finding.outcome
        table.add_row(ruling.finding.probe, f"[{_COLORS[outcome]}]{outcome}[/]", escape(_meaning(ruling)))
    console.print(table)
    for mode in Mode:
        console.print(f"{mode}: {'yes' if verdict.carries(mode) else 'no'}", highlight=False)
    if examination.left is not None:
        console.print(
            f"left behind, since it can't be deleted: {escape(examination.left)}", soft_wrap=True, highlight=False
        )


def _meaning(ruling: Ruling) -> str:
    words = (ruling.finding.detail, ruling.means, ruling.advice and f"to do: {ruling.advice}")
    return "; ".join(word for word in words if word)
