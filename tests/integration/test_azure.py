"""Against an Azure server on a real socket, with requests signed by hand as the independent reader."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from slackwater.bucket.base import Bucket
from slackwater.bucket.open import open_bucket, probe
from slackwater.bucket.patience import Patience
from slackwater.bucket.selftest import examine
from slackwater.bucket.verdict import Mode, Outcome, Probe, Verdict, judge
from slackwater.cli.publish import publish_folder
from slackwater.clock import SystemClock
from slackwater.errors import AuthError, NotFoundError
from slackwater.ids import RunId, Version
from slackwater.publish.restore import restore
from slackwater.testing.faulty_front import FaultyFront, Rule
from slackwater.testing.http_faults import (
    limit_writes,
    lose_answer,
    refuse,
    shift_clock,
)
from slackwater.testing.tiny_model import write_tiny_model
from store_servers import read_azure_blob

pytestmark = pytest.mark.system

HASTY = Patience(deadline_s=20, attempts=12, first_wait_s=0.002, longest_wait_s=0.02, renewal_s=0.002)


@pytest.fixture
def front(azure_container_name: str, azure_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyFront]:
    assert azure_container_name
    server, _, account = azure_endpoint.rpartition("/")
    with FaultyFront(server) as front:
        monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", f"{front.url}/{account}")
        yield front


@pytest.fixture
def bucket(front: FaultyFront, azure_container_name: str) -> Bucket:
    assert front.count() == 0
    return open_bucket(f"az://{azure_container_name}/runs", patience=HASTY)


def judged(bucket: Bucket) -> tuple[Verdict, dict[Probe, Outcome]]:
    verdict = judge(examine(bucket, SystemClock()).findings)
    return verdict, {ruling.finding.probe: ruling.finding.outcome for ruling in verdict.rulings}


def test_a_signed_request_reads_what_we_write_below_the_prefix(
    azure_endpoint: str, azure_container_name: str, bucket: Bucket
) -> None:
    body = bytes(range(256)) * (80 * 1024)
    bucket.put("demo/blobs/b", memoryview(body))
    assert bucket.put_if_absent("demo/manifests/00000000.json", b"{}") is True
    assert read_azure_blob(azure_endpoint, azure_container_name, "runs/demo/blobs/b") == body
    assert read_azure_blob(azure_endpoint, azure_container_name, "runs/demo/manifests/00000000.json") == b"{}"


def test_a_missing_bucket_is_told(front: FaultyFront) -> None:
    assert front.count() == 0
    with pytest.raises(NotFoundError):
        probe(open_bucket("az://no-such-bucket-here/runs", patience=HASTY))


def test_a_good_store_carries_everything_and_nothing_is_left(bucket: Bucket) -> None:
    verdict, found = judged(bucket)
    assert set(found.values()) == {Outcome.OK}
    assert verdict.carries(Mode.PUBLISH)
    assert list(bucket.list("")) == []


@pytest.mark.parametrize(
    ("rule", "wrong", "modes"),
    [
        (Rule(refuse(403, "AuthorizationFailure"), "PUT", times=None), Probe.CREATE, {Mode.READ}),
        (Rule(refuse(403, "AuthorizationFailure"), "POST", "comp=batch", times=None), Probe.DELETE, set(Mode)),
        (Rule(shift_clock(-1200), times=None), Probe.CLOCK, set(Mode)),
    ],
)
def test_the_self_test_refuses_what_the_store_can_not_carry(
    front: FaultyFront, bucket: Bucket, rule: Rule, wrong: Probe, modes: set[Mode]
) -> None:
    front.add(rule)
    verdict, found = judged(bucket)
    assert found[wrong] not in {Outcome.OK, Outcome.UNTRIED}
    assert {mode for mode in Mode if verdict.carries(mode)} == modes


def test_versions_are_published_and_read(front: FaultyFront, azure_container_name: str, tmp_path: Path) -> None:
    url, run = f"az://{azure_container_name}/runs", RunId("demo")
    for version in range(2):
        folder = write_tiny_model(tmp_path / str(version), seed=version)
        published = publish_folder(folder, url, run, step=version)
        assert restore(open_bucket(url), run, Version(version)).table.digest == published.state
    assert front.count("DELETE") + front.count("POST") == 0


def test_f05_a_creation_whose_answer_was_lost_is_found_by_reading_it_back(front: FaultyFront, bucket: Bucket) -> None:
    front.add(Rule(lose_answer(), "PUT"))
    assert bucket.put_if_absent("m/1", b"ours") is False
    assert bucket.get("m/1", max_bytes=10) == b"ours"


def test_f25_a_conflict_that_means_it_exists_is_told_from_one_that_does_not(front: FaultyFront, bucket: Bucket) -> None:
    front.add(Rule(refuse(409, "BlobAlreadyExists"), "PUT", times=2))
    assert bucket.put_if_absent("m/1", b"ours") is True
    assert bucket.put_if_absent("m/1", b"theirs") is False
    assert bucket.get("m/1", max_bytes=10) == b"ours"


def test_f26_a_revoked_token_is_an_auth_error(front: FaultyFront, bucket: Bucket) -> None:
    front.add(Rule(refuse(403, "AuthenticationFailed"), times=None))
    with pytest.raises(AuthError):
        bucket.put("k", b"x")


def test_a6_01_a_hot_name_is_written_in_the_end(front: FaultyFront, bucket: Bucket) -> None:
    front.add(Rule(limit_writes(3), times=None))
    for version in range(5):
        assert bucket.put_if_absent(f"manifests/{version}", b"x") is True
        bucket.put("head.json", b"%d" % version)
    assert bucket.get("head.json", max_bytes=1) == b"4"
