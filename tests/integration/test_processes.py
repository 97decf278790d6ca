"""The whole product as processes: the publisher's command, two replicas and a gateway, over loopback."""

import json
import shutil
import threading
from collections.abc import Generator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI
from processes import (
    CONTROL,
    INFERENCE,
    Process,
    Reply,
    await_version,
    call,
    ending_all,
    free_port,
    health,
    run,
    until,
)

from slackwater.checkpoint.manifest import Manifest
from slackwater.checkpoint.rules import decode_manifest
from slackwater.testing.tiny_model import write_tiny_model

pytestmark = pytest.mark.timeout(300)

RUN = "run"
MODEL = "policy"
REPLICAS = ("replica-0", "replica-1")


def manifests(bucket: Path) -> list[Path]:
    return sorted((bucket / RUN / "manifests").glob("*.json"))


def manifest(bucket: Path, version: int) -> Manifest:
    return decode_manifest((bucket / RUN / "manifests" / f"{version:08d}.json").read_bytes())


@dataclass
class Fleet:
    """Two replicas behind a gateway, on a directory as the bucket."""

    root: Path
    models: tuple[Path, Path]
    urls: dict[str, str]
    replicas: dict[str, Process] = field(default_factory=dict[str, Process])
    gateway: Process | None = None

    @property
    def bucket(self) -> Path:
        return self.root / "bucket"

    @property
    def url(self) -> str:
        return self.gateway.url if self.gateway else ""

    @property
    def head(self) -> int:
        return len(manifests(self.bucket)) - 1

    def publish(self) -> str:
        """Publish the other one of the two models; what the command says."""
        return self.publish_folder(self.models[(self.head + 1) % 2], self.bucket)

    def publish_folder(self, folder: Path, bucket: Path, *more: str) -> str:
        done = run(self.root / "logs", "publish", str(folder), "--bucket", str(bucket), "--run", RUN, *more)
        assert (done.status, done.stderr) == (0, "")
        return done.stdout

    def start(self, name: str) -> None:
        port = self.urls[name].rpartition(":")[2]
        cache = str(self.root / "cache" / name)
        where = ("--bucket", str(self.bucket), "--run", RUN, "--port", port, "--cache", cache)
        self.replicas[name] = Process(self.root / "logs", "replica", "--name", name, *where, "--supervised")

    def start_gateway(self) -> None:
        named = [word for name, url in self.urls.items() for word in ("--replica", f"{name}={url}")]
        where = ("--bucket", str(self.bucket), "--run", RUN, "--port", "0", "--tokenizer", str(self.models[0]))
        self.gateway = Process(self.root / "logs", "gateway", *named, *where, "--supervised")

    def client(self) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key=INFERENCE, max_retries=0)

    def ask(self, path: str, body: object = None) -> Any:
        """A control call to the gateway that must succeed."""
        reply = call(self.url + path, body=body)
        assert reply.status in (200, 202), reply
        return reply.json

    def status(self, name: str) -> Any:
        return call(f"{self.urls[name]}/control/v1/status").json

    def settle(self, version: int | None = None) -> None:
        for url in self.urls.values():
            await_version(url, self.head if version is None else version)

    def routable(self) -> bool:
        rows = call(f"{self.url}/v1/replicas", key=INFERENCE).json["replicas"]
        return all(row["health"] == "good" and row["status"] == "serving" for row in rows)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Generator[Fleet]:
    root = tmp_path_factory.mktemp("fleet")
    models = (write_tiny_model(root / "even", seed=0), write_tiny_model(root / "odd", seed=1))
    made = Fleet(root, models, {name: f"http://127.0.0.1:{free_port()}" for name in REPLICAS})
    assert "anchor" in made.publish()
    for name in REPLICAS:
        made.start(name)
    made.start_gateway()
    assert made.gateway is not None
    with ending_all([made.gateway]):
        try:
            made.settle()
            until(made.routable, "the gateway sees both replicas")
            yield made
        finally:
            with ending_all(list(made.replicas.values())):
                pass


