"""The command line told wrong, and told to end: one clear line, a status, and nothing half-done."""

import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from processes import (
    INFERENCE,
    Ended,
    Process,
    Reply,
    await_version,
    call,
    ending_all,
    environment,
    health,
    run,
    until,
)

from slackwater.cli.keys import CONTROL_KEY, INFERENCE_KEY
from slackwater.testing.tiny_model import write_tiny_model

pytestmark = pytest.mark.timeout(300)

RUN = "run"
END_S = 10.0
"""Longest time from being told to end to the end."""
ONE_REPLICA = ("--replica", "a=http://127.0.0.1:9")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bucket with one anchor, and folders that are no models for it."""
    made = tmp_path_factory.mktemp("cli")
    write_tiny_model(made / "model", seed=0)
    write_tiny_model(made / "other", seed=1)
    write_tiny_model(made / "wide", hidden=96)
    write_tiny_model(made / "deep", layers=3)
    write_tiny_model(made / "shallow", layers=1)
    write_tiny_model(made / "foreign")
    config = made / "foreign" / "config.json"
    config.write_text(config.read_text().replace("LlamaForCausalLM", "GptOssForCausalLM").replace("llama", "gpt_oss"))
    shutil.copytree(made / "model", made / "cut")
    weights = (made / "cut" / "model.safetensors").read_bytes()
    (made / "cut" / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    (made / "pickled").mkdir()
    (made / "pickled" / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch canary'\ntR.")
    (made / "empty").mkdir()
    for name, target in (("model", RUN), ("foreign", "foreign")):
        done = run(made / "logs", "publish", str(made / name), "--bucket", str(made / "bucket"), "--run", target)
        assert done.status == 0, done.stderr
    return made


def visible(bucket: Path) -> dict[str, bytes]:
    """What readers of a bucket can see."""
    files = (path for path in bucket.rglob("*") if path.is_file())
    return {str(path.relative_to(bucket)): path.read_bytes() for path in files if not path.name.startswith(".")}


def assert_one_line(done: Ended, *words: str) -> None:
    assert done.status == 1
    assert done.stderr.startswith("slackwater: ")
    assert done.stderr.count("\n") == 1, done.stderr
    for word in words:
        assert word in done.stderr
    assert done.stdout == ""


PUBLISHED_WRONGLY: dict[str, tuple[str, str, str, list[str]]] = {
    "no folder": ("nowhere", "bucket", RUN, ["is no folder"]),
    "a file": ("model/config.json", "bucket", RUN, ["is no folder"]),
    "no safetensors": ("empty", "bucket", RUN, ["without safetensors"]),
    "pickled weights": ("pickled", "bucket", RUN, ["without safetensors", "safe_serialization=True"]),
    "a cut file": ("cut", "bucket", RUN, ["model.safetensors", "missing"]),
    "other shapes": ("wide", "bucket", RUN, ["model.embed_tokens.weight", "[512, 96]", "[512, 64]"]),
    "an unknown tensor": ("deep", "bucket", RUN, ["model.layers.2.", "isn't in this run"]),
    "a bad run": ("model", "bucket", "../x", ["'../x' can't name a run"]),
    "a bucket that is a file": ("model", "model/config.json", RUN, ["config.json"]),
    "a bucket below a file": ("model", "model/config.json/sub", RUN, ["config.json is a file", "name a directory"]),
}


@pytest.mark.parametrize("case", PUBLISHED_WRONGLY)
def test_a_folder_that_can_not_be_published_changes_nothing(root: Path, case: str) -> None:
    folder, bucket, run_name, words = PUBLISHED_WRONGLY[case]
    before = visible(root / "bucket")
    done = run(root / "logs", "publish", str(root / folder), "--bucket", str(root / bucket), "--run", run_name)
    assert_one_line(done, *words)
    assert visible(root / "bucket") == before


def test_an_anchor_without_a_tensor_is_refused(root: Path) -> None:
    before = visible(root / "bucket")
    where = ("--bucket", str(root / "bucket"), "--run", RUN)
    done = run(root / "logs", "publish", str(root / "shallow"), *where, "--anchor")
    assert_one_line(done, "model.layers.1.input_layernorm.weight", "is missing")
    assert visible(root / "bucket") == before


def test_a_wrong_folder_does_not_make_the_bucket(root: Path) -> None:
    done = run(root / "logs", "publish", str(root / "empty"), "--bucket", str(root / "fresh"), "--run", RUN)
    assert_one_line(done)
    assert not (root / "fresh").exists()


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("ftp://host/x", ["'ftp'", "s3://"]),
        ("s3://", ["s3://bucket/prefix"]),
        ("s3://key:hunter2@bucket/x", ["credentials belong in the environment"]),
        ("/", ["root directory"]),
        ("", ["is no bucket URL"]),
    ],
)
def test_an_address_that_is_no_bucket(root: Path, url: str, words: list[str]) -> None:
    done = run(root / "logs", "publish", str(root / "model"), "--bucket", url, "--run", RUN)
    assert_one_line(done, *words)
    assert "hunter2" not in done.stderr


def test_an_s3_bucket_that_does_not_exist(root: Path, s3_client: Any) -> None:
    assert s3_client is not None
    done = run(root / "logs", "publish", str(root / "model"), "--bucket", "s3://no-such-bucket/x", "--run", RUN)
    assert_one_line(done, "no such bucket", "s3://no-such-bucket/x")


@pytest.mark.parametrize("key", [INFERENCE_KEY, CONTROL_KEY])
@pytest.mark.parametrize("verb", ["replica", "gateway"])
def test_a_missing_key_is_told_at_once(root: Path, verb: str, key: str) -> None:
    more = () if verb == "replica" else (*ONE_REPLICA, "--tokenizer", str(root / "model"))
    where = ("--bucket", str(root / "bucket"), "--run", RUN, "--port", "0")
    done = run(root / "logs", verb, *where, *more, changes={key: ""})
    assert_one_line(done, "two keys", INFERENCE_KEY, CONTROL_KEY)


@pytest.mark.parametrize(
    ("replicas", "words"),
    [
        (["127.0.0.1:8100"], ["names no replica", "name=http://host:port"]),
        (["a=127.0.0.1:8100"], ["names no replica"]),
        (["a/b=http://127.0.0.1:8100"], ["'a/b'"]),
        (["a=http://127.0.0.1:1", "a=http://127.0.0.1:2"], ["'a' is named twice"]),
    ],
)
def test_replicas_that_a_gateway_can_not_name(root: Path, replicas: list[str], words: list[str]) -> None:
    named = [word for replica in replicas for word in ("--replica", replica)]
    where = ("--bucket", str(root / "bucket"), "--run", RUN, "--port", "0", "--tokenizer", str(root / "model"))
    assert_one_line(run(root / "logs", "gateway", *named, *where), *words)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["publish", "model"], ["Missing option", "--bucket"]),
        (["publish", "model", "--bucket", "x", "--run", "x", "--step", "-1"], ["--step", "greater than or equal to 0"]),
        (["replica", "--bucket", "x", "--run", "x", "--port", "99999"], ["--port", "65535"]),
        (["gateway", "--bucket", "x", "--run", "x", "--tokenizer", "x"], ["Missing option", "--replica"]),
        (["nonsense"], ["No such command", "nonsense"]),
        (["publish", "--nonsense"], ["No such option", "--nonsense"]),
    ],
)
def test_wrong_usage_is_one_message_and_status_2(root: Path, arguments: list[str], words: list[str]) -> None:
    done = run(root / "logs", *arguments)
    assert (done.status, done.stdout) == (2, "")
    assert done.stderr.startswith("Usage: slackwater ")
    assert done.stderr.count("Error") == 1
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in done.stderr


@pytest.fixture(scope="module")
def failed_starts(root: Path) -> Generator[dict[str, Ended]]:
    """Servers and checks that find their fault only once torch is loaded: two at a time, for it takes a while."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        good = ("--bucket", str(root / "bucket"), "--run", RUN)
        cache = ("--cache", str(root / "cache"))
        commands = {
            "replica, no bucket": ("replica", "--bucket", str(root / "nowhere"), "--run", RUN, "--port", "0"),
            "replica, port in use": ("replica", *good, *cache, "--port", port),
            "replica, foreign model": (
                "replica", "--bucket", str(root / "bucket"), "--run", "foreign", *cache, "--port", "0",
            ),
            "gateway, port in use": (
                "gateway", *good, *ONE_REPLICA, "--port", port, "--tokenizer", str(root / "model"),
            ),
            "gateway, no tokenizer": (
                "gateway", *good, *ONE_REPLICA, "--port", "0", "--tokenizer", str(root / "empty"),
            ),
            "replay, no record": ("replay", str(root / "nowhere.jsonl"), *good, *cache),
        }  # fmt: skip
        with ThreadPoolExecutor(2) as pool:
            yield dict(
                zip(commands, pool.map(lambda words: run(root / "logs", *words), commands.values()), strict=True)
            )


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("replica, no bucket", ["no such bucket", "nowhere"]),
        ("replica, port in use", ["is in use", "another --port"]),
        ("gateway, port in use", ["is in use", "another --port"]),
        ("gateway, no tokenizer", ["holds no tokenizer"]),
        ("replay, no record", ["nowhere.jsonl can't be read"]),
    ],
)
def test_a_start_that_fails_is_one_line(failed_starts: dict[str, Ended], case: str, words: list[str]) -> None:
    assert_one_line(failed_starts[case], *words)


