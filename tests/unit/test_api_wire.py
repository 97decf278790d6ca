"""The token wire loses nothing and trusts nothing."""

import json
import math
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slackwater.api.arrays import Array, array
from slackwater.api.engine_data import EngineData, engine_data
from slackwater.api.mask_budget import MAX_REPLY_MASK_IDS
from slackwater.api.respond import json_reply
from slackwater.api.stream import line
from slackwater.api.wire import (
    KV_SPANS_PER_LINE,
    MAX_LINE_BYTES,
    MAX_NAME,
    EndLine,
    ErrorLine,
    KvLine,
    Line,
    MaskLine,
    OriginLine,
    StepReader,
    TokenLine,
    decode_line,
    decode_request,
    encode_request,
    lines,
    origin_line,
    read_error,
    token_lines,
)
from slackwater.errors import CorruptError, InternalError, InvalidInputError, PolicyUnmetError
from slackwater.ids import BootId, ReplicaId, RequestId, RunId, Version
from slackwater.rollout.evidence import (
    MAX_MASK_IDS,
    Completion,
    Finish,
    Origin,
    PolicySpan,
    TokenStep,
    grown,
    pack_mask,
    taken_over,
)
from slackwater.rollout.request import MAX_TOP_LOGPROBS, CompletionRequest, PolicyConstraint, SamplingSpec
from slackwater.testing.completer import TableCompleter
from slackwater.testing.conformance_completer import REQUEST


def kv_of(count: int, rows: int) -> tuple[PolicySpan, ...]:
    """So many spans over so many positions."""
    kv: tuple[PolicySpan, ...] = ()
    for index in range(count):
        end = rows if index + 1 == count else index + 1
        kv = grown(kv, Version(2**63 - 1 - index % 2), end)
    return kv


VERSIONS = st.integers(0, 2**40).map(Version)
PROMPT_TOKENS = 700
"""So many that KV spans of each fill more than one line."""
MOVED = Origin(
    replica=ReplicaId("r"), boot=BootId("b"), run=RunId("d"), seed=2**63 - 1, cached_tokens=3, prompt_version=Version(7)
)
KV = st.sampled_from([0, 1, 2, 5, KV_SPANS_PER_LINE, KV_SPANS_PER_LINE + 1, PROMPT_TOKENS])
LOGPROBS = st.floats(max_value=0.0, allow_nan=False)
STEPS = st.builds(
    TokenStep,
    token_id=st.integers(0, 2**31 - 1),
    logprob=LOGPROBS,
    version=VERSIONS,
    top_ids=st.lists(st.integers(0, 9), max_size=3).map(tuple),
    top_logprobs=st.lists(LOGPROBS, max_size=3).map(tuple),
    kv=KV.map(lambda count: kv_of(count, PROMPT_TOKENS)),
    provisional=st.booleans(),
    finish=st.none() | st.sampled_from(Finish),
    raw_logprob=st.none() | LOGPROBS,
    raw_top_ids=st.lists(st.integers(0, 9), max_size=3).map(tuple),
    raw_top_logprobs=st.lists(LOGPROBS, max_size=3).map(tuple),
    mask=st.none() | st.sets(st.integers(0, 2**31 - 1), max_size=9).map(sorted).map(pack_mask),
)
ORIGINS = st.builds(
    Origin,
    replica=st.text(max_size=9).map(ReplicaId),
    boot=st.text(max_size=9).map(BootId),
    run=st.text(max_size=9).map(RunId),
    seed=st.integers(0, 2**63 - 1),
    cached_tokens=st.integers(0, 99),
    prompt_version=st.none() | VERSIONS,
)
REQUESTS = st.builds(
    CompletionRequest,
    request_id=st.text(max_size=9).map(RequestId),
    prompt_ids=st.lists(st.integers(0, 2**31), min_size=1, max_size=5).map(tuple),
    sampling=st.builds(
        SamplingSpec,
        max_tokens=st.integers(1, 9),
        temperature=st.floats(0, 100),
        top_p=st.floats(0.01, 1),
        seed=st.none() | st.integers(0, 2**63 - 1),
        stop_token_ids=st.lists(st.integers(0, 9), max_size=3).map(tuple),
        logit_bias=st.dictionaries(st.integers(0, 9), st.floats(-100, 100), max_size=3).map(
            lambda ids: (*ids.items(),)
        ),
        repetition_penalty=st.floats(0.1, 2),
        min_tokens=st.integers(0, 1),
        sampling_mask=st.booleans(),
    ),
    policy=st.builds(PolicyConstraint, min_version=st.none() | VERSIONS, any_kv=st.booleans())
    | st.builds(PolicyConstraint, min_version=st.just(Version(0)), exact_version=VERSIONS),
    forced_ids=st.lists(st.integers(0, 9), max_size=3).map(tuple),
    streamed=st.booleans(),
    model=st.text(max_size=9),
)


