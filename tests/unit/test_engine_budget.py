"""Who gives up KV for whom."""

from hypothesis import given
from hypothesis import strategies as st

from slackwater.engine.torch.budget import Budget, Holding

LONGEST = 9


@st.composite
def held(draw: st.DrawFn) -> list[Holding]:
    """Answers in slots, the oldest first; each fits alone."""
    sizes = draw(st.lists(st.tuples(st.integers(1, LONGEST), st.booleans()), max_size=8))
    return [Holding(key=key, rows=rows, idle=idle) for key, (rows, idle) in enumerate(sizes)]


def busy(*rows: int) -> list[Holding]:
    return [Holding(key=key, rows=count) for key, count in enumerate(rows)]


def test_nobody_leaves_while_all_fit() -> None:
    assert Budget(slots=3, rows=12).preempted(busy(4, 4, 4)) == ()


def test_the_youngest_leaves_first() -> None:
    assert Budget(slots=3, rows=9).preempted(busy(4, 4, 2)) == (2,)
    assert Budget(slots=3, rows=7).preempted(busy(4, 4, 2)) == (2, 1)


def test_who_does_nothing_leaves_before_the_youngest() -> None:
    idle = Holding(key=9, rows=2, idle=True)
    assert Budget(slots=4, rows=9).preempted([idle, *busy(4, 4)]) == (9,)


def test_only_who_does_nothing_makes_way_for_one_that_comes() -> None:
    budget, idle = Budget(slots=2, rows=9), Holding(key=9, rows=4, idle=True)
    assert budget.displaced([idle, *busy(4)], 5) == (9,)
    assert budget.displaced(busy(4), 5) == ()
    assert budget.displaced(busy(5), 5) is None
    assert budget.displaced(busy(1, 1), 1) is None


@given(held(), st.integers(1, 8), st.integers(LONGEST, 40))
def test_the_rest_fits_and_the_oldest_that_works_stays(answers: list[Holding], slots: int, rows: int) -> None:
    gone = Budget(slots=slots, rows=rows).preempted(answers)
    rest = [one for one in answers if one.key not in gone]
    assert len(rest) <= slots
    assert sum(one.rows for one in rest) <= rows
    working = [one.key for one in answers if not one.idle]
    assert not working or working[0] not in gone
    assert all(one.idle for one in answers if one.key in gone) or not any(one.idle for one in rest)


@given(held(), st.integers(1, LONGEST), st.integers(1, 8), st.integers(LONGEST, 40))
def test_no_more_make_way_than_have_to(answers: list[Holding], coming: int, slots: int, rows: int) -> None:
    budget = Budget(slots=slots, rows=rows)
    gone = budget.displaced(answers, coming)
    working = [one for one in answers if not one.idle]
    fits = len(working) < slots and sum(one.rows for one in working) + coming <= rows
    assert (gone is not None) == fits
    for kept in range(len(gone or ())):
        rest = [one for one in answers if one.key not in (gone or ())[:kept]]
        assert len(rest) >= slots or sum(one.rows for one in rest) + coming > rows


def test_without_a_bound_it_is_that_of_the_slots() -> None:
    assert Budget.of(slots=4, window=100, kv_tokens=None) == Budget(slots=4, rows=400)
    assert Budget.of(slots=4, window=100, kv_tokens=500) == Budget(slots=4, rows=400)
    assert Budget.of(slots=4, window=100, kv_tokens=150) == Budget(slots=4, rows=150)
