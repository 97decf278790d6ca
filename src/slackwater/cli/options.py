"""Options that several commands share."""

from pathlib import Path
from typing import Annotated, Final, Literal

import typer

from slackwater.api.parsing.families import AUTO, REASONING_FORMATS, TOOL_FORMATS
from slackwater.cli.typed import one_of

BucketUrl = Annotated[str, typer.Option("--bucket", help="s3://bucket/prefix, gs://…, az://…, or a directory.")]
OptionalBucket = Annotated[
    str | None, typer.Option("--bucket", help="Bucket in which run/12 is a version and run/3..7 a fold.")
]
RunName = Annotated[str, typer.Option("--run", help="Name of the run: what one training publishes.")]
Host = Annotated[str, typer.Option(help="Address to listen on.")]
Port = Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")]
Threads = Annotated[int, typer.Option(min=1, max=256, help="Tiles worked on at once.")]
LevelName = Annotated[
    Literal["fast", "wan"],
    typer.Option(
        "--level",
        parser=one_of("fast", "wan"),
        metavar="fast|wan",
        help="wan: more time, and fewer bytes on trained weights; on random ones it saves none.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object instead of text.")]
Top = Annotated[int, typer.Option(min=0, help="Tensors to list; --json lists all.")]
Old = Annotated[str, typer.Argument(metavar="OLD", help="The state before: a model folder, or run/12 with --bucket.")]
Snapshot = Annotated[
    str,
    typer.Argument(metavar="SNAPSHOT", help="A model or delta folder, or run/12 or run/3..7 with --bucket."),
]
Supervised = Annotated[bool, typer.Option("--supervised", help="End when standard input ends.", hidden=True)]
CanaryFile = Annotated[
    Path | None,
    typer.Option(
        "--canary",
        metavar="FILE",
        help="JSON file: a prompt, tokens and their log-probabilities, for replicas to check.",
    ),
]
SignWith = Annotated[
    Path | None,
    typer.Option(
        "--sign-with", metavar="FILE", help="File of an Ed25519 private key, PEM, that signs what is committed."
    ),
]
Trust = Annotated[
    list[Path] | None,
    typer.Option(
        "--trust",
        metavar="FILE",
        help="File of a public key, PEM or 64 hex digits: of the bucket, take what it signed. Repeat for each.",
    ),
]
LoadDeadline = Annotated[
    float,
    typer.Option("--deadline", metavar="S", min=1, max=86400, help="Seconds that a hot-load gives its replicas."),
]
LoadPoll = Annotated[
    float,
    typer.Option("--poll", metavar="S", min=0.01, max=60, help="Seconds between looks at replicas being loaded."),
]
WatchPoll = Annotated[
    float, typer.Option("--watch", metavar="S", min=0.1, max=600, help="Seconds between looks at the whole fleet.")
]
CallDeadline = Annotated[
    float,
    typer.Option("--call-deadline", metavar="S", min=0.1, max=600, help="Seconds for each control call to a replica."),
]
LagLimit = Annotated[
    float,
    typer.Option("--lag-limit", metavar="S", min=1, max=86400, help="Seconds that a follower may lag before an alarm."),
]
MaxRequests = Annotated[
    int,
    typer.Option("--max-requests", min=1, max=1_000_000, help="Answers under way at most; what is over is told so."),
]
MaxWaiting = Annotated[
    int | None,
    typer.Option(
        "--max-waiting", min=0, max=1_000_000, help="Answers that wait for a slot, at most. [default: 4 per slot]"
    ),
]
MaxPromptTokens = Annotated[
    int | None,
    typer.Option("--max-prompt-tokens", min=1, help="Tokens of all prompts under way, at most. [default: no bound]"),
]
_TOOL_PARSERS: Final = (AUTO, *TOOL_FORMATS)
_REASONING_PARSERS: Final = (AUTO, *REASONING_FORMATS)
ToolParser = Annotated[
    str,
    typer.Option(
        "--tool-parser",
        metavar="|".join(_TOOL_PARSERS),
        parser=one_of(*_TOOL_PARSERS),
        help="How the model writes tool calls; auto: as its chat template tells plainly.",
    ),
]
ReasoningParser = Annotated[
    str,
    typer.Option(
        "--reasoning-parser",
        metavar="|".join(_REASONING_PARSERS),
        parser=one_of(*_REASONING_PARSERS),
        help="How the model marks reasoning; auto: as its chat template tells plainly.",
    ),
]