def test_a_replica_ends_where_its_model_can_not_be_served(failed_starts: dict[str, Ended]) -> None:
    done = failed_starts["replica, foreign model"]
    assert done.status == 1
    assert done.stderr.splitlines()[-1].startswith("slackwater: ")
    assert "GptOssForCausalLM is not supported" in done.stderr
    assert "Traceback" not in done.stderr


ENDS = [(signal.SIGINT, 130), (signal.SIGTERM, 143)]


@pytest.mark.parametrize(("number", "status"), ENDS)
def test_publish_ends_at_once_though_its_store_is_silent(root: Path, number: signal.Signals, status: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as store:
        settings = {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{store.getsockname()[1]}",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_REGION": "us-east-1",
            "AWS_ALLOW_HTTP": "true",
        }
        where = ("--bucket", "s3://bucket/x", "--run", RUN)
        process = Process(root / "logs", "publish", str(root / "model"), *where, changes=settings)
        with ending_all([process]):
            store.settimeout(END_S)
            with store.accept()[0]:
                process.signal(number)
                done = process.ended(END_S)
    assert (done.status, done.stdout, done.stderr) == (status, "", f"slackwater: ended by {number.name}\n")


@pytest.fixture(scope="module")
def large(root: Path) -> Path:
    """A model whose upload takes a while."""
    return write_tiny_model(root / "large", hidden=512, layers=8)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_publish_that_is_ended_in_its_upload_shows_nothing_and_can_be_done_again(
    root: Path, large: Path, tmp_path: Path, number: signal.Signals
) -> None:
    bucket = tmp_path / "bucket"
    where = ("publish", str(large), "--bucket", str(bucket), "--run", RUN)
    process = Process(root / "logs", *where)
    with ending_all([process]):
        until(lambda: any(bucket.rglob("*.put-*")), "the upload has begun")
        process.signal(number)
        done = process.ended(END_S)
    assert "Traceback" not in done.stderr
    committed = done.status == 0  # the signal came too late
    assert (bucket / RUN / "manifests" / "00000000.json").exists() is committed
    again = run(root / "logs", *where)
    assert (again.status, again.stderr) == (0, "")
    assert f"{RUN}/{int(committed)}" in again.stdout


def replica(root: Path, bucket: Path, name: str, *more: str) -> Process:
    where = ("--bucket", str(bucket), "--run", RUN, "--name", name, "--cache", str(root / "caches" / name))
    return Process(root / "logs", "replica", *where, "--port", "0", *more)


@pytest.mark.parametrize(("number", "status"), ENDS)
def test_a_replica_ends_at_once_in_its_imports(root: Path, number: signal.Signals, status: int) -> None:
    process = replica(root, root / "bucket", f"importing-{status}")
    with ending_all([process]):
        until(process.imports_torch, "torch is being imported")
        process.signal(number)
        done = process.ended(END_S)
    assert (done.status, done.stdout, done.stderr) == (status, "", f"slackwater: ended by {number.name}\n")


def test_no_child_outlives_a_parent_that_is_killed(root: Path) -> None:
    words = ["replica", "--bucket", str(root / "bucket"), "--run", RUN, "--port", "0", "--supervised"]
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, sys.executable, "-m", "slackwater.cli.main", *words],
        stdout=subprocess.PIPE,
        env=environment(),
        text=True,
    )
    with parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        parent.kill()
        parent.wait(END_S)
        until(lambda: not lives(child), "the child has ended", END_S)


