"""The demo's figures, events and children."""

import asyncio
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from slackwater.cli.demo.cast import DemoSettings, assemble
from slackwater.cli.demo.claims import Record, SwapRecord, claims, failures, percentile, reward_gain
from slackwater.cli.demo.events import (
    Phase,
    PublishedEvent,
    StepEvent,
    decode_event,
    encode,
)
from slackwater.cli.demo.processes import Child, keep_running, stop_all
from slackwater.cli.demo.report import write_report
from slackwater.cli.demo.view import Progress, ReplicaView, draw, plain, sparkline
from slackwater.errors import CorruptError, UnavailableError
from slackwater.trainer.align import LabelCheck
from slackwater.trainer.record import AnswerRecord, decode_record


def step(number: int, reward: float) -> StepEvent:
    return StepEvent(
        step=number, reward=reward, mismatch_kl=0.01, num_tokens=10, rollout_s=1, update_s=1, publish_s=1, example="7"
    )


def published(version: int) -> PublishedEvent:
    kind = "delta" if version else "anchor"
    return PublishedEvent(
        version=version, kind=kind, state="ab", changed=5, total=100, uploaded_bytes=10, full_bytes=200
    )


def answer(finish: str, *policy: tuple[int, int, int]) -> AnswerRecord:
    return AnswerRecord(
        prompt_ids=[1], token_ids=[2, 3], logprobs=[-1.0, -1.0], policy=list(policy), replica="replica-0",
        finish=finish, reward=1.0, text="23",
    )  # fmt: skip


RECORD = Record(
    steps=tuple(step(index, index / 9) for index in range(10)),
    published=tuple(published(index) for index in range(11)),
    swaps=tuple(
        SwapRecord(replica="replica-0", version=index, prepare_s=0.5, pause_s=index / 1e3) for index in range(1, 11)
    ),
    answers=(answer("stop", (0, 0, 1), (1, 1, 2)), answer("length", (1, 0, 2))),
    labels=LabelCheck(
        tokens=4,
        mislabelled=0,
        largest_difference=0.0,
        tolerance=1e-3,
        answers=2,
        unchecked=0,
        shifted=2,
        shifted_caught=2,
    ),
    byte_exact=True,
    restarts=0,
    wall_s=12.0,
)


def test_the_figures_are_those_of_the_record() -> None:
    figures = claims(RECORD)
    assert figures["reward_gain"] == pytest.approx(8 / 9)
    assert figures["versions_served"] == 2
    assert figures["pause_ms_p50"] == pytest.approx(5.0)
    assert figures["pause_ms_p99"] == pytest.approx(10.0)
    assert figures["delta_ratio"] == 20
    assert figures["answers_across_a_swap"] == 1
    assert failures(figures) == []


@pytest.mark.parametrize(
    "broken",
    [
        replace(RECORD, byte_exact=False),
        replace(RECORD, labels=replace(RECORD.labels, mislabelled=1)),
        replace(RECORD, labels=replace(RECORD.labels, shifted_caught=1)),
        replace(RECORD, labels=replace(RECORD.labels, unchecked=1)),
        replace(RECORD, answers=(*RECORD.answers, answer("abort", (1, 0, 2)))),
    ],
)
def test_every_claim_that_must_hold_can_fail(broken: Record) -> None:
    assert len(failures(claims(broken))) == 1


EVIDENCE = replace(
    RECORD,
    evidence=True,
    answers=tuple(msgspec.structs.replace(item, masks=[[1, 2], [3]], routes=[b"\0", b"\1"]) for item in RECORD.answers),
    labels=replace(RECORD.labels, masks=4, routes=4),
)


def test_masks_and_routes_are_claimed_where_they_were_asked_for() -> None:
    figures = claims(EVIDENCE)
    assert failures(figures) == []
    assert figures["mean_mask_ids"] == 1.5
    assert figures["masks_replayed_equal"] == figures["routes_replayed_equal"] == 1
    assert "routes_rows_missing" not in claims(RECORD)


@pytest.mark.parametrize(
    ("change", "name", "figure"),
    [
        ({"masks": [[1, 2], []]}, "tokens_without_mask", 2),
        ({"masks": []}, "tokens_without_mask", 4),
        ({"masks": [[1, 2], [1]]}, "tokens_outside_mask", 2),
        ({"routes": [b"\0"]}, "routes_rows_missing", 2),
        ({"routes": []}, "routes_rows_missing", 4),
    ],
)
def test_evidence_that_lacks_or_contradicts_fails(change: dict[str, Any], name: str, figure: int) -> None:
    answers = tuple(msgspec.structs.replace(item, **change) for item in EVIDENCE.answers)
    figures = claims(replace(EVIDENCE, answers=answers))
    assert figures[name] == figure
    assert len(failures(figures)) == 1


