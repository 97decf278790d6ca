"""The history of a fleet as values, and an offline checker over it, as Jepsen has one.

A test appends an event as each thing happens, in one order that respects cause and effect, and `check` says in words
what no right fleet could have done. The order of the list is the order of time; ``at`` is seconds of the test's clock
where a bound is measured.

The checks, by the numbers that violations carry:

====  ==================================================================================================
I1    each token and log-probability is what the labelled weights make of the prompt and the tokens before, with the KV
      that the answer tells of; one that is said to be provisional may be wrong
I2    no label before its version was committed; none that the request did not admit
I3    the versions of one boot fall only where an operator asked for an older one, or a spoilt one was taken back
I4    a version has one state digest, for all readers, for ever
I5    each accepted request ends exactly once, and gives no token after its end
I6    what is reported of the tokens covers exactly the tokens, within what was asked for; another replica goes on only
      where that is told, with its KV, in the same run and under the same seed
I7    a request is accepted in state ``serving`` alone
I8    KV is reused only of the version that samples the first token, or of any where the request takes it, and only
      where some prompt built it
I9    a call ends within its bound
I10   once faults have stopped, every replica that is up reaches the target in time
====  ==================================================================================================

I1 is an equality: it needs the answers of `slackwater.testing.stamp.StampEngine`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import lt
from typing import Final, TypeVar

from slackwater.ids import BootId, ReplicaId, RequestId, StateDigest, Version
from slackwater.rollout.evidence import Finish, Origin, PolicySpan, TokenStep, kv_spans
from slackwater.rollout.request import CompletionRequest
from slackwater.testing.stamp import replayed

E = TypeVar("E")


@dataclass(frozen=True, kw_only=True, slots=True)
class Published:
    """A manifest was committed."""

    version: Version
    state: StateDigest
    mark: int
    """`slackwater.testing.stamp.weights_mark` of the state that was published."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """A reader found a version to have this state, in its manifest or in an engine's memory."""

    reader: str
    version: Version
    state: StateDigest


@dataclass(frozen=True, kw_only=True, slots=True)
class Steered:
    """An operator told a replica where to go."""

    replica: ReplicaId
    goal: Version | None
    """None: the head."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Labelled:
    """An engine took a label: it was opened, or exchanged its weights."""

    replica: ReplicaId
    boot: BootId
    version: Version
    at: float
    mended: bool = False
    """The weights before were not what their label said, and were put back."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stopped:
    """A replica is gone: killed, or closed. Its next boot is another one."""

    replica: ReplicaId


@dataclass(frozen=True, kw_only=True, slots=True)
class Accepted:
    """A replica took a request."""

    replica: ReplicaId
    boot: BootId
    request: CompletionRequest
    state: str
    """The replica's, as it took it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampled:
    """The caller received a token."""

    request: RequestId
    origin: Origin
    step: TokenStep


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """The caller was told the end."""

    request: RequestId
    finish: Finish | None
    error: str = ""
    """``kind`` of the error where there is no finish."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Called:
    """A control call, or a pause, is over."""

    what: str
    seconds: float
    limit_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Healed:
    """Faults have stopped for good, and the target moves no more."""

    target: Version
    at: float
    within_s: float


Event = Published | Seen | Steered | Labelled | Stopped | Accepted | Sampled | Ended | Called | Healed
History = Sequence[Event]


@dataclass(frozen=True, kw_only=True, slots=True)
class Violation:
    """What no right fleet could have done."""

    check: str
    """Its number, such as ``I5``."""
    message: str

    def __str__(self) -> str:
        return f"{self.check}: {self.message}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Answered:
    """One request and all that its caller received, in order."""

    accepted: Accepted
    sampled: tuple[Sampled, ...]
    ends: tuple[Ended, ...]

    @property
    def name(self) -> RequestId:
        """The request's id."""
        return self.accepted.request.request_id

    @property
    def steps(self) -> tuple[TokenStep, ...]:
        """The tokens."""
        return tuple(one.step for one in self.sampled)


def answers(history: History) -> tuple[Answered, ...]:
    """Every accepted request with its tokens and ends, in the order of acceptance."""
    sampled: dict[RequestId, list[Sampled]] = {}
    ended: dict[RequestId, list[Ended]] = {}
    for one in _only(history, Sampled):
        sampled.setdefault(one.request, []).append(one)
    for one in _only(history, Ended):
        ended.setdefault(one.request, []).append(one)
    return tuple(
        Answered(accepted=one, sampled=tuple(sampled.get(name, ())), ends=tuple(ended.get(name, ())))
        for one in _only(history, Accepted)
        for name in (one.request.request_id,)
    )


def check(history: History) -> tuple[Violation, ...]:
    """Every violation of every check, by number."""
    return tuple(
        Violation(check=number, message=message) for number, find in CHECKS.items() for message in find(history)
    )


