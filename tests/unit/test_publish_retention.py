from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slackwater.bucket.base import ObjectInfo
from slackwater.checkpoint.digest import object_digest
from slackwater.checkpoint.keys import anchor_key, blob_key, fold_key, head_key, manifest_key, signature_key
from slackwater.checkpoint.manifest import FORMAT, Manifest, ObjectRef, Parent
from slackwater.errors import ConflictError, CorruptError, InvalidInputError, NotFoundError
from slackwater.ids import ObjectDigest, RunId, StateDigest, Version
from slackwater.publish.retention import Contents, Fold, GcPlan, Policy, Reason, plan_gc

RUN = RunId("run")
DAY_S = 86_400.0
NOW_S = 1000 * DAY_S
OLD_S = NOW_S - 10 * DAY_S
STATE = StateDigest("0" * 64)
NEWEST = Policy(keep_last=1, keep_anchors=1)


def digest(word: str) -> ObjectDigest:
    return ObjectDigest(word.encode().hex().ljust(64, "0"))


def blob(word: str) -> ObjectRef:
    return ObjectRef(key=blob_key(RUN, digest(word)), size=10, sha256=digest(word))


def shard(number: int, file: str = "model.safetensors") -> ObjectRef:
    key = anchor_key(RUN, Version(number), f"{number:016x}", file)
    return ObjectRef(key=key, size=100, sha256=digest(f"anchor {number}"))


def anchor(number: int, *objects: ObjectRef) -> Manifest:
    return Manifest(
        format=FORMAT, run=RUN, version=Version(number), kind="anchor", state=STATE, step=0, created_at="now",
        objects=objects or (shard(number),),
    )  # fmt: skip


def delta(number: int, *objects: ObjectRef, base: int | None = None) -> Manifest:
    parent = Parent(version=Version(number - 1 if base is None else base), state=STATE)
    return Manifest(
        format=FORMAT, run=RUN, version=Version(number), kind="delta", parent=parent, state=STATE, step=0,
        created_at="now", objects=objects or (blob(f"delta {number}"),),
    )  # fmt: skip


def chain(kinds: str, first: int = 0) -> list[Manifest]:
    """``addad``: an anchor, two deltas, an anchor, a delta."""
    return [anchor(n) if kind == "a" else delta(n) for n, kind in enumerate(kinds, start=first)]


def contents(
    manifests: list[Manifest],
    *folds: Manifest,
    ages: dict[str, float | None] | None = None,
    more: tuple[str, ...] = (),
    without: tuple[str, ...] = (),
) -> Contents:
    """A run whose objects are ten days old, but for ``ages`` in seconds by key."""
    read: dict[Fold, Manifest] = {(f.parent.version, f.version): f for f in folds if f.parent is not None}
    keys = {
        **{manifest_key(RUN, m.version): 5 for m in manifests},
        **{fold_key(RUN, *fold): 5 for fold in read},
        **{ref.key: ref.size for m in (*manifests, *folds) for ref in m.objects},
        head_key(RUN): 3,
        **dict.fromkeys(more, 7),
    }
    written = {key: NOW_S - age if age is not None else None for key, age in (ages or {}).items()}
    listing = [
        ObjectInfo(key=key, size=size, modified_s=written.get(key, OLD_S))
        for key, size in keys.items()
        if key not in without
    ]
    signed = [*(manifest_key(RUN, m.version) for m in manifests), *(fold_key(RUN, *fold) for fold in read)]
    return Contents(
        run=RUN,
        objects=listing,
        manifests={m.version: m for m in manifests},
        folds=read,
        digests={key: digest_of(key) for key in signed},
        now_s=NOW_S,
    )


def digest_of(key: str) -> ObjectDigest:
    """What stands for the SHA-256 of a manifest's bytes."""
    return object_digest(key.encode())


def signature_of(key: str) -> str:
    return signature_key(RUN, digest_of(key))


def gone(plan: GcPlan) -> list[str]:
    return [item.key for item in plan.delete]


def reasons(plan: GcPlan) -> dict[int, Reason]:
    return {int(version): reason for version, reason in plan.versions.items()}


def manifest_keys(*numbers: int) -> list[str]:
    return [manifest_key(RUN, Version(number)) for number in numbers]