@dataclass(frozen=True)
class Told:
    """What one answer says of itself."""

    finish: str | None
    replica: str
    policy: list[tuple[int, int, int]]
    tokens: int

    @property
    def versions(self) -> list[int]:
        return [version for version, _, _ in self.policy]

    def check(self) -> None:
        """Spans cover exactly the tokens, in order; versions rise."""
        ends = [end for _, _, end in self.policy]
        assert [start for _, start, _ in self.policy] == [0, *ends[:-1]]
        assert ends[-1] == self.tokens > 0
        assert self.versions == sorted(set(self.versions))


def told(finish: str | None, extra: dict[str, Any] | None) -> Told:
    data = (extra or {})["engine_data"]
    return Told(finish, data["replica"], [tuple(span) for span in data["policy"]], data["token_ids"]["shape"][0])


def whole(client: OpenAI, seed: int, tokens: int = 24) -> Told:
    reply = client.completions.create(
        model=MODEL, prompt="tide", seed=seed, temperature=0.7, max_tokens=tokens, extra_body={"engine_data": True}
    )
    return told(reply.choices[0].finish_reason, reply.choices[0].model_extra)


def streamed(client: OpenAI, seed: int, tokens: int = 24) -> tuple[str, Told]:
    stream = client.completions.create(
        model=MODEL, prompt="tide", seed=seed, temperature=0.7, max_tokens=tokens, stream=True,
        extra_body={"engine_data": True},
    )  # fmt: skip
    choices = [choice for chunk in stream for choice in chunk.choices]
    return "".join(choice.text for choice in choices), told(choices[-1].finish_reason, choices[-1].model_extra)


def test_the_openai_client_is_answered_through_the_gateway_with_evidence(fleet: Fleet) -> None:
    head = fleet.head
    with fleet.client() as client:
        text, stream = streamed(client, seed=5)
        reply = client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "hello"}],
            seed=5,
            max_tokens=8,
            extra_body={"engine_data": True},
        )
    chat = told(reply.choices[0].finish_reason, reply.choices[0].model_extra)
    assert text
    for answer in (stream, chat):
        answer.check()
        assert answer.versions == [head]
        assert answer.replica in REPLICAS


def test_a_streamed_answer_equals_the_whole_one(fleet: Fleet) -> None:
    with fleet.client() as client:
        text, _ = streamed(client, seed=11)
        whole_one = client.completions.create(model=MODEL, prompt="tide", seed=11, temperature=0.7, max_tokens=24)
    assert text == whole_one.choices[0].text


def test_a8_01_each_key_opens_its_own_routes_alone(fleet: Fleet) -> None:
    for path in ("/v1/fleet", "/v1/hot-loads", "/v1/snapshots", "/control/v1/status", "/nothing/here"):
        for url in (fleet.url, *fleet.urls.values()):
            assert call(url + path, key=INFERENCE).status == 403
            assert call(url + path, key="wrong").status == 401
    assert call(f"{fleet.url}/v1/follow", key=INFERENCE, body={}).status == 403
    assert call(f"{fleet.url}/v1/completions", key=CONTROL, body={}).status == 403
    assert {row["replica"] for row in fleet.ask("/v1/fleet")["replicas"]} == set(REPLICAS)


def test_max_lag_counts_from_the_newest_version_of_the_bucket(fleet: Fleet) -> None:
    fleet.settle()
    body = {"prompt": "tide", "max_tokens": 2, "return_token_ids": True, "engine_data": True, "policy": {"max_lag": 0}}
    for url in (fleet.url, *fleet.urls.values()):

        def answered(url: str = url) -> Any:
            reply = call(f"{url}/v1/completions", key=INFERENCE, body=body)
            assert reply.status == 200 or reply.json["error"]["code"] == "policy_unmet"
            return reply.json if reply.status == 200 else None

        told = until(answered, "the newest version is known there")
        assert told["choices"][0]["engine_data"]["policy"] == [[fleet.head, 0, 2]]


