"""A lineage in a directory, the trainer that publishes it, and replicas and gateways as processes that follow it."""

import threading
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from processes import INFERENCE, Reply, call, health, until
from publish_rig import stepped
from replica_nursery import Child, Moment, Nursery
from safetensors.torch import load_file

from slackwater.bucket.local import LocalBucket
from slackwater.checkpoint.manifest import Manifest
from slackwater.checkpoint.rules import decode_manifest
from slackwater.publish.publisher import Publisher
from slackwater.testing.tiny_model import write_tiny_model
from slackwater.weights.state_dict import StateDictSource

RUN: Final = "run"
MODEL: Final = "policy"


class Lineage:
    """A run in a directory, and the trainer that publishes it."""

    def __init__(self, root: Path) -> None:
        self.bucket = root / "bucket"
        self.model = write_tiny_model(root / "model")
        self.first = load_file(self.model / "model.safetensors")
        self.head = -1
        self._tensors = self.first
        self._publisher = Publisher(LocalBucket(self.bucket, create=True), RUN, threads=1, anchor_share=1e6)
        self.publish(self.first)

    def publish(self, tensors: dict[str, Any] | None = None) -> None:
        """Publish a model, or the next step of the trainer."""
        self._tensors = stepped(self._tensors, self.head, 1e-4) if tensors is None else tensors
        done = self._publisher.publish(StateDictSource(self._tensors), step=self.head + 1, folder_files=self.model)
        self.head = done.version

    def poison(self) -> None:
        """Publish weights that are no numbers."""
        spoilt = self.first["model.norm.weight"] * float("nan")
        self.publish({**self.first, "model.norm.weight": spoilt})

    def manifest(self, version: int) -> Manifest:
        return decode_manifest((self.bucket / RUN / "manifests" / f"{version:08d}.json").read_bytes())

    def keys(self, version: int) -> list[str]:
        return [ref.key for ref in self.manifest(version).objects]

    def close(self) -> None:
        self._publisher.close()


@dataclass
class Site:
    """A lineage, a nursery, and replicas that each keep their cache when they start again."""

    root: Path
    nursery: Nursery
    lineage: Lineage

    def cache(self, name: str) -> Path:
        return self.root / "cache" / name

    def cached(self, name: str) -> set[str]:
        """Names of the verified packs that a replica holds."""
        blobs = self.cache(name) / RUN / "blobs"
        return {path.name for path in blobs.iterdir() if not path.name.startswith(".")}

    def start(self, name: str = "r0", *, port: int = 0, moment: Moment | None = None, version: int = -1) -> Child:
        where = ("--bucket", str(self.lineage.bucket), "--run", RUN, "--cache", str(self.cache(name)))
        more = ("--name", name, "--port", str(port))
        return self.nursery.start("replica", *where, *more, moment=moment, version=version)

    def gateway(self, urls: dict[str, str]) -> Child:
        named = [word for name, url in urls.items() for word in ("--replica", f"{name}={url}")]
        where = ("--bucket", str(self.lineage.bucket), "--run", RUN, "--port", "0")
        return self.nursery.start("gateway", *named, *where, "--tokenizer", str(self.lineage.model))

    def serves_the_head(self, child: Child) -> None:
        """It answers nothing until it serves the head, and then holds exactly the head's bits."""
        seen: set[tuple[str, int | None]] = set()

        def serves() -> bool:
            now, reply = health(child.url), complete(child.url)
            seen.add((now["status"], now["version"]))
            assert reply.status == 503 or versions_of(reply) == [self.lineage.head]
            return reply.status == 200

        until(serves, f"{child.url} answers")
        assert {version for status, version in seen if status == "serving"} <= {self.lineage.head}
        assert health(child.url)["status"] == "serving"
        held = call(f"{child.url}/control/v1/weights").json
        assert held == {"version": self.lineage.head, "state_digest": self.lineage.manifest(self.lineage.head).state}


@contextmanager
def publishing(lineage: Lineage) -> Generator[None]:
    """A trainer that publishes one version after the other."""
    done = threading.Event()

    def go_on() -> None:
        while not done.is_set():
            lineage.publish()

    with ThreadPoolExecutor(1) as pool:
        trainer = pool.submit(go_on)
        try:
            yield
        finally:
            done.set()
        trainer.result()


def complete(url: str, **more: object) -> Reply:
    body = {"model": MODEL, "prompt": "tide", "max_tokens": 4, "seed": 1, "engine_data": True, **more}
    return call(f"{url}/v1/completions", key=INFERENCE, body=body)


def data_of(reply: Reply) -> Any:
    assert reply.status == 200, reply
    return reply.json["choices"][0]["engine_data"]


def versions_of(reply: Reply) -> list[int]:
    return [span[0] for span in data_of(reply)["policy"]]


def status_of(url: str) -> Any:
    return call(f"{url}/control/v1/status").json


def aim(url: str, version: int | Literal["head"]) -> None:
    assert call(f"{url}/control/v1/target", body={"version": version}).status == 200
