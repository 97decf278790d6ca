"""What of a run may be deleted. Decided from a listing and manifests alone; nothing is read or deleted here.

A version is kept with its whole chain, down to its anchor; an object is kept while a kept manifest names it. The order
of the deletions is the safety: folds and manifests go first, rising, then their signatures and the objects that only
they named. So at any point every manifest that is left has all its objects and its signature, and a collection that
ends in the middle leaves objects without a manifest, which the next one finds.

Writes that were begun and never ended belong to no version: their age alone decides.
"""

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Final, Literal

from slackwater.bucket.base import ObjectInfo, Unfinished
from slackwater.checkpoint.keys import fold_key, head_key, manifest_key, parse_fold_key, signature_key
from slackwater.checkpoint.manifest import Manifest
from slackwater.errors import ConflictError, CorruptError, InvalidInputError, NotFoundError
from slackwater.ids import ObjectDigest, RunId, Version

Reason = Literal[
    "head",
    "last",
    "anchor",
    "pinned",
    "in use",
    "chain",
    "young",
    "undated",
    "named",
    "fold",
    "signature",
    "hint",
    "foreign",
]
"""Why something is kept.

Versions: ``head`` the newest anchor and all after it, ``last`` one of the newest, ``anchor`` one of the newest anchors,
``pinned`` and ``in use`` as the policy says, ``chain`` leads to a kept one, ``young`` and ``undated`` written less than
the minimum age ago, or who knows when. Objects: ``named`` by a kept manifest, ``young``, ``undated``; ``fold`` between
kept versions, ``signature`` of a version or a fold that stays, ``hint`` the head's; ``foreign`` is no key of this run's
grammar.
"""

Why = Literal["fold", "manifest", "object", "orphan", "signature"]
"""What is deleted: an ``object`` was named by a manifest that goes; an ``orphan`` by none, as dead publishers leave
them. A ``signature`` is that of a manifest or a fold that goes, or of none.
"""

_MANIFEST: Final = re.compile(r"manifests/([0-9]{8})\.json")
_OBJECT: Final = re.compile(
    r"blobs/[0-9a-f]{64}|anchors/[0-9]{8}-[0-9a-f]{16}/(?!.*\.\.)[A-Za-z0-9][A-Za-z0-9._-]{0,127}"
)
_SIGNATURE: Final = re.compile(r"signatures/[0-9a-f]{64}\.json")

