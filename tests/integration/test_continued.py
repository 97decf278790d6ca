"""A5-10 as processes: a replica is killed in mid-answer, and the official client sees nothing of it."""

from collections.abc import Callable, Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from openai import OpenAI
from openai.types import CompletionChoice
from processes import INFERENCE, Process, await_version, call, ending_all, free_port, run, until

from slackwater.testing.tiny_model import write_tiny_model

pytestmark = pytest.mark.timeout(300)

RUN = "run"
REPLICAS = ("replica-0", "replica-1")
AT_LEAST = 20
"""Tokens of each answer before the kill."""


class Fleet:
    """Two replicas of a float32 model behind a gateway: prefill and decoding differ in its last bits at most."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._model = write_tiny_model(root / "model", dtype="float32")
        self._where = ("--bucket", str(root / "bucket"), "--run", RUN)
        self.urls = {name: f"http://127.0.0.1:{free_port()}" for name in REPLICAS}
        self.replicas: dict[str, Process] = {}
        self.killed: set[str] = set()
        done = run(root / "logs", "publish", str(self._model), *self._where)
        assert (done.status, done.stderr) == (0, "")

    def start(self, name: str) -> None:
        port, cache = self.urls[name].rpartition(":")[2], str(self._root / "cache" / name)
        more = ("--name", name, "--port", port, "--cache", cache, "--supervised")
        self.replicas[name] = Process(self._root / "logs", "replica", *self._where, *more)

    def kill(self, name: str) -> None:
        self.killed.add(name)
        self.replicas[name].kill()

    def gateway(self) -> Process:
        named = [word for name, url in self.urls.items() for word in ("--replica", f"{name}={url}")]
        more = ("--port", "0", "--tokenizer", str(self._model), "--supervised")
        return Process(self._root / "logs", "gateway", *named, *self._where, *more)


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Generator[tuple[Fleet, str]]:
    fleet = Fleet(tmp_path_factory.mktemp("continued"))
    for name in REPLICAS:
        fleet.start(name)
    gateway = fleet.gateway()
    with ending_all([gateway]):
        try:
            yield fleet, gateway.url
        finally:
            with ending_all(list(fleet.replicas.values())):
                pass


@pytest.fixture
def fleet(started: tuple[Fleet, str]) -> Fleet:
    """All replicas serve, whoever was killed before, and the gateway takes them for good."""
    fleet, url = started
    for name in REPLICAS:
        if name in fleet.killed:
            fleet.start(name)
        await_version(fleet.urls[name], 0)
    fleet.killed.clear()
    serves = {"health": "good", "status": "serving"}
    until(lambda: all(serves.items() <= row.items() for row in rows(url)), "the gateway sees both replicas")
    return fleet


def rows(url: str) -> list[Any]:
    return call(f"{url}/v1/replicas", key=INFERENCE).json["replicas"]


@pytest.fixture
def client(started: tuple[Fleet, str]) -> Generator[OpenAI]:
    with OpenAI(base_url=f"{started[1]}/v1", api_key=INFERENCE, max_retries=0) as opened:
        yield opened


@dataclass
class Told:
    """One choice as its pieces came."""

    ids: list[int] = field(default_factory=list[int])
    text: str = ""
    scored: int = 0
    """Tokens with a log-probability."""
    finish: str | None = None
    data: dict[str, Any] = field(default_factory=dict[str, Any])

    def take(self, choice: CompletionChoice) -> None:
        assert self.finish is None
        extra = choice.model_extra or {}
        self.ids += extra["token_ids"]
        self.text += choice.text
        self.scored += len((choice.logprobs and choice.logprobs.token_logprobs) or ())
        self.finish = choice.finish_reason
        self.data = extra.get("engine_data", {})

    @property
    def by(self) -> list[str]:
        return [name for name, _, _, _ in self.data["replicas"]]

    def check(self) -> None:
        """Everything covers exactly the tokens, whoever sampled them."""
        size, shares = len(self.ids), self.data["replicas"]
        assert self.scored == size > AT_LEAST
        assert self.data["token_ids"]["shape"] == self.data["logprobs"]["values"]["shape"] == [size]
        assert [start for _, _, start, _ in shares] == [0, *(end for _, _, _, end in shares[:-1])]
        assert shares[-1][3] == size
        assert self.data["policy"] == [[0, 0, size]]
        assert [span[0] for span in self.data["kv"]] == [0]
        assert [self.data["replica"], self.data["boot_id"]] == shares[0][:2]
        assert len({boot for _, boot, _, _ in shares}) == len(shares)


def asked(seed: int, n: int, more: Mapping[str, Any]) -> dict[str, Any]:
    evidence = {"engine_data": True, "return_token_ids": True}
    return {
        "model": "policy", "prompt": "tide", "seed": seed, "n": n, "temperature": 1.0, "max_tokens": 900,
        "logprobs": 0, "extra_body": evidence, **more,
    }  # fmt: skip


def streamed(
    client: OpenAI,
    seed: int,
    n: int,
    kill: Callable[[], None] | None = None,
    more: Mapping[str, Any] = MappingProxyType({}),
) -> list[Told]:
    """Read ``n`` choices; ``kill`` is called once, when each of them has begun."""
    told = [Told() for _ in range(n)]
    with client.completions.create(**asked(seed, n, more), stream=True) as stream:
        for chunk in stream:
            for choice in chunk.choices:
                told[choice.index].take(choice)
            if kill and all(len(one.ids) >= AT_LEAST for one in told):
                kill()
                kill = None
    return told


@pytest.mark.parametrize("n", [1, 4])
def test_a5_10_a_stream_goes_on_over_a_kill(fleet: Fleet, client: OpenAI, started: tuple[Fleet, str], n: int) -> None:
    alone = streamed(client, 3, n)

    def kill() -> None:
        busiest = max(rows(started[1]), key=lambda row: row["in_flight"])
        assert busiest["in_flight"] == (n + 1) // 2
        fleet.kill(busiest["replica"])

    told = streamed(client, 3, n, kill)
    (victim,) = fleet.killed
    (survivor,) = set(REPLICAS) - {victim}
    for one in (*told, *alone):
        one.check()
    assert [(one.ids, one.text, one.finish) for one in told] == [(one.ids, one.text, one.finish) for one in alone]
    assert sorted(one.by for one in told) == sorted([[victim, survivor]] * ((n + 1) // 2) + [[survivor]] * (n // 2))


def test_a5_10_penalties_go_on_from_the_tokens_so_far(fleet: Fleet, client: OpenAI) -> None:
    """They are of the answer's tokens, whoever sampled these."""
    penalties = {"frequency_penalty": 0.5, "presence_penalty": 0.3}
    (alone,) = streamed(client, 7, 1, more=penalties)
    (free,) = streamed(client, 7, 1)
    (told,) = streamed(client, 7, 1, lambda: fleet.kill(busiest_of(client)), penalties)
    assert told.ids == alone.ids != free.ids
    assert len(told.by) == 2


