"""Answers under a grammar: always what it admits, drawn from exactly what it leaves, wherever they go on."""

import json
import re
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest
from llguidance import LLParserLimits

from slackwater.engine.torch.engine import TorchEngine
from slackwater.engine.torch.replay import Replayer
from slackwater.errors import InvalidInputError, UnsupportedError
from slackwater.ids import BootId, ReplicaId, RequestId, RunId, Version
from slackwater.rollout.evidence import Finish, TokenStep, mask_ids
from slackwater.rollout.grammar import Grammar, GrammarKind
from slackwater.rollout.request import CompletionRequest, SamplingSpec
from slackwater.router.resume import Ask, after_failure
from slackwater.testing.tiny_model import IM_END, write_tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")

SCHEMA: Final = {
    "type": "object",
    "properties": {
        "tide": {"enum": ["ebb", "flood", "slack"]},
        "depth": {"type": "integer", "minimum": 0, "maximum": 99},
        "log": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["tide", "depth", "log"],
    "additionalProperties": False,
}
OBJECT: Final = Grammar(kind=GrammarKind.JSON_SCHEMA, source=json.dumps(SCHEMA))
WORDS: Final = Grammar(kind=GrammarKind.REGEX, source="(ebb|flood){1,4}")
LIST: Final = Grammar(kind=GrammarKind.EBNF, source='root ::= "<" item+ ">"\nitem ::= [a-c] | root')


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


async def opened(folder: Path, **more: Any) -> TorchEngine:
    return await TorchEngine.open(
        folder, version=Version(7), run=RunId("r"), replica=ReplicaId("a"), boot=BootId("b"), window=512, **more
    )


@pytest.fixture
async def engine(folder: Path) -> AsyncIterator[TorchEngine]:
    made = await opened(folder, slots=8)
    yield made
    await made.close()


def asked(grammar: Grammar | None, *, max_tokens: int = 200, **fields: Any) -> CompletionRequest:
    spec = SamplingSpec(max_tokens=max_tokens, grammar=grammar, **fields)
    return CompletionRequest(request_id=RequestId("r"), prompt_ids=(1, 2, 3), sampling=spec)


async def steps_of(engine: TorchEngine, request: CompletionRequest) -> list[TokenStep]:
    answer = await engine.generate(request)
    return [step async for step in answer]


def said(steps: Sequence[TokenStep]) -> str:
    """The text of an answer, its end left out."""
    return "".join(TEXTS[step.token_id] for step in steps if step.token_id != IM_END)


TERSE: Final = (*((blank, -100.0) for blank in b" \n\r\t"), (ord("a"), 15.0), (ord(">"), 20.0), (IM_END, 20.0))
"""Has a model that knows nothing come to an end."""


def texts() -> dict[int, str]:
    letters, second = " etaoinshrdlucm", "etaoinshrdlucmfwyp"
    pairs = [one + two for one in letters for two in second][: 509 - 256]
    return {**{byte: chr(byte) for byte in range(256)}, **{256 + at: pair for at, pair in enumerate(pairs)}}


TEXTS: Final = texts()


def admitted(grammar: Grammar, text: str) -> bool:
    if grammar is OBJECT:
        value = json.loads(text)
        return (
            set(value) == {"tide", "depth", "log"}
            and value["tide"] in ("ebb", "flood", "slack")
            and 0 <= value["depth"] <= 99
            and len(value["log"]) <= 3
            and all(isinstance(one, bool) for one in value["log"])
        )
    if grammar is WORDS:
        return re.fullmatch(WORDS.source, text) is not None
    while text != (shorter := re.sub("<[a-c]+>", "a", text)):
        text = shorter
    return text == "a"


@pytest.mark.parametrize("grammar", [OBJECT, WORDS, LIST], ids=lambda one: one.kind)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_answers_are_what_their_grammar_admits(engine: TorchEngine, grammar: Grammar, temperature: float) -> None:
    for seed in range(3):
        steps = await steps_of(engine, asked(grammar, temperature=temperature, seed=seed, logit_bias=TERSE))
        assert (steps[-1].finish, steps[-1].token_id) == (Finish.STOP, IM_END)
        assert admitted(grammar, said(steps)), said(steps)


async def test_every_token_is_of_its_draws_support_and_what_can_only_end_ends(engine: TorchEngine) -> None:
    shown = {"sampling_mask": True, "raw_logprobs": True}
    steps = await steps_of(engine, asked(OBJECT, seed=2, top_k=3, min_tokens=200, logit_bias=TERSE, **shown))
    for step in steps:
        assert step.token_id in mask_ids(step.mask or b"")
        assert step.raw_logprob is not None
        assert step.raw_logprob < 0.0
    assert mask_ids(steps[0].mask or b"") == (ord("{"),)
    # ``min_tokens`` doesn't keep an answer that can only end from its end.
    assert (mask_ids(steps[-1].mask or b""), steps[-1].logprob) == ((IM_END,), 0.0)


async def test_stop_tokens_may_come_where_the_grammar_may_end(engine: TorchEngine) -> None:
    many = Grammar(kind=GrammarKind.REGEX, source="(ab)+")
    steps = await steps_of(engine, asked(many, seed=1, stop_token_ids=(500,), logit_bias=((500, 100.0),)))
    assert [step.token_id for step in steps] == [97, 98, 500]
    assert steps[-1].finish is Finish.STOP


async def test_a5_10_an_answer_goes_on_elsewhere_in_the_same_state(engine: TorchEngine, folder: Path) -> None:
    request = asked(OBJECT, seed=5, temperature=1.5, logit_bias=TERSE)
    whole = await steps_of(engine, request)
    other = await opened(folder, slots=2)
    for kept in (1, 7, len(whole) - 1):
        ask = after_failure(request, whole[:kept], 5, lost=True)
        assert isinstance(ask, Ask)
        rest = await steps_of(other, ask.request)
        assert [step.token_id for step in rest] == [step.token_id for step in whole[kept:]]
    with pytest.raises(InvalidInputError, match="tokens that the answer has"):
        await other.generate(replace(request, prompt_ids=(1, 2, 3, 4), continued=1))
    await other.close()


async def test_answers_that_give_way_go_on_in_the_same_state(engine: TorchEngine, folder: Path) -> None:
    request = asked(OBJECT, seed=5, temperature=1.5, logit_bias=TERSE)
    alone = [step.token_id for step in await steps_of(engine, request)]
    tight = await opened(folder, slots=4, kv_tokens=len(alone) + 12)
    answers = [await tight.generate(request) for _ in range(4)]
    for answer in answers:
        assert [step.token_id async for step in answer] == alone
    assert tight.stats().preemptions
    await tight.close()


async def test_a_grammar_that_leaves_nothing_ends_its_answer_alone(
    engine: TorchEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    # This vocabulary has every byte, so what can't go on is a matter of limits: states, here.
    monkeypatch.setattr("slackwater.engine.torch.grammar.LIMITS", LLParserLimits(max_lexer_states=100))
    endless = Grammar(kind=GrammarKind.REGEX, source=".*a.{200}b")
    biased = asked(endless, seed=1, temperature=9.0, logit_bias=((97, 100.0), (98, 100.0)))
    answer, beside = await engine.generate(biased), await engine.generate(asked(WORDS, seed=1))
    with pytest.raises(InvalidInputError, match="the regex can't be followed"):
        [step async for step in answer]
    assert admitted(WORDS, said([step async for step in beside]))
    assert await steps_of(engine, asked(None, max_tokens=2))


@pytest.mark.parametrize(
    "grammar",
    [
        ("regex", "("),
        ("regex", "(?=a)b"),
        ("regex", r"[^\x00-\x{10FFFF}]"),
        ("regex", "(" * 30_000 + "a" + ")" * 30_000),
        ("json_schema", "{"),
        ("json_schema", "false"),
        ("json_schema", '{"not": {}}'),
        ("json_schema", '{"$ref": "#"}'),
        ("json_schema", '{"type":"array","items":' * 2000 + "{}" + "}" * 2000),
        ("json_schema", json.dumps({"allOf": [{"pattern": f".*a.{{{at}}}b.*"} for at in range(2, 40)]})),
        ("ebnf", "hello"),
        ("ebnf", "root ::= missing"),
        ("ebnf", "root ::= " + "(" * 20_000),
        ("ebnf", 'start: %json {"type": "integer", "multipleOf": 99999999}'),
    ],
    ids=lambda case: f"{case[0]} {case[1][:24]}",
)
async def test_what_cant_be_followed_is_refused_while_others_are_answered(
    engine: TorchEngine, grammar: tuple[str, str]
) -> None:
    kind, source = grammar
    with pytest.raises(InvalidInputError, match="grammar is refused"):
        await engine.generate(asked(Grammar(kind=GrammarKind(kind), source=source)))


async def test_a_model_without_a_tokenizer_follows_none(tmp_path: Path) -> None:
    engine = await opened(write_tiny_model(tmp_path / "bare", tokenizer=False), slots=1)
    with pytest.raises(UnsupportedError, match="no tokenizer"):
        await engine.generate(asked(WORDS))
    assert await steps_of(engine, asked(None, max_tokens=1))
    await engine.close()


def test_a_replayer_refuses_distributions_that_a_grammar_constrains(folder: Path) -> None:
    replayer = Replayer(folder, version=Version(7), slots=1, window=64)
    with pytest.raises(UnsupportedError, match="grammar"):
        replayer.begin({"a": ((1, 2), SamplingSpec(max_tokens=2, grammar=WORDS))})


def test_what_doesnt_go_with_a_grammar_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="ignore_eos"):
        asked(WORDS, ignore_eos=True)
    with pytest.raises(InvalidInputError, match="forced_token_ids"):
        replace(asked(WORDS), forced_ids=(1,))
    for source in ("", "a" * 65_537, "\ud800"):
        with pytest.raises(InvalidInputError, match="grammar"):
            Grammar(kind=GrammarKind.REGEX, source=source)
