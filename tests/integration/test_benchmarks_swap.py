"""The benchmark of swapping on a tiny model: results, not speed."""

import asyncio
import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import claims
import swap
import swap_peers
import swap_still
import swap_tables
import vllm_reload
from pairs import Pair, copy
from slackwater.checkpoint.outline import Outline
from slackwater.errors import InternalError
from slackwater.ids import Version
from slackwater.testing.tiny_model import write_tiny_model
from slackwater.weights.source import FolderSource
from swap_load import StillClock, Streams, Token
from swap_peers import Live, Peer
from swap_still import Still

SCALE = swap.Scale(samples=3, beside=2, dense_samples=2, swaps=2)
STILL = {"pause_p50_ms", "pause_p99_ms", "undo_p50_ms", "undo_p99_ms", "dense_copy_ms", "nan_patch_ms",
         "scatter_limit_ms", "staged_mb", "strict_pause_p50_ms"}  # fmt: skip
SERVED = {"to_first_token_ms", "served_pause_ms", "step_ms", "token_gap_ms", "longest_gap_ms", "quiet_over_step_ms"}
NAMES = {
    *(f"{name}_{what}" for name in ("p019", "p142", "p100") for what in STILL),
    *(f"{name}_{what}" for name in ("p019", "p142") for what in SERVED),
    *claims.SWAP_AT_MOST, *claims.SWAP_AT_LEAST, "token_gap_over_step_ms",
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), tokenizer=False)


@pytest.fixture(scope="module")
def pair(folder: Path) -> Pair:
    """The tiny model, and one bit of every fiftieth weight changed."""
    source = FolderSource(folder)
    old = copy({name: source.bits(name) for name in source.specs()})
    new = copy(old)
    for bits in new.values():
        bits[::50] ^= 1
    return Pair(outline=Outline(source.specs().values()), old=old, new=new)


def live_on(pair: Pair) -> Live:
    shapes = {spec.name: spec.shape for spec in pair.outline.specs}
    tensors = {
        name: torch.from_numpy(bits.copy().view(np.int16)).view(torch.bfloat16).view(shapes[name])
        for name, bits in pair.old.items()
    }
    return Live(tensors=tensors)


def saved(pair: Pair, work: Path) -> Path:
    swap.save(work / "new.safetensors", pair, pair.new)
    return work / "new.safetensors"


@pytest.mark.parametrize("every", [False, True])
def test_each_peer_makes_the_new_bits(every: bool, pair: Pair, tmp_path: Path) -> None:
    step = swap.every_bit(pair) if every else pair
    live = live_on(step)
    _, patches = swap_peers.nan_patches(live, step)
    peers = [swap_peers.limit(live, step), *swap_peers.dense(live, saved(step, tmp_path)), *patches]
    assert {peer.name for peer in peers} == {swap_peers.LIMIT, *swap_peers.DENSE, *swap_peers.NAN}
    for peer in peers:
        swap_peers.check(peer, live, step)
        assert live.holds(step.old)


def test_a_peer_that_makes_other_bits_is_found_out(pair: Pair) -> None:
    with pytest.raises(InternalError, match="idle doesn't make the new bits"):
        swap_peers.check(Peer(name="idle", write=lambda: None), live_on(pair), pair)


@pytest.mark.parametrize("size", [1, 31, 32, 33, 1000])
@pytest.mark.parametrize("skip", [0, 1, 5])
def test_a_copy_past_the_caches_copies_any_size_from_any_place(size: int, skip: int) -> None:
    source = np.arange(size + skip, dtype=np.uint16)[skip:]
    target = np.full(size + skip + 64, 0xFFFF, dtype=np.uint16)
    swap_peers.stream(swap_peers.stream_table([(target[skip : skip + size], source)]))
    assert np.array_equal(target[skip : skip + size], source)
    assert (target[:skip] == 0xFFFF).all()
    assert (target[skip + size :] == 0xFFFF).all()


def test_the_writes_are_those_that_make_the_new_state(pair: Pair) -> None:
    for step in (pair, swap.every_bit(pair)):
        made = {name: bits.copy() for name, bits in step.old.items()}
        for write in swap_still.writes(step):
            write.put(made[write.name])
        assert all(np.array_equal(bits, step.new[name]) for name, bits in made.items())


def test_work_before_a_pause_is_done_once_and_outside_of_its_time() -> None:
    clock, done = StillClock(), list[int]()
    clock.before_pause(lambda: done.append(1))
    assert clock.monotonic() <= clock.monotonic()
    assert done == [1]


def test_waits_are_taken_where_they_should() -> None:
    async def ask(_: object) -> object:
        raise NotImplementedError

    streams = Streams(ask=ask, in_place=lambda: Version(2), max_tokens=1)  # type: ignore[arg-type]
    streams.tokens[0] = [
        Token(at=at, version=Version(version)) for at, version in ((0, 1), (1, 1), (2, 1), (5, 2), (6, 2))
    ]
    streams.tokens[1] = [Token(at=at, version=Version(version)) for at, version in ((0.5, 1), (1.5, 1), (3.5, 2))]
    assert streams.gap(Version(2)) == 3
    assert streams.step(0, 2) == 1
    assert streams.last(0, 4) == 2
    assert streams.last(0, 3) == 1
    assert streams.longest(0, 1) == 1
    assert streams.longest(4, 4.5) == 3
    assert asyncio.run(streams.first_of(Version(2))) == 3.5


