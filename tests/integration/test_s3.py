"""Against an S3 server on a real socket, with boto3 as the independent reader and writer."""

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from s3_rig import HASTY, MIB, Role, acting, body_of, fronting, url_of

from slackwater.bucket.base import Bucket, Delete
from slackwater.bucket.open import open_bucket, probe
from slackwater.bucket.selftest import examine
from slackwater.bucket.verdict import Mode, Outcome, Probe, Verdict, judge
from slackwater.cli.doctor import report
from slackwater.cli.publish import publish_folder
from slackwater.clock import SystemClock
from slackwater.errors import AuthError, CorruptError, NotFoundError, UnavailableError, UnsupportedError
from slackwater.ids import RunId, Version
from slackwater.publish.restore import restore
from slackwater.testing.bucket import Gate
from slackwater.testing.faulty_front import FaultyFront, Rule
from slackwater.testing.http_faults import (
    Fault,
    Forward,
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
from slackwater.testing.tiny_model import write_tiny_model

RENEWING = replace(HASTY, renewal_s=0.15)
IMPATIENT = replace(HASTY, idle_s=0.8)
DENY_DELETION = {
    "Version": "2012-10-17",
    "Statement": [{"Effect": "Deny", "Principal": "*", "Action": "s3:DeleteObject", "Resource": "arn:aws:s3:::*/*"}],
}


@pytest.fixture
def front(s3_client: Any, s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyFront]:
    assert s3_client is not None
    with fronting(s3_endpoint, monkeypatch) as front:
        yield front


@pytest.fixture
def gate(front: FaultyFront) -> Iterator[Gate]:
    """Opened before the front ends."""
    assert front.count() == 0
    gate = Gate()
    yield gate
    gate.open()


@pytest.fixture
def bucket(front: FaultyFront, s3_bucket_name: str) -> Bucket:
    assert front.count() == 0
    return open_bucket(url_of(s3_bucket_name), patience=HASTY)


def judged(bucket: Bucket) -> tuple[Verdict, dict[Probe, Outcome]]:
    verdict = judge(examine(bucket, SystemClock()).findings)
    return verdict, {ruling.finding.probe: ruling.finding.outcome for ruling in verdict.rulings}


@pytest.fixture
def role(monkeypatch: pytest.MonkeyPatch) -> Iterator[Role]:
    with acting(monkeypatch) as role:
        yield role


def test_boto3_reads_what_we_write_below_the_prefix(s3_client: Any, s3_bucket_name: str) -> None:
    bucket = open_bucket(f"s3://{s3_bucket_name}/team/runs")
    body = bytes(range(256)) * (80 * 1024)
    bucket.put("demo/blobs/b", memoryview(body))
    bucket.put_if_absent("demo/manifests/00000000.json", b"{}")
    listed = s3_client.list_objects_v2(Bucket=s3_bucket_name)["Contents"]
    assert {item["Key"]: item["Size"] for item in listed} == {
        "team/runs/demo/blobs/b": 20 * MIB,
        "team/runs/demo/manifests/00000000.json": 2,
    }
    answer = s3_client.get_object(Bucket=s3_bucket_name, Key="team/runs/demo/blobs/b")
    assert answer["Body"].read() == body


def test_we_read_what_boto3_writes(s3_client: Any, s3_bucket_name: str) -> None:
    s3_client.put_object(Bucket=s3_bucket_name, Key="runs/demo/head.json", Body=b'{"version": 3}')
    bucket = open_bucket(url_of(s3_bucket_name))
    assert bucket.get("demo/head.json", max_bytes=100) == b'{"version": 3}'
    assert bucket.get_range("demo/head.json", 12, 1) == b"3"
    assert bucket.put_if_absent("demo/head.json", b"ours") is False


def test_a_listing_of_more_than_a_page_is_whole(s3_client: Any, s3_bucket_name: str) -> None:
    for number in range(45):
        s3_client.put_object(Bucket=s3_bucket_name, Key=f"runs/m/{number:08d}.json", Body=b"x")
    assert s3_client.list_objects_v2(Bucket=s3_bucket_name)["IsTruncated"] is True
    bucket = open_bucket(url_of(s3_bucket_name))
    assert [info.key for info in bucket.list("m")] == [f"m/{number:08d}.json" for number in range(45)]


def test_a_missing_bucket_is_told_by_every_verb(s3_client: Any) -> None:
    assert s3_client is not None
    bucket = open_bucket("s3://no-such-bucket-here/runs")
    with pytest.raises(NotFoundError, match="no such bucket"):
        probe(bucket)
    with pytest.raises(NotFoundError, match="no such bucket"):
        bucket.get("k", max_bytes=1)
    with pytest.raises(NotFoundError, match="no such bucket"):
        bucket.put("k", b"x")
    with pytest.raises(NotFoundError, match="no such bucket"):
        bucket.put_if_absent("k", b"x")


def test_probe_is_content_with_an_empty_bucket(s3_bucket_name: str) -> None:
    probe(open_bucket(f"s3://{s3_bucket_name}"))


def test_a_key_without_the_right_to_delete_publishes_and_reads(
    s3_client: Any, s3_bucket_name: str, front: FaultyFront, bucket: Bucket, tmp_path: Path
) -> None:
    s3_client.put_bucket_policy(Bucket=s3_bucket_name, Policy=json.dumps(DENY_DELETION))
    url, run = url_of(s3_bucket_name), RunId("demo")
    for version in range(3):
        folder = write_tiny_model(tmp_path / str(version), seed=version)
        published = publish_folder(folder, url, run, step=version)
        assert restore(bucket, run, Version(version)).table.digest == published.state
    assert front.count("DELETE") + front.count("POST", "?delete") == 0
    assert isinstance(bucket, Delete)
    with pytest.raises(AuthError):
        bucket.delete("demo/head.json")


def test_a_key_without_the_right_to_delete_leaves_one_small_object_of_the_self_test(
    s3_client: Any, s3_bucket_name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    s3_client.put_bucket_policy(Bucket=s3_bucket_name, Policy=json.dumps(DENY_DELETION))
    report(url_of(s3_bucket_name), mode=Mode.PUBLISH, as_json=True)
    said = json.loads(capsys.readouterr().out)
    (left,) = s3_client.list_objects_v2(Bucket=s3_bucket_name)["Contents"]
    assert (left["Key"], left["Size"] < 100) == (f"runs/{said['left']}", True)
    assert said["publish"] is True


def test_a_good_store_carries_everything_and_nothing_is_left(
    s3_client: Any, s3_bucket_name: str, bucket: Bucket
) -> None:
    verdict, found = judged(bucket)
    assert set(found.values()) == {Outcome.OK}
    assert verdict.carries(Mode.PUBLISH)
    assert "Contents" not in s3_client.list_objects_v2(Bucket=s3_bucket_name)
    assert not s3_client.list_multipart_uploads(Bucket=s3_bucket_name).get("Uploads")


@pytest.mark.parametrize(
    ("rule", "wrong", "modes"),
    [
        (Rule(ignore_preconditions(), times=None), Probe.CREATE, {Mode.READ}),
        (Rule(ignore_preconditions(), times=None), Probe.REFUSE, {Mode.READ}),
        (Rule(ignore_preconditions(), times=None), Probe.SWAP, {Mode.READ}),
        (Rule(refuse(501, "NotImplemented"), "PUT", times=None), Probe.CREATE, {Mode.READ}),
        (Rule(refuse(403, "AccessDenied"), "PUT", times=None), Probe.CREATE, {Mode.READ}),
        (Rule(stale_reads(), times=None), Probe.READ, {Mode.READ}),
        (Rule(refuse(403, "AccessDenied"), "POST", "?uploads", times=None), Probe.PARTS, {Mode.READ}),
        (Rule(refuse(403, "AccessDenied"), "DELETE", "?uploadId", times=None), Probe.ABORT, set(Mode)),
        (Rule(refuse(403, "AccessDenied"), "POST", "?delete", times=None), Probe.DELETE, set(Mode)),
        (Rule(answer(b"<html>sign in</html>"), "GET", "doctor", times=None), Probe.ABSENT, set[Mode]()),
        (Rule(refuse(403, "AccessDenied"), "GET", "doctor", times=None), Probe.ABSENT, set[Mode]()),
        (Rule(refuse(403, "AccessDenied"), times=None), Probe.LIST, set[Mode]()),
        (Rule(shorten(7), "GET", "/slackwater-doctor/", skip=2, times=None), Probe.RANGE, set[Mode]()),
    ],
)
def test_the_self_test_refuses_what_the_store_can_not_carry(
    front: FaultyFront, bucket: Bucket, rule: Rule, wrong: Probe, modes: set[Mode]
) -> None:
    front.add(rule)
    verdict, found = judged(bucket)
    assert found[wrong] not in {Outcome.OK, Outcome.UNTRIED}
    assert {mode for mode in Mode if verdict.carries(mode)} == modes


def test_the_self_test_survives_trouble(front: FaultyFront, bucket: Bucket) -> None:
    front.add(Rule(sometimes(0.3, [refuse(503), refuse(429), hang_up()], seed=7), times=None))
    assert judged(bucket)[0].carries(Mode.PUBLISH)


def test_a_store_that_ignores_preconditions_is_refused_by_name(front: FaultyFront, s3_bucket_name: str) -> None:
    front.add(Rule(ignore_preconditions(), times=None))
    with pytest.raises(UnsupportedError, match=rf"s3://{s3_bucket_name}/runs can't be used to publish") as refused:
        report(url_of(s3_bucket_name), mode=Mode.PUBLISH, as_json=True)
    assert "If-None-Match" in refused.value.hint


def test_f05_a_creation_whose_answer_was_lost_is_found_by_reading_it_back(
    s3_client: Any, s3_bucket_name: str, front: FaultyFront, bucket: Bucket
) -> None:
    front.add(Rule(lose_answer(), "PUT"))
    assert bucket.put_if_absent("m/1", b"ours") is False
    assert bucket.get("m/1", max_bytes=10) == body_of(s3_client, s3_bucket_name, "m/1") == b"ours"


@pytest.mark.parametrize("after", [True, False])
def test_f05_a_creation_without_an_answer_is_made_again(
    front: FaultyFront, s3_bucket_name: str, gate: Gate, *, after: bool
) -> None:
    bucket = open_bucket(url_of(s3_bucket_name), patience=IMPATIENT)
    front.add(Rule(hold(gate, after=after), "PUT"))
    assert bucket.put_if_absent("m/1", b"ours") is not after
    assert bucket.get("m/1", max_bytes=10) == b"ours"
    gate.open()
    assert bucket.put_if_absent("m/1", b"theirs") is False


def test_f18_a_third_of_the_calls_fail_and_everything_ends_well(
    s3_client: Any, s3_bucket_name: str, front: FaultyFront, bucket: Bucket
) -> None:
    faults = [refuse(503, "SlowDown"), refuse(503), refuse(429), refuse(500), hang_up(), lose_answer()]
    front.add(Rule(sometimes(0.3, faults, seed=18), times=None))
    bodies = {f"k/{number}": bytes([number]) * 1000 for number in range(60)}

    def carry(key: str) -> None:
        bucket.put(key, bodies[key])
        assert bucket.get(key, max_bytes=1000) == bodies[key]
        assert bucket.get_range(key, 10, 20) == bodies[key][10:30]

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(carry, bodies))
    assert {info.key for info in bucket.list("k")} == set(bodies)
    assert all(body_of(s3_client, s3_bucket_name, key) == body for key, body in bodies.items())
    clean = 3 * len(bodies) + 60 // 20
    assert clean < front.count() <= 3 * clean


@pytest.mark.parametrize("fault", [refuse(503, "SlowDown"), refuse(503), refuse(429), refuse(500), hang_up()])
def test_a6_11_no_repeat_comes_before_its_wait(front: FaultyFront, bucket: Bucket, fault: Fault) -> None:
    front.add(Rule(fault, "GET", "k/1", times=6), Rule(fault, "GET", "k/2", times=6))
    gaps: list[float] = []
    for key in ("k/1", "k/2"):
        bucket.put(key, b"x")
        bucket.get(key, max_bytes=1)
        times = [each.at for each in front.seen if each.request.method == "GET" and key in each.request.path]
        gaps += [after - before for before, after in pairwise(times)]
    assert len(gaps) == 12
    assert all(gap >= HASTY.first_wait_s for gap in gaps)


def test_f19_a_store_that_stays_away_is_told_within_bounds(front: FaultyFront, bucket: Bucket) -> None:
    front.add(Rule(refuse(503, "SlowDown"), times=None))
    with pytest.raises(UnavailableError, match="503"):
        bucket.put("k", b"x")
    assert front.count() == HASTY.attempts
    front.clear()
    bucket.put("k", b"x")


def test_f21_a_body_that_stops_coming_goes_on_by_range(front: FaultyFront, s3_bucket_name: str, gate: Gate) -> None:
    bucket = open_bucket(url_of(s3_bucket_name), patience=IMPATIENT)
    body = bytes(range(200)) * 10
    bucket.put("k", body)
    front.add(Rule(stall(gate, 700), "GET"))
    assert bucket.get("k", max_bytes=len(body)) == body
    assert front.seen[-1].request.header("range") == f"bytes=700-{len(body) - 1}"


@pytest.mark.parametrize("fault", [cut(700), cut(0), hang_up()])
def test_f22_a6_07_a_short_body_is_completed(front: FaultyFront, bucket: Bucket, fault: Fault) -> None:
    body = bytes(range(200)) * 10
    bucket.put("k", body)
    front.add(Rule(fault, "GET"))
    assert bucket.get("k", max_bytes=len(body)) == body
    front.add(Rule(fault, "GET"))
    assert bucket.get_range("k", 100, 1500) == body[100:1600]


@pytest.mark.parametrize("fault", [cut(300, framed=False), shorten(300), shorten(0), answer(b"<html>sign in</html>")])
def test_f22_an_answer_that_is_not_the_range_is_corrupt(front: FaultyFront, bucket: Bucket, fault: Fault) -> None:
    bucket.put("k", bytes(2000))
    front.add(Rule(fault, "GET"))
    with pytest.raises(CorruptError):
        bucket.get_range("k", 100, 1500)


def test_f22_a_body_without_length_is_not_taken(front: FaultyFront, bucket: Bucket) -> None:
    bucket.put("k", bytes(2000))
    front.add(Rule(cut(700, framed=False), "GET"))
    with pytest.raises(CorruptError):
        bucket.get("k", max_bytes=2000)


@pytest.mark.parametrize("code", ["ConditionalRequestConflict", ""])
def test_f25_a6_03_conflicts_end_in_one_commit(
    s3_client: Any, s3_bucket_name: str, front: FaultyFront, bucket: Bucket, code: str
) -> None:
    front.add(Rule(refuse(409, code), "PUT", times=2))
    assert bucket.put_if_absent("m/1", b"ours") is True
    assert (front.count("PUT"), body_of(s3_client, s3_bucket_name, "m/1")) == (3, b"ours")


def test_f25_a6_03_an_object_of_another_writer_stays(
    s3_client: Any, s3_bucket_name: str, front: FaultyFront, bucket: Bucket
) -> None:
    s3_client.put_object(Bucket=s3_bucket_name, Key="runs/m/1", Body=b"theirs")
    front.add(Rule(refuse(409, "ConditionalRequestConflict"), "PUT"))
    assert bucket.put_if_absent("m/1", b"ours") is False
    assert bucket.get("m/1", max_bytes=10) == b"theirs"


def test_f26_a6_05_a_role_changes_its_token_in_mid_upload_and_no_part_is_sent_twice(
    s3_client: Any, s3_bucket_name: str, front: FaultyFront, role: Role
) -> None:
    bucket = open_bucket(url_of(s3_bucket_name), patience=RENEWING)

    def change(request: Request, forward: Forward) -> Reply | None:
        role.token = "new"
        time.sleep(RENEWING.renewal_s)  # obstore's own clock: it doesn't read credentials more often
        return forward(request)

    front.add(Rule(change, "POST", "?uploads"), Rule(expire_token("old"), "PUT", times=None))
    body = bytes(range(256)) * (80 * 1024)
    bucket.put("k", body)
    parts = [each.request.path for each in front.seen if each.request.method == "PUT" and each.status == 200]
    assert len(parts) == len(set(parts)) == 3
    assert body_of(s3_client, s3_bucket_name, "k") == body


def test_f26_a_token_that_expired_too_early_is_read_anew(
    s3_client: Any, s3_bucket_name: str, front: FaultyFront, role: Role
) -> None:
    bucket = open_bucket(url_of(s3_bucket_name), patience=RENEWING)

    def expire(request: Request, forward: Forward) -> Reply | None:
        role.token = "new"
        return expire_token("old")(request, forward)

    front.add(Rule(expire, times=None))
    assert bucket.put_if_absent("m/1", b"x") is True
    assert body_of(s3_client, s3_bucket_name, "m/1") == b"x"


@pytest.mark.parametrize("code", ["ExpiredToken", "InvalidAccessKeyId", "AccessDenied"])
def test_f26_a_revoked_token_is_an_auth_error_soon(
    s3_client: Any, s3_bucket_name: str, front: FaultyFront, bucket: Bucket, code: str
) -> None:
    bucket.put("before", b"x")
    front.add(Rule(refuse(403, code), times=None))
    for call in (
        lambda: bucket.get("before", max_bytes=1),
        lambda: bucket.put("k", b"x"),
        lambda: bucket.put_if_absent("k", b"x"),
        lambda: list(bucket.list("")),
    ):
        begun = front.count()
        with pytest.raises(AuthError, match=code):
            call()
        assert front.count() - begun <= 3
    assert s3_client.list_objects_v2(Bucket=s3_bucket_name)["KeyCount"] == 1


def test_f27_a6_06_a_wrong_clock_is_named(front: FaultyFront, bucket: Bucket) -> None:
    front.add(Rule(refuse(403, "RequestTimeTooSkewed"), times=None))
    with pytest.raises(AuthError, match="clock"):
        bucket.put("k", b"x")
    with pytest.raises(AuthError, match="clock"):
        judged(bucket)[0].require(Mode.PUBLISH, bucket.url)


def test_f27_a6_06_a_part_that_was_signed_too_early_is_signed_again(
    s3_client: Any, s3_bucket_name: str, front: FaultyFront, bucket: Bucket
) -> None:
    front.add(Rule(refuse(403, "RequestTimeTooSkewed"), "PUT"))
    bucket.put("k", b"x")
    assert body_of(s3_client, s3_bucket_name, "k") == b"x"


@pytest.mark.parametrize(
    ("seconds", "says"), [(1200, "1200 s ahead"), (-1200, "s behind"), (-3600, "s behind"), (6, "s ahead")]
)
def test_f27_clocks_that_differ_are_told_and_stop_nothing(
    front: FaultyFront, bucket: Bucket, seconds: float, says: str
) -> None:
    front.add(Rule(shift_clock(seconds), times=None))
    verdict, found = judged(bucket)
    assert found[Probe.CLOCK] is Outcome.WRONG
    told = next(ruling.finding.detail for ruling in verdict.rulings if ruling.finding.probe is Probe.CLOCK)
    assert says.partition(" ")[2] in told
    assert abs(abs(float(told.split(" is ")[1].split(" s ")[0])) - abs(seconds)) <= 3
    assert verdict.carries(Mode.PUBLISH)


def test_a_part_whose_answer_was_lost_is_sent_again(
    s3_client: Any, s3_bucket_name: str, front: FaultyFront, bucket: Bucket
) -> None:
    front.add(
        Rule(lose_answer(), "POST", "?uploads"),
        Rule(lose_answer(), "PUT", "partNumber=2"),
        Rule(lose_answer(), "POST", "?uploadId"),
    )
    body = bytes(range(256)) * (80 * 1024)
    bucket.put("k", body)
    assert body_of(s3_client, s3_bucket_name, "k") == body


def test_a6_01_a_hot_name_is_written_in_the_end(
    s3_client: Any, s3_bucket_name: str, front: FaultyFront, bucket: Bucket
) -> None:
    front.add(Rule(limit_writes(3), times=None))
    for version in range(5):
        assert bucket.put_if_absent(f"manifests/{version}", b"x") is True
        bucket.put("head.json", b"%d" % version)
    assert body_of(s3_client, s3_bucket_name, "head.json") == b"4"
    assert (front.count("PUT", "manifests"), front.count("PUT", "head.json")) == (5, 1 + 4 * 4)
