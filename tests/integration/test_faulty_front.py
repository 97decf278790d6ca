"""The front does to requests what its rules say, so that other tests may rest on it."""

import http.client
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import pytest

from slackwater.testing.bucket import Gate
from slackwater.testing.faulty_front import FaultyFront, Rule
from slackwater.testing.http_faults import (
    PRECONDITIONS,
    Fault,
    Forward,
    Headers,
    Reply,
    Request,
    answer,
    cut,
    expire_token,
    hang_up,
    hold,
    ignore_preconditions,
    limit_writes,
    lose_answer,
    refuse,
    shift_clock,
    shorten,
    sometimes,
    stale_reads,
    stall,
)

BODY = b"0123456789"
DATE = "Mon, 01 Jan 2024 00:00:00 GMT"
NOWHERE = "http://127.0.0.1:1"


class Echo:
    """A store that answers with a body and counts what it carried out."""

    def __init__(self) -> None:
        self.served: list[Request] = []

    def __call__(self, request: Request, forward: Forward) -> Reply:
        del forward
        self.served.append(request)
        head = (("content-length", str(len(BODY))),) if request.method == "HEAD" else ()
        return Reply(headers=(("date", DATE), ("x-store", "echo"), *head), body=BODY)


@pytest.fixture
def echo() -> Echo:
    return Echo()


@pytest.fixture
def front(echo: Echo) -> Iterator[FaultyFront]:
    with FaultyFront(NOWHERE, Rule(echo, times=None)) as upstream, FaultyFront(upstream.url) as front:
        yield front


def ask(
    front: FaultyFront, target: str = "/b/k", method: str = "GET", body: bytes = b"", headers: Headers = ()
) -> tuple[int, bytes, http.client.HTTPMessage]:
    """One request on a connection of its own.

    Raises:
        http.client.HTTPException: The answer breaks off.
    """
    connection = http.client.HTTPConnection(urlsplit(front.url).netloc, timeout=10)
    try:
        connection.request(method, target, body or None, dict(headers))
        reply = connection.getresponse()
        return reply.status, reply.read(), reply.headers
    finally:
        connection.close()


def test_without_rules_everything_passes_as_it_is(front: FaultyFront, echo: Echo) -> None:
    status, body, headers = ask(
        front, "/b/a%2Fb%20c?x=%31", "PUT", b"sent", (("x-mine", "yes"), ("expect", "100-continue"))
    )
    assert (status, body, headers["date"], headers["x-store"]) == (200, BODY, DATE, "echo")
    (seen,) = echo.served
    assert (seen.method, seen.target, seen.path, seen.body) == ("PUT", "/b/a%2Fb%20c?x=%31", "/b/a/b c?x=1", b"sent")
    assert (seen.header("X-Mine"), seen.header("expect")) == ("yes", None)
    assert seen.header("host") == urlsplit(front.url).netloc


def test_a_connection_serves_many_requests(front: FaultyFront) -> None:
    connection = http.client.HTTPConnection(urlsplit(front.url).netloc)
    for method in ("GET", "HEAD", "DELETE", "POST", "PUT"):
        connection.request(method, "/b/k", b"x" if method in {"POST", "PUT"} else None)
        reply = connection.getresponse()
        assert (reply.read(), reply.headers["content-length"]) == (b"" if method == "HEAD" else BODY, str(len(BODY)))
    connection.close()
    assert [each.request.method for each in front.seen] == ["GET", "HEAD", "DELETE", "POST", "PUT"]


@pytest.mark.parametrize("status", [409, 412, 429, 503])
@pytest.mark.parametrize("code", ["SlowDown", ""])
def test_a_refusal_comes_with_and_without_a_body(front: FaultyFront, echo: Echo, status: int, code: str) -> None:
    front.add(Rule(refuse(status, code, headers=(("retry-after", "7"),))))
    told, body, headers = ask(front)
    assert (told, headers["retry-after"], bool(body)) == (status, "7", bool(code))
    assert f"<Code>{code}</Code>".encode() in body or not code
    assert (ask(front)[0], len(echo.served)) == (200, 1)


