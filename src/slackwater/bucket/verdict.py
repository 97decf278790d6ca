"""What a store can carry, by what a self-test found out about it: a table."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NamedTuple

from slackwater.errors import AuthError, UnsupportedError


class Mode(StrEnum):
    """What somebody wants of a bucket."""

    READ = "read"
    """Follow a run: a replica."""
    PUBLISH = "publish"
    """Commit versions: a trainer. Includes reading."""


class Probe(StrEnum):
    """One question to a store."""

    LIST = "list"
    ABSENT = "tell what is absent"
    CREATE = "create if absent"
    READ = "read after write"
    REFUSE = "refuse to create again"
    SHOWN = "list after write"
    CLOCK = "clock"
    RANGE = "ranged read"
    RANGE_END = "range past the end"
    REPLACE = "replace"
    SWAP = "compare and swap"
    ABORT = "abort an upload"
    PARTS = "upload in parts"
    DELETE = "delete"


class Outcome(StrEnum):
    """What came of a probe."""

    OK = "ok"
    WRONG = "wrong"
    """The store did it, and not as it should."""
    DENIED = "denied"
    """The credentials have no right to it."""
    UNSUPPORTED = "unsupported"
    UNTRIED = "untried"
    """An earlier outcome left nothing to try it on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """A probe and its outcome."""

    probe: Probe
    outcome: Outcome
    detail: str = ""
    """What happened, for people."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ruling:
    """What a finding means."""

    finding: Finding
    stops: frozenset[Mode] = frozenset()
    """The modes that it rules out."""
    means: str = ""
    advice: str = ""
    """What to do; empty where nothing needs doing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """A ruling for every probe, in the order of `Probe`."""

    rulings: tuple[Ruling, ...]

    def carries(self, mode: Mode) -> bool:
        """Whether the store and the credentials can carry it."""
        return not self.against(mode)

    def against(self, mode: Mode) -> tuple[Ruling, ...]:
        """What rules a mode out; empty: nothing."""
        return tuple(ruling for ruling in self.rulings if mode in ruling.stops)

    def require(self, mode: Mode, where: str) -> None:
        """Let a mode pass, or refuse it.

        Args:
            mode: What is wanted.
            where: The bucket's URL, for the message.

        Raises:
            AuthError: The credentials lack a right that it needs.
            UnsupportedError: The store can't carry it.
        """
        against = self.against(mode)
        if not against:
            return
        first = against[0]
        kind = AuthError if first.finding.outcome is Outcome.DENIED else UnsupportedError
        why = "; ".join(words for words in (first.means, first.finding.detail) if words)
        raise kind(f"{where} can't be used to {mode}: {why}", hint=first.advice)


class _Row(NamedTuple):
    outcomes: frozenset[Outcome]
    stops: frozenset[Mode]
    means: str
    advice: str = ""


_WRONG: Final = frozenset({Outcome.WRONG})
_DENIED: Final = frozenset({Outcome.DENIED})
_UNTRIED: Final = frozenset({Outcome.UNTRIED})
_CAN_NOT: Final = frozenset({Outcome.WRONG, Outcome.UNSUPPORTED})
_NOT_DONE: Final = frozenset({Outcome.WRONG, Outcome.UNSUPPORTED, Outcome.DENIED})
_BOTH: Final = frozenset(Mode)
_PUBLISH: Final = frozenset({Mode.PUBLISH})
_NONE: Final[frozenset[Mode]] = frozenset()

_NO_COMMIT: Final = "a version is committed by nothing else, so two trainers could overwrite each other's"
_OTHER_STORE: Final = "use a store, or a newer server, that honours If-None-Match (GCS: a generation of 0)"

