"""The toy demo as a user runs it: real processes, a mixture of experts, masks and routes from end to end."""

import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from slackwater.trainer.align import LabelCheck
from slackwater.trainer.record import decode_record, encode_record

pytestmark = pytest.mark.timeout(300)
STEPS, ANSWERS, TOKENS, PROMPT = 3, 128, 4, 4


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a demo that ended well left its files."""
    folder = tmp_path_factory.mktemp("toy")
    options = ("--toy", "--steps", str(STEPS), "--plain", "--out", str(folder))
    told = subprocess.run(
        [sys.executable, "-m", "slackwater.cli.main", "demo", *options], capture_output=True, text=True, check=False
    )
    assert told.returncode == 0, told.stdout + told.stderr
    assert "the demo fails" not in told.stdout
    return folder


def test_every_claim_is_met_and_none_is_empty(out: Path) -> None:
    claims = {item["name"]: item["value"] for item in json.loads((out / "claims.json").read_text())["claims"]}
    tokens, rows = STEPS * ANSWERS * TOKENS, STEPS * ANSWERS * (PROMPT + TOKENS - 1)
    expected = {
        "versions_served": STEPS,
        "mislabelled_tokens": 0,
        "aborted_requests": 0,
        "byte_exact": 1,
        "tokens_checked": tokens,
        "answers_unchecked": 0,
        "tokens_without_mask": 0,
        "tokens_outside_mask": 0,
        "routes_rows_missing": 0,
        "masks_replayed": tokens,
        "masks_replayed_equal": 1,
        "routes_rows_replayed": rows,
        "routes_replayed_equal": 1,
    }
    assert {name: claims[name] for name in expected} == expected
    assert claims["shifted_labels_caught"] >= 0.9
    assert claims["mismatch_kl"] < 0.1
    assert 1 < claims["mean_mask_ids"] < 64


def test_the_record_holds_what_the_claims_are_of(out: Path) -> None:
    answers = [decode_record(line) for line in (out / "rollouts.jsonl").read_bytes().splitlines()]
    assert len(answers) == STEPS * ANSWERS
    assert {answer.replica for answer in answers} == {"replica-0", "replica-1"}
    assert all(len(answer.routes) == answer.rows == PROMPT + TOKENS - 1 for answer in answers)
    assert all(answer.top_p == 0.9 and len(answer.masks) == len(answer.raw_logprobs) == TOKENS for answer in answers)


def test_false_masks_routes_and_labels_are_told_apart(out: Path, tmp_path: Path) -> None:
    lines = [decode_record(line) for line in (out / "rollouts.jsonl").read_bytes().splitlines()]
    wide = [line for line in lines if line.replica == "replica-0" and len(line.masks[-1]) > 1]
    masked, routed, drawn, *true = wide[:12]
    false = [
        msgspec.structs.replace(masked, masks=[*masked.masks[:-1], masked.masks[-1][:-1]]),
        msgspec.structs.replace(routed, routes=[*routed.routes[:-1], bytes(reversed(routed.routes[-1]))]),
        msgspec.structs.replace(drawn, raw_logprobs=[*drawn.raw_logprobs[:-1], drawn.raw_logprobs[-1] - 0.1]),
    ]
    record = tmp_path / "rollouts.jsonl"
    record.write_text("".join(encode_record(line) + "\n" for line in (*false, *true)))
    bucket = out / "work" / "bucket"
    (run,) = (folder.name for folder in bucket.iterdir() if folder.name.startswith("demo-"))
    options = ("--bucket", str(bucket), "--run", run, "--window", "64", "--cache", str(tmp_path / "cache"))
    told = subprocess.run(
        [sys.executable, "-m", "slackwater.cli.main", "replay", str(record), *options],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    found = msgspec.json.decode(told.stdout, type=LabelCheck)
    assert (found.masks_differing, found.routes_differing, found.mislabelled) == (1, 1, 1)
    assert (found.answers, found.masks, found.routes) == (12, 12 * TOKENS, 12 * (PROMPT + TOKENS - 1))