def test_rules_meet_method_path_and_turn(front: FaultyFront) -> None:
    front.add(Rule(refuse(503), "PUT", "a/b", skip=1, times=2))
    assert [ask(front, "/x/a%2Fb", "PUT")[0] for _ in range(5)] == [200, 503, 503, 200, 200]
    assert [ask(front, "/x/a%2Fb")[0], ask(front, "/x/ab", "PUT")[0]] == [200, 200]
    assert (front.count(), front.count("PUT"), front.count("PUT", "a/b"), front.count(path="zz")) == (7, 6, 5, 0)
    assert [each.status for each in front.seen[:3]] == [200, 503, 503]


def test_a_rule_behind_one_that_answers_is_not_spent(front: FaultyFront) -> None:
    front.add(Rule(refuse(409), times=2), Rule(refuse(412)))
    assert [ask(front)[0] for _ in range(4)] == [409, 409, 412, 200]


def test_rules_wrap_one_another(front: FaultyFront) -> None:
    front.add(Rule(shift_clock(3600), times=None), Rule(shorten(4)))
    _, body, headers = ask(front)
    assert (body, headers["date"]) == (BODY[:4], "Mon, 01 Jan 2024 01:00:00 GMT")


def test_cleared_rules_are_gone(front: FaultyFront) -> None:
    front.add(Rule(refuse(503), times=None))
    assert ask(front)[0] == 503
    front.clear()
    assert ask(front)[0] == 200


@pytest.mark.parametrize(("fault", "carried_out"), [(hang_up(), 0), (lose_answer(), 1)])
def test_an_answer_never_comes(front: FaultyFront, echo: Echo, fault: Fault, carried_out: int) -> None:
    front.add(Rule(fault))
    with pytest.raises(http.client.RemoteDisconnected):
        ask(front, method="PUT")
    assert len(echo.served) == carried_out
    assert front.seen[0].status is None


def test_a_store_that_is_away_is_as_silent() -> None:
    with FaultyFront(NOWHERE) as front, pytest.raises(http.client.RemoteDisconnected):
        ask(front)


def test_a_cut_body_misses_bytes_that_were_announced(front: FaultyFront) -> None:
    front.add(Rule(cut(4)))
    with pytest.raises(http.client.IncompleteRead) as broken:
        ask(front)
    assert broken.value.partial == BODY[:4]


def test_a_cut_body_without_length_looks_whole(front: FaultyFront) -> None:
    front.add(Rule(cut(4, framed=False)))
    _, body, headers = ask(front)
    assert (body, headers["content-length"]) == (BODY[:4], None)


def test_a_short_body_announces_what_it_has(front: FaultyFront) -> None:
    front.add(Rule(shorten(4)))
    _, body, headers = ask(front)
    assert (body, headers["content-length"]) == (BODY[:4], "4")


def test_a_page_stands_in_for_the_store(front: FaultyFront, echo: Echo) -> None:
    front.add(Rule(answer(b"<html>sign in</html>")))
    status, body, headers = ask(front)
    assert (status, body, headers["content-type"]) == (200, b"<html>sign in</html>", "text/html")
    assert echo.served == []


@pytest.mark.parametrize(("after", "before_opening"), [(False, 0), (True, 1)])
def test_a_held_request_waits_before_or_after_it_is_carried_out(
    front: FaultyFront, echo: Echo, *, after: bool, before_opening: int
) -> None:
    gate = Gate()
    front.add(Rule(hold(gate, after=after)))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(ask, front)
        assert gate.reached.wait(10)
        assert len(echo.served) == before_opening
        gate.open()
        assert waiting.result(10)[:2] == (200, BODY)
    assert len(echo.served) == 1


def test_a_stalled_body_waits_at_each_of_its_gates(front: FaultyFront) -> None:
    gates = {3: Gate(), 7: Gate()}
    front.add(*(Rule(stall(gate, at)) for at, gate in gates.items()))
    connection = http.client.HTTPConnection(urlsplit(front.url).netloc, timeout=10)
    connection.request("GET", "/b/k")
    reply = connection.getresponse()
    assert reply.read(3) == BODY[:3]
    assert gates[3].reached.wait(10)
    assert not gates[7].reached.is_set()
    gates[3].open()
    assert reply.read(4) == BODY[3:7]
    assert gates[7].reached.wait(10)
    gates[7].open()
    assert reply.read() == BODY[7:]
    connection.close()