@given(request=REQUESTS)
def test_a_request_comes_back_as_itself(request: CompletionRequest) -> None:
    assert decode_request(encode_request(request)) == request


@given(step=STEPS, origin=ORIGINS)
def test_tokens_and_origins_come_back_bit_for_bit(step: TokenStep, origin: Origin) -> None:
    reader = StepReader(PROMPT_TOKENS)
    taken = [reader.take(item) for item in sent(step)]
    assert taken == [None] * (len(taken) - 1) + [step]
    told = decode_line(line(origin_line(origin)))
    assert isinstance(told, OriginLine)
    assert told.origin() == origin


def sent(step: TokenStep) -> list[TokenLine | MaskLine | KvLine]:
    """The lines of a step as their reader decodes them."""
    written = [line(item) for item in token_lines(step)]
    assert all(len(data) <= MAX_LINE_BYTES for data in written)
    decoded = [decode_line(data) for data in written]
    return [item for item in decoded if isinstance(item, TokenLine | MaskLine | KvLine)]


@pytest.mark.parametrize("moved", [MOVED, replace(MOVED, seed=0, cached_tokens=0, prompt_version=None)])
@pytest.mark.parametrize("count", [1, KV_SPANS_PER_LINE + 1])
def test_who_took_over_comes_back_as_it_was(moved: Origin, count: int) -> None:
    reader = StepReader(PROMPT_TOKENS)
    first, second = (TokenStep(token_id=1, logprob=-1.0, version=Version(7)) for _ in range(2))
    second = replace(second, kv=kv_of(count, PROMPT_TOKENS + 1), moved=moved)
    assert [step for one in (first, second) for item in sent(one) if (step := reader.take(item))] == [first, second]


LINE = '{"type":"token","token_id":1,"logprob":-1.0,"version":7,"kv":[[7,0,4]],"moved":%s}'
MOVER = '{"replica":"r","boot":"b","run":"d","seed":5%s}'


@pytest.mark.parametrize(
    "moved",
    [
        "7",
        "[]",
        "{}",
        '{"replica":"r","boot":"b","run":"d"}',
        '{"replica":"r","boot":"b","seed":5}',
        '{"replica":"","boot":"b","run":"d","seed":5}',
        '{"replica":"r","boot":7,"run":"d","seed":5}',
        '{"replica":"r","boot":"%s","run":"d","seed":5}' % ("b" * (MAX_NAME + 1)),
        '{"replica":"r","boot":"b","run":"d","seed":-1}',
        '{"replica":"r","boot":"b","run":"d","seed":9223372036854775808}',
        '{"replica":"r","boot":"b","run":"d","seed":1.5}',
        MOVER % ',"cached_tokens":-1',
        MOVER % ',"cached_tokens":5',
        MOVER % ',"prompt_version":-7',
    ],
)
def test_who_cannot_have_taken_over_is_corrupt(moved: str) -> None:
    def read(told: str) -> TokenStep | None:
        reader = StepReader(3)
        reader.take(TokenLine(token_id=1, logprob=-1.0, version=Version(7)))
        token = decode_line((LINE % told).encode())
        assert isinstance(token, TokenLine)
        return reader.take(token)

    assert read(MOVER % "") is not None
    with pytest.raises(CorruptError):
        read(moved)


