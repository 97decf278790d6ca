"""The benchmark of publishing: `make bench-publish`. What a trainer waits for, sends and holds; crashes and races.

Data: a real AdamW step of `deltas`, and copies of it that make a model of two thousand million parameters. They are
published to moto, an S3 server in Python, over loopback: bytes cross a socket, and the server is the slow part of a
full checkpoint. A delta is compared with a plain write of the same files, not with our anchor, which takes longer. The
last line is one JSON object.
"""

import argparse
import logging
import os
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import msgspec

import deltas
import measure
import pairs
import publish_cost
import publish_models
import publish_proofs
import tables
from claims import PUBLISH_AT_MOST, Claim, claim, line
from publish_cost import Cost
from store_servers import S3_ENVIRONMENT, s3_server

USUAL: Final = "p142"
"""The set that is published."""
_BUCKET: Final = "bench"
_MEGA: Final = 1e6
_OF_SPEED: Final = frozenset({"blocked_vs_memcpy", "delta_vs_full_seconds"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """How much is measured."""

    copies: int = 15
    """Of SmolLM2-135M in the larger model: 2.0e9 parameters."""
    runs: int = 5
    """Deltas that are timed."""
    crashes: int = 204
    """Four at each place."""
    races: int = 1000


QUICK: Final = Scale(copies=2, runs=1, crashes=8, races=6)
"""Enough to see that everything works."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """Everything that was measured."""

    costs: tuple[Cost, ...]
    torn_reads: int
    lost_races: int


def run(pair: pairs.Pair, work: Path, scale: Scale, show: Callable[[object], None]) -> Measured:
    """Measure everything.

    Args:
        pair: A bf16 model before and after a step.
        work: A folder on a disk, for the models.
        scale: How much.
        show: Takes the table of costs when it is done.
    """
    work.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=work) as scratch:
        root = Path(scratch)
        costs = (
            _cost(root, pair, "small", 1, scale.runs),
            _cost(root, pair, "large", scale.copies, scale.runs),
        )
        show(tables.published(costs))
        (root / "crashes").mkdir()
        torn = publish_proofs.torn_reads(root / "crashes", scale.crashes)
        lost = publish_proofs.lost_races(root, scale.races)
    return Measured(costs=costs, torn_reads=torn, lost_races=lost)


def _cost(root: Path, pair: pairs.Pair, name: str, copies: int, runs: int) -> Cost:
    """Of one model, measured in a process of its own, against a server of its own."""
    model = publish_models.make(root, name, pair, copies)
    with _store(root / name) as environment:
        task = publish_cost.Task(
            name=name, before=str(model.before), after=str(model.after), url=f"s3://{_BUCKET}/", runs=runs
        )
        command = [sys.executable, str(Path(publish_cost.__file__)), msgspec.json.encode(task).decode()]
        found = subprocess.run(command, check=True, stdout=subprocess.PIPE, env=environment).stdout
    return msgspec.json.decode(found, type=Cost)


@contextmanager
def _store(scratch: Path) -> Generator[dict[str, str]]:
    """An S3 server with one bucket, which keeps large objects in a folder; the environment that leads to it."""
    before = os.environ.get("TMPDIR")
    os.environ["TMPDIR"] = str(scratch)  # the server's, which inherits it
    try:
        with s3_server() as endpoint:
            urllib.request.urlopen(urllib.request.Request(f"{endpoint}/{_BUCKET}", method="PUT")).close()
            yield {**os.environ, **S3_ENVIRONMENT, "AWS_ENDPOINT_URL": endpoint}
    finally:
        if before is None:
            del os.environ["TMPDIR"]
        else:
            os.environ["TMPDIR"] = before


def claims(measured: Measured) -> list[Claim]:
    """What the measurements say, by name; of what is held to a target, the worse of both models."""
    costs = measured.costs
    held = {
        "blocked_vs_memcpy": max(cost.blocked_s / cost.copy_s for cost in costs),
        "uploaded_vs_encoded": max(cost.uploaded / cost.encoded for cost in costs),
        "delta_vs_full_seconds": max(cost.delta_s / cost.full_s for cost in costs),
        "extra_mb": max(cost.extra for cost in costs) / _MEGA,
        "torn_reads": measured.torn_reads,
        "lost_races_mixed": measured.lost_races,
    }
    told = [item for cost in costs for item in _told(cost)]
    return [*told, *(claim(name, value, PUBLISH_AT_MOST) for name, value in held.items())]


def _told(cost: Cost) -> list[Claim]:
    values = {
        "model_mb": cost.num_bytes / _MEGA,
        "changed_share": cost.share,
        "anchor_mb": cost.anchor_uploaded / _MEGA,
        "anchor_seconds": cost.anchor_s,
        "full_seconds": cost.full_s,
        "delta_mb": cost.uploaded / _MEGA,
        "delta_seconds": cost.delta_s,
        "blocked_seconds": cost.blocked_s,
        "memcpy_seconds": cost.copy_s,
        "memcpy_threads_seconds": cost.copy_threads_s,
        "anchor_anon_mb": cost.anchor_extra / _MEGA,
        "delta_anon_mb": cost.delta_extra / _MEGA,
        "peak_resident_mb": cost.most / _MEGA,
    }
    return [Claim(name=f"{cost.name}_{name}", value=value) for name, value in values.items()]


def main() -> None:
    """Measure, print tables, and print the claims as the last line."""
    parser = argparse.ArgumentParser(description="measure publishing to an S3 server over loopback; crashes and races")
    parser.add_argument("--quick", action="store_true", help="a little of everything: to see that it works")
    quick = parser.parse_args().quick
    logging.getLogger("slackwater").setLevel(logging.ERROR)  # the states that crash hold NaN on purpose
    folder = deltas.ensure(lambda text: print(text, file=sys.stderr, flush=True))
    show = tables.printer()
    before = measure.load()
    show(measure.machine())
    found = claims(run(pairs.load(USUAL), folder.parent, QUICK if quick else Scale(), show))
    if quick:  # speeds of one run are no speeds
        found = [replace(item, target=None) if item.name in _OF_SPEED else item for item in found]
    show(f"load average over a minute: {before:.2f} before, {measure.load():.2f} after")
    show(tables.claims(found))
    print(line("publish", found))


if __name__ == "__main__":
    main()