PARENT = """
import subprocess, sys, time
child = subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
print(child.pid, flush=True)
child.wait()
"""


def lives(pid: int) -> bool:
    """Whether a process runs; one that nobody has waited for has ended all the same."""
    try:
        return ") Z" not in Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False


@dataclass(frozen=True)
class Endings:
    """How servers ended, and what the last request of the busy one was answered."""

    servers: dict[str, Ended]
    refusal: Reply


@pytest.fixture(scope="module")
def endings(root: Path) -> Endings:
    """Four servers, told to end in four ways: side by side, for each takes its time to start."""
    (root / "anchorless").mkdir()
    where = ("--bucket", str(root / "bucket"), "--run", RUN, "--tokenizer", str(root / "model"))
    servers = {
        "waiting": replica(root, root / "anchorless", "waiting"),
        "busy": replica(root, root / "bucket", "busy", "--slots", "1", "--max-waiting", "64"),
        "supervised": replica(root, root / "bucket", "supervised", "--supervised"),
        "gateway": Process(root / "logs", "gateway", *ONE_REPLICA, *where, "--port", "0"),
    }
    with ending_all(list(servers.values())), ThreadPoolExecutor(1) as pool:
        urls = {name: server.url for name, server in servers.items()}
        assert health(urls["waiting"])["status"] == "starting"
        assert health(urls["gateway"])["status"] == "no_replica"
        for name in ("busy", "supervised"):
            await_version(urls[name], 0)
        body = {"model": "policy", "prompt": "tide", "max_tokens": 1000, "n": 64, "temperature": 0.7}
        asked = pool.submit(lambda: call(f"{urls['busy']}/v1/completions", key=INFERENCE, body=body))
        until(lambda: health(urls["busy"])["in_flight"], "the replica is busy")
        servers["waiting"].signal(signal.SIGINT)
        servers["busy"].signal(signal.SIGTERM)
        servers["busy"].signal(signal.SIGTERM)  # some supervisors tell a process and its group
        servers["supervised"].hang_up()
        servers["gateway"].signal(signal.SIGTERM)
        return Endings({name: server.ended(END_S) for name, server in servers.items()}, asked.result())


