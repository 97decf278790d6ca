"""The slot table: who may share which prompt rows."""

from hypothesis import given
from hypothesis import strategies as st

from slackwater.engine.torch.prefix import Seat, SlotTable

PROMPT = tuple(range(10))


def table(slots: int = 3) -> SlotTable:
    return SlotTable(slots=slots, chunk=4)


def filled(made: SlotTable, prompt: tuple[int, ...], tokens: int | None = None) -> int:
    seat = made.take(prompt)
    assert seat is not None
    made.fill(seat.slot, len(prompt) if tokens is None else tokens)
    return seat.slot


def test_the_first_answer_shares_nothing() -> None:
    assert table().take(PROMPT) == Seat(slot=0, source=0, shared=0)


def test_a_finished_prompt_is_shared_whole() -> None:
    made = table()
    slot = filled(made, PROMPT)
    assert made.take(PROMPT) == Seat(slot=1, source=slot, shared=10)


def test_another_prompt_shares_whole_chunks_only() -> None:
    made = table()
    slot = filled(made, PROMPT)
    assert made.take((*PROMPT[:7], 99, 98)) == Seat(slot=1, source=slot, shared=4)


def test_the_chunk_of_the_last_token_is_never_shared_without_its_logits() -> None:
    made = table()
    filled(made, PROMPT)
    seat = made.take(PROMPT[:8])
    assert seat is not None
    assert seat.shared == 4


def test_only_rows_in_place_are_shared() -> None:
    made = table()
    filled(made, PROMPT, tokens=4)
    seat = made.take(PROMPT)
    assert seat is not None
    assert seat.shared == 4


def test_a_flip_forgets_every_prompt() -> None:
    made = table()
    filled(made, PROMPT)
    made.flip()
    assert made.take(PROMPT) == Seat(slot=1, source=1, shared=0)


def test_a_freed_slot_keeps_its_prompt_until_it_is_taken() -> None:
    made = table(slots=1)
    made.release(filled(made, PROMPT))
    assert made.take(PROMPT) == Seat(slot=0, source=0, shared=10)
    made.release(0)
    filled(made, (5, 5, 5))
    made.release(0)
    assert made.take(PROMPT) == Seat(slot=0, source=0, shared=0)


def test_no_free_slot_means_no_seat() -> None:
    made = table(slots=1)
    filled(made, PROMPT)
    assert made.take(PROMPT) is None
    assert made.taken == 1


def test_the_longest_free_slot_is_taken_first() -> None:
    made = table()
    slots = [filled(made, (number,)) for number in (7, 8, 9)]
    for slot in (slots[1], slots[0], slots[2]):
        made.release(slot)
    seat = made.take((1,))
    assert seat is not None
    assert seat.slot == slots[1]


@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=14).map(tuple), min_size=1, max_size=12))
def test_what_is_shared_is_a_common_prefix(prompts: list[tuple[int, ...]]) -> None:
    made = table(slots=2)
    held: dict[int, tuple[int, ...]] = {}
    for prompt in prompts:
        seat = made.take(prompt)
        assert seat is not None
        if seat.shared:
            assert held[seat.source][: seat.shared] == prompt[: seat.shared]
            assert seat.shared % 4 == 0 or held[seat.source] == prompt
        held[seat.slot] = prompt
        made.fill(seat.slot, len(prompt))
        made.release(seat.slot)
