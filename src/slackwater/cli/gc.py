"""``slackwater gc``: what of a run may be deleted, and with ``--delete`` its deletion."""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Final

from slackwater.bucket.base import Delete
from slackwater.bucket.open import open_bucket
from slackwater.cli.attended import Attended
from slackwater.cli.text import console, size_text, write_json
from slackwater.clock import Clock, SystemClock
from slackwater.errors import InvalidInputError, UnsupportedError
from slackwater.ids import RunId, Version
from slackwater.publish.gc import Collected, collect, point_at_head, survey
from slackwater.publish.retention import GcPlan, Policy, plan_gc

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
    url: str, run: RunId, policy: Policy, *, delete: bool, work: Attended, clock: Clock | None = None
) -> Garbage:
    """Plan a collection, and with ``delete`` make it.

    Args:
        url: The bucket's.
        run: The run.
        policy: What to keep.
        delete: Whether anything is written or deleted. Ages are measured by the store's clock then, else by ours.
        work: The command's bars.
        clock: Ours.

    Raises:
        NotFoundError: The run has no versions.
        ConflictError: The listing can't be right.
        CorruptError: A manifest can't be read, or the head's chain isn't whole.
        UnsupportedError: The bucket can't delete.
        AuthError: The credentials may not.
    """
    bucket = open_bucket(url)
    if not delete:
        now_s = (clock or SystemClock()).wall()
        plan = plan_gc(survey(bucket, run, now_s=now_s, progress=work.tell), policy)
        return Garbage(run=run, plan=plan, collected=None)
    if not isinstance(bucket, Delete):
        raise UnsupportedError(f"{bucket.url} can't delete objects")
    point_at_head(bucket, run)
    plan = plan_gc(survey(bucket, run, now_s=None, progress=work.tell), policy)
    return Garbage(run=run, plan=plan, collected=collect(bucket, run, plan, threads=_THREADS, progress=work.tell))


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
            "collected": None if collected is None else asdict(collected),
        }
        write_json(value)
        return
    out = console()
    for item in plan.delete[:_SHOWN]:
        out.print(f"{item.why:<9} {item.key}  {size_text(item.size)}", soft_wrap=True)
    if len(plan.delete) > _SHOWN:
        out.print(f"… and {len(plan.delete) - _SHOWN:,} more: --json lists all")
    kept = sum(item.size for item in plan.keep)
    reasons = Counter(plan.versions.values())
    out.print(
        f"stays     {_ranges([*plan.versions])} of {garbage.run}, {size_text(kept)}: "
        + ", ".join(f"{number} {reason}" for reason, number in reasons.items()),
        soft_wrap=True,
    )
    counts = Counter(item.why for item in plan.delete)
    what = ", ".join(f"{number:,} {why}s" if number > 1 else f"1 {why}" for why, number in counts.items()) or "nothing"
    if collected is None:
        out.print(f"would go  {what}, {size_text(plan.num_bytes)}", soft_wrap=True)
        if plan.delete:
            out.print("nothing was deleted: --delete does it")
        return
    out.print(f"gone      {what}, {size_text(collected.num_bytes)}", soft_wrap=True)
    for key in collected.spared:
        out.print(f"spared    {key}: a version published meanwhile needs it", soft_wrap=True)


def _ranges(versions: list[Version]) -> str:
    """Numbers in short."""
    found: list[list[Version]] = []
    for version in versions:
        if found and version == found[-1][-1] + 1:
            found[-1].append(version)
        else:
            found.append([version])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in found)