def test_the_newest_anchor_and_all_after_it_stay_and_what_is_before_goes_manifests_first() -> None:
    plan = plan_gc(contents(chain("addadd")), NEWEST)
    assert reasons(plan) == {3: "head", 4: "head", 5: "head"}
    assert gone(plan)[:3] == manifest_keys(0, 1, 2)
    assert set(gone(plan)[3:]) == {shard(0).key, blob("delta 1").key, blob("delta 2").key}
    assert [item.why for item in plan.delete] == ["manifest"] * 3 + ["object"] * 3
    assert plan.num_bytes == 3 * 5 + 100 + 2 * 10
    assert {item.key: item.reason for item in plan.keep}[head_key(RUN)] == "hint"


def test_kept_versions_keep_their_chains() -> None:
    history = contents(chain("addaddadd"))
    assert reasons(plan_gc(history, Policy(keep_last=4, keep_anchors=1))) == {
        3: "chain", 4: "chain", 5: "last", 6: "head", 7: "head", 8: "head",
    }  # fmt: skip
    assert reasons(plan_gc(history, Policy(keep_last=1, keep_anchors=2)))[3] == "anchor"
    assert 4 not in reasons(plan_gc(history, Policy(keep_last=1, keep_anchors=2)))
    pinned = Policy(keep_last=1, keep_anchors=1, pinned=[Version(1)])
    assert [*reasons(plan_gc(history, pinned)).items()][:2] == [(0, "chain"), (1, "pinned")]
    leased = Policy(keep_last=1, keep_anchors=1, leases=[Version(4), Version(77)])
    assert [*reasons(plan_gc(history, leased)).items()][:2] == [(3, "chain"), (4, "in use")]


def test_an_anchor_is_no_part_of_the_chain_of_the_next_one() -> None:
    assert reasons(plan_gc(contents(chain("aaa")), NEWEST)) == {2: "head"}


def test_what_a_kept_manifest_names_stays_wherever_it_lies() -> None:
    linked = anchor(2, shard(0), shard(2))
    plan = plan_gc(contents([anchor(0), delta(1, blob("same")), linked, delta(3, blob("same"))]), NEWEST)
    assert gone(plan) == manifest_keys(0, 1)
    kept = {item.key: item.reason for item in plan.keep}
    assert (kept[shard(0).key], kept[blob("same").key]) == ("named", "named")


def test_a_young_or_undated_manifest_keeps_its_version_and_chain() -> None:
    for age, reason in ((DAY_S - 1, "young"), (-DAY_S, "young"), (None, "undated")):
        plan = plan_gc(contents(chain("addad"), ages={manifest_keys(1)[0]: age}), NEWEST)
        assert reasons(plan) == {0: "chain", 1: reason, 3: "head", 4: "head"}
    assert 1 not in reasons(plan_gc(contents(chain("addad"), ages={manifest_keys(1)[0]: DAY_S}), NEWEST))


def test_young_objects_stay_and_those_without_any_manifest_go_when_they_are_old() -> None:
    orphans = (blob("a").key, blob("b").key, anchor_key(RUN, Version(9), "0" * 16, "config.json"))
    ages: dict[str, float | None] = {orphans[0]: 10.0, shard(0).key: None}
    plan = plan_gc(contents(chain("aa"), more=orphans, ages=ages), NEWEST)
    assert gone(plan) == [*manifest_keys(0), *sorted(orphans[1:])]
    assert [item.why for item in plan.delete] == ["manifest", "orphan", "orphan"]
    kept = {item.key: item.reason for item in plan.keep}
    assert (kept[orphans[0]], kept[shard(0).key]) == ("young", "undated")


@pytest.mark.parametrize(
    "key",
    [
        "other/manifests/00000000.json",
        f"other/blobs/{'0' * 64}",
        f"run2/blobs/{'0' * 64}",
        "run",
        "notes.txt",
        "run/notes.txt",
        f"run/blobs/{'0' * 63}",
        f"run/blobs/{'A' * 64}",
        f"run/blobs/deep/{'0' * 64}",
        "run/manifests/0.json",
        "run/manifests/00000000.json.bak",
        "run/folds/0-1.json",
        "run/folds/00000000-00000001.json/deep",
        "run/anchors/00000000-0000/model.safetensors",
        "run/anchors/00000000-0000000000000000/a/b",
        "run/anchors/00000000-0000000000000000/a..b",
        "run/anchors/00000000-0000000000000000",
        "run/head.json.old",
        f"run/signatures/{'0' * 63}.json",
        f"run/signatures/{'0' * 64}",
        f"run/signatures/{'0' * 64}.json.old",
        f"other/signatures/{'0' * 64}.json",
    ],
)
def test_what_is_no_key_of_this_run_is_never_deleted(key: str) -> None:
    plan = plan_gc(contents(chain("aa"), more=(key,)), NEWEST)
    assert key not in gone(plan)
    assert next(item.reason for item in plan.keep if item.key == key) == "foreign"