def test_nobody_takes_over_at_the_first_token_or_without_telling_of_kv() -> None:
    step = TokenStep(token_id=1, logprob=-1.0, version=Version(7), kv=kv_of(1, 3), moved=MOVED)
    (first,) = token_lines(step)
    with pytest.raises(CorruptError):
        StepReader(3).take(first)
    (silent,) = token_lines(replace(step, kv=()))
    reader = StepReader(2)
    reader.take(TokenLine(token_id=1, logprob=-1.0, version=Version(7)))
    with pytest.raises(CorruptError):
        reader.take(silent)


def test_a_token_says_nothing_of_what_its_reader_assumes() -> None:
    plain = b"".join(line(item) for item in token_lines(TokenStep(token_id=1, logprob=0.0, version=Version(1))))
    assert b"kv" not in plain
    assert b"provisional" not in plain
    assert b"moved" not in plain


def test_the_longest_line_of_a_token_is_within_the_bound() -> None:
    rows = 10**18
    kv = [PolicySpan(version=Version(2**63 - 1), start=rows + at, end=rows + at + 1) for at in range(KV_SPANS_PER_LINE)]
    step = TokenStep(
        token_id=2**31 - 1,
        logprob=-2.2250738585072014e-308,
        version=Version(2**63 - 1),
        top_ids=(2**31 - 1,) * MAX_TOP_LOGPROBS,
        top_logprobs=(-2.2250738585072014e-308,) * MAX_TOP_LOGPROBS,
        kv=tuple(kv),
        provisional=True,
        moved=Origin(
            replica=ReplicaId("\x01" * MAX_NAME),
            boot=BootId("\x01" * MAX_NAME),
            run=RunId("\x01" * MAX_NAME),
            seed=2**63 - 1,
            cached_tokens=2**63 - 1,
            prompt_version=Version(2**63 - 1),
        ),
        finish=Finish.POLICY_CHANGED,
    )
    (longest,) = token_lines(step)
    assert len(line(longest)) <= MAX_LINE_BYTES
    assert len(line(msgspec.structs.replace(longest, kv=()))) < 8 * 1024


def test_later_tokens_tell_of_the_positions_before_them() -> None:
    reader = StepReader(2)
    for rows in (2, 3, 4):
        step = TokenStep(token_id=1, logprob=0.0, version=Version(1), kv=kv_of(rows, rows))
        assert [reader.take(item) for item in token_lines(step)] == [step]
    for item in token_lines(TokenStep(token_id=1, logprob=0.0, version=Version(1), kv=kv_of(1, 4))):
        with pytest.raises(CorruptError):
            reader.take(item)


def test_a_reader_holds_no_more_spans_than_there_are_positions() -> None:
    reader = StepReader(3)
    assert reader.take(KvLine(spans=((Version(7), 0, 1), (Version(8), 1, 2)))) is None
    with pytest.raises(CorruptError):
        reader.take(KvLine(spans=((Version(7), 2, 3), (Version(8), 3, 4))))


@given(data=st.binary(max_size=60) | st.text(max_size=60).map(str.encode))
def test_hostile_lines_are_corrupt(data: bytes) -> None:
    with pytest.raises(CorruptError):
        decode_line(data)


@pytest.mark.parametrize(
    "body",
    [
        b"{}",
        b"[" * 99_999,
        b'{"request_id":"r","prompt_ids":[],"sampling":{"max_tokens":1}}',
        b'{"request_id":"r","prompt_ids":[1],"sampling":{"max_tokens":0}}',
        b'{"request_id":"r","prompt_ids":[1.5],"sampling":{"max_tokens":1}}',
    ],
)
def test_hostile_requests_are_refused(body: bytes) -> None:
    with pytest.raises(InvalidInputError):
        decode_request(body)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_no_log_probability_does_not_leave(value: float) -> None:
    with pytest.raises(InternalError):
        list(token_lines(TokenStep(token_id=1, logprob=value, version=Version(1))))


async def written(completer: TableCompleter, request: CompletionRequest) -> list[Line]:
    answer = await completer.complete(request)
    seen = [decode_line(line(item)) async for item in lines(answer)]
    await answer.aclose()
    return seen