_TABLE: Final[Mapping[Probe, tuple[_Row, ...]]] = {
    Probe.LIST: (
        _Row(_DENIED, _BOTH, "nothing may be listed"),
        _Row(_UNTRIED, _BOTH, "nothing was tried"),
    ),
    Probe.ABSENT: (
        _Row(_DENIED, _BOTH, "objects may not be read", "give the right to get"),
        _Row(_CAN_NOT, _BOTH, "an object that doesn't exist isn't reported missing", "check the endpoint for a proxy"),
        _Row(_UNTRIED, _BOTH, "nothing could be read"),
    ),
    Probe.CREATE: (
        _Row(_DENIED, _PUBLISH, "objects may not be written", "give a trainer the right to put; replicas need none"),
        _Row(_CAN_NOT, _PUBLISH, f"creating only if absent doesn't work; {_NO_COMMIT}", _OTHER_STORE),
        _Row(_UNTRIED, _PUBLISH, "writing was not tried"),
    ),
    Probe.REFUSE: (
        _Row(_NOT_DONE, _PUBLISH, f"the store overwrites what it should only create; {_NO_COMMIT}", _OTHER_STORE),
        _Row(_UNTRIED, _PUBLISH, "creating twice was not tried"),
    ),
    Probe.READ: (
        _Row(_DENIED, _BOTH, "objects may not be read", "give the right to get"),
        _Row(_CAN_NOT, _PUBLISH, "what was just written reads otherwise, so that a commit can't be confirmed",
             "use the store itself instead of a cache or a mirror of it"),
        _Row(_UNTRIED, _PUBLISH, "reading back was not tried"),
    ),
    Probe.SHOWN: (_Row(_CAN_NOT, _NONE, "listings lag; no safety rests on them, but garbage collection waits longer"),),
    Probe.CLOCK: (
        _Row(_CAN_NOT, _NONE, "this machine's clock and the store's disagree; beyond 15 minutes S3 refuses requests",
             "set the clock, for example with NTP"),
    ),
    Probe.RANGE: (
        _Row(_DENIED, _BOTH, "objects may not be read", "give the right to get"),
        _Row(_CAN_NOT, _BOTH, "a range of an object is answered wrongly", "check the endpoint for a proxy"),
        _Row(_UNTRIED, _NONE, "nothing is there yet to read from"),
    ),
    Probe.RANGE_END: (
        _Row(_CAN_NOT, _BOTH, "bytes past an object's end are answered", "use another store"),
    ),
    Probe.REPLACE: (
        _Row(_NOT_DONE, _NONE, "a replaced object reads as before: the head hint lags; versions are found by number"),
    ),
    Probe.SWAP: (_Row(_NOT_DONE, _NONE, "there is no compare-and-swap; nothing needs it"),),
    Probe.ABORT: (
        _Row(_NOT_DONE, _NONE, "what broken uploads leave stays, invisible and charged for",
             "give the right to abort uploads, or let a lifecycle rule remove their parts"),
    ),
    Probe.PARTS: (
        _Row(_NOT_DONE, _PUBLISH, "large objects can't be uploaded in parts", "allow multipart uploads"),
        _Row(_UNTRIED, _PUBLISH, "uploading in parts was not tried"),
    ),
    Probe.DELETE: (
        _Row(frozenset({Outcome.OK}), _NONE, "not needed: only garbage collection deletes"),
        _Row(_NOT_DONE, _NONE, "not needed, and trainers and replicas do better without"),
    ),
}  # fmt: skip


def judge(findings: Iterable[Finding]) -> Verdict:
    """Rule on what a self-test found; a probe without a finding counts as untried."""
    found = {finding.probe: finding for finding in findings}
    return Verdict(
        rulings=tuple(_rule(found.get(probe, Finding(probe=probe, outcome=Outcome.UNTRIED))) for probe in Probe)
    )


def _rule(finding: Finding) -> Ruling:
    for row in _TABLE[finding.probe]:
        if finding.outcome in row.outcomes:
            return Ruling(finding=finding, stops=row.stops, means=row.means, advice=row.advice)
    return Ruling(finding=finding)
