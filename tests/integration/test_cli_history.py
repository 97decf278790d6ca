"""The commands that look back: log, pull, gc and rollback, on a bucket in a directory."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest
from states_rig import FILE, RUN, bits, publish_states, write_states

from slackwater.bucket.base import Delete
from slackwater.bucket.local import LocalBucket
from slackwater.bucket.open import open_bucket
from slackwater.cli.attended import Attended
from slackwater.cli.gc import collect_garbage
from slackwater.cli.pull import pull_version
from slackwater.cli.scratch import Scratch
from slackwater.errors import CorruptError, InvalidInputError, NotFoundError
from slackwater.ids import Version
from slackwater.publish.gc import collect, survey
from slackwater.publish.lineage import read_manifest
from slackwater.publish.retention import Policy, plan_gc

SOURCE = Path(__file__).parents[2] / "src"


@pytest.fixture(scope="module")
def states(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return write_states(tmp_path_factory.mktemp("states"), 5)


@pytest.fixture(scope="module")
def published(states: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the states as versions, anchors at 0 and 3."""
    folder = tmp_path_factory.mktemp("bucket")
    publish_states(LocalBucket(folder), states, anchor_every=3)
    return folder


@pytest.fixture
def bucket(published: Path, tmp_path: Path) -> Path:
    """A copy, to be changed."""
    return shutil.copytree(published, tmp_path / "bucket")


@pytest.fixture
def work() -> Generator[Attended]:
    with Scratch() as scratch:
        yield Attended(scratch=scratch, tell=lambda _stage, _done, _total: None)


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(SOURCE), "TERM": "dumb", "COLUMNS": "120"}


def slackwater(*words: Path | str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "slackwater.cli.main", *map(str, words)]
    return subprocess.run(command, check=False, capture_output=True, text=True, env=environment(), timeout=100)


def until(look: Callable[[], object]) -> None:
    """Look until there is something to see: another process tells of its progress in no other way."""
    deadline = time.monotonic() + 60
    while not look():
        assert time.monotonic() < deadline
        time.sleep(0.01)


# log


def test_log_lists_the_chain_the_newest_last(published: Path) -> None:
    shown = slackwater("log", "--bucket", published, "--run", RUN)
    assert (shown.returncode, shown.stderr) == (0, "")
    lines = shown.stdout.splitlines()
    assert lines[0].split() == [
        "version", "kind", "parent", "bytes", "changed", "density", "bodies", "step", "age", "state",
    ]  # fmt: skip
    assert [line.split()[:3] for line in lines[1:]] == [
        ["0", "anchor", "–"], ["1", "delta", "0"], ["2", "delta", "1"], ["3", "anchor", "–"], ["4", "delta", "3"],
    ]  # fmt: skip
    assert read_manifest(LocalBucket(published), RUN, Version(4)).state[:12] in lines[-1]


def test_log_as_json_and_with_a_limit(published: Path) -> None:
    shown = slackwater("log", "--bucket", published, "--run", RUN, "--json", "--limit", "2")
    assert shown.returncode == 0
    read = json.loads(shown.stdout)
    assert (read["run"], read["head"], [item["version"] for item in read["versions"]]) == (RUN, 4, [3, 4])
    assert read["versions"][1]["kind"] == "delta"
    assert read["versions"][1]["age_s"] >= 0


def test_log_shows_damage_and_gaps(bucket: Path) -> None:
    (bucket / "run/manifests/00000001.json").write_text("{")
    (bucket / "run/manifests/00000002.json").unlink()
    shown = slackwater("log", "--bucket", bucket, "--run", RUN)
    assert shown.returncode == 0
    assert [line.split()[:2] for line in shown.stdout.splitlines()[2:4]] == [["1", "damaged"], ["…", "collected"]]
    assert "version 1 can't be read: " in shown.stdout.splitlines()[-1]


