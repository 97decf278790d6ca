import re
from itertools import product
from pathlib import Path

import pytest

from slackwater.errors import InternalError
from slackwater.ids import Version
from slackwater.replica.swap import MOVES, Event, Stage, Swap, diagram, keeps

PAGE = Path(__file__).parents[2] / "docs" / "swap.md"
ILLEGAL = [pair for pair in product(Stage, Event) if pair not in MOVES]


def at(stage: Stage, version: int = 6, goal: int | None = None, previous: int | None = None) -> Swap:
    return Swap(
        version=Version(version),
        stage=stage,
        goal=None if goal is None else Version(goal),
        previous=None if previous is None else Version(previous),
    )


def run(swap: Swap, *events: Event, goal: int = 7) -> Swap:
    for event in events:
        swap = swap.after(event, Version(goal) if event is Event.BEGIN else None)
    return swap


@pytest.mark.parametrize(("stage", "event"), ILLEGAL, ids=str)
def test_an_illegal_event_names_machine_state_and_event(stage: Stage, event: Event) -> None:
    with pytest.raises(InternalError, match=rf"swap machine: '{event}' is illegal in '{stage}'"):
        at(stage, goal=7, previous=5).after(event, Version(7))


def test_a_whole_exchange_moves_the_label_once_and_confirms_it() -> None:
    staged = run(at(Stage.IDLE), Event.BEGIN, Event.PREPARED)
    assert (staged.version, staged.goal, staged.provisional) == (6, 7, False)
    committed = run(staged, Event.COMMIT, Event.COMMITTED)
    assert (committed.version, committed.previous, committed.provisional) == (7, 6, True)
    assert run(committed, Event.AGREED) == at(Stage.IDLE, version=7, previous=6)


@pytest.mark.parametrize(
    "events",
    [
        (Event.FAILED,),
        (Event.SUPERSEDE,),
        (Event.PREPARED, Event.SUPERSEDE),
        (Event.PREPARED, Event.COMMIT, Event.FAILED),
    ],
    ids=str,
)
def test_whatever_ends_before_the_commit_leaves_no_trace(events: tuple[Event, ...]) -> None:
    assert run(at(Stage.IDLE, previous=5), Event.BEGIN, *events) == at(Stage.IDLE, previous=5)


def test_a_difference_is_undone_and_can_not_be_undone_again() -> None:
    undone = run(
        at(Stage.IDLE), Event.BEGIN, Event.PREPARED, Event.COMMIT, Event.COMMITTED, Event.DIFFERED, Event.UNDONE
    )
    assert undone == at(Stage.IDLE)
    with pytest.raises(InternalError, match="needs a commit to undo"):
        run(undone, Event.ROLL_BACK, Event.UNDONE)


def test_a_shortened_exchange_makes_the_version_that_it_still_leads_to() -> None:
    begun = run(at(Stage.IDLE, previous=5), Event.BEGIN, goal=9)
    shortened = begun.after(Event.SHORTENED, Version(8))
    assert (shortened.stage, shortened.version, shortened.goal) == (Stage.PREPARING, 6, 8)
    made = run(shortened, Event.PREPARED, Event.COMMIT, Event.COMMITTED, Event.AGREED)
    assert made == at(Stage.IDLE, version=8, previous=6)
    with pytest.raises(InternalError, match="needs a goal"):
        begun.after(Event.SHORTENED)


@pytest.mark.parametrize("stage", list(Stage))
def test_only_retired_does_not_serve_and_nothing_leads_out_of_it(stage: Stage) -> None:
    assert at(stage).serves == (stage is not Stage.RETIRED)
    assert not [pair for pair in MOVES if pair[0] is Stage.RETIRED]


@pytest.mark.parametrize(
    ("stage", "goal", "target", "kept"),
    [
        (Stage.PREPARING, 7, 7, True),
        (Stage.PREPARING, 7, 9, True),
        (Stage.STAGED, 7, 6, False),
        (Stage.PREPARING, 0, 5, False),
        (Stage.PREPARING, 0, 0, True),
        (Stage.PREPARING, 9, 7, False),
        (Stage.PREPARING, 9, 12, True),
        (Stage.COMMITTING, 7, 3, True),
        (Stage.VERIFYING, None, 3, True),
        (Stage.IDLE, None, 3, True),
    ],
)
def test_an_exchange_is_kept_only_where_it_leads_to_the_target(
    stage: Stage, goal: int | None, target: int, kept: bool
) -> None:
    assert keeps(at(stage, goal=goal), Version(target)) is kept


def test_what_a_roll_back_gives_counts_the_commit_under_way() -> None:
    assert at(Stage.COMMITTING, version=7, goal=8, previous=6).undo_version == 7
    assert at(Stage.VERIFYING, version=8, previous=7).undo_version == 7
    assert at(Stage.IDLE).undo_version is None


def test_the_page_draws_the_table() -> None:
    drawn = re.search(r"```mermaid\n(.*?)\n```", PAGE.read_text("utf-8"), re.DOTALL)
    assert drawn is not None
    assert drawn.group(1) == diagram()