def test_answers_in_flight_live_through_a_swap_to_a_published_delta(fleet: Fleet) -> None:
    before, done = fleet.head, threading.Event()
    answers: list[Told] = []

    def keep_asking(worker: int) -> None:
        with fleet.client() as client:
            while not done.is_set():
                answers.append(streamed(client, seed=worker, tokens=600)[1])

    with ThreadPoolExecutor(4) as pool:
        askers = [pool.submit(keep_asking, worker) for worker in range(4)]
        try:
            until(lambda: all(health(url)["in_flight"] for url in fleet.urls.values()), "both replicas are busy")
            assert "delta" in fleet.publish()
            fleet.settle()
        finally:
            done.set()
    for asker in askers:
        asker.result()
    for answer in answers:
        answer.check()
        assert answer.finish in {"length", "stop"}
        assert set(answer.versions) <= {before, before + 1}
    assert [before, before + 1] in [answer.versions for answer in answers]


def test_every_replica_holds_exactly_what_was_published(fleet: Fleet) -> None:
    published = manifest(fleet.bucket, fleet.head)
    for url in fleet.urls.values():
        held = call(f"{url}/control/v1/weights").json
        assert held == {"version": published.version, "state_digest": published.state}


def hot_load(fleet: Fleet, snapshot: str) -> Any:
    begun = fleet.ask("/v1/hot-loads", {"snapshot": snapshot})

    def ended() -> Any:
        seen = fleet.ask(f"/v1/hot-loads/{begun['id']}")
        return None if seen["state"] in {"queued", "running"} else seen

    return until(ended, f"the hot-load of {snapshot} ends")


def test_a_hot_load_takes_the_fleet_back_and_following_brings_it_to_the_head(fleet: Fleet) -> None:
    fleet.publish()
    fleet.settle()
    operation = hot_load(fleet, f"{RUN}/0")
    assert operation["state"] == "succeeded"
    assert {(part["replica"], part["stage"], part["version"]) for part in operation["replicas"]} == {
        (name, "done", 0) for name in REPLICAS
    }
    assert {row["status"]["mode"] for row in fleet.ask("/v1/fleet")["replicas"]} == {"manual"}
    with fleet.client() as client:
        assert whole(client, seed=1).versions == [0]
    assert fleet.ask("/v1/follow", {})["mode"] == "follow"
    fleet.settle()
    assert {row["status"]["mode"] for row in fleet.ask("/v1/fleet")["replicas"]} == {"follow"}
    with fleet.client() as client:
        assert whole(client, seed=1).versions == [fleet.head]


@pytest.mark.parametrize(
    "snapshot",
    [
        "../x",
        "/etc",
        "s3://other/..",
        "http://169.254.169.254/",
        "file:///",
        "x" * 301,
        "run/\0",
        "run/\uff11",
        "run/-1",
    ],
)
def test_a8_04_a_name_that_is_no_snapshot_is_refused(fleet: Fleet, snapshot: str) -> None:
    reply = call(f"{fleet.url}/v1/hot-loads", body={"snapshot": snapshot})
    assert (reply.status, reply.json["error"]["code"]) == (400, "invalid_input")


@pytest.mark.parametrize("snapshot", [f"{RUN}/999", "another/0"])
def test_an_unknown_snapshot_is_not_found_and_moves_nobody(fleet: Fleet, snapshot: str) -> None:
    reply = call(f"{fleet.url}/v1/hot-loads", body={"snapshot": snapshot})
    assert (reply.status, reply.json["error"]["code"]) == (404, "not_found")
    assert {row["status"]["mode"] for row in fleet.ask("/v1/fleet")["replicas"]} == {"follow"}


def test_a7_03_requests_outlive_a_killed_replica(fleet: Fleet) -> None:
    victim, survivor = REPLICAS
    with fleet.client() as client, ThreadPoolExecutor(8) as pool:
        asked: list[Future[Told]] = [pool.submit(whole, client, seed, 300) for seed in range(24)]
        until(lambda: health(fleet.urls[victim])["in_flight"], "the victim is busy")
        fleet.replicas[victim].kill()
        answers = [future.result() for future in asked]
    for answer in answers:
        answer.check()
        assert answer.finish in {"length", "stop"}
    assert survivor in {answer.replica for answer in answers}
    with fleet.client() as client:
        assert {whole(client, seed).replica for seed in range(6)} == {survivor}