def busiest_of(client: OpenAI) -> str:
    """The replica that works on something."""
    url = str(client.base_url).removesuffix("/v1/")
    return max(rows(url), key=lambda row: row["in_flight"])["replica"]


def test_a5_10_a_whole_answer_goes_on_over_a_kill(fleet: Fleet, client: OpenAI, started: tuple[Fleet, str]) -> None:
    (alone,) = streamed(client, 5, 1)
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(lambda: client.completions.create(**asked(5, 1, {})))
        victim = until(lambda: [row["replica"] for row in rows(started[1]) if row["in_flight"]], "a replica is busy")[0]
        fleet.kill(victim)
        reply = asking.result()
    told = Told()
    told.take(reply.choices[0])
    told.check()
    assert (told.ids, told.text, told.finish) == (alone.ids, alone.text, alone.finish)
    assert told.by[-1] != victim


def test_a5_10_a_grammar_goes_on_from_the_tokens_so_far(fleet: Fleet, client: OpenAI) -> None:
    """Where an answer stands in it follows from the answer's tokens."""
    evidence = {"engine_data": True, "return_token_ids": True}
    words = {"extra_body": {**evidence, "structured_outputs": {"regex": "((ebb|flood|slack) ){100,}"}}}
    (alone,) = streamed(client, 7, 1, more=words)
    (told,) = streamed(client, 7, 1, lambda: fleet.kill(busiest_of(client)), words)
    assert (told.ids, told.text, told.finish) == (alone.ids, alone.text, alone.finish)
    assert set(told.text.split()[:100]) <= {"ebb", "flood", "slack"}
    assert len(told.by) == 2
