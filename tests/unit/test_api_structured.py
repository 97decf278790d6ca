"""Structured output by every name that it has: one grammar comes of it, or a refusal that names the field."""

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slackwater.api.asking import requests, text_wanted
from slackwater.api.faults import fault
from slackwater.api.foreign import text_body
from slackwater.api.schema import Sampled, TextBody, read_text
from slackwater.api.sglang_shapes import SAMPLING as SGLANG
from slackwater.api.structured import StructuredOutputs
from slackwater.api.vllm import SAMPLING as VLLM
from slackwater.api.wire import decode_request, encode_request
from slackwater.errors import InvalidInputError, SlackwaterError
from slackwater.rollout.grammar import MAX_GRAMMAR_CHARACTERS, Grammar, GrammarKind
from slackwater.rollout.request import CompletionRequest

SCHEMA = {"type": "object", "properties": {"z": {"type": "integer"}, "a": {"const": "é"}}}
TEXT = '{"type":"object","properties":{"z":{"type":"integer"},"a":{"const":"é"}}}'
OF_SCHEMA = Grammar(kind=GrammarKind.JSON_SCHEMA, source=TEXT)
OBJECT = Grammar(kind=GrammarKind.JSON_SCHEMA, source='{"type":"object"}')
REGEX = Grammar(kind=GrammarKind.REGEX, source="a+")
EBNF = Grammar(kind=GrammarKind.EBNF, source='root ::= "a"')


def ask(fields: dict[str, object]) -> CompletionRequest:
    body = read_text(json.dumps({"prompt": [1], **fields}).encode())
    return requests(body, text_wanted(body), (1,), window=100, request_id="r", model="m")[0]


def named(schema: object) -> dict[str, object]:
    return {"type": "json_schema", "json_schema": {"name": "tide", "strict": True, "schema": schema}}


@pytest.mark.parametrize(
    ("fields", "grammar"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, OBJECT),
        ({"response_format": named(SCHEMA)}, OF_SCHEMA),
        ({"structured_outputs": {}}, None),
        ({"structured_outputs": {"json": SCHEMA}}, OF_SCHEMA),
        ({"structured_outputs": {"json": TEXT}}, OF_SCHEMA),
        ({"structured_outputs": {"json_object": True}}, OBJECT),
        ({"structured_outputs": {"regex": "a+"}}, REGEX),
        ({"structured_outputs": {"choice": ["a+", "b"]}}, Grammar(kind=GrammarKind.REGEX, source=r"a\+|b")),
        ({"structured_outputs": {"grammar": EBNF.source}}, EBNF),
        ({"guided_json": SCHEMA, "response_format": {"type": "text"}}, OF_SCHEMA),
        ({"guided_regex": "a+", "guided_grammar": ""}, REGEX),
        ({"guided_choice": ["a"]}, Grammar(kind=GrammarKind.REGEX, source="a")),
        ({"guided_grammar": EBNF.source}, EBNF),
    ],
    ids=str,
)
def test_every_name_makes_one_grammar(fields: dict[str, object], grammar: Grammar | None) -> None:
    asked = ask(fields)
    assert asked.sampling.grammar == grammar
    assert decode_request(encode_request(asked)) == asked


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "structural_tag"}}, "response_format"),
        ({"response_format": "json"}, "response_format"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs"),
        ({"guided_choice": ["x"] * 1025}, "guided_choice"),
        ({"structured_outputs": {"regex": ""}}, "grammar"),
        ({"structured_outputs": {"regex": "a" * (MAX_GRAMMAR_CHARACTERS + 1)}}, "grammar"),
        ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs"),
        ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex"),
        ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "ignore_eos"),
        ({"structured_outputs": {"regex": "a"}, "forced_token_ids": [1]}, "forced_token_ids"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_what_makes_no_grammar_is_refused_by_name(fields: dict[str, object], param: str) -> None:
    with pytest.raises(InvalidInputError) as refused:
        ask(fields)
    assert fault(refused.value).param == param


def test_two_grammars_of_one_field_are_both_named() -> None:
    with pytest.raises(InvalidInputError, match=r"^structured_outputs\.regex .* beside structured_outputs\.json"):
        ask({"structured_outputs": {"regex": "a", "json": {}}})
    with SGLANG.worded(), pytest.raises(InvalidInputError, match=r"^guided_regex .* beside guided_json"):
        grammar_of(SGLANG.fields({"regex": "a", "json_schema": "{}"}))
    with pytest.raises(InvalidInputError, match=r"^regex .* beside json_schema"), SGLANG.worded():
        grammar_of(SGLANG.fields({"regex": "a", "json_schema": "{}"}))


def grammar_of(fields: dict[str, object]) -> Grammar | None:
    body: Sampled = text_body({"prompt": (1,), **fields})
    assert isinstance(body, TextBody)
    return body.grammar()


def test_the_dialects_of_vllm_and_sglang_say_the_same() -> None:
    assert grammar_of(VLLM.fields({"structured_outputs": {"json": SCHEMA}})) == OF_SCHEMA
    assert grammar_of(SGLANG.fields({"json_schema": TEXT, "regex": "", "ebnf": None})) == OF_SCHEMA
    assert grammar_of(SGLANG.fields({"regex": "a+"})) == REGEX
    assert grammar_of(SGLANG.fields({"ebnf": EBNF.source, "json_schema": ""})) == EBNF
    with SGLANG.worded(), pytest.raises(SlackwaterError):
        grammar_of(SGLANG.fields({"regex": 5}))


@given(st.lists(st.text(st.characters(codec="utf-8"), min_size=1, max_size=8), min_size=1, max_size=4), st.data())
def test_a_choice_matches_its_texts_and_nothing_else(choices: list[str], data: st.DataObject) -> None:
    ((_, grammar),) = StructuredOutputs(choice=tuple(choices)).grammars()
    # Python's expressions write a code point as ``\U``, and escape what they needn't.
    pattern = re.sub(r"\\x\{([0-9a-f]+)\}", lambda found: rf"\U{found[1]:0>8}", grammar.source)
    for text in choices:
        assert re.fullmatch(pattern, text)
    other = data.draw(st.text(st.characters(codec="utf-8"), max_size=8))
    assert bool(re.fullmatch(pattern, other)) is (other in choices)
