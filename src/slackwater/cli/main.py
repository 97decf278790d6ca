"""The ``slackwater`` command. Each verb imports what it composes only when it runs."""

import asyncio
import signal
import sys
from pathlib import Path
from typing import Annotated, Final, get_args

import typer

from slackwater.cli.doctor import doctor
from slackwater.cli.ending import Ending
from slackwater.cli.keys import keys_from
from slackwater.cli.options import (
    AsJson,
    BucketUrl,
    CallDeadline,
    CanaryFile,
    Host,
    LagLimit,
    LevelName,
    LoadDeadline,
    LoadPoll,
    MaxPromptTokens,
    MaxRequests,
    Old,
    OptionalBucket,
    Port,
    ReasoningParser,
    RunName,
    SignWith,
    Snapshot,
    Supervised,
    Threads,
    ToolParser,
    Top,
    Trust,
    WatchPoll,
)
from slackwater.cli.replica_command import replica
from slackwater.cli.text import plain
from slackwater.cli.typed import one_of, tell_version
from slackwater.config.process import GatewaySettings, parse_groups, parse_replicas
from slackwater.errors import SlackwaterError
from slackwater.ids import Version, run_id
from slackwater.publish.damage import Depth
from slackwater.telemetry import log

app = typer.Typer(
    name="slackwater",
    help="Rollouts for reinforcement learning: every step's weights, live; every token labelled.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)

_TERMINATED: Final = 128 + signal.SIGTERM
_FOLD_EVERY: Final = "Also make folds, one after every N versions, so that replicas that join late have less to read."

app.command()(doctor)
app.command()(replica)


@app.callback()
def slackwater(
    _version: Annotated[
        bool, typer.Option("--version", callback=tell_version, is_eager=True, help="Tell the version, and end.")
    ] = False,
) -> None:
    """Rollouts for reinforcement learning: every step's weights, live; every token labelled."""


@app.command(epilog="Example: slackwater publish ./model --bucket s3://bucket/prefix --run my-run --step 0")
def publish(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A Hugging Face folder with safetensors.")],
    bucket: BucketUrl,
    run: RunName,
    step: Annotated[int, typer.Option(min=0, help="The trainer's step, for people.")] = 0,
    anchor: Annotated[bool, typer.Option("--anchor", help="Publish an anchor even where a delta would do.")] = False,
    partial: Annotated[bool, typer.Option("--partial", help="Tensors that FOLDER lacks stay as they are.")] = False,
    files: Annotated[Path | None, typer.Option(help="Take config and tokenizer from this folder instead.")] = None,
    level: LevelName = "fast",
    threads: Annotated[int, typer.Option(min=1, max=256, help="Threads that encode and upload.")] = 2,
    fold_every: Annotated[int | None, typer.Option("--fold-every", metavar="N", min=1, help=_FOLD_EVERY)] = None,
    canary: CanaryFile = None,
    sign_with: SignWith = None,
    trust: Trust = None,
    as_json: AsJson = False,
) -> None:
    """Publish a folder as the run's next version: an anchor first, then deltas."""
    ending = Ending.watch(grace_s=0)
    log.configure("publish")
    from slackwater.cli.attended import attended
    from slackwater.cli.progress import Bars
    from slackwater.cli.publish import PublishSettings, fold_after, missing_directory, publish_folder
    from slackwater.cli.show import show_published

    settings = PublishSettings(
        level=level, threads=threads, files=files, canary=canary, sign_with=sign_with, trust=trust or ()
    )
    missing = missing_directory(bucket)
    with Bars() as bars:
        published = publish_folder(
            folder, bucket, run_id(run), settings, step=step, anchor=anchor, partial=partial, progress=bars.tell
        )
    show_published(published, missing, as_json=as_json)
    if fold_every is not None:
        with attended(ending) as work:
            fold_after(published, bucket, settings, fold_every, work, is_told=not as_json)


@app.command(epilog="Example: slackwater diff ./old ./new --out ./delta")
def diff(
    old: Old,
    new: Annotated[str, typer.Argument(metavar="NEW", help="The state after, named likewise.")],
    bucket: OptionalBucket = None,
    trust: Trust = None,
    out: Annotated[Path | None, typer.Option(help="Delta folder to make.")] = None,
    level: LevelName = "fast",
    partial: Annotated[bool, typer.Option("--partial", help="Tensors that NEW lacks stay as they are.")] = False,
    threads: Threads = 2,
    top: Top = 10,
    as_json: AsJson = False,
) -> None:
    """Compare two states: density, bytes, bits per changed element, the tensors that change most."""
    ending = Ending.watch(grace_s=0)
    log.configure("diff")
    from slackwater.cli.attended import attended
    from slackwater.cli.diff import DiffSettings, diff_states
    from slackwater.cli.snapshot import Shelf
    from slackwater.cli.tables import show_summary

    settings = DiffSettings(out=out, level=level, threads=threads, partial=partial)
    with attended(ending) as work:
        summary = diff_states(old, new, settings, Shelf(bucket, work, threads, trust or ()), work)
    show_summary(summary, top, as_json=as_json)


@app.command(epilog="Example: slackwater apply ./old ./delta --out ./new")
def apply(
    old: Old,
    delta: Annotated[
        str, typer.Argument(metavar="DELTA", help="A delta folder, or run/13 or run/12..20 with --bucket.")
    ],
    bucket: OptionalBucket = None,
    trust: Trust = None,
    out: Annotated[Path | None, typer.Option(help="Model folder to make.")] = None,
    in_place: Annotated[bool, typer.Option("--in-place", help="Change OLD itself, which is a folder.")] = False,
    threads: Threads = 2,
) -> None:
    """Apply a delta: make a new model folder, or change the old one where it lies."""
    if in_place == (out is not None):
        raise typer.BadParameter("exactly one of --out and --in-place is needed")
    ending = Ending.watch(grace_s=0)
    log.configure("apply")
    from slackwater.cli.apply import apply_in_place, apply_to_copy
    from slackwater.cli.attended import attended
    from slackwater.cli.snapshot import Shelf
    from slackwater.cli.tables import show_applied

    with attended(ending) as work:
        shelf = Shelf(bucket, work, threads, trust or ())
        if out is not None:
            shelf.check_base(old, delta, may_be_after=True)
        if out is None:
            applied = apply_in_place(Path(old), shelf.delta(delta), threads=threads, work=work)
        else:
            applied = apply_to_copy(shelf.state(old), shelf.delta(delta), out, threads=threads, work=work)
    show_applied(applied)


@app.command(epilog="Example: slackwater fold run/3..7 --bucket s3://bucket/prefix")
def fold(
    names: Annotated[
        list[str],
        typer.Argument(metavar="DELTA...", help="Deltas in a row, the oldest first; or run/3..7 with --bucket."),
    ],
    bucket: OptionalBucket = None,
    trust: Trust = None,
    base: Annotated[str | None, typer.Option(help="The state that the first delta was made on.")] = None,
    out: Annotated[Path | None, typer.Option(help="Delta folder to make.")] = None,
    level: LevelName = "fast",
    sign_with: SignWith = None,
    threads: Threads = 2,
    top: Top = 10,
    as_json: AsJson = False,
) -> None:
    """Make one delta of several: a folder, or run/3..7 in the bucket, beside the run's versions."""
    ending = Ending.watch(grace_s=0)
    log.configure("fold")
    from slackwater.cli.attended import attended
    from slackwater.cli.diff import DiffSettings
    from slackwater.cli.fold import fold_folders, fold_in_bucket
    from slackwater.cli.snapshot import FoldName, Shelf
    from slackwater.cli.tables import show_summary

    settings = DiffSettings(out=out, level=level, threads=threads, sign_with=sign_with, trust=trust or ())
    with attended(ending) as work:
        shelf = Shelf(bucket, work, threads, trust or ())
        first = shelf.name(names[0])
        if isinstance(first, FoldName) and len(names) == 1 and base is None and out is None:
            summary = fold_in_bucket(first, settings, shelf, work)
        elif base is not None and out is not None and sign_with is None:
            summary = fold_folders(names, base, settings, shelf, work)
        else:
            raise typer.BadParameter(
                "name deltas with --base and --out, or one run/3..7 with --bucket, which can be signed"
            )
    show_summary(summary, top, as_json=as_json)


@app.command(name="inspect", epilog="Example: slackwater inspect run/12 --bucket s3://bucket/prefix")
def inspect_(
    snapshot: Snapshot,
    bucket: OptionalBucket = None,
    trust: Trust = None,
    base: Annotated[
        str | None,
        typer.Option(help="The state before a delta: also tells how far each tensor's elements move, added up."),
    ] = None,
    threads: Threads = 2,
    top: Top = 10,
    as_json: AsJson = False,
) -> None:
    """Tell what a snapshot holds, from its manifest alone."""
    ending = Ending.watch(grace_s=0)
    log.configure("inspect")
    from slackwater.cli.attended import attended
    from slackwater.cli.inspect import inspect_snapshot
    from slackwater.cli.snapshot import Shelf
    from slackwater.cli.tables import show_summary

    with attended(ending) as work:
        summary = inspect_snapshot(snapshot, base, threads, Shelf(bucket, work, threads, trust or ()), work)
    show_summary(summary, top, as_json=as_json)


@app.command(epilog="Example: slackwater verify run/12 --bucket s3://bucket/prefix --depth tensors")
def verify(
    snapshot: Snapshot,
    bucket: OptionalBucket = None,
    trust: Trust = None,
    depth: Annotated[
        Depth,
        typer.Option(parser=one_of(*get_args(Depth)), metavar="|".join(get_args(Depth)), help="How much is read."),
    ] = "objects",
    base: Annotated[
        str | None, typer.Option(help="The state that a delta folder was made on, for --depth tensors.")
    ] = None,
    threads: Threads = 2,
    as_json: AsJson = False,
) -> None:
    """Check a snapshot and list all damage. Status 0: none; 3 to 8: a status for each class, see docs/errors.md."""
    ending = Ending.watch(grace_s=0)
    log.configure("verify")
    from slackwater.cli.attended import attended
    from slackwater.cli.snapshot import Shelf
    from slackwater.cli.tables import show_report
    from slackwater.cli.verify import status_of, verify_snapshot

    with attended(ending) as work:
        shelf = Shelf(bucket, work, threads, trust or ())
        report = verify_snapshot(snapshot, base, depth, threads=threads, shelf=shelf, work=work)
    show_report(snapshot, report, as_json=as_json)
    raise typer.Exit(status_of(report))


@app.command(name="log", epilog="Example: slackwater log --bucket s3://bucket/prefix --run my-run --limit 20")
def history(
    bucket: BucketUrl,
    run: RunName,
    limit: Annotated[int | None, typer.Option(min=1, help="Versions to show, counted from the newest.")] = None,
    trust: Trust = None,
    as_json: AsJson = False,
) -> None:
    """List a run's versions, the newest last: kind, bytes, density, encodings, step, age. Reads manifests alone."""
    Ending.watch(grace_s=0)
    log.configure("log")
    from slackwater.cli.history import show_history

    show_history(bucket, run_id(run), limit=limit, as_json=as_json, trust=trust or ())


@app.command(epilog="Example: slackwater pull my-run/12 ./model --bucket s3://bucket/prefix")
def pull(
    version: Annotated[str, typer.Argument(help="A version: run/12.")],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder to make; it must not be there.")],
    bucket: BucketUrl,
    trust: Trust = None,
    threads: Threads = 2,
) -> None:
    """Make a version an ordinary Hugging Face folder: whole and verified, or none."""
    ending = Ending.watch(grace_s=0)
    log.configure("pull")
    from slackwater.cli.attended import attended
    from slackwater.cli.pull import pull_version, show_pulled

    with attended(ending) as work:
        pulled = pull_version(version, folder, bucket, threads=threads, work=work, trust=trust or ())
    show_pulled(pulled)


@app.command(epilog="Example: slackwater gc --bucket s3://bucket/prefix --run my-run --keep 20")
def gc(
    bucket: BucketUrl,
    run: RunName,
    keep: Annotated[int, typer.Option(min=1, help="Newest versions to keep, with what leads to them.")] = 100,
    keep_anchors: Annotated[int, typer.Option("--keep-anchors", min=1, help="Newest anchors to keep.")] = 2,
    pin: Annotated[list[int] | None, typer.Option(min=0, help="A version to keep; repeat for each.")] = None,
    min_age: Annotated[str, typer.Option("--min-age", help="Nothing younger goes: 24h, 90min, 7d.")] = "24h",
    delete: Annotated[bool, typer.Option("--delete", help="Delete it; without this nothing is written.")] = False,
    trust: Trust = None,
    as_json: AsJson = False,
) -> None:
    """Tell what of a run may be deleted, and with --delete delete it: old versions, what dead publishers left."""
    ending = Ending.watch(grace_s=0)
    log.configure("gc")
    from slackwater.cli.attended import attended
    from slackwater.cli.gc import collect_garbage, parse_age, show_garbage
    from slackwater.publish.retention import Policy

    policy = Policy(
        keep_last=keep, keep_anchors=keep_anchors, min_age_s=parse_age(min_age), pinned=[*map(Version, pin or ())]
    )
    with attended(ending) as work:
        garbage = collect_garbage(bucket, run_id(run), policy, delete=delete, work=work, trust=trust or ())
    show_garbage(garbage, as_json=as_json)


@app.command(epilog="Example: slackwater rollback --bucket s3://bucket/prefix --run my-run --to 12")
def rollback(
    bucket: BucketUrl,
    run: RunName,
    to: Annotated[int, typer.Option("--to", min=0, help="The version to go back to.")],
    anchor: Annotated[bool, typer.Option("--anchor", help="Publish an anchor: also where the head is broken.")] = False,
    level: LevelName = "fast",
    sign_with: SignWith = None,
    trust: Trust = None,
    threads: Threads = 2,
    as_json: AsJson = False,
) -> None:
    """Publish the state of an old version once more, as the newest: replicas just follow."""
    ending = Ending.watch(grace_s=0)
    log.configure("rollback")
    from slackwater.cli.attended import attended
    from slackwater.cli.publish import PublishSettings
    from slackwater.cli.rollback import roll_back
    from slackwater.cli.show import show_published

    settings = PublishSettings(level=level, threads=threads, sign_with=sign_with, trust=trust or ())
    with attended(ending) as work:
        published = roll_back(bucket, run_id(run), Version(to), settings, anchor=anchor, work=work)
    show_published(published, None, as_json=as_json)


@app.command()
def gateway(
    bucket: BucketUrl,
    run: RunName,
    replica_urls: Annotated[
        list[str], typer.Option("--replica", help="name=http://host:port of a replica; repeat for each.")
    ],
    tokenizer: Annotated[Path, typer.Option(help="Folder with the model's tokenizer and chat template.")],
    model: Annotated[str, typer.Option(help="Name under which the fleet serves.")] = "policy",
    group: Annotated[list[str] | None, typer.Option(help="NAME=MODE:REPLICA,…; repeat for each.")] = None,
    ledger: Annotated[Path | None, typer.Option(help="File that keeps hot-loads over restarts.")] = None,
    deadline: LoadDeadline = 600.0,
    poll: LoadPoll = 0.1,
    watch: WatchPoll = 2.0,
    call_deadline: CallDeadline = 5.0,
    lag_limit: LagLimit = 60.0,
    max_requests: MaxRequests = 1024,
    max_prompt_tokens: MaxPromptTokens = None,
    tool_parser: ToolParser = "auto",
    reasoning_parser: ReasoningParser = "auto",
    host: Host = "127.0.0.1",
    port: Port = 8000,
    trust: Trust = None,
    supervised: Supervised = False,
) -> None:
    """Serve the OpenAI-compatible API over replicas, hot-load routes included. Keys come from the environment."""
    ending = Ending.watch(supervised=supervised)
    log.configure("gateway")
    settings = GatewaySettings(
        replicas=parse_replicas(replica_urls), groups=parse_groups(group or (), run_id(run)), tokenizer=tokenizer,
        bucket=bucket, run=run_id(run), model=model, host=host, port=port, trust=trust or (), ledger=ledger,
        deadline_s=deadline, poll_s=poll, watch_s=watch, call_s=call_deadline, lag_limit_s=lag_limit,
        tool_parser=tool_parser, reasoning_parser=reasoning_parser, max_requests=max_requests,
        max_prompt_tokens=max_prompt_tokens,
    )  # fmt: skip
    keys = keys_from()
    from slackwater.cli.gateway import run_gateway

    asyncio.run(run_gateway(settings, keys, ending))


@app.command(hidden=True)
def train(
    bucket: BucketUrl,
    run: RunName,
    gateway_url: Annotated[str, typer.Option("--gateway")],
    model_folder: Annotated[Path, typer.Option("--model-folder")],
    record: Annotated[Path, typer.Option()],
    steps: Annotated[int, typer.Option(min=1)],
    seed: Annotated[int, typer.Option()] = 0,
    threads: Annotated[int, typer.Option(min=1)] = 2,
    toy: Annotated[bool, typer.Option("--toy")] = False,
    supervised: Supervised = False,
) -> None:
    """Run the demo's trainer; its events go to standard output."""
    Ending.watch(supervised=supervised)
    from slackwater.cli.demo.train import TrainSettings, run_trainer

    log.configure("trainer")
    settings = TrainSettings(
        bucket=bucket, run=run_id(run), gateway=gateway_url, model_folder=model_folder, record=record, steps=steps,
        seed=seed, threads=threads, toy=toy,
    )  # fmt: skip
    asyncio.run(run_trainer(settings, keys_from()))


@app.command()
def replay(
    record: Annotated[Path, typer.Argument(help="rollouts.jsonl of a run.")],
    bucket: BucketUrl,
    run: RunName,
    replica_name: Annotated[str | None, typer.Option("--replica", help="Only this replica's answers.")] = None,
    slots: Annotated[int, typer.Option(min=1, help="As the replicas had.")] = 16,
    threads: Annotated[int, typer.Option(min=1, help="As the replicas had.")] = 1,
    window: Annotated[int, typer.Option(min=32, help="As the replicas had.")] = 1024,
    cache: Annotated[Path | None, typer.Option(help="Where verified bytes are kept.")] = None,
    trust: Trust = None,
    supervised: Supervised = False,
) -> None:
    """Re-score a run's rollouts under the policy versions that they claim, and once more with shifted labels."""
    Ending.watch(supervised=supervised)
    from slackwater.cli.replay import ReplaySettings, run_replay

    log.configure("replay")
    run_replay(
        ReplaySettings(
            record=record,
            bucket=bucket,
            run=run_id(run),
            replica=replica_name,
            slots=slots,
            threads=threads,
            window=window,
            cache=cache,
            trust=trust or (),
        )
    )


@app.command()
def demo(
    steps: Annotated[int | None, typer.Option(min=1, max=200, help="12, of a toy 48.", show_default=False)] = None,
    toy: Annotated[bool, typer.Option("--toy", help="Train a tiny random mixture of experts instead.")] = False,
    bucket: Annotated[str | None, typer.Option(help="Bucket to publish to; by default a directory of the run.")] = None,
    out: Annotated[Path, typer.Option(help="Where report, logs and record go.")] = Path("out/demo"),
    seed: Annotated[int, typer.Option(help="Of prompts and sampling.")] = 0,
    plain: Annotated[bool, typer.Option("--plain", help="Lines instead of a live view.")] = False,
) -> None:
    """Train a real small model, or a toy, with RL against a real rollout fleet on this machine."""
    from slackwater.cli.demo.cast import DemoSettings
    from slackwater.cli.demo.run import run_demo

    log.configure("demo")
    default = 48 if toy else 12
    settings = DemoSettings(steps=steps or default, bucket=bucket, out=out, seed=seed, toy=toy, plain=plain)
    try:
        raise SystemExit(asyncio.run(run_demo(settings)))
    except asyncio.CancelledError:  # by SIGTERM; its children have ended
        raise SystemExit(_TERMINATED) from None


def main() -> None:
    """Run the command: an error is one line and status 1, wrong usage is status 2."""
    try:
        app(prog_name="slackwater")
    except SlackwaterError as error:
        sys.stderr.write(f"slackwater: {plain(str(error))}\n")
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