def test_a_fold_stays_while_both_of_its_ends_do_and_goes_before_anything_else() -> None:
    near, far = delta(6, blob("near"), base=4), delta(6, blob("far"), base=1)
    young = delta(2, blob("young"), base=0)
    run = contents(chain("addaddd"), near, far, young, ages={fold_key(RUN, Version(0), Version(2)): 5.0})
    plan = plan_gc(run, NEWEST)
    assert gone(plan)[0] == fold_key(RUN, Version(1), Version(6))
    assert plan.delete[0].why == "fold"
    assert blob("far").key in gone(plan)
    assert not {blob("near").key, blob("young").key, fold_key(RUN, Version(4), Version(6))} & {*gone(plan)}


def test_signatures_stay_with_what_they_sign_and_go_after_it() -> None:
    near, far = delta(5, blob("near"), base=4), delta(5, blob("far"), base=1)
    signed = [*manifest_keys(*range(6)), fold_key(RUN, Version(4), Version(5)), fold_key(RUN, Version(1), Version(5))]
    of_none, young = signature_of("nothing"), signature_of("a manifest that is about to be committed")
    signatures = (*map(signature_of, signed), of_none, young)
    plan = plan_gc(contents(chain("addadd"), near, far, more=signatures, ages={young: DAY_S - 1}), NEWEST)
    going = [*manifest_keys(0, 1, 2), fold_key(RUN, Version(1), Version(5))]
    assert {item.key for item in plan.delete if item.why == "signature"} == {*map(signature_of, going), of_none}
    assert {item.key for item in plan.delete if item.why in {"manifest", "fold"}} == {*going}
    order = gone(plan)
    assert all(order.index(key) < order.index(signature_of(key)) for key in going)
    kept = {item.key: item.reason for item in plan.keep}
    assert {kept[signature_of(key)] for key in signed if key not in going} == {"signature"}
    assert kept[young] == "young"


def test_a_signature_that_a_kept_version_shares_with_a_fold_that_goes_stays() -> None:
    """A fold over one version may be its delta, byte for byte."""
    signature = signature_of(manifest_keys(4)[0])
    run = contents(chain("addad"), delta(4, blob("delta 4"), base=2), more=(signature,))
    shared = {**run.digests, fold_key(RUN, Version(2), Version(4)): run.digests[manifest_keys(4)[0]]}
    plan = plan_gc(replace(run, digests=shared), NEWEST)
    assert fold_key(RUN, Version(2), Version(4)) in gone(plan)
    assert signature not in gone(plan)


def test_a_young_signature_outlives_what_it_signed_until_it_is_old() -> None:
    """As one that was put again for a manifest that is about to be made again."""
    signature = signature_of(manifest_keys(0)[0])
    for age, reason in ((5.0, "young"), (None, "undated")):
        plan = plan_gc(contents(chain("aa"), more=(signature,), ages={signature: age}), NEWEST)
        assert manifest_keys(0)[0] in gone(plan)
        assert {item.key: item.reason for item in plan.keep}[signature] == reason


# What can't be right


def test_a_run_without_versions_is_refused() -> None:
    with pytest.raises(NotFoundError, match="run has no version"):
        plan_gc(contents([]), NEWEST)


@pytest.mark.parametrize("lacking", [(0,), (2,), (0, 1, 2, 3, 4)])
def test_a_listing_that_lacks_manifests_is_refused(lacking: tuple[int, ...]) -> None:
    with pytest.raises(ConflictError, match="the listing of run lacks version"):
        plan_gc(contents(chain("addad"), without=tuple(manifest_keys(*lacking))), NEWEST)


