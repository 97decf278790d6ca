"""Settings of each process, as the command line fills them."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from slackwater.config.in_flight import InFlight
from slackwater.errors import InvalidInputError
from slackwater.ids import ReplicaId, RunId, Version, parse_snapshot, run_id


@dataclass(frozen=True, kw_only=True, slots=True)
class SwapSettings:
    """How one replica swaps."""

    in_flight: InFlight = InFlight.CONTINUE
    """What becomes of answers in flight, unless whoever sets a target says otherwise."""
    strict: bool = False
    """Bits are compared in the pause, before the version serves, and not after it."""
    lease_s: float = 30.0
    """Seconds in which the engine must stage, commit or undo."""
    drain_s: float = 120.0
    """Seconds for answers to end by themselves in the mode ``drain``."""
    canary_s: float = 60.0
    """Seconds after which a canary that waits for a slot is warned of."""
    scrub_s: float = 600.0
    """Seconds in which all weights that serve are compared once again; 0: never."""
    max_deltas: int = 32
    """Deltas that one swap takes at most."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaSettings:
    """One replica process."""

    bucket: str
    """URL of the bucket."""
    run: RunId
    """The lineage to follow."""
    replica: ReplicaId
    host: str = "127.0.0.1"
    port: int = 0
    """0 takes a free port."""
    cache: Path | None = None
    """Where verified bytes are kept; None: the user's cache folder."""
    slots: int = 16
    """Answers decoded at once."""
    batch_invariant: bool = False
    """No bit of an answer depends on who else is served; slower."""
    threads: int = 1
    """torch threads of the engine."""
    window: int = 1024
    """Context window in tokens, at most the model's."""
    kv_tokens: int | None = None
    """Most positions of KV in use; None: ``slots`` times ``window``. The window is cut to it."""
    model: str = "policy"
    """The name under which the gateway asks."""
    poll_s: float = 0.2
    """Seconds between looks at the bucket's head."""
    trust: Sequence[Path] = ()
    """Files of the public keys whose versions are taken; none takes all."""
    tool_parser: str = "auto"
    """Format in which the model writes tool calls; ``auto``: as its chat template tells plainly."""
    reasoning_parser: str = "auto"
    """Likewise, of reasoning."""
    max_waiting: int | None = None
    """Answers that wait for a slot, at most; None: four for each slot."""
    max_requests: int = 1024
    """Answers under way in the process, at most."""
    max_prompt_tokens: int | None = None
    """Tokens of all prompts under way in the process, at most; None: no bound."""
    swaps: SwapSettings = field(default_factory=SwapSettings)


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupSettings:
    """Some replicas that are moved together."""

    name: str
    mode: Literal["follow", "manual", "pinned"]
    version: Version | None
    """Of the pin; None for the other modes."""
    replicas: Sequence[ReplicaId]


@dataclass(frozen=True, kw_only=True, slots=True)
class GatewaySettings:
    """One gateway process, control routes included."""

    replicas: Mapping[ReplicaId, str]
    """Base URL by the replica's own name."""
    tokenizer: Path
    """Folder with the model's tokenizer and chat template."""
    bucket: str
    run: RunId
    model: str
    """The name under which the fleet serves."""
    host: str = "127.0.0.1"
    port: int = 0
    probe_s: float = 0.25
    """Seconds between looks at each replica's health."""
    trust: Sequence[Path] = ()
    """Files of the public keys whose versions can be named; none takes all."""
    tool_parser: str = "auto"
    """Format in which the model writes tool calls; ``auto``: as its chat template tells plainly."""
    reasoning_parser: str = "auto"
    """Likewise, of reasoning."""
    groups: Sequence[GroupSettings] = ()
    """Of the replicas; those in none make up the group ``default``."""
    ledger: Path | None = None
    """File of the hot-loads' history; None: it ends with the process."""
    deadline_s: float = 600.0
    """Seconds that a hot-load gives replicas which are told together."""
    poll_s: float = 0.1
    """Seconds between looks at a replica that is being loaded."""
    watch_s: float = 2.0
    """Seconds between looks at one that follows or is pinned, and at the whole fleet."""
    call_s: float = 5.0
    """Seconds for each control call to a replica."""
    max_requests: int = 1024
    """Answers under way in the process, at most."""
    max_prompt_tokens: int | None = None
    """Tokens of all prompts under way in the process, at most; None: no bound."""
    lag_limit_s: float = 60.0
    """Seconds that a replica which follows the head may be behind without an alarm."""