def test_log_of_a_run_that_is_not_there_is_told(published: Path) -> None:
    for words in (("log",), ("gc",), ("gc", "--delete")):
        shown = slackwater(*words, "--bucket", published, "--run", "other")
        assert (shown.returncode, shown.stderr.count("\n")) == (1, 1)
        assert f"there is no run other in {published.as_uri()} (it has: run)" in shown.stderr
    shown = slackwater("log", "--bucket", published / "nowhere", "--run", RUN)
    assert (shown.returncode, "no such bucket: " in shown.stderr) == (1, True)


def test_a_version_that_is_not_there_is_told_alike_by_all_commands(
    bucket: Path, states: list[Path], tmp_path: Path
) -> None:
    for number in range(3):
        (bucket / f"run/manifests/{number:08}.json").unlink()
    out = tmp_path / "out"
    for version, told in (
        ("other/1", f"there is no run other in {bucket.as_uri()} (it has: run)"),
        ("run/99", "run has no version 99 (the newest is run/4)"),
        ("run/1", "version 1 of run was collected: the oldest that is there is anchor 3 (name a newer version; "),
    ):
        run, _, number = version.partition("/")
        for words in (
            ("pull", version, out),
            ("rollback", "--run", run, "--to", number),
            ("inspect", version),
            ("verify", version),
            ("diff", states[0], version),
        ):
            done = slackwater(*words, "--bucket", bucket)
            assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1), (words, done.stderr)
            assert told in done.stderr, (words, done.stderr)
    assert not out.exists()


# pull


@pytest.mark.parametrize("number", range(5))
def test_every_version_is_pulled_as_the_folder_that_was_published(
    published: Path, states: list[Path], tmp_path: Path, work: Attended, number: int
) -> None:
    pulled = pull_version(f"run/{number}", tmp_path / "model", str(published), threads=1, work=work)
    assert pulled.state == read_manifest(LocalBucket(published), RUN, Version(number)).state
    assert bits(tmp_path / "model") == bits(states[number])
    names = {path.name for path in states[number].iterdir()}
    assert {path.name for path in (tmp_path / "model").iterdir()} == names
    for name in names - {FILE}:
        assert (tmp_path / "model" / name).read_bytes() == (states[number] / name).read_bytes()


def test_a_folder_that_is_there_is_refused_and_left_alone(published: Path, tmp_path: Path, work: Attended) -> None:
    (tmp_path / "model").mkdir()
    with pytest.raises(InvalidInputError, match="is there already"):
        pull_version("run/4", tmp_path / "model", str(published), threads=1, work=work)
    assert list(tmp_path.rglob("*")) == [tmp_path / "model"]


@pytest.mark.parametrize("name", ["run/9", "other/0"])
def test_a_version_that_is_not_there_makes_no_folder(
    published: Path, tmp_path: Path, work: Attended, name: str
) -> None:
    with pytest.raises(NotFoundError):
        pull_version(name, tmp_path / "model", str(published), threads=1, work=work)
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize("name", ["run", "run/x", "run/3..7", "a/b/1", ""])
def test_what_is_no_version_is_refused(published: Path, tmp_path: Path, work: Attended, name: str) -> None:
    with pytest.raises(InvalidInputError):
        pull_version(name, tmp_path / "model", str(published), threads=1, work=work)


@pytest.mark.parametrize("number", [0, 1])
def test_a_damaged_version_makes_no_folder(bucket: Path, tmp_path: Path, work: Attended, number: int) -> None:
    key = read_manifest(LocalBucket(bucket), RUN, Version(number)).objects[0].key
    body = bytearray((bucket / key).read_bytes())
    body[-1] ^= 1
    (bucket / key).write_bytes(body)
    with pytest.raises(CorruptError, match=key):
        pull_version("run/2", tmp_path / "model", str(bucket), threads=1, work=work)
    assert not (tmp_path / "model").exists()