def tokens_are_their_labels(history: History) -> Iterator[str]:
    """I1. One message an answer: after its first wrong token the rest proves nothing."""
    marks = {one.version: one.mark for one in _only(history, Published)}
    for answer in answers(history):
        steps = answer.steps
        if not steps or any(version not in marks for version in _named(steps)):  # I2 tells of those
            continue
        right = replayed(answer.accepted.request, answer.sampled[0].origin.seed, steps, marks)
        for index, (step, pair) in enumerate(zip(steps, right, strict=True)):
            if (step.token_id, step.logprob) != pair and not step.provisional:
                yield f"token {index} of {answer.name} is not what version {step.version} makes there"
                break


def labels_are_committed(history: History) -> Iterator[str]:
    """I2."""
    committed: set[Version] = set()
    asked: dict[RequestId, CompletionRequest] = {}
    begun: set[RequestId] = set()
    for event in history:
        match event:
            case Published(version=version):
                committed.add(version)
            case Accepted(request=request):
                asked[request.request_id] = request
            case Sampled(request=name, step=step):
                if step.version not in committed:
                    yield f"a token of {name} is labelled {step.version}, which was not committed"
                if name in asked and not _admitted(asked[name], step.version, first=name not in begun):
                    yield f"{name} asked for {asked[name].policy} and got version {step.version}"
                begun.add(name)
            case Labelled(version=version, replica=replica) if version not in committed:
                yield f"{replica} took label {version}, which was not committed"
            case _:
                pass


def versions_rise(history: History) -> Iterator[str]:
    """I3. A fall is licensed by an older goal in force since the label before it."""
    held: dict[ReplicaId, Labelled] = {}
    goals: dict[ReplicaId, list[Version | None]] = {}
    for event in history:
        match event:
            case Steered(replica=replica, goal=goal):
                goals.setdefault(replica, []).append(goal)
            case Labelled(replica=replica, boot=boot, version=version, mended=mended):
                before, given = held.get(replica), goals.get(replica, [])
                if before is None or before.boot != boot or mended:
                    pass
                elif not _may_follow(before.version, version, given):
                    yield f"{replica} went from version {before.version} to {version}, and nobody asked for it"
                held[replica], goals[replica] = event, given[-1:]
            case _:
                pass


def versions_have_one_state(history: History) -> Iterator[str]:
    """I4."""
    first: dict[Version, StateDigest] = {}
    for event in history:
        if isinstance(event, Published | Seen) and first.setdefault(event.version, event.state) != event.state:
            who = event.reader if isinstance(event, Seen) else "the publisher"
            yield f"version {event.version} has another state for {who} than before"


def requests_end_once(history: History) -> Iterator[str]:
    """I5."""
    for answer in answers(history):
        if len(answer.ends) != 1:
            yield f"{answer.name} has {len(answer.ends)} ends"
    over: set[RequestId] = set()
    known = {one.request.request_id for one in _only(history, Accepted)}
    for event in history:
        if isinstance(event, Ended):
            over.add(event.request)
        if isinstance(event, Sampled) and event.request in over:
            yield f"{event.request} gave a token after its end"
        if isinstance(event, Sampled | Ended) and event.request not in known:
            yield f"{event.request} was answered and never accepted"


def evidence_is_aligned(history: History) -> Iterator[str]:
    """I6."""
    for answer in answers(history):
        yield from (f"{answer.name} {what}" for what in _misalignments(answer))


def only_who_serves_accepts(history: History) -> Iterator[str]:
    """I7."""
    for one in _only(history, Accepted):
        if one.state != "serving":
            yield f"{one.replica} accepted {one.request.request_id} while it was {one.state}"


def kv_is_of_one_version(history: History) -> Iterator[str]:
    """I8."""
    whole, places = answers(history), {id(event): place for place, event in enumerate(history)}
    for answer in whole:
        if not answer.steps:
            continue
        origin, first = answer.sampled[0].origin, answer.steps[0]
        prompt = len(answer.accepted.request.prompt_ids)
        builders = {span.version for span in kv_spans(prompt, answer.steps[:1])}
        if builders != {first.version} and not answer.accepted.request.policy.any_kv:
            yield f"the prompt of {answer.name} was built by {sorted(builders)}, its first token by {first.version}"
        if origin.prompt_version not in (None, *builders) or (origin.prompt_version is None and len(builders) == 1):
            yield f"{answer.name} says that {origin.prompt_version} built its prompt, which {sorted(builders)} did"
        # Requests may begin in another order than they were accepted in.
        begun = places[id(answer.sampled[0])]
        others = (other for other in whole if other is not answer and places[id(other.accepted)] < begun)
        reused = origin.cached_tokens
        if reused and not any(_built(other, answer) >= reused for other in others):
            yield f"{answer.name} reused {reused} tokens of KV that nobody built for it"