_GROUP_HINT: Final = "write train=follow:r0,r1, spare=manual:r2 or eval=pinned:<run>/<version>:r3"
_BASE_URL = re.compile(r"https?://(\[[0-9a-fA-F:]+\]|[A-Za-z0-9._-]+)(:\d{1,5})?/?")


def parse_replicas(words: Sequence[str]) -> dict[ReplicaId, str]:
    """Read ``name=http://host:port`` words.

    Raises:
        InvalidInputError: A word is not of that form, or a name comes twice.
    """
    found: dict[ReplicaId, str] = {}
    for word in words:
        name, equals, url = word.partition("=")
        if not equals or not _BASE_URL.fullmatch(url):
            raise InvalidInputError(f"{word[:80]!r} names no replica", hint="write name=http://host:port")
        if name in found:
            raise InvalidInputError(f"the replica {name!r} is named twice", hint="give each a name of its own")
        found[ReplicaId(_named(name, "replica"))] = url.rstrip("/")
    if not found:
        raise InvalidInputError("no replica is named", hint="add --replica name=http://host:port")
    return found


def parse_groups(words: Sequence[str], run: RunId) -> tuple[GroupSettings, ...]:
    """Read ``name=follow:r0,r1``, ``name=manual:r2`` and ``name=pinned:<run>/<version>:r3`` words.

    Raises:
        InvalidInputError: A word is not of that form, or pins another run's snapshot.
    """
    return tuple(_group(word, run) for word in words)


def _group(word: str, run: RunId) -> GroupSettings:
    name, equals, rest = word.partition("=")
    if not equals or not name:
        raise InvalidInputError(f"{word[:80]!r} names no group", hint=_GROUP_HINT)
    match rest.split(":"):
        case ["follow" | "manual" as mode, replicas]:
            version = None
        case ["pinned" as mode, snapshot, replicas]:
            version = _pin(name, snapshot, run)
        case parts:
            raise _no_group(name, parts, run)
    names = tuple(ReplicaId(_named(replica, f"replica of group {name[:80]!r}")) for replica in replicas.split(","))
    return GroupSettings(name=_named(name, "group"), mode=mode, version=version, replicas=names)


def _pin(name: str, snapshot: str, run: RunId) -> Version:
    pinned, version = parse_snapshot(snapshot)
    if pinned != run:
        raise InvalidInputError(
            f"group {name[:80]!r} pins a snapshot of another run, {snapshot[:80]!r}", hint=f"this fleet serves {run!r}"
        )
    return version


def _no_group(name: str, parts: Sequence[str], run: RunId) -> InvalidInputError:
    """What is wrong with the words after ``name=``."""
    group = f"group {name[:80]!r}"
    match parts:
        case ["pinned", one] if one and "/" not in one:
            return InvalidInputError(
                f"{group} is pinned, and its snapshot is missing", hint=f"write {name[:80]}=pinned:{run}/12:{one[:80]}"
            )
        case ["follow" | "manual" | "pinned", *rest] if len(rest) < 2:  # noqa: PLR2004  # the last part is the replicas
            return InvalidInputError(f"{group} names no replicas", hint=_GROUP_HINT)
        case ["follow" | "manual" | "pinned" as mode, *_]:
            return InvalidInputError(f"{group} has more parts than the mode {mode} takes", hint=_GROUP_HINT)
        case _:
            return InvalidInputError(
                f"{group}: there is no mode {parts[0][:80]!r}", hint="the modes are follow, manual and pinned"
            )


def _named(text: str, what: str) -> RunId:
    """A name by the one grammar that names have; an error says of what it was to be the name."""
    try:
        return run_id(text)
    except InvalidInputError as error:
        raise InvalidInputError(f"{text[:80]!r} can't name a {what}", hint=error.hint) from None
