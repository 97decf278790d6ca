"""The benchmark of the embedded engine on a tiny model: results, not speed."""

import asyncio
import json
import math
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

import claims
import engine
import engine_limit
import engine_load
import engine_peers
import engine_tables
from engine_exact import parting
from engine_load import Figures, Kept, Load, Reply
from engine_peers import Contender, Tried
from slackwater.engine.torch.kernels import tiles
from slackwater.errors import UnavailableError
from slackwater.testing.tiny_model import write_tiny_model

LOAD = Load(name="s2", streams=2, episodes=4, new_tokens=3, prompt_tokens=5)
REPLY = Reply(token_ids=[1, 2, 3], logprobs=[-1.0, -2.0, 0.0], at=[1.0, 2.0, 3.0])
KEPT = Kept(prompt=[1], token_ids=[5, 6], logprobs=[-1.0, -1.0])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


class Echo:
    """Answers with a token that counts the prompts, and holds what it was asked."""

    def __init__(self) -> None:
        self.prompts: list[list[int]] = []
        self.loads: list[Load] = []

    async def begin(self, load: Load) -> None:
        self.loads.append(load)

    async def answer(self, prompt: list[int], load: Load) -> Reply:
        self.prompts.append(prompt)
        count = load.new_tokens
        at = [float(place) for place in range(count)]
        return Reply(token_ids=[300] * count, logprobs=[-1.0] * count, at=at)

    async def end(self) -> None:
        pass


def contender(sweep: tuple[engine_peers.Settings, ...], driver: str = "none", folder: Path = Path()) -> Contender:
    def nothing(_: engine_peers.Settings) -> Mapping[str, str]:
        return {}

    return Contender(name="any", driver=driver, sweep=sweep, folder=lambda _: folder, environment=nothing)


def figures(speed: float) -> Figures:
    return Figures(load="s2", tokens_per_s=speed, wrong=0, first_p50_s=1, first_p99_s=1, gap_p50_s=1, gap_p99_s=1)


@pytest.mark.parametrize(
    ("reply", "holds"),
    [
        (REPLY, True),
        (replace(REPLY, token_ids=[1, 2]), False),
        (replace(REPLY, logprobs=[-1.0, -2.0]), False),
        (replace(REPLY, logprobs=[-1.0, math.nan, -1.0]), False),
        (replace(REPLY, logprobs=[-1.0, -math.inf, -1.0]), False),
        (replace(REPLY, logprobs=[-1.0, 0.5, -1.0]), False),
    ],
)
def test_an_answer_that_lacks_something_is_counted_as_wrong(reply: Reply, holds: bool) -> None:
    assert engine_load.sound(reply, 3) == holds


def test_each_turn_has_the_turns_before_it_as_its_prefix() -> None:
    echo = Echo()
    load = replace(LOAD, streams=1, episodes=1, turns=3, turn_tokens=4, keep=True)
    found = asyncio.run(engine_load.run(echo, load))
    told = [kept.prompt for kept in found.kept]
    assert [len(prompt) for prompt in told] == [5, 12, 19]
    assert told[1][:8] == [*told[0], 300, 300, 300]
    assert told[2][:12] == told[1]
    assert len(told[2]) + load.new_tokens == load.window


def test_loads_of_other_seeds_and_warming_up_share_no_prompt() -> None:
    echo = Echo()
    for seed in (0, 1):
        asyncio.run(engine_load.run(echo, replace(LOAD, seed=seed)))
    assert len({tuple(prompt) for prompt in echo.prompts}) == len(echo.prompts) == 2 * (2 + 4)


def test_runs_of_all_loads_share_no_prompt() -> None:
    loads = engine.Scale().loads()
    assert len({(load.seed, load.streams) for load in loads}) == len({load.seed for load in loads}) == len(loads)
    assert all(load.episodes % load.streams == 0 for load in loads)


def test_parting_finds_the_first_other_token() -> None:
    other = Kept(prompt=[2], token_ids=[5, 6], logprobs=[-1.0, -1.0])
    found = parting([KEPT, other], [replace(other, token_ids=[5, 7]), KEPT])
    assert (found.answers, found.parted, found.first) == (2, 1, 1)
    assert parting([KEPT], [KEPT]).parted == 0


def test_the_fastest_settings_are_taken_and_those_that_do_not_run_are_told() -> None:
    broken = Tried(settings={"threads": 1}, tokens_per_s=0, why="no such thing")
    fast = Tried(settings={"threads": 2}, tokens_per_s=2)
    assert engine_peers.best([broken, fast, replace(fast, settings={}, tokens_per_s=1)]) == {"threads": 2}
    with pytest.raises(UnavailableError, match="no such thing"):
        engine_peers.best([broken])


def test_a_peer_that_does_not_run_is_told_with_its_error(tmp_path: Path) -> None:
    (tried,) = engine_peers.swept(contender(({},)), LOAD, tmp_path)
    assert tried.tokens_per_s == 0
    assert "ModuleNotFoundError: No module named 'engine_none'" in tried.why


def test_an_earlier_result_is_not_taken_for_that_of_a_process_that_wrote_none(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    out.write_text("[]")
    with pytest.raises(UnavailableError, match="it said nothing"):
        engine_peers.finished([sys.executable, "-c", ""], out, {})


def test_every_contender_may_wait_in_each_way_with_all_threads(folder: Path) -> None:
    us = engine_peers.ours({"bfloat16": folder}, 2)
    for one in (us, engine_peers.generate(folder, 2), engine_peers.continuous(folder, 2)):
        waits = {settings["wait"] for settings in one.sweep if settings["threads"] == 2}
        assert waits == set(engine_peers.WAITS)
        assert {one.environment(settings)["OMP_WAIT_POLICY"] for settings in one.sweep} == waits


def test_the_median_run_of_two_is_the_slower() -> None:
    assert engine_tables.median([figures(3), figures(1)]).tokens_per_s == 1
    assert engine_tables.median([figures(3), figures(1), figures(2)]).tokens_per_s == 2


def test_the_limit_multiplies_by_every_matrix_once(folder: Path) -> None:
    shapes = [tuple(matrix.shape) for matrix in engine_limit.matrices(folder)]
    assert len(shapes) == 2 * 7 + 1
    assert shapes[-1] == (512, 64)
    found = engine_limit.limits(folder, (1, 2), (1,))
    assert len(found) == 2 * 2 * 2 + (2 if tiles.available() else 0)
    assert all(item.tokens_per_s > 0 for item in found)


@pytest.mark.timeout(600)
def test_the_quick_run_carries_every_load_and_finds_log_probabilities_exact(folder: Path, tmp_path: Path) -> None:
    shown: list[object] = []
    measured = engine.run(folder, tmp_path, engine.QUICK, None, shown.append)
    assert set(measured.figures) == {engine_peers.OURS, engine_peers.GENERATE, engine_peers.CONTINUOUS}
    assert all({run.load for run in runs} == {"s1", "s4", "turns"} for runs in measured.figures.values())
    told = json.loads(claims.line("engine", engine.claims(measured)))
    value = {entry["name"]: entry["value"] for entry in told["claims"]}
    assert len(value) == len(told["claims"])
    assert value["wrong_answers"] == value["invariant_parted"] == 0
    assert value["logprob_fp32_most"] <= claims.ENGINE_AT_MOST["logprob_fp32_most"]
    assert "vs_vllm_cpu" not in value
    targets = {*claims.ENGINE_AT_MOST, *claims.ENGINE_AT_LEAST} - {"vs_vllm_cpu"}
    assert {entry["name"] for entry in told["claims"] if "target" in entry} == targets
