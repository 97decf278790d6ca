"""Routes between replica and gateway: lines of a bounded length that lose nothing, and nothing that can't be."""

import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slackwater.api.arrays import PIECE_BYTES, joined
from slackwater.api.stream import line
from slackwater.api.wire import (
    MAX_LINE_BYTES,
    ROUTE_BYTES_PER_LINE,
    RoutesLine,
    StepReader,
    TokenLine,
    decode_line,
    decode_request,
    encode_request,
    token_lines,
)
from slackwater.errors import CorruptError, InvalidInputError
from slackwater.ids import Version
from slackwater.rollout.evidence import TokenStep
from slackwater.rollout.routes import Routing
from slackwater.testing.conformance_completer import REQUEST
from slackwater.testing.routes import ROUTING

ROW = ROUTING.row_bytes
PROMPT_TOKENS = 3 * ROUTE_BYTES_PER_LINE // ROW


def told(rows: bytes | None) -> TokenStep:
    return TokenStep(token_id=1, logprob=-1.0, version=Version(1), routes=rows)


def read(reader: StepReader, step: TokenStep) -> TokenStep | None:
    """Through the wire and back."""
    made = None
    for item in token_lines(step):
        data = line(item)
        assert len(data) <= MAX_LINE_BYTES
        got = decode_line(data)
        assert isinstance(got, RoutesLine | TokenLine)
        made = reader.take(got)
    return made


SIZES = st.sampled_from([0, 1, 2, ROUTE_BYTES_PER_LINE // ROW, ROUTE_BYTES_PER_LINE // ROW + 1, PROMPT_TOKENS])


@given(rows=SIZES, start=st.sampled_from([0, 1, PROMPT_TOKENS - 1]), fill=st.binary(min_size=1, max_size=9))
def test_any_number_of_rows_arrives_in_lines_of_a_bounded_length(rows: int, start: int, fill: bytes) -> None:
    count = min(rows, PROMPT_TOKENS - start)
    data = (fill * (count * ROW // len(fill) + 1))[: count * ROW]
    reader = StepReader(PROMPT_TOKENS, ROUTING, start)
    for step in (told(data), told(b"\1" * ROW), told(None), told(b"\2" * ROW), told(b"")):
        assert read(reader, step) == step


@pytest.mark.parametrize(
    ("reader", "steps"),
    [
        (StepReader(3), [b"\0" * ROW]),
        (StepReader(3, ROUTING), [b"\0" * ROW]),
        (StepReader(3, None, 0), [b"\0" * ROW]),
        (StepReader(3, ROUTING, 0), [b"\0" * (4 * ROW)]),
        (StepReader(3, ROUTING, 1), [b"\0" * (3 * ROW)]),
        (StepReader(3, ROUTING, 0), [b"\0" * (3 * ROW), b"\0" * (2 * ROW)]),
        (StepReader(3, ROUTING, 0), [b"\0" * (ROW + 1)]),
    ],
    ids=["not asked", "not asked, known", "unknown routers", "too many", "before the start", "twice", "no whole rows"],
)
def test_routes_that_cannot_be_are_refused(reader: StepReader, steps: list[bytes]) -> None:
    *good, bad = steps
    for rows in good:
        read(reader, told(rows))
    with pytest.raises(CorruptError):
        read(reader, told(bad))


def test_a_line_of_too_many_bytes_is_no_line() -> None:
    rows = base64.b64encode(b"\0" * (ROUTE_BYTES_PER_LINE + 1)).decode()
    with pytest.raises(CorruptError):
        decode_line(b'{"type": "routes", "rows": "%s"}' % rows.encode())


def test_a_request_for_routes_arrives() -> None:
    plain = decode_request(encode_request(REQUEST))
    assert (plain.routes_from, plain.forced_routes) == (None, b"")
    body = encode_request(REQUEST)[:-1]
    asked = decode_request(body.replace(b'"routes_from":null', b'"routes_from":2') + b"}")
    assert asked.routes_from == 2
    with pytest.raises(InvalidInputError):
        decode_request(body.replace(b'"routes_from":null', b'"routes_from":3') + b"}")


@given(sizes=st.lists(st.sampled_from([0, 1, 2, 3, 7, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1]), max_size=4))
def test_base64_in_pieces_is_base64_of_the_whole(sizes: list[int]) -> None:
    parts = [bytes([number + 1]) * size for number, size in enumerate(sizes)]
    assert base64.b64decode(joined(parts), validate=True) == b"".join(parts)


@pytest.mark.parametrize(
    ("layers", "experts", "per_token"),
    [((), 4, 1), ((2, 1), 4, 1), ((1, 1), 4, 1), ((-1,), 4, 1), ((0,), 4, 5), ((0,), 4, 0), ((0,), 65_537, 1)],
)
def test_routers_that_cannot_be_are_refused(layers: tuple[int, ...], experts: int, per_token: int) -> None:
    with pytest.raises(InvalidInputError):
        Routing(layers=layers, experts=experts, per_token=per_token)


@pytest.mark.parametrize("experts", [256, 257, 65_536])
def test_a_row_has_room_for_every_expert(experts: int) -> None:
    routing = Routing(layers=(0,), experts=experts, per_token=1)
    last = (experts - 1).to_bytes(routing.row_bytes, "little")
    assert routing.check(last * 3) == 3


@pytest.mark.parametrize("rows", [b"\0", bytes([0, 1, 2, 3, 4, 12]), bytes([0, 1, 2, 2, 4, 5])])
def test_a4_04_rows_that_no_router_chose_are_refused(rows: bytes) -> None:
    with pytest.raises(InvalidInputError):
        ROUTING.check(rows)