def test_pull_tells_what_it_made(published: Path, states: list[Path], tmp_path: Path) -> None:
    made = slackwater("pull", "run/2", tmp_path / "model", "--bucket", published)
    assert (made.returncode, made.stderr) == (0, "")
    assert made.stdout.startswith(f"{tmp_path / 'model'} is run/2, state ")
    assert bits(tmp_path / "model") == bits(states[2])
    again = slackwater("pull", "run/2", tmp_path / "model", "--bucket", published)
    assert (again.returncode, "is there already" in again.stderr) == (1, True)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_pull_that_is_ended_leaves_no_folder(
    bucket: Path, tmp_path: Path, number: signal.Signals, status: int
) -> None:
    """A pack that is a pipe without a writer holds the command where half of its folder is made."""
    blob = bucket / read_manifest(LocalBucket(bucket), RUN, Version(1)).objects[0].key
    blob.unlink()
    os.mkfifo(blob)
    with subprocess.Popen(
        [sys.executable, "-m", "slackwater.cli.main", "pull", "run/1", str(tmp_path / "new"), "--bucket", str(bucket)],
        stderr=subprocess.PIPE, text=True, env=environment(),
    ) as process:  # fmt: skip
        until(lambda: list(tmp_path.glob(f".slackwater-*/{FILE}")))
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (status, f"slackwater: ended by {number.name}\n")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bucket"]


# gc


def grown_old(bucket: Path) -> Path:
    """Ten days pass."""
    then = time.time() - 10 * 86_400
    for path in bucket.rglob("*"):
        if path.is_file():
            os.utime(path, (then, then))
    return bucket


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_gc_tells_first_and_deletes_when_told_to(bucket: Path, states: list[Path], tmp_path: Path) -> None:
    grown_old(bucket)
    before = contents(bucket)
    words = ("gc", "--bucket", bucket, "--run", RUN, "--keep", "1", "--keep-anchors", "1")
    dry = slackwater(*words)
    assert (dry.returncode, dry.stderr, contents(bucket)) == (0, "", before)
    assert dry.stdout.splitlines()[0].startswith("manifest  run/manifests/00000000.json")
    assert "would go  3 manifests, " in dry.stdout
    assert dry.stdout.splitlines()[-1] == "nothing was deleted: --delete does it"
    planned = json.loads(slackwater(*words, "--json").stdout)
    assert (planned["collected"], [item["version"] for item in planned["versions"]]) == (None, [3, 4])
    done = slackwater(*words, "--delete")
    assert (done.returncode, done.stderr) == (0, "")
    assert before.keys() - contents(bucket).keys() == {item["key"] for item in planned["delete"]}
    assert "gone      3 manifests, " in done.stdout
    again = slackwater(*words, "--delete", "--json")
    assert json.loads(again.stdout)["collected"] == {"num_deleted": 0, "num_bytes": 0, "spared": [], "num_aborted": 0}
    assert slackwater("verify", "run/4", "--bucket", bucket, "--depth", "tensors").returncode == 0
    assert slackwater("pull", "run/4", tmp_path / "model", "--bucket", bucket).returncode == 0
    assert bits(tmp_path / "model") == bits(states[4])
    assert slackwater("publish", states[0], "--bucket", bucket, "--run", RUN).returncode == 0
    assert slackwater("log", "--bucket", bucket, "--run", RUN).stdout.splitlines()[-1].split()[:2] == ["5", "delta"]