@pytest.mark.parametrize("change", [{"masks_differing": 1}, {"routes_differing": 1}, {"masks": 0}, {"routes": 0}])
def test_evidence_that_no_replay_made_again_fails(change: dict[str, Any]) -> None:
    assert len(failures(claims(replace(EVIDENCE, labels=replace(EVIDENCE.labels, **change))))) == 1


def test_a_percentile_is_a_value_that_was_seen() -> None:
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert percentile([1.0], 0.99) == 1.0
    assert math.isnan(percentile([], 0.5))


def test_a_gain_over_fewer_than_five_steps_compares_the_first_with_the_last() -> None:
    assert reward_gain([0.25, 0.5, 1.0]) == 0.75


@pytest.mark.parametrize("event", [Phase(name="model"), published(0), step(1, 0.5)])
def test_events_survive_the_pipe(event: Phase | PublishedEvent | StepEvent) -> None:
    assert decode_event(encode(event)) == event


@pytest.mark.parametrize("line", ["", "{}", "Traceback", '{"type": "step"}', '{"type": "other"}'])
def test_a_line_that_is_no_event_is_refused_by_name(line: str) -> None:
    with pytest.raises(CorruptError):
        decode_event(line)
    with pytest.raises(CorruptError):
        decode_record(line)


def test_the_view_draws_every_stage() -> None:
    progress = Progress(phase="starting", num_steps=3)
    console = Console(width=120, record=True, file=Path("/dev/null").open("w"))  # noqa: SIM115 - closed with the process
    console.print(draw(progress, 1.0))
    progress.steps.append(step(0, 0.5))
    progress.published.append(published(1))
    progress.replicas["replica-0"] = ReplicaView(
        name="replica-0", state="serving", version=1, target=1, in_flight=2, swaps=RECORD.swaps
    )
    console.print(draw(progress, 2.0))
    text = console.export_text()
    assert "serving" in text
    assert "v1" in text
    assert "replica-0=v1" in plain(progress.steps[0], progress)
    console.file.close()


def test_a_sparkline_has_one_sign_a_value_and_its_ends() -> None:
    assert sparkline([-1.0, 0.5, 2.0]) == " ▄█"


def test_the_report_is_a_picture_that_appears_whole(tmp_path: Path) -> None:
    write_report(RECORD, tmp_path / "report.png")
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in tmp_path.iterdir()] == ["report.png"]


def test_a_cast_has_a_run_of_its_own_and_two_different_keys(tmp_path: Path) -> None:
    settings = DemoSettings(steps=1, bucket=None, out=tmp_path, seed=0, toy=False, plain=True)
    toy = assemble(replace(settings, toy=True))
    assert "--toy" in toy.trainer.arguments
    assert all("64" in child.arguments for child in (*toy.replicas, *toy.checkers))
    first, second = assemble(settings), assemble(settings)
    assert first.run != second.run
    assert len(set(first.urls.values())) == 3
    environment = first.gateway.environment
    assert environment["SLACKWATER_INFERENCE_KEY"] != environment["SLACKWATER_CONTROL_KEY"]
    assert all("SLACKWATER" not in word for child in first.children for word in child.arguments)


def child_of(tmp_path: Path, *arguments: str) -> Child:
    return Child(name="child", arguments=arguments, environment={}, log=tmp_path / "child.log")


async def test_a_child_is_started_again_until_it_ended_too_often(tmp_path: Path) -> None:
    child = child_of(tmp_path, "publish")  # ends at once: arguments are missing
    await child.start()
    with pytest.raises(UnavailableError, match="ended 2 times"):
        await keep_running(child, most_starts=2)
    assert child.starts == 2


async def test_stopping_ends_a_child_and_may_be_called_twice(tmp_path: Path) -> None:
    child = child_of(tmp_path, "--help")
    await child.start()
    lines = asyncio.ensure_future(anext(child.lines()))
    await stop_all([child, child_of(tmp_path)])
    await stop_all([child])
    assert child.running.returncode is not None
    lines.cancel()
    await asyncio.gather(lines, return_exceptions=True)