def test_versions_committed_after_the_listing_are_kept() -> None:
    without = (*manifest_keys(4, 5), blob("delta 4").key, shard(5).key)
    plan = plan_gc(contents(chain("addada"), without=without), NEWEST)
    assert reasons(plan) == {3: "chain", 4: "undated", 5: "head"}
    assert not {shard(3).key} & {*gone(plan)}


def test_a_listed_manifest_that_was_not_read_is_refused() -> None:
    with pytest.raises(CorruptError, match=r"00000007\.json can't be read"):
        plan_gc(contents(chain("aa"), more=tuple(manifest_keys(7))), NEWEST)


@pytest.mark.parametrize("key", [shard(1).key, blob("delta 2").key])
def test_an_older_anchor_is_not_deleted_while_the_heads_chain_is_broken(key: str) -> None:
    with pytest.raises(CorruptError, match=r"is needed for version 2 of run and isn't listed .*publish an anchor"):
        plan_gc(contents(chain("aad"), without=(key,)), NEWEST)
    run = contents(chain("aad"))
    shorter = [ObjectInfo(key=i.key, size=1, modified_s=OLD_S) if i.key == key else i for i in run.objects]
    with pytest.raises(CorruptError, match="has 1 bytes"):
        plan_gc(replace(run, objects=shorter), NEWEST)


def test_a_head_that_no_anchor_leads_to_is_refused() -> None:
    with pytest.raises(CorruptError, match=r"no anchor leads to version 4 of run: version 2 isn't there"):
        plan_gc(contents([anchor(0), delta(1), *chain("dd", first=3)]), NEWEST)


def test_a_pin_on_what_is_not_there_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="version 9 of run is pinned and isn't committed"):
        plan_gc(contents(chain("a")), Policy(pinned=[Version(9)]))


@pytest.mark.parametrize(
    "wrong", [{"keep_last": 0}, {"keep_anchors": 0}, {"min_age_s": -1}, {"min_age_s": float("nan")}]
)
def test_a_policy_is_bounded(wrong: dict[str, float]) -> None:
    with pytest.raises(InvalidInputError):
        Policy(**wrong)  # type: ignore[arg-type]  # hypothesis of a wrong caller


@given(
    kinds=st.text("ad", min_size=0, max_size=12).map(lambda text: "a" + text),
    keep=st.integers(1, 6),
    anchors=st.integers(1, 3),
    blobs=st.lists(st.integers(0, 3), min_size=13, max_size=13),
    young=st.sets(st.integers(0, 12)),
    data=st.data(),
)
def test_after_any_prefix_every_manifest_that_is_left_has_its_objects(
    kinds: str, keep: int, anchors: int, blobs: list[int], young: set[int], data: st.DataObject
) -> None:
    """Objects shared at random: deltas have one of four blobs, anchors link the one before."""
    manifests = [
        anchor(n, shard(n), *((shard(blobs[n]),) if blobs[n] < n else ()))
        if kind == "a"
        else delta(n, blob(str(blobs[n])))
        for n, kind in enumerate(kinds)
    ]
    signatures = tuple(signature_of(manifest_key(RUN, m.version)) for m in manifests)
    ages: dict[str, float | None] = {manifest_key(RUN, Version(n)): 1.0 for n in young if n < len(kinds)}
    run = contents(manifests, ages=ages, more=signatures)
    pinned = data.draw(st.sets(st.sampled_from([m.version for m in manifests])))
    plan = plan_gc(run, Policy(keep_last=keep, keep_anchors=anchors, pinned=pinned))
    done = gone(plan)[: data.draw(st.integers(0, len(plan.delete)))]
    left = {item.key for item in run.objects} - {*done}
    for manifest in manifests:
        if manifest_key(RUN, manifest.version) in left:
            assert {ref.key for ref in manifest.objects} <= left
            assert signature_of(manifest_key(RUN, manifest.version)) in left
    kept = {v for v in plan.versions if manifest_key(RUN, v) in left}
    assert kept == {*plan.versions} >= pinned | {m.version for m in manifests[-keep:]}
    for version in kept:
        if manifests[version].kind == "delta":
            assert version - 1 in kept
    assert {item.key for item in plan.delete} | {item.key for item in plan.keep} == {i.key for i in run.objects}
    assert len(plan.delete) + len(plan.keep) == len(run.objects)
