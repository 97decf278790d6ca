from collections.abc import Callable
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slackwater.checkpoint.chain import MAX_LISTED, Path, plan_listed, plan_path
from slackwater.errors import NotFoundError
from slackwater.ids import Version

Kind = Literal["anchor", "delta"] | None


def chain(text: str) -> Callable[[Version], Kind]:
    """``a``: anchor, ``d``: delta, ``.``: gone."""
    kinds: dict[str, Kind] = {"a": "anchor", "d": "delta", ".": None}
    return lambda version: kinds[text[version]] if version < len(text) else None


def path(anchor: int | None, *deltas: int) -> Path:
    return Path(anchor=None if anchor is None else Version(anchor), deltas=tuple(map(Version, deltas)))


@pytest.mark.parametrize(
    ("held", "target", "text", "expected"),
    [
        (None, 0, "a", path(0)),
        (None, 3, "addd", path(0, 1, 2, 3)),
        (None, 4, "addad", path(3, 4)),
        (1, 3, "addd", path(None, 2, 3)),
        (3, 3, "addd", path(None)),
        (1, 4, "addad", path(3, 4)),
        (3, 1, "addd", path(0, 1)),
        (0, 0, "a", path(None)),
        (9, 1, "ad", path(0, 1)),
        (1, 3, "..dd", path(None, 2, 3)),
    ],
)
def test_the_cheapest_path_is_found(held: int | None, target: int, text: str, expected: Path) -> None:
    base = None if held is None else Version(held)
    assert plan_path(base, Version(target), chain(text)) == expected


def test_f14_a_gap_falls_back_to_the_newest_anchor_after_it() -> None:
    assert plan_path(Version(2), Version(5), chain("add.ad")) == path(4, 5)


@pytest.mark.parametrize(
    ("held", "target", "text"),
    [(2, 5, "add.dd"), (None, 2, ".dd"), (None, 0, ""), (None, 3, "add"), (None, 1, "dd")],
)
def test_f14_a_target_out_of_reach_is_told(held: int | None, target: int, text: str) -> None:
    with pytest.raises(NotFoundError, match=f"version {target} can't be reached"):
        plan_path(None if held is None else Version(held), Version(target), chain(text))


Folds = set[tuple[int, int]]


def folding(folds: Folds) -> Callable[[Version], list[Version]]:
    """Folds from the first to the second version of each pair."""
    return lambda version: [Version(start) for start, end in sorted(folds) if end == version]


@pytest.mark.parametrize(
    ("held", "target", "text", "folds", "expected"),
    [
        (None, 5, "addddd", {(0, 5)}, path(0, 5)),
        (None, 5, "addddd", {(0, 4)}, path(0, 4, 5)),
        (None, 5, "addddd", {(1, 3), (3, 5)}, path(0, 1, 3, 5)),
        (2, 5, "addddd", {(0, 5)}, path(None, 3, 4, 5)),
        (2, 5, "addddd", {(2, 5)}, path(None, 5)),
        (1, 5, "adda.d", {(1, 5)}, path(None, 5)),
        (0, 5, "a....d", {(0, 5)}, path(None, 5)),
        (None, 5, "a....d", {(0, 5)}, path(0, 5)),
        (None, 5, "addadd", {(0, 5)}, path(0, 5)),
        (2, 4, "addad", {(2, 4)}, path(None, 4)),
        (None, 3, "addd", {(3, 3), (4, 3)}, path(0, 1, 2, 3)),
    ],
)
def test_a_fold_is_taken_where_it_saves_steps(
    held: int | None, target: int, text: str, folds: Folds, expected: Path
) -> None:
    base = None if held is None else Version(held)
    assert plan_path(base, Version(target), chain(text), folding(folds)) == expected


@given(
    st.text("ad.", max_size=9),
    st.one_of(st.none(), st.integers(0, 9)),
    st.integers(0, 9),
    st.sets(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=6),
)
def test_every_path_with_folds_is_made_of_deltas_and_folds(
    text: str, held: int | None, target: int, folds: Folds
) -> None:
    kind_of = chain(text)
    try:
        found = plan_path(None if held is None else Version(held), Version(target), kind_of, folding(folds))
    except NotFoundError:
        with pytest.raises(NotFoundError):
            plan_path(None, Version(target), kind_of)
        return
    at = held if found.anchor is None else found.anchor
    assert at is not None
    assert found.anchor is None or kind_of(found.anchor) == "anchor"
    for version in found.deltas:
        assert at < version
        assert (at, version) in folds or (at == version - 1 and kind_of(version) == "delta")
        at = version
    assert at == target


