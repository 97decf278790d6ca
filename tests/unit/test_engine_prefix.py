"""The slot table: who may share which prompt rows."""

from hypothesis import given
from hypothesis import strategies as st

from slackwater.engine.torch.prefix import Seat, SlotTable
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
    filled(made, PROMPT, tokens=4)
    got = made.take(PROMPT, OLD)
    assert got is not None
    assert got.shared == 4


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
    filled(made, PROMPT)
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