@pytest.mark.parametrize("name", ["waiting", "busy", "supervised", "gateway"])
def test_a_server_ends_in_order_when_it_is_told_to(endings: Endings, name: str) -> None:
    done = endings.servers[name]
    assert done.status == 0, done
    assert "Traceback" not in done.stderr
    assert "slackwater: " not in done.stderr


def test_a_request_that_outlasts_its_server_is_refused_as_retryable(endings: Endings) -> None:
    assert (endings.refusal.status, endings.refusal.json["error"]["code"]) == (503, "unavailable")


STUBBORN = """
import sys, threading
from slackwater.cli.ending import Ending
with Ending.watch(grace_s=float(sys.argv[1])).in_order(lambda: print("asked", flush=True)):
    print("serving", flush=True)
    threading.Event().wait()
"""


@pytest.mark.parametrize(
    ("grace_s", "numbers", "status"),
    [
        (0.1, [signal.SIGTERM], 143),
        (60, [signal.SIGINT, signal.SIGINT], 130),
        (60, [signal.SIGTERM, signal.SIGINT], 130),
    ],
)
def test_a_process_that_does_not_end_in_order_is_ended(
    grace_s: float, numbers: list[signal.Signals], status: int
) -> None:
    command = [sys.executable, "-c", STUBBORN, str(grace_s)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment(), text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "serving\n"
        process.send_signal(numbers[0])
        assert process.stdout.readline() == "asked\n"
        for number in numbers[1:]:
            process.send_signal(number)
        assert process.wait(END_S) == status


def processes_about(path: Path) -> list[int]:
    """Processes whose command line names a path."""
    found: list[int] = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes()
        except OSError:
            continue  # it has ended meanwhile
        if str(path).encode() in words:
            found.append(int(folder.name))
    return found


@pytest.mark.parametrize(("number", "status"), ENDS)
def test_a_demo_that_is_ended_takes_its_children_along(tmp_path: Path, number: signal.Signals, status: int) -> None:
    process = Process(tmp_path / "logs", "demo", "--plain", "--out", str(tmp_path / "demo"))
    with ending_all([process]):
        until(lambda: len(processes_about(tmp_path)) >= 4, "the trainer and both replicas are started")
        process.signal(number)
        done = process.ended(END_S)
    assert (done.status, done.stderr) == (status, "")
    assert processes_about(tmp_path) == []