def calls_end_in_time(history: History) -> Iterator[str]:
    """I9."""
    for one in _only(history, Called):
        if one.seconds > one.limit_s:
            yield f"{one.what} took {one.seconds:g} s of at most {one.limit_s:g}"


def targets_are_reached(history: History) -> Iterator[str]:
    """I10."""
    healed = next(iter(_only(tuple(reversed(history)), Healed)), None)
    if healed is None:
        return
    held: dict[ReplicaId, Version] = {}
    for event in history:
        if isinstance(event, Labelled) and event.at <= healed.at + healed.within_s:
            held[event.replica] = event.version
        if isinstance(event, Stopped):
            held.pop(event.replica, None)
    for replica, version in held.items():
        if version != healed.target:
            yield f"{replica} is at version {version}, not {healed.target}, {healed.within_s:g} s after the faults"


CHECKS: Final[Mapping[str, Callable[[History], Iterator[str]]]] = {
    "I1": tokens_are_their_labels,
    "I2": labels_are_committed,
    "I3": versions_rise,
    "I4": versions_have_one_state,
    "I5": requests_end_once,
    "I6": evidence_is_aligned,
    "I7": only_who_serves_accepts,
    "I8": kv_is_of_one_version,
    "I9": calls_end_in_time,
    "I10": targets_are_reached,
}
"""Each check by its number; one gives a message for each violation."""


def _only(history: History, kind: type[E]) -> list[E]:
    return [event for event in history if isinstance(event, kind)]


def _named(steps: Sequence[TokenStep]) -> Iterator[Version]:
    """Every version that steps name."""
    for step in steps:
        yield step.version
        yield from (span.version for span in step.kv)


def _admitted(request: CompletionRequest, version: Version, *, first: bool) -> bool:
    exact = request.policy.exact_version
    return request.policy.admits(version) if first else exact in (None, version)


def _misalignments(answer: Answered) -> Iterator[str]:
    request, steps = answer.accepted.request, answer.steps
    finish = answer.ends[0].finish if answer.ends else None
    if len(steps) > request.sampling.max_tokens and not request.forced_ids:
        yield f"has {len(steps)} tokens of at most {request.sampling.max_tokens}"
    forced = request.forced_ids
    if forced and tuple(step.token_id for step in steps) != forced[: len(steps)]:
        yield "has other tokens than were forced"
    if any(len(step.top_ids) != len(step.top_logprobs) for step in steps):
        yield "has alternatives without log-probabilities"
    if any(step.kv and not _covers(step.kv, len(request.prompt_ids) + index) for index, step in enumerate(steps)):
        yield "tells of other KV than there is before its token"
    if any(step.finish is not None for step in steps[:-1]):
        yield "goes on after its last token"
    if answer.ends and steps and steps[-1].finish not in (None, finish):
        yield f"ended as {steps[-1].finish} in its last token and as {finish} outside"
    if finish in (Finish.STOP, Finish.LENGTH) and not (steps and steps[-1].finish):
        yield f"ended as {finish} without a last token"
    yield from _misplaced(answer.sampled)


def _misplaced(sampled: Sequence[Sampled]) -> Iterator[str]:
    """Who sampled: who began, and then only those that tokens tell of. Reports may go on naming who began."""
    known = {_named_as(one.origin) for one in sampled[:1]}
    for index, one in enumerate(sampled):
        moved = one.step.moved
        if moved is not None:
            before = sampled[0].origin
            if not index or not one.step.kv or (moved.run, moved.seed) != (before.run, before.seed):
                yield f"moved to {moved.replica} at token {index} without its KV, its run or its seed"
            known.add(_named_as(moved))
        if _named_as(one.origin) not in known:
            yield "names more than one origin"
            break


def _named_as(origin: Origin) -> tuple[ReplicaId, BootId, int]:
    return origin.replica, origin.boot, origin.seed


def _covers(kv: Sequence[PolicySpan], rows: int) -> bool:
    """Whether spans are adjacent and reach from 0 to ``rows``."""
    starts = [span.start for span in kv]
    ends = [span.end for span in kv]
    return starts == [0, *ends[:-1]] and ends[-1] == rows and all(map(lt, starts, ends))


def _may_follow(before: Version, version: Version, goals: Sequence[Version | None]) -> bool:
    return version >= before or any(goal is not None and goal < before for goal in goals)


def _built(earlier: Answered, answer: Answered) -> int:
    """Prompt tokens of an ``earlier`` answer that this one may have reused; without a token, any version built it."""
    if earlier.accepted.boot != answer.accepted.boot:
        return 0
    any_kv = answer.accepted.request.policy.any_kv
    if not any_kv and earlier.steps and earlier.steps[0].version != answer.steps[0].version:
        return 0
    pair = answer.accepted.request.prompt_ids, earlier.accepted.request.prompt_ids
    differing = (index for index, (ours, theirs) in enumerate(zip(*pair, strict=False)) if ours != theirs)
    return next(differing, min(map(len, pair)))
