"""``slackwater gc``: what of a run may be deleted or aborted, and with ``--delete`` its end."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from rich.console import Console

from slackwater.bucket.base import Delete, Unfinished
from slackwater.bucket.open import open_bucket
from slackwater.cli.absent import telling_absent
from slackwater.cli.attended import Attended
from slackwater.cli.history import spell_age
from slackwater.cli.text import console, counted, plain, size_text, write_json
from slackwater.cli.trust import trusting
from slackwater.clock import Clock, SystemClock
from slackwater.errors import InvalidInputError, UnsupportedError
from slackwater.ids import RunId, Version
from slackwater.publish.gc import Collected, collect, point_at_head, survey
from slackwater.publish.retention import Contents, GcPlan, Policy, plan_gc

LEAST_AGE_S: Final = 3600.0
"""No smaller minimum age is taken: objects of a version lie there before its manifest does."""

_SHOWN: Final = 20
_THREADS: Final = 8
_UNITS: Final[Mapping[str, float]] = {"s": 1, "min": 60, "m": 60, "h": 3600, "d": 86_400}
_AGE: Final = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)(s|min|m|h|d)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Garbage:
    """What was planned, and what came of it."""

    run: RunId
    plan: GcPlan
    now_s: float
    """Seconds since the epoch, by the clock of the plan's ages."""
    blind: str | None
    """Why unfinished uploads weren't looked for; None: they were."""
    collected: Collected | None
    """None: nothing was deleted, nor was it to be."""


def parse_age(text: str) -> float:
    """Read an age: ``24h``, ``90min``, ``7d``.

    Returns:
        Seconds.

    Raises:
        InvalidInputError: It is none, or less than `LEAST_AGE_S`.
    """
    found = _AGE.fullmatch(text)
    seconds = float(found[1]) * _UNITS[found[2]] if found else 0.0
    if seconds < LEAST_AGE_S:
        raise InvalidInputError(
            f"{text[:40]!r} is no minimum age",
            hint="write 24h, 90min or 7d; 1h or more, and longer than a publish takes",
        )
    return seconds


def collect_garbage(
    url: str,
    run: RunId,
    policy: Policy,
    *,
    delete: bool,
    work: Attended,
    trust: Sequence[Path] = (),
    clock: Clock | None = None,
) -> Garbage:
    """Plan a collection, and with ``delete`` make it.

    Args:
        url: The bucket's.
        run: The run.
        policy: What to keep.
        delete: Whether anything is written or deleted. Ages are measured by the store's clock then, else by ours.
        work: The command's bars.
        trust: Files of the public keys that must have signed every version and fold; none takes all.
        clock: Ours.

    Raises:
        NotFoundError: The run has no versions.
        ConflictError: The listing can't be right.
        CorruptError: A manifest can't be read, no trusted key signed it, or the head's chain isn't whole.
        InvalidInputError: A key file is wrong.
        UnsupportedError: The bucket can't delete.
        AuthError: The credentials may not.
    """
    bucket = open_bucket(url)
    signed = trusting(bucket, trust)
    if not delete:
        with telling_absent(bucket, run):
            now_s = (clock or SystemClock()).wall()
            contents = survey(bucket, run, now_s=now_s, progress=work.tell, manifests_from=signed)
            return _garbage(contents, plan_gc(contents, policy), None)
    if not isinstance(bucket, Delete):
        raise UnsupportedError(f"{bucket.url} can't delete objects")
    with telling_absent(bucket, run):
        point_at_head(bucket, run)
    contents = survey(bucket, run, now_s=None, progress=work.tell, manifests_from=signed)
    plan = plan_gc(contents, policy)
    return _garbage(contents, plan, collect(bucket, run, plan, threads=_THREADS, progress=work.tell))


def _garbage(contents: Contents, plan: GcPlan, collected: Collected | None) -> Garbage:
    return Garbage(run=contents.run, plan=plan, now_s=contents.now_s, blind=contents.blind, collected=collected)


def show_garbage(garbage: Garbage, *, as_json: bool) -> None:
    """Print what goes, and how much: the first keys, or all of them as JSON."""
    plan, collected = garbage.plan, garbage.collected
    if as_json:
        value = {
            "run": garbage.run,
            "bytes": plan.num_bytes,
            "versions": [{"version": version, "reason": reason} for version, reason in plan.versions.items()],
            "delete": [asdict(item) for item in plan.delete],
            "keep": [asdict(item) for item in plan.keep],
            "abort": [asdict(upload) for upload in plan.abort],
            "underway": [asdict(upload) for upload in plan.underway],
            "blind": garbage.blind,
            "collected": None if collected is None else asdict(collected),
        }
        write_json(value)
        return
    out = console()
    for item in plan.delete[:_SHOWN]:
        out.print(f"{item.why:<9} {item.key}  {size_text(item.size)}", soft_wrap=True)
    if len(plan.delete) > _SHOWN:
        out.print(f"… and {len(plan.delete) - _SHOWN:,} more: --json lists all")
    _show_unfinished(out, garbage)
    kept = sum(item.size for item in plan.keep)
    reasons = Counter(plan.versions.values())
    out.print(
        f"stays     {_ranges([*plan.versions])} of {garbage.run}, {size_text(kept)}: "
        + ", ".join(f"{number} {reason}" for reason, number in reasons.items()),
        soft_wrap=True,
    )
    if collected is None:
        out.print(f"would go  {_sum(plan, plan.num_bytes)}", soft_wrap=True)
        if plan.delete or plan.abort:
            out.print("nothing was deleted: --delete does it")
        return
    out.print(f"gone      {_sum(plan, collected.num_bytes)}", soft_wrap=True)
    for key in collected.spared:
        out.print(f"spared    {key}: a version published meanwhile needs it", soft_wrap=True)


def _show_unfinished(out: Console, garbage: Garbage) -> None:
    plan = garbage.plan
    for upload in plan.abort[:_SHOWN]:
        out.print(f"unfinished upload {upload.key} {_started(upload, garbage.now_s)}", soft_wrap=True)
    for upload in plan.underway[:_SHOWN]:
        out.print(f"unfinished upload {upload.key} {_started(upload, garbage.now_s)}: stays", soft_wrap=True)
    hidden = sum(max(0, len(uploads) - _SHOWN) for uploads in (plan.abort, plan.underway))
    if hidden:
        out.print(f"… and {counted(hidden, 'more unfinished upload')}: --json lists all")
    if garbage.blind is not None:
        out.print(f"not looked for: {plain(garbage.blind)}", soft_wrap=True)


def _started(upload: Unfinished, now_s: float) -> str:
    if upload.started_s is None:
        return "started who knows when"
    return f"started {spell_age(max(0.0, now_s - upload.started_s))} ago"


def _sum(plan: GcPlan, num_bytes: int) -> str:
    """How large uploads are is told by no listing."""
    kinds = Counter(item.why for item in plan.delete)
    objects = [*(counted(number, what) for what, number in kinds.items()), size_text(num_bytes)] if kinds else []
    uploads = [counted(len(plan.abort), "unfinished upload")] if plan.abort else []
    return ", ".join([*objects, *uploads]) or f"nothing, {size_text(0)}"


def _ranges(versions: list[Version]) -> str:
    """Numbers in short."""
    found: list[list[Version]] = []
    for version in versions:
        if found and version == found[-1][-1] + 1:
            found[-1].append(version)
        else:
            found.append([version])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in found)