async def test_an_answer_is_origin_tokens_end() -> None:
    seen = await written(TableCompleter([[0.0] * 8]), REQUEST)
    assert [type(item) for item in seen] == [OriginLine, *[TokenLine] * 6, EndLine]


async def test_a_failure_after_admission_is_the_last_line() -> None:
    completer = TableCompleter([[0.0] * 8])
    completer.fail_after(1, PolicyUnmetError("moved on", versions=(8,)))
    *_, token, last = await written(completer, REQUEST)
    assert isinstance(token, TokenLine)
    assert isinstance(last, ErrorLine)
    error = read_error(last)
    assert isinstance(error, PolicyUnmetError)
    assert error.versions == (8,)


@given(values=st.lists(st.floats(width=32, allow_nan=False), max_size=9))
def test_arrays_are_exact(values: list[float]) -> None:
    assert array("float32", values).values() == tuple(values)


def test_arrays_whose_data_and_shape_differ_are_corrupt() -> None:
    for bad in (
        Array(dtype="int32", shape=(2,), data="AAAA"),
        Array(dtype="int32", shape=(-1,), data="AAAAAA=="),
        Array(dtype="int32", shape=(1,), data="***"),
    ):
        with pytest.raises(CorruptError):
            bad.values()


def test_a3_04_no_json_has_nan_or_infinity() -> None:
    body = bytes(json_reply({"a": math.nan, "b": [-math.inf]}).body)
    assert json.loads(body, parse_constant=pytest.fail) == {"a": None, "b": [None]}


def test_rows_of_alternatives_are_filled_up() -> None:
    step = TokenStep(token_id=4, logprob=0.0, version=Version(2), top_ids=(4,), top_logprobs=(0.0,))
    origin = Origin(replica=ReplicaId("r"), boot=BootId("b"), run=RunId("d"), seed=1)
    data = engine_data(Completion(origin=origin, steps=(step, step), finish=Finish.STOP), 2, prompt_tokens=3)
    assert data.top is not None
    assert data.top.ids.shape == (2, 2)
    assert data.top.ids.values() == (4, -1, 4, -1)
    assert data.top.logprobs.values() == (0.0, -math.inf) * 2
    assert data.policy == ((2, 0, 2),)
    assert data.kv == ((2, 0, 4),)
    assert data.replicas == (("r", "b", 0, 2),)
    assert data.status["routed_experts"] == "not_requested"


def test_a_mask_of_any_size_fits_into_a_line() -> None:
    step = TokenStep(token_id=4, logprob=0.0, version=Version(2), mask=pack_mask(range(MAX_MASK_IDS)))
    mask, token = token_lines(step)
    assert len(line(mask)) < MAX_LINE_BYTES
    reader = StepReader(3)
    assert isinstance(mask, MaskLine)
    assert reader.take(mask) is None
    assert reader.take(token) == step
    plain = replace(step, mask=None)
    assert [reader.take(item) for item in token_lines(plain)] == [plain]


@pytest.mark.parametrize("ids", [b"\1", b"\2\0\0\0\1\0\0\0", b"\1\0\0\0\1\0\0\0", b"\xff\xff\xff\xff"])
def test_a_mask_that_is_none_is_refused(ids: bytes) -> None:
    with pytest.raises(CorruptError):
        StepReader(3).take(MaskLine(ids=ids))
    with pytest.raises(CorruptError):
        decode_line(line(MaskLine(ids=b"\0\0\0\0" * (MAX_MASK_IDS + 1))))


