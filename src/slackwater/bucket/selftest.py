"""Asks a store what it can do, with one small object of its own; `slackwater.bucket.verdict` says what that means."""

import contextlib
import secrets
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import Final

from slackwater.bucket.base import Bucket, Delete, ObjectInfo, Swap, Upload
from slackwater.bucket.verdict import Finding, Outcome, Probe
from slackwater.clock import Clock
from slackwater.errors import AuthError, CorruptError, NotFoundError, SlackwaterError, UnsupportedError

FOLDER: Final = "slackwater-doctor"
"""Where the self-test's objects lie, below the bucket's prefix."""
SKEW_S: Final = 5.0
"""Seconds by which clocks may disagree without a word."""

_RACERS: Final = 8
_BODY_BYTES: Final = 1000
_SAMPLES: Final = 100
_NOTE: Final = b"Left by `slackwater doctor`, which may not delete here. Delete it at will.\n"


@dataclass(frozen=True, kw_only=True, slots=True)
class Examination:
    """What a self-test found, and what it left behind."""

    findings: tuple[Finding, ...]
    left: str | None
    """Key of a small object that it could not delete; None: nothing."""


def examine(bucket: Bucket, clock: Clock) -> Examination:
    """Ask every `Probe` of a store, as far as the credentials allow; uploads about 8 MiB to an object store.

    Whatever is wrong with an answer is a finding. Beyond `Bucket`, the verbs `Delete`, `Swap` and
    `slackwater.bucket.base.Upload` are probed where the bucket has them.

    Args:
        bucket: The store, with the credentials in question.
        clock: This machine's, to hold against the store's.

    Raises:
        NotFoundError: No such bucket.
        UnavailableError: The store doesn't answer at all.
    """
    return _Examiner(bucket, clock, f"{FOLDER}/{secrets.token_hex(6)}").run()


def skew_s(began_s: float, ended_s: float, modified_s: float) -> float:
    """By how many seconds a store's clock is ahead of ours (negative: behind), as far as that is certain.

    Args:
        began_s: Our clock before the object was written.
        ended_s: Our clock after it.
        modified_s: The store's clock when it was written, cut to whole seconds.
    """
    if modified_s > ended_s:
        return modified_s - ended_s
    return min(0.0, modified_s + 1.0 - began_s)