def test_the_tail_leaves_out_one_in_a_hundred() -> None:
    assert swap.tail([3.0, 1.0, 2.0]) == 3.0
    assert swap.tail([float(number) for number in range(200)]) == 197.0


FAKE_VLLM = """
__version__ = "0"
class SamplingParams:
    def __init__(self, **_): pass
class LLM:
    answers = ANSWERS
    def __init__(self, **_): print("a line of a log", flush=True)
    def reset_prefix_cache(self): pass
    def collective_rpc(self, method): assert method == "reload_weights"
    def generate(self, *_, **__):
        class Told: token_ids = [self.answers.pop(0)]
        class Request: outputs = [Told]
        return [Request]
"""


def reloaded(tmp_path: Path, text: str) -> tuple[tuple[float, ...], list[object]]:
    """What is measured with an interpreter that finds a module of this text under vLLM's name."""
    shown: list[object] = []
    (tmp_path / "vllm.py").write_text(text)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return vllm_reload.measured(tmp_path, str(python), shown.append), shown


def test_reloads_are_the_seconds_of_the_last_line(tmp_path: Path) -> None:
    seconds, shown = reloaded(tmp_path, FAKE_VLLM.replace("ANSWERS", "[1, 1]"))
    assert len(seconds) == 7
    told = json.loads(str(shown[0]).removeprefix("vLLM's reload: "))
    assert (told["vllm"], told["seconds"]) == ("0", list(seconds))
    assert told["least_s"] <= told["median_s"] <= told["most_s"]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (FAKE_VLLM.replace("ANSWERS", "[1, 2]"), "another answer"),
        ("raise ValueError('no such thing')", "no such thing"),
    ],
)
def test_reloads_that_fail_are_told_and_no_failure_of_the_benchmark(tmp_path: Path, text: str, why: str) -> None:
    seconds, shown = reloaded(tmp_path, text)
    assert seconds == ()
    assert len(shown) == 1
    assert why in str(shown[0])


def test_without_vllm_one_line_says_so(tmp_path: Path) -> None:
    shown: list[object] = []
    assert vllm_reload.measured(tmp_path, vllm_reload.interpreter({}, tmp_path / "none"), shown.append) == ()
    assert vllm_reload.measured(tmp_path, str(tmp_path / "none"), shown.append) == ()
    assert ["not installed" in str(shown[0]), "wasn't measured" in str(shown[1])] == [True, True]
    assert vllm_reload.interpreter({vllm_reload.VARIABLE: "given"}, Path(__file__)) == "given"
    assert vllm_reload.interpreter({}, Path(__file__)) == __file__


@pytest.mark.parametrize("reloads", [(), (1.5, 2.5, 2.0)])
def test_reloads_are_a_row_of_the_table_where_there_are_any(reloads: tuple[float, ...]) -> None:
    item = Still(name="p019", share=0.0019, num_bytes=1, staged_bytes=1, pauses=(1.0,), undos=(1.0,), stricts=(),
                 peers={}, nan_made=1.0, mixed=0, aborted=0, false_labels=0)  # fmt: skip
    cells = [cell for column in swap_tables.still([item], reloads).columns for cell in column.cells]
    assert ("2000.00 (1500.00 to 2500.00), 3" in cells) == bool(reloads)


def test_the_whole_benchmark_claims_every_number(folder: Path, pair: Pair, tmp_path: Path) -> None:
    shown: list[object] = []
    measured = swap.run(folder, lambda _: pair, tmp_path, SCALE, shown.append)
    assert len(shown) == 2
    assert not list(tmp_path.iterdir())
    found = swap.claims(measured)
    told = json.loads(claims.line("swap", found))
    assert told["bench"] == "swap"
    names = [entry["name"] for entry in told["claims"]]
    assert (len(names), set(names)) == (len(NAMES), NAMES)
    targets = {*claims.SWAP_AT_MOST, *claims.SWAP_AT_LEAST, "token_gap_over_step_ms"}
    assert all(("target" in entry) == (entry["name"] in targets) for entry in told["claims"])
    value = {item.name: item.value for item in found}
    assert [value[name] for name in ("aborted", "mixed_weights", "stale_kv", "false_labels")] == [0, 0, 0, 0]
    assert all(
        entry["value"] > 0 for entry in told["claims"] if entry["name"].endswith("_ms") and "over" not in entry["name"]
    )
    assert [len(item.pauses) for item in measured.still.values()] == [3, 3, 2]
    spoilt = replace(measured, served=(replace(measured.served[0], mixed=1), measured.served[1]))
    assert not next(item for item in swap.claims(spoilt) if item.name == "mixed_weights").ok
