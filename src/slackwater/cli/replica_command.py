"""The command line of `slackwater replica`. What it composes is imported when it runs."""

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from slackwater.cli.ending import Ending
from slackwater.cli.keys import keys_from
from slackwater.cli.options import (
    BucketUrl,
    Host,
    MaxPromptTokens,
    MaxRequests,
    MaxWaiting,
    Port,
    ReasoningParser,
    RunName,
    Supervised,
    ToolParser,
    Trust,
)
from slackwater.cli.typed import one_of
from slackwater.config.in_flight import InFlight
from slackwater.config.process import ReplicaSettings, SwapSettings
from slackwater.ids import ReplicaId, run_id
from slackwater.telemetry import log

_DAY = 86_400.0
_MODES = tuple(mode.value for mode in InFlight)

BatchInvariant = Annotated[
    bool, typer.Option("--batch-invariant", help="Let no bit of an answer depend on who else is served; slower.")
]
KvTokens = Annotated[
    int | None,
    typer.Option(min=32, help="Positions of KV in use, at most; answers take turns. [default: slots times window]"),
]
Strict = Annotated[
    bool, typer.Option("--strict", help="Compare all bits of a swap in its pause, before the version serves.")
]
CanaryPatience = Annotated[
    float, typer.Option(min=1, max=_DAY, help="Seconds after which a canary that waits for a slot is warned of.")
]
Scrub = Annotated[
    float,
    typer.Option(min=0, max=_DAY, help="Seconds in which all weights are compared again, over and over; 0: never."),
]


def replica(  # one option each
    bucket: BucketUrl,
    run: RunName,
    name: Annotated[str, typer.Option(help="The replica's name, stable over restarts.")] = "replica-0",
    host: Host = "127.0.0.1",
    port: Port = 8100,
    cache: Annotated[Path | None, typer.Option(help="Where verified bytes are kept.")] = None,
    slots: Annotated[int, typer.Option(min=1, max=256, help="Answers decoded at once.")] = 16,
    max_waiting: MaxWaiting = None,
    max_requests: MaxRequests = 1024,
    max_prompt_tokens: MaxPromptTokens = None,
    batch_invariant: BatchInvariant = False,
    threads: Annotated[int, typer.Option(min=1, max=256, help="torch threads of the engine.")] = 1,
    window: Annotated[int, typer.Option(min=32, help="Context window in tokens.")] = 1024,
    kv_tokens: KvTokens = None,
    model: Annotated[str, typer.Option(help="Name under which the gateway asks.")] = "policy",
    in_flight: Annotated[
        str,
        typer.Option(parser=one_of(*_MODES), metavar="|".join(_MODES), help="What swaps do with answers in flight."),
    ] = "continue",
    strict: Strict = False,
    lease: Annotated[
        float, typer.Option(min=1, max=_DAY, help="Seconds in which the engine must stage, commit or undo.")
    ] = 30.0,
    drain: Annotated[
        float, typer.Option(min=0, max=_DAY, help="Seconds that --in-flight drain waits for answers.")
    ] = 120.0,
    canary_patience: CanaryPatience = 60.0,
    scrub: Scrub = 600.0,
    tool_parser: ToolParser = "auto",
    reasoning_parser: ReasoningParser = "auto",
    max_deltas: Annotated[int, typer.Option(min=1, help="Deltas that one swap takes at most.")] = 32,
    trust: Trust = None,
    supervised: Supervised = False,
) -> None:
    """Serve one replica that follows the run's head. Keys come from the environment."""
    ending = Ending.watch(supervised=supervised)
    log.configure(name)
    swaps = SwapSettings(
        in_flight=InFlight(in_flight),
        strict=strict,
        lease_s=lease,
        drain_s=drain,
        canary_s=canary_patience,
        scrub_s=scrub,
        max_deltas=max_deltas,
    )
    settings = ReplicaSettings(
        bucket=bucket, run=run_id(run), replica=ReplicaId(run_id(name)), host=host, port=port, cache=cache,
        slots=slots, threads=threads, window=window, model=model, trust=trust or (), swaps=swaps,
        tool_parser=tool_parser, reasoning_parser=reasoning_parser, batch_invariant=batch_invariant,
        max_waiting=max_waiting, max_requests=max_requests, max_prompt_tokens=max_prompt_tokens,
        kv_tokens=kv_tokens,
    )  # fmt: skip
    keys = keys_from()
    from slackwater.cli.replica import run_replica

    asyncio.run(run_replica(settings, keys, ending))