def test_preconditions_are_ignored(front: FaultyFront, echo: Echo) -> None:
    front.add(Rule(ignore_preconditions()))
    ask(front, method="PUT", headers=(*((name, "*") for name in PRECONDITIONS), ("x-kept", "1")))
    (seen,) = echo.served
    assert [seen.header(name) for name in PRECONDITIONS] == [None] * 3
    assert seen.header("x-kept") == "1"


@pytest.mark.parametrize(("seconds", "date"), [(1200, "00:20:00"), (-1, "23:59:59"), (0, "00:00:00")])
def test_a_clock_is_shifted(front: FaultyFront, seconds: float, date: str) -> None:
    front.add(Rule(shift_clock(seconds)))
    assert date in ask(front)[2]["date"]


@pytest.mark.parametrize(
    ("listed", "shifted"),
    [
        ("<LastModified>2024-01-01T00:00:00.000Z</LastModified>", "<LastModified>2024-01-01T00:20:00.000Z"),
        (
            "<Last-Modified>Mon, 01 Jan 2024 00:00:00 GMT</Last-Modified>",
            "<Last-Modified>Mon, 01 Jan 2024 00:20:00 GMT",
        ),
    ],
)
def test_a_clock_is_shifted_in_listings(listed: str, shifted: str) -> None:
    page = Rule(answer(listed.encode(), content_type="application/xml; charset=utf-8"))
    with FaultyFront(NOWHERE, Rule(shift_clock(1200)), page) as front:
        assert shifted in ask(front)[1].decode()


@pytest.mark.parametrize(("name", "scheme"), [("x-amz-security-token", ""), ("authorization", "Bearer ")])
def test_an_expired_token_is_refused_and_a_new_one_passes(front: FaultyFront, name: str, scheme: str) -> None:
    front.add(Rule(expire_token("old"), times=None))
    status, body, _ = ask(front, headers=((name, f"{scheme}old"),))
    assert (status, b"<Code>ExpiredToken</Code>" in body) == (403, True)
    assert ask(front, headers=((name, f"{scheme}new"),))[0] == 200
    assert ask(front)[0] == 200


def test_reads_stay_as_they_first_were(front: FaultyFront) -> None:
    front.add(Rule(stale_reads(), times=None), Rule(refuse(404, "NoSuchKey")))
    assert [ask(front)[0], ask(front)[0]] == [404, 404]
    assert ask(front, headers=(("range", "bytes=0-1"),))[0] == 200
    assert ask(front, method="PUT")[0] == 200
    assert ask(front)[0] == 404


def test_a_hot_name_is_refused_by_count(front: FaultyFront) -> None:
    front.add(Rule(limit_writes(2), times=None))
    assert [ask(front, "/b/hot", "PUT")[0] for _ in range(7)] == [200, 429, 429, 200, 429, 429, 200]
    assert [ask(front, "/b/cold", "PUT")[0], ask(front, "/b/hot")[0]] == [200, 200]


def test_a_share_of_the_requests_fails_by_its_seed() -> None:
    def run(seed: int) -> list[int]:
        rule = Rule(sometimes(0.3, [refuse(503), refuse(429)], seed=seed), times=None)
        with FaultyFront(NOWHERE, rule, Rule(answer(BODY), times=None)) as front:
            return [ask(front)[0] for _ in range(200)]

    first = run(1)
    assert first == run(1) != run(2)
    assert set(first) == {200, 429, 503}
    assert 40 <= 200 - first.count(200) <= 80


def test_requests_are_timed(front: FaultyFront) -> None:
    before = time.monotonic()
    ask(front)
    ask(front)
    times = [each.at for each in front.seen]
    assert before <= times[0] <= times[1] <= time.monotonic()


def test_an_error_of_a_rule_fails_the_test() -> None:
    def broken(request: Request, forward: Forward) -> Reply | None:
        raise ZeroDivisionError(request, forward)

    with (
        pytest.raises(ZeroDivisionError),
        FaultyFront(NOWHERE, Rule(broken)) as front,
        pytest.raises(http.client.RemoteDisconnected),
    ):
        ask(front)
