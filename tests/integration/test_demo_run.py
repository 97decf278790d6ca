"""The demo as a user runs it: real model, real processes, a replica killed in mid-run, and Ctrl-C at any moment."""

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]


@contextmanager
def demo(out: Path, *options: str) -> Generator[subprocess.Popen[str]]:
    """A demo under way, its output readable line by line; ended whatever the test does."""
    command = [sys.executable, "-m", "slackwater.cli.main", "demo", "--plain", "--out", str(out), *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def until(process: subprocess.Popen[str], words: str) -> str:
    """Read lines up to one that has ``words``."""
    assert process.stdout is not None
    seen: list[str] = []
    for line in process.stdout:
        seen.append(line)
        if words in line:
            return line
    pytest.fail(f"{words!r} never came in {''.join(seen)!r}")


def children(out: Path) -> dict[int, str]:
    """Command lines of living processes that belong to the demo in ``out``, by process id."""
    found: dict[int, str] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
            except OSError:
                continue
            if str(out) in " ".join(words) and "--supervised" in words:
                found[int(entry.name)] = " ".join(words)
    return found


def test_a_run_over_s3_goes_on_when_a_replica_is_killed(tmp_path: Path, s3_bucket_name: str) -> None:
    with demo(tmp_path, "--steps", "4", "--bucket", f"s3://{s3_bucket_name}/runs") as process:
        until(process, "step   0")
        (victim,) = [number for number, words in children(tmp_path).items() if "--name replica-1" in words]
        os.kill(victim, signal.SIGKILL)
        line = until(process, '"bench"')
        assert process.wait() == 0
    claims = {item["name"]: item["value"] for item in json.loads(line)["claims"]}
    assert claims["replica_restarts"] == 1
    assert claims["versions_served"] >= 4
    assert claims["mislabelled_tokens"] == 0
    assert claims["shifted_labels_caught"] >= 0.9
    assert claims["aborted_requests"] == 0
    assert claims["byte_exact"] == 1
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")
    assert not children(tmp_path)


@pytest.mark.parametrize(
    ("moment", "number"),
    [
        ("loading", signal.SIGINT),
        ("training", signal.SIGINT),
        ("training", signal.SIGTERM),
        ("step   0", signal.SIGINT),
    ],
)
def test_a_signal_ends_everything_in_one_line(tmp_path: Path, moment: str, number: signal.Signals) -> None:
    with demo(tmp_path, "--steps", "2") as process:
        until(process, moment)
        process.send_signal(number)
        rest, _ = process.communicate(timeout=60)
        assert process.returncode == (130 if number == signal.SIGINT else 143)
    assert "Traceback" not in rest
    assert not children(tmp_path)


def test_a_killed_demo_leaves_no_process_behind(tmp_path: Path) -> None:
    with demo(tmp_path, "--steps", "2") as process:
        until(process, "training")
        left = children(tmp_path)
        process.kill()
        process.wait()
    for child in left:
        wait_for_end(child)
    assert not children(tmp_path)


def wait_for_end(number: int) -> None:
    """Block until a process that is no child of ours has ended."""
    try:
        handle = os.pidfd_open(number)
    except ProcessLookupError:
        return
    with os.fdopen(handle) as watched:
        ready, _, _ = select.select([watched], [], [], 30)
        assert ready, f"process {number} is still there"