def test_gc_keeps_what_is_young_or_pinned(bucket: Path) -> None:
    words = ("gc", "--bucket", bucket, "--run", RUN, "--keep", "1", "--keep-anchors", "1", "--json")
    assert json.loads(slackwater(*words).stdout)["delete"] == []
    grown_old(bucket)
    pinned = json.loads(slackwater(*words, "--pin", "1").stdout)
    assert [(item["version"], item["reason"]) for item in pinned["versions"]] == [
        (0, "chain"), (1, "pinned"), (3, "head"), (4, "head"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--min-age", "5min"], "is no minimum age"),
        (["--pin", "77"], "version 77 of run is pinned and isn't committed"),
    ],
)
def test_a_wrong_gc_is_told_and_deletes_nothing(bucket: Path, words: list[str], says: str) -> None:
    before = contents(grown_old(bucket))
    done = slackwater("gc", "--bucket", bucket, "--run", RUN, *words, "--delete")
    assert (done.returncode, says in done.stderr, done.stderr.count("\n")) == (1, True, 1)
    assert contents(bucket) == before


def test_gc_of_a_run_with_a_broken_manifest_or_head_deletes_nothing(bucket: Path) -> None:
    blob = bucket / read_manifest(LocalBucket(bucket), RUN, Version(4)).objects[0].key
    blob.unlink()
    before = contents(grown_old(bucket))
    words = ("gc", "--bucket", bucket, "--run", RUN, "--keep", "1", "--keep-anchors", "1", "--delete")
    done = slackwater(*words)
    assert (done.returncode, "publish an anchor" in done.stderr, contents(bucket)) == (1, True, before)
    (bucket / "run/manifests/00000001.json").write_text("{")
    done = slackwater(*words)
    assert (done.returncode, "00000001.json can't be read" in done.stderr) == (1, True)
    assert contents(bucket).keys() == before.keys()


def test_gc_and_pull_on_an_s3_server(
    s3_client: Any, s3_bucket_name: str, states: list[Path], tmp_path: Path, work: Attended
) -> None:
    """Its objects are young; the same survey ten days later deletes, and boto3 sees what is left."""
    url = f"s3://{s3_bucket_name}/runs"
    bucket = open_bucket(url)
    publish_states(bucket, states, anchor_every=3)
    policy = Policy(keep_last=1, keep_anchors=1)
    assert collect_garbage(url, RUN, policy, delete=True, work=work).plan.delete == ()
    contents = survey(bucket, RUN, now_s=time.time() + 10 * 86_400, progress=work.tell)
    plan = plan_gc(contents, policy)
    assert isinstance(bucket, Delete)
    collect(bucket, RUN, plan, threads=2, progress=work.tell)
    listed = s3_client.list_objects_v2(Bucket=s3_bucket_name)["Contents"]
    assert {item["Key"] for item in listed} == {f"runs/{item.key}" for item in plan.keep}
    pull_version("run/4", tmp_path / "model", url, threads=1, work=work)
    assert bits(tmp_path / "model") == bits(states[4])


# rollback


def test_rollback_makes_an_old_state_the_newest_version(bucket: Path, states: list[Path], tmp_path: Path) -> None:
    words = ("rollback", "--bucket", bucket, "--run", RUN, "--to", "1")
    done = slackwater(*words)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("published run/5, delta: ")
    assert slackwater("pull", "run/5", tmp_path / "model", "--bucket", bucket).returncode == 0
    assert bits(tmp_path / "model") == bits(states[1])
    again = slackwater(*words)
    assert (again.returncode, "has the state of version 1 already" in again.stderr) == (1, True)
    anchored = slackwater("rollback", "--bucket", bucket, "--run", RUN, "--to", "4", "--anchor", "--json")
    read = json.loads(anchored.stdout)
    assert (read["version"], read["kind"]) == (6, "anchor")
    assert [path for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    shown = slackwater("log", "--bucket", bucket, "--run", RUN).stdout.splitlines()
    assert [line.split()[:2] for line in shown[-2:]] == [["5", "delta"], ["6", "anchor"]]


def test_rollback_to_what_is_not_there_is_told(bucket: Path) -> None:
    done = slackwater("rollback", "--bucket", bucket, "--run", RUN, "--to", "9")
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert slackwater("rollback", "--bucket", bucket, "--run", RUN).returncode == 2
