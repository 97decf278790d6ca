"""The slot table: who may share which prompt rows."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slackwater.engine.torch.architectures import Memory
from slackwater.engine.torch.prefix import Seat, SlotTable, common
from slackwater.ids import Version
from slackwater.rollout.evidence import PolicySpan

PROMPT = tuple(range(10))
OLD, NEW = Version(7), Version(8)


def table(slots: int = 3) -> SlotTable:
    return SlotTable(slots=slots, chunk=4)


def filled(made: SlotTable, prompt: tuple[int, ...], tokens: int | None = None, version: Version = OLD) -> int:
    got = made.take(prompt, version)
    assert got is not None
    made.fill(got.slot, len(prompt) if tokens is None else tokens, version, whole=tokens is None)
    return got.slot


def seat(slot: int, source: int, shared: int, version: Version = OLD) -> Seat:
    kv = (PolicySpan(version=version, start=0, end=shared),) if shared else ()
    return Seat(slot=slot, source=source, shared=shared, kv=kv)


def test_the_first_answer_shares_nothing() -> None:
    assert table().take(PROMPT, OLD) == seat(0, 0, 0)


def test_a_finished_prompt_is_shared_whole() -> None:
    made = table()
    slot = filled(made, PROMPT)
    assert made.take(PROMPT, OLD) == seat(1, slot, 10)


def test_another_prompt_shares_whole_chunks_only() -> None:
    made = table()
    slot = filled(made, PROMPT)
    assert made.take((*PROMPT[:7], 99, 98), OLD) == seat(1, slot, 4)


def test_the_chunk_of_the_last_token_is_never_shared_without_its_logits() -> None:
    made = table()
    filled(made, PROMPT)
    got = made.take(PROMPT[:8], OLD)
    assert got is not None
    assert got.shared == 4


def test_only_rows_in_place_are_shared() -> None:
    made = table()
    made.release(filled(made, PROMPT, tokens=4))
    got = made.take(PROMPT, OLD)
    assert got is not None
    assert got.shared == 4


def test_a_prompt_waits_for_the_rows_of_one_that_begins_alike_while_these_are_computed() -> None:
    made = SlotTable(slots=3, chunk=1)
    prompt = tuple(range(100))
    slot = filled(made, prompt, tokens=4)
    assert made.take(prompt, OLD) is None
    assert made.take((*prompt[:50], 999), OLD) is None
    assert made.take((*prompt[:10], 999), OLD) == seat(1, slot, 4)
    made.fill(slot, 60, OLD)
    assert made.take((*prompt[:50], 999), OLD) == seat(2, slot, 50)


def test_an_answers_rows_are_shared_with_the_next_turn_in_its_own_slot() -> None:
    made = SlotTable(slots=2, chunk=1)
    slot = filled(made, PROMPT)
    made.extend(slot, (20, 21), (PolicySpan(version=OLD, start=0, end=12),))
    made.release(slot)
    assert made.take((*PROMPT, 20, 21, 22, 23), OLD) == seat(slot, slot, 12)


def test_a_slot_of_which_a_part_is_of_use_is_copied_from() -> None:
    made = SlotTable(slots=2, chunk=1)
    made.release(filled(made, PROMPT))
    assert made.take((*PROMPT[:6], 99), OLD) == seat(1, 0, 6)


@given(one=st.lists(st.integers(0, 2), max_size=12), other=st.lists(st.integers(0, 2), max_size=12))
def test_common_is_where_two_lists_part(one: list[int], other: list[int]) -> None:
    parts = [at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b]
    assert common(tuple(one), tuple(other)) == min([*parts, len(one), len(other)])


def test_a_flip_forgets_every_prompt() -> None:
    made = table()
    filled(made, PROMPT)
    made.flip()
    assert made.take(PROMPT, OLD) == seat(1, 1, 0)


def test_rows_of_other_weights_are_shared_where_they_are_asked_for_and_never_with_their_logits() -> None:
    made = table()
    slot = filled(made, PROMPT)
    made.flip()
    assert made.take(PROMPT, NEW, any_kv=True) == seat(1, slot, 8)


def test_rows_of_several_weights_are_no_ones_own() -> None:
    made = table()
    filled(made, PROMPT)
    made.flip()
    got = made.take(PROMPT, NEW, any_kv=True)
    assert got is not None
    made.fill(got.slot, len(PROMPT), NEW, whole=True)
    assert made.take(PROMPT, NEW) == seat(2, 2, 0)
    made.release(2)
    mixed = (PolicySpan(version=OLD, start=0, end=8), PolicySpan(version=NEW, start=8, end=10))
    assert made.take(PROMPT, NEW, any_kv=True) == Seat(slot=2, source=1, shared=10, kv=mixed)


def test_the_label_alone_does_not_make_rows_fresh() -> None:
    made = table()
    filled(made, PROMPT)
    made.flip()
    assert made.take(PROMPT, OLD) == seat(1, 1, 0)


def test_what_spoilt_weights_made_is_shared_with_nobody() -> None:
    made = table()
    made.release(filled(made, PROMPT))
    made.flip()
    made.disown(OLD)
    assert made.take(PROMPT, NEW, any_kv=True) == seat(1, 1, 0)


def test_a_freed_slot_keeps_its_prompt_until_it_is_taken() -> None:
    made = table(slots=1)
    made.release(filled(made, PROMPT))
    assert made.take(PROMPT, OLD) == seat(0, 0, 10)
    made.release(0)
    filled(made, (5, 5, 5))
    made.release(0)
    assert made.take(PROMPT, OLD) == seat(0, 0, 0)


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 14), st.booleans()), min_size=1, max_size=16))
def test_nothing_is_shared_across_salts(asks: list[tuple[str, int, bool]]) -> None:
    made, salts = SlotTable(slots=4, chunk=2), dict[int, str]()
    for salt, length, fills in asks:
        prompt = tuple(range(length))
        got = made.take(prompt, OLD, salt=salt, any_kv=True)
        if got is None:
            for slot in salts:
                made.release(slot)
            continue
        assert not got.shared or salts[got.source] == salt
        salts[got.slot] = salt
        made.fill(got.slot, length if fills else max(got.shared, length // 2), OLD, whole=fills)
        made.release(got.slot)


def test_a_prompt_does_not_wait_for_rows_of_another_salt() -> None:
    made, prompt = SlotTable(slots=3, chunk=1), tuple(range(100))
    got = made.take(prompt, OLD, salt="a")
    assert got is not None
    made.fill(got.slot, 4, OLD)
    assert made.take(prompt, OLD, salt="a") is None
    assert made.take(prompt, OLD, salt="b") == seat(1, 1, 0)


def test_no_free_slot_means_no_seat() -> None:
    made = table(slots=1)
    filled(made, PROMPT)
    assert made.take(PROMPT, OLD) is None
    assert made.taken == 1


def test_the_longest_free_slot_is_taken_first() -> None:
    made = table()
    slots = [filled(made, (number,)) for number in (7, 8, 9)]
    for slot in (slots[1], slots[0], slots[2]):
        made.release(slot)
    got = made.take((1,), OLD)
    assert got is not None
    assert got.slot == slots[1]


@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=14).map(tuple), min_size=1, max_size=12))
def test_what_is_shared_is_a_common_prefix(prompts: list[tuple[int, ...]]) -> None:
    made = table(slots=2)
    held: dict[int, tuple[int, ...]] = {}
    for prompt in prompts:
        got = made.take(prompt, OLD)
        assert got is not None
        if got.shared:
            assert held[got.source][: got.shared] == prompt[: got.shared]
            assert got.shared % 4 == 0 or held[got.source] == prompt
        held[got.slot] = prompt
        made.fill(got.slot, len(prompt), OLD, whole=True)
        made.release(got.slot)


def of_states(slots: int = 3, chunk: int = 1) -> SlotTable:
    return SlotTable(slots=slots, chunk=chunk, memory=Memory.STATES)


def answered(made: SlotTable, prompt: tuple[int, ...], tokens: tuple[int, ...]) -> int:
    """Its prompt's end is marked, and its answer's end is where its state is."""
    slot = filled(made, prompt)
    made.extend(slot, tokens, (PolicySpan(version=OLD, start=0, end=len(prompt) + len(tokens)),))
    made.release(slot)
    return slot


def test_a_state_is_shared_as_a_whole_or_not_at_all() -> None:
    made = of_states()
    slot = filled(made, PROMPT)
    assert made.take((*PROMPT[:7], 99), OLD) == seat(1, 1, 0)
    assert made.take((*PROMPT, 99), OLD) == seat(2, slot, 10)


def test_a_state_at_the_last_token_of_another_prompt_is_no_use_without_its_logits() -> None:
    made = of_states()
    answered(made, PROMPT, (20, 21))
    assert made.take((*PROMPT, 20, 21), OLD) == seat(1, 0, 10)


@pytest.mark.parametrize("memory", [Memory.ROWS, Memory.STATES])
def test_a_prompt_is_shared_whole_after_its_answer_too(memory: Memory) -> None:
    made = SlotTable(slots=3, chunk=1, memory=memory)
    slot = answered(made, PROMPT, (20, 21))
    assert made.take(PROMPT, OLD) == seat(1, slot, 10)
    made.flip()
    wanted = seat(2, slot, 9) if memory is Memory.ROWS else seat(2, 2, 0)
    assert made.take(PROMPT, NEW, any_kv=True) == wanted


def test_the_longest_state_that_fits_is_shared() -> None:
    made = of_states(slots=4)
    answered(made, PROMPT, (20, 21))
    assert made.take((*PROMPT, 20, 99), OLD) == seat(1, 0, 10)
    assert made.take((*PROMPT, 20, 21, 99), OLD) == seat(0, 0, 12)


def test_an_answer_under_way_has_its_prompts_state_to_give_and_so_has_an_aborted_one() -> None:
    made = of_states()
    slot = filled(made, PROMPT)
    assert made.take((*PROMPT, 20), OLD) == seat(1, slot, 10)
    made.release(slot)
    assert made.take((*PROMPT, 30), OLD) == seat(slot, slot, 10)


def test_a_prompt_that_was_left_half_way_has_a_state_where_it_was_left() -> None:
    made = of_states()
    made.release(filled(made, PROMPT, tokens=4))
    assert made.take((*PROMPT[:6], 99), OLD) == seat(0, 0, 4)


def test_a_state_that_was_taken_and_run_on_is_not_to_be_had_again() -> None:
    made = of_states()
    filled(made, PROMPT)
    assert made.take((*PROMPT, 20, 21, 22, 23), OLD) == seat(1, 0, 10)
    made.fill(1, 12, OLD)
    made.release(0)
    made.empty(0)
    assert made.take((*PROMPT, 20, 99), OLD) == seat(2, 2, 0)


def test_what_is_computed_again_has_no_state_to_give_once_it_is_past_its_prompt() -> None:
    made = of_states()
    slot = filled(made, PROMPT)
    made.flip()
    made.empty(slot)
    made.fill(slot, 4, NEW)
    assert made.take((*PROMPT[:6], 99), NEW) == seat(1, slot, 4, NEW)
    made.fill(slot, 10, NEW)
    assert made.take((*PROMPT, 99), NEW) == seat(2, 1, 4, NEW)
    made.extend(slot, (20, 21), (PolicySpan(version=NEW, start=0, end=12),))
    made.release(slot)
    assert made.take((*PROMPT, 20, 21, 99), NEW) == seat(slot, slot, 12, NEW)


def test_in_chunks_states_are_shared_after_whole_ones_or_with_the_logits_of_a_whole_prompt() -> None:
    made = of_states(slots=4, chunk=4)
    filled(made, PROMPT)
    assert made.take((*PROMPT, 99), OLD) == seat(1, 1, 0)
    assert made.take(PROMPT, OLD) == seat(2, 0, 10)
    made.release(filled(made, PROMPT[:8]))
    assert made.take((*PROMPT[:8], 99), OLD) == seat(3, 3, 8)


def test_a_prompt_waits_for_a_state_that_comes_and_not_for_one_that_never_will() -> None:
    made = of_states()
    prompt = tuple(range(100))
    filled(made, prompt, tokens=4)
    assert made.take(prompt, OLD) is None
    assert made.take((*prompt, 999), OLD) is None
    assert made.take((*prompt[:99], 999), OLD) == seat(1, 0, 4)


@pytest.mark.parametrize("memory", Memory)
@pytest.mark.parametrize("chunk", [1, 4])
def test_a_private_prompt_takes_nothing_and_gives_nothing(memory: Memory, chunk: int) -> None:
    made = SlotTable(slots=3, chunk=chunk, memory=memory)
    assert made.take(PROMPT, OLD, private=True) == seat(0, 0, 0)
    made.fill(0, 10, OLD, whole=True)
    assert made.take(PROMPT, OLD) == seat(1, 1, 0)
    made.fill(1, 10, OLD, whole=True)
    assert made.take(PROMPT, OLD, private=True) == seat(2, 2, 0)


@pytest.mark.parametrize("memory", Memory)
@pytest.mark.parametrize("chunk", [1, 4])
def test_a_private_prompt_takes_nothing_of_slots_that_all_have_something(memory: Memory, chunk: int) -> None:
    made = SlotTable(slots=2, chunk=chunk, memory=memory)
    filled(made, PROMPT)
    made.release(filled(made, (5, 6, 7)))
    assert made.take(PROMPT, OLD, private=True) == seat(1, 1, 0)


def test_where_nothing_is_remembered_nothing_is_shared_or_waited_for() -> None:
    made = SlotTable(slots=3, chunk=1, memory=Memory.NOTHING)
    filled(made, PROMPT, tokens=4)
    answered(made, PROMPT, (20, 21))
    assert made.take((*PROMPT, 20, 21, 22), OLD) == seat(2, 2, 0)
