"""The slot table: who may share which prompt rows."""

from hypothesis import given
from hypothesis import strategies as st

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
