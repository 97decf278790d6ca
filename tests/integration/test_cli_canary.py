"""``slackwater publish --canary``: a file becomes part of the version, or is refused before anything is written."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from states_rig import RUN, write_states

from slackwater.bucket.local import LocalBucket
from slackwater.checkpoint.canary import Canary
from slackwater.cli.canary import canary_text, read_canary
from slackwater.errors import AuthError, InvalidInputError
from slackwater.ids import Version
from slackwater.publish.lineage import read_manifest

SOURCE = Path(__file__).parents[2] / "src"
GOOD: dict[str, Any] = {"prompt": [1, 2, 3], "tokens": [4, 5], "logprobs": [-0.25, -3], "tolerance": 0.5}
CANARY = Canary(prompt=(1, 2, 3), tokens=(4, 5), logprobs=(-0.25, -3.0), tolerance=0.5)


def slackwater(*words: Path | str) -> subprocess.CompletedProcess[str]:
    return ended("-m", "slackwater.cli.main", *words)


def script(*words: Path | str) -> subprocess.CompletedProcess[str]:
    return ended(SOURCE.parent / "publish_checkpoint.py", *words)


def ended(*words: Path | str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *map(str, words)]
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "TERM": "dumb", "COLUMNS": "120"}
    return subprocess.run(command, check=False, capture_output=True, text=True, env=environment, timeout=100)


@pytest.fixture(scope="module")
def states(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return write_states(tmp_path_factory.mktemp("states"), 2)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "canary.json"
    path.write_text(json.dumps(GOOD))
    return path


@pytest.fixture(scope="module")
def published(states: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An anchor without a canary, a delta with one, and a roll-back to each."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "canary.json").write_text(json.dumps(GOOD, indent=4))
    where = ("--bucket", folder / "bucket", "--run", RUN)
    for words in (
        ("publish", states[0]),
        ("publish", states[1], "--canary", folder / "canary.json"),
        ("rollback", "--to", "0"),
        ("rollback", "--to", "1"),
    ):
        done = slackwater(*words, *where)
        assert done.returncode == 0, done.stderr
    return folder / "bucket"


def test_the_file_becomes_part_of_the_version_and_a_roll_back_takes_it_along(published: Path) -> None:
    bucket = LocalBucket(published)
    found = [read_manifest(bucket, RUN, Version(version)).canary for version in range(4)]
    assert found == [None, CANARY, None, CANARY]


def test_inspect_shows_a_versions_canary(published: Path) -> None:
    shown = slackwater("inspect", f"{RUN}/1", "--bucket", published)
    assert shown.returncode == 0
    assert "canary    2 tokens after a prompt of 3 tokens, each within 0.5 nats\n" in shown.stdout
    assert "canary" not in slackwater("inspect", f"{RUN}/0", "--bucket", published).stdout
    read = json.loads(slackwater("inspect", f"{RUN}/1", "--bucket", published, "--json").stdout)
    assert read["canary"] == GOOD


def test_log_shows_which_versions_have_one(published: Path) -> None:
    where = ("--bucket", published, "--run", RUN)
    lines = slackwater("log", *where).stdout.splitlines()
    assert [line.split()[-1] for line in lines] == ["canary", "–", "yes", "–", "yes"]
    read = json.loads(slackwater("log", *where, "--json").stdout)
    assert [entry["has_canary"] for entry in read["versions"]] == [False, True, False, True]
    lines = slackwater("log", *where, "--limit", "1").stdout.splitlines()
    assert len(lines) == 2


def test_a_bad_file_is_told_in_one_line_and_nothing_is_written(states: list[Path], file: Path, tmp_path: Path) -> None:
    file.write_text(json.dumps({**GOOD, "logprobs": [-0.25]}))
    bucket = tmp_path / "bucket"
    done = slackwater("publish", states[0], "--bucket", bucket, "--run", RUN, "--canary", file)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert f"slackwater: {file} is no canary: canary.logprobs: 1 for 2 tokens" in done.stderr
    assert not bucket.exists()


def test_an_id_outside_of_the_models_vocabulary_is_told_in_one_line_and_nothing_is_written(
    states: list[Path], file: Path, tmp_path: Path
) -> None:
    model = shutil.copytree(states[0], tmp_path / "model")
    (model / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "vocab_size": 5}')
    bucket = tmp_path / "bucket"
    words = (model, "--bucket", bucket, "--run", RUN, "--canary", file)
    for done in (slackwater("publish", *words), script(*words)):
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
        assert f"{file} isn't for this model: canary.tokens: number 1 is token id 5" in done.stderr
        assert f"{model / 'config.json'} has vocab_size 5" in done.stderr
        assert not bucket.exists()
    assert slackwater("publish", *words, "--files", states[0]).returncode == 0


def test_the_one_file_publishes_a_canary_too(states: list[Path], file: Path, tmp_path: Path) -> None:
    done = script(states[0], "--bucket", tmp_path / "bucket", "--run", RUN, "--canary", file)
    assert done.returncode == 0, done.stderr
    assert read_manifest(LocalBucket(tmp_path / "bucket"), RUN, Version(0)).canary == CANARY


# The file


def test_a_file_without_a_tolerance_has_the_usual_one(file: Path) -> None:
    file.write_text(json.dumps({name: GOOD[name] for name in GOOD if name != "tolerance"}))
    assert read_canary(file).tolerance == 0.25


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "is no canary: "),
        ("[]", "is no canary: "),
        ("null", "is no canary: "),
        ("[" * 60_000, "is no canary: "),
        ('{"prompt": "\udcff"}', "is no canary: "),
        (json.dumps({**GOOD, "more": 1}), "more"),
        (json.dumps({**GOOD, "prompt": []}), "canary.prompt: 0 token ids"),
        (json.dumps({**GOOD, "prompt": [True]}), "prompt"),
        (json.dumps({**GOOD, "logprobs": [-0.25, 0.1]}), "canary.logprobs: number 1"),
        (json.dumps({**GOOD, "logprobs": [-0.25, float("nan")]}), "is no canary: "),
        (json.dumps({**GOOD, "tolerance": 0}), "canary.tolerance"),
        (json.dumps({name: GOOD[name] for name in ("prompt", "tokens")}), "logprobs"),
        (json.dumps(GOOD) + " " * 65_536, "has more than 65536 bytes"),
    ],
    ids=range(13),
)
def test_what_is_wrong_with_a_file_is_told_with_its_name(file: Path, text: str, told: str) -> None:
    file.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(InvalidInputError) as caught:
        read_canary(file)
    assert told in caught.value.message
    assert str(file) in caught.value.message


def test_a_file_that_never_ends_is_not_read_to_its_end() -> None:
    with pytest.raises(InvalidInputError, match="more than 65536 bytes"):
        read_canary(Path("/dev/zero"))


def test_a_file_that_is_not_there_or_no_file_is_told(tmp_path: Path) -> None:
    for path in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(InvalidInputError, match="can't be read: "):
            read_canary(path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read_is_an_auth_error(file: Path) -> None:
    file.chmod(0)
    with pytest.raises(AuthError):
        read_canary(file)


def test_the_longest_canary_fits_in_the_file_even_when_it_is_indented(file: Path) -> None:
    longest = {
        "prompt": [2**31 - 1] * 512,
        "tokens": [2**31 - 1] * 64,
        "logprobs": [-1.2345678901234567e-300] * 64,
        "tolerance": 0.012345678901234567,
    }
    file.write_text(json.dumps(longest, indent=8))
    assert canary_text(read_canary(file)) == "64 tokens after a prompt of 512 tokens, each within 0.0123457 nats"
