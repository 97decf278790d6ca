"""Replays of answers whose KV was kept, computed again or taken over: checked, or left out with a reason."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest
import torch

from slackwater.bucket.local import LocalBucket
from slackwater.checkpoint.tensor import TileWrite, tiles
from slackwater.cli.replay import ReplaySettings, run_replay
from slackwater.config.in_flight import InFlight
from slackwater.engine.torch.batch import Shaping
from slackwater.engine.torch.core import Core
from slackwater.engine.torch.model import load
from slackwater.engine.torch.sequence import Began, Ended, Event, Made
from slackwater.engine.torch.weights import WeightBits
from slackwater.ids import RequestId, RunId, Version
from slackwater.publish.publisher import Publisher
from slackwater.rollout.evidence import kv_spans, spans
from slackwater.rollout.request import CompletionRequest, PolicyConstraint, SamplingSpec
from slackwater.testing.tiny_model import write_tiny_model
from slackwater.trainer.align import LabelCheck
from slackwater.trainer.record import AnswerRecord, encode_record
from slackwater.weights.source import FolderSource

RUN = RunId("demo")
SLOTS, WINDOW, TOKENS = 4, 256, 24
CONTINUE, RECOMPUTE = InFlight.CONTINUE, InFlight.RECOMPUTE


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@dataclass(frozen=True, kw_only=True, slots=True)
class Chain:
    """A published run of three versions, and the folder of each."""

    bucket: Path
    folders: tuple[Path, ...]


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Chain:
    root = tmp_path_factory.mktemp("chain")
    folders = tuple(write_tiny_model(root / f"v{seed}", seed=seed, tokenizer=False) for seed in range(3))
    with Publisher.open(LocalBucket(root / "bucket", create=True), RUN) as publisher:
        for step, folder in enumerate(folders):
            publisher.publish(FolderSource(folder), step=step)
    return Chain(bucket=root / "bucket", folders=folders)


@dataclass(kw_only=True, slots=True, eq=False)
class Served:
    """A core that goes along the chain, and what it answered."""

    chain: Chain
    core: Core = field(init=False)
    weights: WeightBits = field(init=False)
    requests: dict[int, CompletionRequest] = field(default_factory=dict[int, CompletionRequest])
    events: list[Event] = field(default_factory=list[Event])

    def __post_init__(self) -> None:
        model = load(self.chain.folders[0])
        self.weights = WeightBits(model.parameters, model.specs)
        self.core = Core(model, Shaping(slots=SLOTS, invariant=True), window=WINDOW, version=Version(0))

    def ask(self, key: int, prompt: Iterable[int], *, any_kv: bool = False) -> None:
        self.requests[key] = CompletionRequest(
            request_id=RequestId(str(key)),
            prompt_ids=tuple(prompt),
            sampling=SamplingSpec(max_tokens=TOKENS),
            policy=PolicyConstraint(any_kv=any_kv),
        )
        self.core.add(key, self.requests[key], seed=key)

    def go_on(self, steps: int) -> None:
        for _ in range(steps):
            self.events += self.core.step()

    def finish(self) -> None:
        while self.core.busy:
            self.go_on(1)

    def exchange(self, version: int, in_flight: InFlight) -> None:
        other = load(self.chain.folders[version])
        bits = WeightBits(other.parameters, other.specs)
        writes = [
            TileWrite(name=name, tile=tile, positions=None, values=bits.read(name, tile))
            for name, spec in other.specs.items()
            for tile in tiles(spec)
        ]
        self.weights.commit(self.weights.stage(writes))
        self.events += self.core.relabel(Version(version), in_flight=in_flight)

    def record(self, key: int) -> AnswerRecord:
        steps = [event.step for event in self.events if isinstance(event, Made) and event.key == key]
        (began,) = (event for event in self.events if isinstance(event, Began) and event.key == key)
        cut = any(isinstance(event, Ended) and event.key == key for event in self.events)
        prompt = self.requests[key].prompt_ids
        return AnswerRecord(
            prompt_ids=list(prompt),
            token_ids=[step.token_id for step in steps],
            logprobs=[step.logprob for step in steps],
            policy=[(span.version, span.start, span.end) for span in spans(step.version for step in steps)],
            replica="a",
            finish="swapped" if cut else "length",
            reward=0.0,
            text="",
            kv=[(span.version, span.start, span.end) for span in kv_spans(len(prompt), steps)],
            prompt_version=began.prompt_version,
        )


@pytest.fixture
def served(chain: Chain) -> Served:
    return Served(chain=chain)


def verdict(
    chain: Chain, records: Iterable[AnswerRecord], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> LabelCheck:
    path = tmp_path / "rollouts.jsonl"
    path.write_text("".join(encode_record(record) + "\n" for record in records))
    run_replay(
        ReplaySettings(
            record=path,
            bucket=str(chain.bucket),
            run=RUN,
            replica=None,
            slots=SLOTS,
            threads=1,
            window=WINDOW,
            cache=tmp_path / "cache",
        )
    )
    return msgspec.json.decode(capsys.readouterr().out, type=LabelCheck)


def prompt_of(key: int) -> range:
    return range(key + 1, key + 71)


def answers_over(served: Served, *modes: InFlight) -> list[AnswerRecord]:
    """Two answers that cross an exchange of each mode."""
    for key in range(2):
        served.ask(key, prompt_of(key))
    served.go_on(7)
    for version, in_flight in enumerate(modes, 1):
        served.exchange(version, in_flight)
        served.go_on(5)
    served.finish()
    return [served.record(key) for key in range(2)]


@pytest.mark.parametrize("modes", [(CONTINUE,), (CONTINUE, CONTINUE), (RECOMPUTE,)], ids=str)
def test_kept_and_recomputed_kv_are_told_apart_and_every_label_holds(
    chain: Chain, served: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str], modes: tuple[InFlight, ...]
) -> None:
    records = answers_over(served, *modes)
    assert all(len(record.policy) == len(modes) + 1 for record in records)
    found = verdict(chain, records, tmp_path, capsys)
    assert (found.answers, found.tokens, found.unchecked) == (2, 2 * TOKENS, 0)
    assert (found.mislabelled, found.largest_difference) == (0, 0.0)
    assert found.shifted_caught == found.shifted


@pytest.mark.parametrize(("mode", "claimed"), [(RECOMPUTE, CONTINUE), (CONTINUE, RECOMPUTE)], ids=str)
def test_a_false_claim_of_how_the_kv_was_built_is_caught(
    chain: Chain, served: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str], mode: InFlight, claimed: InFlight
) -> None:
    records = answers_over(served, mode)
    rows = len(prompt_of(0)) + TOKENS - 1
    false: list[AnswerRecord] = []
    for record in records:
        kept = rows - (TOKENS - record.policy[0][2])
        kv = [(1, 0, rows)] if claimed is RECOMPUTE else [(0, 0, kept), (1, kept, rows)]
        false.append(msgspec.structs.replace(record, kv=kv))
    found = verdict(chain, false, tmp_path, capsys)
    assert found.unchecked == 0
    assert found.mislabelled == sum(
        end - start for record in records for version, start, end in record.policy if version
    )


def test_both_kinds_of_one_replica_are_checked_together(
    chain: Chain, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = [*answers_over(Served(chain=chain), RECOMPUTE), *answers_over(Served(chain=chain), CONTINUE, CONTINUE)]
    found = verdict(chain, records, tmp_path, capsys)
    assert (found.answers, found.tokens, found.unchecked, found.mislabelled) == (4, 4 * TOKENS, 0, 0)


def test_what_the_last_spans_cannot_explain_is_left_out_with_its_reason(
    chain: Chain, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    twice = answers_over(Served(chain=chain), RECOMPUTE, RECOMPUTE)
    then_kept = answers_over(Served(chain=chain), RECOMPUTE, CONTINUE)
    found = verdict(chain, [*twice, *then_kept], tmp_path, capsys)
    assert (found.answers, found.tokens, found.mislabelled) == (0, 0, 0)
    assert (found.unchecked, found.unchecked_because) == (4, {"kv_of_other_versions": 4})


@pytest.mark.parametrize("recomputed", [False, True])
def test_a_prompt_on_kv_of_another_version_is_left_out_even_if_it_was_computed_again_later(
    chain: Chain, served: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str], *, recomputed: bool
) -> None:
    served.ask(0, prompt_of(0))
    served.finish()
    served.exchange(1, CONTINUE)
    served.ask(1, prompt_of(0), any_kv=True)
    served.go_on(5)
    if recomputed:
        served.exchange(2, RECOMPUTE)
    served.finish()
    records = [served.record(key) for key in range(2)]
    assert records[1].prompt_version is None
    found = verdict(chain, records, tmp_path, capsys)
    assert (found.answers, found.tokens, found.mislabelled) == (1, TOKENS, 0)
    assert (found.unchecked, found.unchecked_because) == (1, {"kv_of_other_versions": 1})


def test_a5_10_an_answer_that_another_replica_went_on_with_is_left_out(
    chain: Chain, served: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stayed, moved = answers_over(served, CONTINUE)
    stayed = msgspec.structs.replace(stayed, replicas=[("a", "x", 0, TOKENS)])
    moved = msgspec.structs.replace(moved, replicas=[("a", "x", 0, 5), ("b", "y", 5, TOKENS)])
    found = verdict(chain, [stayed, moved], tmp_path, capsys)
    assert (found.answers, found.tokens, found.mislabelled) == (1, TOKENS, 0)
    assert (found.unchecked, found.unchecked_because) == (1, {"moved": 1})


def test_an_answer_that_an_exchange_cut_is_checked_as_far_as_it_goes(
    chain: Chain, served: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = answers_over(served, InFlight.ABORT)
    assert {record.finish for record in records} == {"swapped"}
    found = verdict(chain, records, tmp_path, capsys)
    assert (found.answers, found.tokens) == (2, sum(len(record.token_ids) for record in records))
    assert (found.mislabelled, found.unchecked) == (0, 0)


def test_records_of_before_kv_was_told_are_checked_as_kept(
    chain: Chain, served: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = answers_over(served, CONTINUE)
    path = tmp_path / "older.jsonl"
    for record in records:
        plain = json.loads(encode_record(record))
        del plain["kv"], plain["prompt_version"]
        with path.open("a") as file:
            file.write(json.dumps(plain) + "\n")
    older = [msgspec.json.decode(line, type=AnswerRecord) for line in path.read_bytes().splitlines()]
    assert [record.kv for record in older] == [[], []]
    found = verdict(chain, older, tmp_path, capsys)
    assert (found.answers, found.mislabelled, found.unchecked) == (2, 0, 0)