@given(st.text("ad.", max_size=12), st.one_of(st.none(), st.integers(0, 12)), st.integers(0, 12))
def test_every_path_ends_at_the_target_without_gaps(text: str, held: int | None, target: int) -> None:
    kind_of = chain(text)
    try:
        found = plan_path(None if held is None else Version(held), Version(target), kind_of)
    except NotFoundError:
        return
    start = held if found.anchor is None else found.anchor
    assert start is not None
    assert [*found.deltas] == list(range(start + 1, target + 1))
    assert all(kind_of(version) == "delta" for version in found.deltas)
    assert found.anchor is None or kind_of(found.anchor) == "anchor"


def planned(
    held: int | None, target: int, text: str, folds: Folds, listed: set[int]
) -> tuple[Path | None, list[Version]]:
    """The path by listings, and the versions that were asked what they are."""
    asked: list[Version] = []

    def kind_of(version: Version) -> Literal["anchor", "delta"]:
        asked.append(version)
        return "anchor" if text[version] == "a" else "delta"

    base, maybe = None if held is None else Version(held), {Version(number) for number in listed}
    return plan_listed(base, Version(target), kind_of, folding(folds), maybe), asked


@pytest.mark.parametrize(
    ("held", "target", "text", "folds", "listed", "expected", "asked"),
    [
        (None, 5, "addddd", {(0, 4)}, {0}, path(0, 4, 5), {0}),
        (None, 5, "addadd", {(0, 5)}, {0, 3}, path(3, 4, 5), {3}),
        (None, 5, "addddd", {(0, 5)}, {0, 3}, path(0, 5), {0, 3}),
        (None, 5, "addddd", {(0, 5)}, {0, 3, 9}, path(0, 5), {0, 3}),
        (None, 5, "addadd", {(0, 5)}, {0}, path(0, 5), {0}),
        (0, 5, "addadd", {(0, 5)}, {0, 3}, path(None, 5), set[int]()),
        (1, 5, "addadd", {(0, 5)}, {0, 3}, path(3, 4, 5), {3}),
        (2, 5, "addadd", {(2, 3)}, {0, 3}, path(None, 3, 4, 5), {3}),
        (9, 2, "addadd", {(0, 2)}, {0, 3}, path(0, 2), {0}),
        (5, 5, "addadd", {(0, 5)}, {0, 3}, path(None), set[int]()),
        (None, 5, "addadd", {(0, 5)}, set[int](), None, set[int]()),
        (None, 5, "dddddd", {(0, 5)}, {2}, None, {2}),
    ],
)
def test_by_listings_only_versions_that_may_be_anchors_are_asked_about(
    held: int | None, target: int, text: str, folds: Folds, listed: set[int], expected: Path | None, asked: set[int]
) -> None:
    found, questions = planned(held, target, text, folds, listed)
    assert (found, set(questions)) == (expected, asked)


@given(
    st.text("ad", max_size=9).map(lambda text: "a" + text),
    st.one_of(st.none(), st.integers(0, 9)),
    st.sets(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=6),
    st.sets(st.integers(0, 9)),
    st.data(),
)
def test_a_path_by_listings_is_as_short_as_any_and_begins_with_the_newest_anchor(
    text: str, held: int | None, folds: Folds, more: set[int], data: st.DataObject
) -> None:
    target = data.draw(st.integers(0, len(text) - 1))
    anchors = {number for number, kind in enumerate(text) if kind == "a"}
    found, _ = planned(held, target, text, folds, anchors | {number for number in more if number < len(text)})
    assert found is not None
    base = None if held is None else Version(held)
    wanted = plan_path(base, Version(target), chain(text), folding(folds))
    if wanted.anchor is not None:
        newest = Version(max(number for number in anchors if number <= target))
        assert found.anchor == newest
        wanted = plan_path(newest, Version(target), chain(text), folding(folds))
    else:
        assert found.anchor is None
    assert len(found.deltas) == len(wanted.deltas)


def test_a_number_far_above_the_anchor_is_not_planned_for() -> None:
    far, near = Version(MAX_LISTED + 1), Version(MAX_LISTED)
    folds = folding({(0, far), (0, near)})
    for held in (None, Version(0)):
        assert plan_listed(held, far, lambda _: "anchor", folds, {Version(0)}) is None
    assert plan_listed(None, near, lambda _: "anchor", folds, {Version(0)}) == path(0, near)