def test_a_reader_holds_no_more_masks_than_one_reply_may_have() -> None:
    reader, wide = StepReader(3), pack_mask(range(MAX_MASK_IDS))
    token = TokenLine(token_id=1, logprob=0.0, version=Version(7))
    steps: list[TokenStep | None] = []
    for _ in range(MAX_REPLY_MASK_IDS // MAX_MASK_IDS + 2):
        reader.take(MaskLine(ids=wide))
        steps.append(reader.take(token))
    held = [step.mask for step in steps if step is not None]
    assert held[-2:] == [b"", b""]
    assert {len(mask or b"") for mask in held[:-2]} == {len(wide)}


def evidence_of(*steps: TokenStep, raw: bool = True, top: int = 0) -> EngineData:
    origin = Origin(replica=ReplicaId("r"), boot=BootId("b"), run=RunId("d"), seed=1)
    asked = SamplingSpec(max_tokens=9, raw_logprobs=raw, sampling_mask=True)
    whole = Completion(origin=origin, steps=steps, finish=Finish.STOP)
    return engine_data(whole, top, prompt_tokens=3, sampling=asked)


def test_a3_01_both_kinds_of_logprobs_say_what_they_are() -> None:
    data = evidence_of(TokenStep(token_id=4, logprob=-0.5, version=Version(2), raw_logprob=-math.inf, mask=b""))
    assert data.raw_logprobs is not None
    assert (data.logprobs.kind, data.logprobs.values.values()) == ("processed", (-0.5,))
    assert (data.raw_logprobs.kind, data.raw_logprobs.values.values()) == ("raw", (-math.inf,))


def test_a3_03_the_raw_alternatives_are_told_apart_from_the_processed_ones() -> None:
    plain = TokenStep(token_id=4, logprob=0.0, version=Version(2), top_ids=(4,), top_logprobs=(0.0,), raw_logprob=-0.5)
    step = replace(plain, raw_top_ids=(4, 1), raw_top_logprobs=(-0.5, -1.0))
    data = evidence_of(step, top=2)
    assert data.top is not None
    assert data.raw_top is not None
    assert (data.top.ids.values(), data.raw_top.ids.values()) == ((4, -1), (4, 1))
    assert data.raw_top.logprobs.values() == (-0.5, -1.0)
    assert evidence_of(plain, top=2).status["raw_top"] == "unsupported", "an older replica's"
    assert evidence_of(step, top=2, raw=False).status["raw_top"] == "not_requested"
    assert evidence_of(step).raw_top is None


def test_a3_22_masks_are_rows_of_ids_and_one_that_is_too_wide_is_told() -> None:
    step = TokenStep(token_id=4, logprob=0.0, version=Version(2), mask=pack_mask((1, 4)), raw_logprob=0.0)
    data = evidence_of(step, replace(step, mask=pack_mask((7,))))
    assert data.sampling_mask is not None
    assert (data.sampling_mask.indptr.dtype, data.sampling_mask.indptr.values()) == ("int64", (0, 2, 3))
    assert (data.sampling_mask.indices.dtype, data.sampling_mask.indices.values()) == ("int32", (1, 4, 7))
    assert (data.status["sampling_mask"], data.status["raw_logprobs"]) == ("ok", "ok")
    wide = evidence_of(step, replace(step, mask=b""), step)
    assert wide.sampling_mask is not None
    assert wide.sampling_mask.indptr.values() == (0, 2, 2, 4)
    assert wide.status["sampling_mask"] == "partial"


def test_evidence_that_an_older_replica_does_not_give_is_unsupported_and_never_made_up() -> None:
    old = TokenStep(token_id=4, logprob=0.0, version=Version(2))
    data = evidence_of(old, replace(old, mask=b"", raw_logprob=0.0))
    assert (data.raw_logprobs, data.sampling_mask) == (None, None)
    assert (data.status["sampling_mask"], data.status["raw_logprobs"]) == ("unsupported", "unsupported")
    assert evidence_of(old, raw=False).status["raw_logprobs"] == "not_requested"


def test_a5_10_every_replica_that_sampled_is_named_with_its_tokens() -> None:
    first = TokenStep(token_id=4, logprob=0.0, version=Version(2))
    other = replace(MOVED, replica=ReplicaId("s"), boot=BootId("c"))
    second = taken_over(first, other, rows=5)
    origin = replace(MOVED, seed=1)

    def told(*steps: TokenStep) -> tuple[tuple[str, str, int, int], ...] | None:
        return engine_data(Completion(origin=origin, steps=steps, finish=Finish.STOP), 0, prompt_tokens=3).replicas

    assert told(first, first, second, first) == (("r", "b", 0, 2), ("s", "c", 2, 4))
    assert told(first, second, replace(second, moved=MOVED)) == (("r", "b", 0, 1), ("s", "c", 1, 2), ("r", "b", 2, 3))
    assert told() == ()
