"""Grammars of an engine: who waits for whom, what is remembered, and a state that follows from the tokens."""

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from subprocess import CompletedProcess, TimeoutExpired

import numpy as np
import pytest

from slackwater.engine.torch import grammar_trial
from slackwater.engine.torch import grammars as module
from slackwater.engine.torch.grammars import Grammars
from slackwater.errors import InternalError, InvalidInputError, SlackwaterError, UnavailableError, UnsupportedError
from slackwater.rollout.grammar import Grammar, GrammarKind
from slackwater.testing.tiny_model import IM_END, TINY_VOCAB, write_tiny_tokenizer


class Trials:
    """Stand for the processes: those of the sources named ``held`` wait."""

    def __init__(self) -> None:
        self.held: set[str] = set()
        self.gate = threading.Event()
        self.made: list[str] = []
        self.errors: list[SlackwaterError] = []
        self.arrived = threading.Semaphore(0)

    def tried(self, grammar: Grammar) -> InvalidInputError | None:
        self.made.append(grammar.source)
        self.arrived.release()
        if self.errors:
            raise self.errors.pop()
        if grammar.source in self.held:
            assert self.gate.wait(30)
            return InvalidInputError("grammar is refused: it was held")
        return None


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch) -> Iterator[Trials]:
    made = Trials()
    monkeypatch.setattr(module, "tried", made.tried)
    yield made
    made.gate.set()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_tokenizer(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
async def grammars(folder: Path) -> Grammars:
    return Grammars(folder, ends=(IM_END,), vocabulary=TINY_VOCAB + 8)


def regex(source: str) -> Grammar:
    return Grammar(kind=GrammarKind.REGEX, source=source)


async def begun(trials: Trials, count: int) -> None:
    for _ in range(count):
        assert await asyncio.to_thread(trials.arrived.acquire, timeout=30)


async def test_answers_of_one_grammar_share_one_trial_and_its_verdict(trials: Trials, grammars: Grammars) -> None:
    trials.held = {"a+"}
    asked = [asyncio.create_task(grammars.begin(regex("a+"))) for _ in range(8)]
    await begun(trials, 1)
    asked[0].cancel()  # who goes away takes nobody's trial along
    trials.gate.set()
    found = await asyncio.gather(*asked, return_exceptions=True)
    assert [type(one) for one in found] == [asyncio.CancelledError, *[InvalidInputError] * 7]
    with pytest.raises(InvalidInputError, match="it was held"):
        await grammars.begin(regex("a+"))
    assert trials.made == ["a+"]


async def test_a_known_grammar_waits_for_no_trial(trials: Trials, grammars: Grammars) -> None:
    await grammars.begin(regex("a+"))
    trials.held = {"x", "y", "z"}
    waiting = [asyncio.create_task(grammars.begin(regex(source))) for source in sorted(trials.held)]
    await begun(trials, 3)
    assert (await grammars.begin(regex("a+"))).allowed(()).any()
    grammars.close()
    trials.gate.set()
    ended = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(one) for one in ended] == [InvalidInputError, InvalidInputError, UnavailableError]
    with pytest.raises(UnavailableError):
        await grammars.begin(regex("a+"))


async def test_a_trial_that_the_machine_had_no_time_for_is_held_again(trials: Trials, grammars: Grammars) -> None:
    trials.errors = [UnavailableError("a grammar's trial had no end")]
    with pytest.raises(UnavailableError):
        await grammars.begin(regex("a"))
    assert (await grammars.begin(regex("a"))).allowed(()).any()
    assert trials.made == ["a", "a"]


def test_a_trial_is_ended_by_its_limits_and_by_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = iter((CompletedProcess([], -24, b"", b""), CompletedProcess([], 1, b"", b"ImportError: x"), None))

    def run(command: list[str], **_: object) -> CompletedProcess[bytes]:
        if (end := next(ends)) is None:
            raise TimeoutExpired(command, 10)
        return end

    monkeypatch.setattr("slackwater.engine.torch.grammar_trial.subprocess.run", run)
    assert "too complex" in str(grammar_trial.tried(regex("a")))
    with pytest.raises(InternalError, match="ImportError"):
        grammar_trial.tried(regex("a"))
    with pytest.raises(UnavailableError):
        grammar_trial.tried(regex("a"))


def test_a_trial_says_what_is_wrong() -> None:
    assert grammar_trial.tried(regex("a+")) is None
    assert "unclosed group" in str(grammar_trial.tried(regex("(")))
    told = str(grammar_trial.tried(Grammar(kind=GrammarKind.EBNF, source="begin: /a/")))
    assert (told.count("is refused"), "a rule 'start:'" in told) == (1, True)
    assert "admits no answer" in str(grammar_trial.tried(Grammar(kind=GrammarKind.JSON_SCHEMA, source='{"$ref":"#"}')))


@pytest.mark.parametrize("source", ["((a{100}){100}){100}", "q((a{100}){90}){90}"])
def test_what_would_keep_an_engines_steps_or_fill_its_memory_is_refused(source: str) -> None:
    assert "too complex" in str(grammar_trial.tried(regex(source)))


async def test_verdicts_are_remembered_up_to_a_bound(
    trials: Trials, grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "KEPT_VERDICTS", 2)
    for source in ("a", "b", "a", "c", "a", "b"):
        await grammars.begin(regex(source))
    assert trials.made == ["a", "b", "c", "b"]


@pytest.mark.usefixtures("trials")
async def test_a_state_follows_from_the_tokens_alone(grammars: Grammars) -> None:
    """Tokens that cut across the grammar's parts included; ids past the tokenizer's never come."""
    grammar, ids = regex("(ebb|flood| t| )*"), []
    stepped = await grammars.begin(grammar)
    for seed in range(40):
        allowed = stepped.allowed((IM_END,))
        assert allowed.shape == (TINY_VOCAB + 8,)
        assert not allowed[TINY_VOCAB:].any()
        ids.append(int(np.random.default_rng(seed).choice(np.flatnonzero(allowed[:IM_END]))))
        assert stepped.take(ids[-1:])
        rebuilt = await grammars.begin(grammar, ids)
        assert np.array_equal(rebuilt.allowed((IM_END,)), stepped.allowed((IM_END,)))
    with pytest.raises(InvalidInputError, match="so far"):
        await grammars.begin(grammar, [*ids, ord("Z")])


@pytest.mark.usefixtures("trials")
async def test_ends_may_come_exactly_where_the_grammar_may_end(grammars: Grammars) -> None:
    state = await grammars.begin(regex("(ab)+"))
    for token_id, ends in ((97, False), (98, True), (97, False), (98, True)):
        assert state.take([token_id])
        allowed = state.allowed((IM_END, 500))
        assert (bool(allowed[IM_END]), bool(allowed[500])) == (ends, ends)
        assert not state.allowed(())[IM_END]
    assert not state.take([ord("x")])
    assert not state.allowed((IM_END,)).any()
    assert "the regex can't be followed" in state.failure().message


@pytest.mark.parametrize("text", [None, "{", '{"model": 1}'])
async def test_a_folder_whose_tokenizer_is_missing_or_strange_follows_none(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "tokenizer.json").write_text(text)
    for ends in ((IM_END,), ()):
        with pytest.raises(UnsupportedError, match="grammar can't be followed"):
            await Grammars(tmp_path, ends=ends, vocabulary=TINY_VOCAB).begin(regex("a"))