Fold = tuple[Version, Version]
"""The version that a fold is made on, and the one that it leads to."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """What is to be kept beside the head's chain.

    Raises:
        InvalidInputError: A number is out of its bounds.
    """

    keep_last: int = 100
    """The newest versions, 1 or more."""
    keep_anchors: int = 2
    """The newest anchors, 1 or more."""
    min_age_s: float = 86_400.0
    """Nothing younger goes. Longer than the longest publish, and than a replica takes to catch up."""
    pinned: Collection[Version] = ()
    """Versions that people want."""
    leases: Collection[Version] = ()
    """Versions in use; one that isn't there any more is no matter."""

    def __post_init__(self) -> None:
        if min(self.keep_last, self.keep_anchors) < 1 or not self.min_age_s >= 0:
            raise InvalidInputError(
                f"keep_last={self.keep_last} and keep_anchors={self.keep_anchors} are 1 or more, "
                f"min_age_s={self.min_age_s} is 0 or more"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Contents:
    """A run as it lies in its bucket."""

    run: RunId
    objects: Collection[ObjectInfo]
    """The listing."""
    manifests: Mapping[Version, Manifest]
    """Every committed version."""
    folds: Mapping[Fold, Manifest]
    digests: Mapping[str, ObjectDigest]
    """By key, the SHA-256 of each manifest and fold: it names the signature."""
    now_s: float
    """Seconds since the epoch, by the clock of ``ObjectInfo.modified_s``."""
    unfinished: Collection[Unfinished] = ()
    """Writes that were begun and haven't ended."""
    blind: str | None = None
    """Why these weren't looked for, and what else removes them; None: they were."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Doomed:
    """An object that may go."""

    key: str
    size: int
    """Bytes."""
    why: Why


@dataclass(frozen=True, kw_only=True, slots=True)
class Kept:
    """An object that stays."""

    key: str
    size: int
    """Bytes."""
    reason: Reason


@dataclass(frozen=True, kw_only=True, slots=True)
class GcPlan:
    """What goes, in the order in which it has to, and what stays."""

    delete: tuple[Doomed, ...]
    keep: tuple[Kept, ...]
    versions: Mapping[Version, Reason]
    """The versions that stay, rising."""
    abort: tuple[Unfinished, ...]
    """Unfinished writes of the run that are old, by key."""
    underway: tuple[Unfinished, ...]
    """Those that stay, by key: they are young, or of unknown age, and a publisher may be at them."""

    @property
    def num_bytes(self) -> int:
        """Bytes that go."""
        return sum(item.size for item in self.delete)


def plan_gc(contents: Contents, policy: Policy) -> GcPlan:
    """Plan a collection.

    Args:
        contents: The run. What its manifests name and the listing lacks is no matter, but in the head's chain.
        policy: What to keep.

    Raises:
        ConflictError: The listing can't be right: it lacks manifests that are there.
        CorruptError: The head's chain isn't whole, so that older versions may be needed to mend it.
        InvalidInputError: A pinned version isn't committed.
        NotFoundError: The run has no versions.
    """
    aged = _Ages(contents, policy.min_age_s)
    _check_listing(contents)
    versions = _kept_versions(contents, policy, aged)
    folds = {
        fold for fold in contents.folds if versions.keys() >= set(fold) or aged.protects(fold_key(contents.run, *fold))
    }
    kept = [*(contents.manifests[v] for v in versions), *(contents.folds[f] for f in folds)]
    named = frozenset(ref.key for manifest in kept for ref in manifest.objects)
    signed = [manifest_key(contents.run, v) for v in versions] + [fold_key(contents.run, *f) for f in folds]
    signatures = [signature_key(contents.run, contents.digests[key]) for key in signed if key in contents.digests]
    known = frozenset(ref.key for m in chain(contents.manifests.values(), contents.folds.values()) for ref in m.objects)
    sorter = _Sorter(contents.run, versions, folds, signatures, named, known, aged)
    judged = [(item, sorter.judge(item)) for item in sorted(contents.objects, key=lambda item: item.key)]
    begun = sorted(
        (upload for upload in contents.unfinished if _is_ours(contents.run, upload.key)),
        key=lambda upload: (upload.key, upload.upload),
    )
    doomed = [Doomed(key=item.key, size=item.size, why=why) for item, (why, _) in judged if why]
    return GcPlan(
        delete=tuple(sorted(doomed, key=lambda item: _ORDER[item.why])),
        keep=tuple(Kept(key=item.key, size=item.size, reason=reason) for item, (_, reason) in judged if reason),
        versions=versions,
        abort=tuple(upload for upload in begun if not aged.guards(upload.started_s)),
        underway=tuple(upload for upload in begun if aged.guards(upload.started_s)),
    )


_ORDER: Final[Mapping[Why, int]] = {"fold": 0, "manifest": 1, "object": 2, "orphan": 2, "signature": 2}


class _Ages:
    """When objects were written."""

    def __init__(self, contents: Contents, min_age_s: float) -> None:
        self._written_s = {item.key: item.modified_s for item in contents.objects}
        self._before_s = contents.now_s - min_age_s

    def protects(self, key: str) -> Literal["young", "undated"] | None:
        """Whether an object's age keeps it; one that isn't listed has none."""
        return self.guards(self._written_s.get(key))

    def guards(self, written_s: float | None) -> Literal["young", "undated"] | None:
        """Whether what was written then, or who knows when, stays for its age."""
        if written_s is None:
            return "undated"
        return None if written_s <= self._before_s else "young"


def _check_listing(contents: Contents) -> None:
    """Check that the listing and the manifests tell of one run; manifests above the listing's newest came after it."""
    if not contents.manifests:
        raise NotFoundError(f"{contents.run} has no version", hint="check --bucket and --run")
    sizes = {item.key: item.size for item in contents.objects}
    unread = sorted(listed_manifests(contents.run, sizes) - contents.manifests.keys())
    if unread:
        raise CorruptError(
            f"{manifest_key(contents.run, unread[0])} can't be read, so what it needs isn't known",
            hint="find out what wrote it; `slackwater verify` tells more",
        )
    listed = {version for version in contents.manifests if manifest_key(contents.run, version) in sizes}
    missing = [version for version in contents.manifests if version < max(listed, default=1) and version not in listed]
    if missing or not listed:
        raise ConflictError(
            f"the listing of {contents.run} lacks version {min(missing or contents.manifests)}, which is there",
            hint="the store's listing lags: try again later",
        )
    _check_head(contents, max(listed), sizes)


def listed_manifests(run: RunId, keys: Iterable[str]) -> set[Version]:
    """The versions whose manifests are among some keys."""
    below = (key.removeprefix(f"{run}/") for key in keys if key.startswith(f"{run}/"))
    return {Version(int(found[1])) for found in map(_MANIFEST.fullmatch, below) if found}


def _check_head(contents: Contents, head: Version, sizes: Mapping[str, int]) -> None:
    steps = [contents.manifests[version] for version in _chain(contents.manifests, head)]
    if steps[-1].kind != "anchor":
        raise CorruptError(
            f"no anchor leads to version {head} of {contents.run}: version {steps[-1].version - 1} isn't there",
            hint="publish an anchor, then collect again",
        )
    for ref in (ref for step in steps for ref in step.objects):
        if sizes.get(ref.key) != ref.size:
            found = "isn't listed" if ref.key not in sizes else f"has {sizes[ref.key]} bytes"
            raise CorruptError(
                f"{ref.key}, of {ref.size} bytes, is needed for version {head} of {contents.run} and {found}",
                hint="publish an anchor, then collect again",
            )


def _chain(manifests: Mapping[Version, Manifest], version: Version) -> list[Version]:
    """A version and those that lead to it, falling, down to its anchor or to a gap."""
    found = [version]
    while manifests[found[-1]].kind == "delta" and Version(found[-1] - 1) in manifests:
        found.append(Version(found[-1] - 1))
    return found


def _kept_versions(contents: Contents, policy: Policy, aged: _Ages) -> dict[Version, Reason]:
    manifests = contents.manifests
    numbers = sorted(manifests)
    unknown = sorted(set(policy.pinned) - manifests.keys())
    if unknown:
        raise InvalidInputError(f"version {unknown[0]} of {contents.run} is pinned and isn't committed")
    anchors = [version for version in numbers if manifests[version].kind == "anchor"]
    wanted: list[tuple[Iterable[Version], Reason]] = [
        (_chain(manifests, numbers[-1]), "head"),
        (numbers[-policy.keep_last :], "last"),
        (anchors[-policy.keep_anchors :], "anchor"),
        (policy.pinned, "pinned"),
        (manifests.keys() & set(policy.leases), "in use"),
    ]
    kept: dict[Version, Reason] = {}
    for versions, reason in wanted:
        for version in versions:
            kept.setdefault(version, reason)
    for version in numbers:
        age = aged.protects(manifest_key(contents.run, version))
        if age is not None:
            kept.setdefault(version, age)
    for version in reversed(numbers):
        before = Version(version - 1)
        if version in kept and manifests[version].kind == "delta" and before in manifests:
            kept.setdefault(before, "chain")
    return dict(sorted(kept.items()))


class _Sorter:
    """Says of each listed object why it goes or why it stays."""

    def __init__(
        self,
        run: RunId,
        versions: Mapping[Version, Reason],
        folds: Collection[Fold],
        signatures: Collection[str],
        named: Collection[str],
        known: Collection[str],
        aged: _Ages,
    ) -> None:
        self._run = run
        self._reasons: dict[str, Reason] = {
            **dict.fromkeys(named, "named"),
            **{manifest_key(run, version): reason for version, reason in versions.items()},
            **{fold_key(run, *fold): "fold" for fold in folds},
            **dict.fromkeys(signatures, "signature"),
            head_key(run): "hint",
        }
        self._known = known
        self._aged = aged

    def judge(self, item: ObjectInfo) -> tuple[Why | None, Reason | None]:
        """Exactly one of both."""
        reason = self._reasons.get(item.key)
        why = self._kind(item.key)
        if reason is None and why is None:
            reason = "foreign"
        if reason is None:
            reason = self._aged.protects(item.key)
        return (why, None) if reason is None else (None, reason)

    def _kind(self, key: str) -> Why | None:
        kind = _kind(self._run, key)
        return "orphan" if kind == "object" and key not in self._known else kind


def _kind(run: RunId, key: str) -> Literal["fold", "manifest", "object", "signature"] | None:
    """What a key of the run's grammar names, of all that a plan may delete."""
    owner, _, rest = key.partition("/")
    if owner != run:
        return None
    if _MANIFEST.fullmatch(rest):
        return "manifest"
    if parse_fold_key(run, key) is not None:
        return "fold"
    if _SIGNATURE.fullmatch(rest):
        return "signature"
    return "object" if _OBJECT.fullmatch(rest) else None


def _is_ours(run: RunId, key: str) -> bool:
    return _kind(run, key) is not None or key == head_key(run)