class _Examiner:
    """One examination. A probe returns a complaint, or nothing where all is well."""

    def __init__(self, bucket: Bucket, clock: Clock, key: str) -> None:
        self._bucket = bucket
        self._clock = clock
        self._key = key
        self._findings: list[Finding] = []
        self._body = b""
        self._began_s = 0.0
        self._created_s = 0.0
        self._sample: ObjectInfo | None = None

    def run(self) -> Examination:
        left = None
        if self._lists():
            self._probe(Probe.ABSENT, self._absent)
            made = self._probe(Probe.CREATE, self._create)
            if made in {Outcome.OK, Outcome.WRONG}:
                try:
                    self._examine_object()
                finally:
                    left = self._tidy()
            else:
                self._examine_sample()
        return Examination(findings=tuple(self._findings), left=left)

    def _lists(self) -> bool:
        """The first call: only here does a store that can't be reached raise."""
        try:
            first = list(islice(self._bucket.list(""), _SAMPLES))
        except AuthError as error:
            self._note(Probe.LIST, Outcome.DENIED, str(error))  # wrong keys and clocks show here, with their cure
            return False
        self._sample = next((info for info in first if info.size > 1), None)
        self._note(Probe.LIST, Outcome.OK)
        return True

    def _examine_object(self) -> None:
        reads = self._probe(Probe.READ, lambda: self._differs("right after its creation")) is Outcome.OK
        self._probe(Probe.REFUSE, lambda: self._refuse(compare=reads))
        self._probe(Probe.SHOWN, self._shown)
        self._probe(Probe.RANGE, lambda: self._range(self._key, len(self._body)))
        self._probe(Probe.RANGE_END, self._range_end)
        self._probe(Probe.REPLACE, self._replace)
        bucket = self._bucket
        if isinstance(bucket, Swap):
            self._probe(Probe.SWAP, lambda: self._swap(bucket))
        else:
            self._note(Probe.SWAP, Outcome.UNSUPPORTED)
        if isinstance(bucket, Upload):
            self._probe(Probe.ABORT, lambda: bucket.abandon(self._key))
            self._probe(Probe.PARTS, lambda: self._parts(bucket.part_bytes + 1))
        else:
            self._note(Probe.ABORT, Outcome.OK, "objects are written whole here")
            self._note(Probe.PARTS, Outcome.OK, "objects are written whole here")

    def _examine_sample(self) -> None:
        """Without the right to write, an object of somebody else has to do."""
        sample = self._sample
        if sample is not None:
            self._probe(Probe.RANGE, lambda: self._range(sample.key, min(sample.size, _BODY_BYTES)))

    def _probe(self, probe: Probe, ask: Callable[[], str | None]) -> Outcome:
        try:
            complaint = ask()
        except AuthError as error:
            return self._note(probe, Outcome.DENIED, error.message)
        except UnsupportedError as error:
            return self._note(probe, Outcome.UNSUPPORTED, error.message)
        except SlackwaterError as error:
            return self._note(probe, Outcome.WRONG, error.message)
        return self._note(probe, Outcome.WRONG if complaint else Outcome.OK, complaint or "")

    def _note(self, probe: Probe, outcome: Outcome, detail: str = "") -> Outcome:
        self._findings.append(Finding(probe=probe, outcome=outcome, detail=detail))
        return outcome

    def _absent(self) -> str | None:
        try:
            self._bucket.get(self._key, max_bytes=_BODY_BYTES)
        except NotFoundError:
            return None
        return f"{self._key} was answered, and nobody wrote it"

    def _create(self) -> str | None:
        """Several at once, for stores that look first and write then."""
        bodies = [self._filled(racer) for racer in range(_RACERS)]
        self._began_s = self._clock.wall()
        with ThreadPoolExecutor(_RACERS) as pool:
            told = list(pool.map(lambda body: self._bucket.put_if_absent(self._key, body), bodies))
        self._created_s = self._clock.wall()
        winners = told.count(True)
        if winners == 1:
            self._body = bodies[told.index(True)]
            return None
        self._body = self._bucket.get(self._key, max_bytes=_BODY_BYTES)
        if winners == 0 and self._body in bodies:
            return None  # the winner's answer was lost, and its next attempt met its own object
        return f"{winners} of {_RACERS} writers at once were told that they created it"

    def _refuse(self, *, compare: bool) -> str | None:
        again = self._filled(_RACERS)
        if self._bucket.put_if_absent(self._key, again):
            self._body = again
            return "a second creation was told that it was the first"
        return self._differs("after a refused creation") if compare else None

    def _differs(self, when: str) -> str | None:
        same = self._bucket.get(self._key, max_bytes=_BODY_BYTES) == self._body
        return None if same else f"the object reads otherwise {when}"

    def _shown(self) -> str | None:
        found = next((info for info in self._bucket.list(FOLDER) if info.key == self._key), None)
        if found is None:
            return "a new object is missing from the listing"
        if found.modified_s is not None:
            self._compare_clocks(found.modified_s)
        return None if found.size == len(self._body) else f"it is listed with {found.size} of {len(self._body)} bytes"

    def _compare_clocks(self, modified_s: float) -> None:
        skew = skew_s(self._began_s, self._created_s, modified_s)
        says = f"the store's is {abs(skew):.0f} s {'ahead' if skew > 0 else 'behind'}"
        wrong = abs(skew) > SKEW_S
        self._note(Probe.CLOCK, Outcome.WRONG if wrong else Outcome.OK, says if wrong else "")

    def _range(self, key: str, size: int) -> str | None:
        whole = self._bucket.get_range(key, 0, size)
        middle = size // 3
        part = self._bucket.get_range(key, middle, size - middle - 1)
        return None if part == whole[middle : size - 1] else "a range holds other bytes than the whole"

    def _range_end(self) -> str | None:
        try:
            self._bucket.get_range(self._key, len(self._body) - 2, 4)
        except (CorruptError, NotFoundError):
            return None
        return "two bytes past its end were answered"

    def _replace(self) -> str | None:
        self._body = self._filled(_RACERS + 1)
        self._bucket.put(self._key, self._body)
        return self._differs("after it was replaced")

    def _swap(self, bucket: Swap) -> str | None:
        before = bucket.tag(self._key)
        swapped = self._filled(_RACERS + 2)
        if not bucket.swap(self._key, swapped, before):
            return "a swap with the right tag was refused"
        self._body = swapped
        if bucket.swap(self._key, self._filled(_RACERS + 3), before):
            return "a swap with an outdated tag was carried out"
        return self._differs("after a refused swap")

    def _parts(self, size: int) -> str | None:
        body = self._filled(_RACERS + 4, size)
        self._bucket.put(self._key, body)
        tail = self._bucket.get_range(self._key, size - _BODY_BYTES, _BODY_BYTES)
        return None if tail == body[-_BODY_BYTES:] else "a large object reads otherwise than it was written"

    def _tidy(self) -> str | None:
        """Delete the object; where that isn't allowed, leave a small one that says what it is."""
        bucket = self._bucket
        if not isinstance(bucket, Delete):
            self._note(Probe.DELETE, Outcome.UNSUPPORTED)
        elif self._probe(Probe.DELETE, lambda: bucket.delete(self._key)) is Outcome.OK:
            return None
        with contextlib.suppress(SlackwaterError):  # a store that keeps objects as they are
            self._bucket.put(self._key, _NOTE)
        return self._key

    def _filled(self, number: int, size: int = _BODY_BYTES) -> bytes:
        """A body that no other attempt writes, and whose every range is told from its neighbours."""
        line = b"%s %d " % (self._key.encode(), number)
        return b"".join(b"%s%d\n" % (line, row) for row in range(size // len(line) + 1))[:size]