def test_a7_01_a_restarted_replica_gets_requests_at_the_head_alone(fleet: Fleet) -> None:
    name = REPLICAS[0]
    if health(fleet.urls[name])["status"] != "away":
        fleet.replicas[name].kill()
    fleet.publish()
    head = fleet.head
    await_version(fleet.urls[REPLICAS[1]], head)
    seen: set[tuple[str, int | None]] = set()
    answers: list[Told] = []

    def is_back() -> bool:
        now = health(fleet.urls[name])
        seen.add((now["status"], now["version"]))
        answers.append(whole(client, seed=len(answers), tokens=4))
        return name in {answer.replica for answer in answers}

    with fleet.client() as client:
        fleet.start(name)
        until(is_back, "the restarted replica answers")
    assert {version for status, version in seen if status == "serving"} <= {head}
    assert ("starting", None) in seen
    assert {version for answer in answers for version in answer.versions} == {head}
    assert fleet.status(name)["state_digest"] == manifest(fleet.bucket, head).state


def copy_version(source: Path, target: Path, version: int) -> None:
    """Copy a version's objects, and then, last, its manifest."""
    for ref in manifest(source, version).objects:
        (target / ref.key).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source / ref.key, target / ref.key)
    copied = manifests(source)[version]
    shutil.copy(copied, target / RUN / "manifests" / f".{copied.name}")
    (target / RUN / "manifests" / f".{copied.name}").replace(target / RUN / "manifests" / copied.name)


def test_a_corrupt_delta_is_named_the_old_version_serves_and_an_anchor_heals(fleet: Fleet, tmp_path: Path) -> None:
    staging, good = tmp_path / "bucket", fleet.head
    shutil.copytree(fleet.bucket, staging)
    fresh = write_tiny_model(tmp_path / "fresh", seed=2)  # packs that no replica has cached
    fleet.publish_folder(fresh, staging)
    fleet.publish_folder(fresh, staging, "--anchor")
    broken = manifest(staging, good + 1).objects[0].key
    bytes_of = bytearray((staging / broken).read_bytes())
    bytes_of[len(bytes_of) // 2] ^= 0x10
    (staging / broken).write_bytes(bytes_of)

    copy_version(staging, fleet.bucket, good + 1)
    for name in REPLICAS:
        fault = until(lambda name=name: fleet.status(name)["last_error"], f"{name} finds the fault")
        assert fault["kind"] == "corrupt"
        assert broken in fault["message"]
        assert health(fleet.urls[name])["version"] == good
    with fleet.client() as client:
        assert whole(client, seed=2).versions == [good]

    copy_version(staging, fleet.bucket, good + 2)
    fleet.settle(good + 2)
    for name in REPLICAS:
        status = fleet.status(name)
        assert status["last_error"] is None
        assert status["state_digest"] == manifest(staging, good + 2).state


def complete(url: str, prompt: str) -> Reply:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 8, "temperature": 0.7, "engine_data": True}
    return call(f"{url}/v1/completions", key=INFERENCE, body=body)


def test_a_run_on_s3_is_published_followed_and_served(s3_bucket_name: str, tmp_path: Path) -> None:
    bucket = f"s3://{s3_bucket_name}/team/runs"
    where = ("--bucket", bucket, "--run", RUN)
    models = [write_tiny_model(tmp_path / str(seed), seed=seed) for seed in range(2)]
    cache = ("--cache", str(tmp_path / "cache"))
    replica = Process(tmp_path / "logs", "replica", *where, *cache, "--port", "0", "--supervised")
    with ending_all([replica]):
        for version, model in enumerate(models):
            done = run(tmp_path / "logs", "publish", str(model), *where)
            assert (done.status, done.stderr) == (0, "")
            await_version(replica.url, version)
            reply = complete(replica.url, "tide")
            assert reply.status == 200, json.dumps(reply.json)
            assert {span[0] for span in reply.json["choices"][0]["engine_data"]["policy"]} == {version}
