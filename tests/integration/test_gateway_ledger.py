"""A gateway process that is killed goes on where it was, if it has a ledger."""

from pathlib import Path
from typing import Any

from processes import Process, call, ending_all, free_port, run, until

from slackwater.testing.tiny_model import write_tiny_model


def gateway(root: Path, port: int, *more: str) -> Process:
    """One over two replicas that aren't there."""
    where = ("--bucket", str(root / "bucket"), "--run", "run", "--tokenizer", str(root / "model"), "--port", "0")
    fleet = [word for name in ("r0", "r1") for word in ("--replica", f"{name}=http://127.0.0.1:{port}")]
    return Process(root / "logs", "gateway", *where, *fleet, *more, "--supervised")


def shown(url: str) -> list[Any]:
    return [[item["id"], item["state"], item["standing"]] for item in call(f"{url}/v1/hot-loads").json["hot_loads"]]


def test_a_killed_gateway_goes_on_with_its_operations_groups_and_keys(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model", seed=0)
    published = run(tmp_path / "logs", "publish", str(model), "--bucket", str(tmp_path / "bucket"), "--run", "run")
    assert published.status == 0, published.stderr
    settings = ("--ledger", str(tmp_path / "ledger.sqlite"), "--group", "eval=pinned:run/0:r1")
    first = gateway(tmp_path, free_port(), *settings)
    with ending_all([first]):
        made = call(f"{first.url}/v1/hot-loads", body={"snapshot": "run/0"})
        assert made.status == 202, made
        second = gateway(tmp_path, free_port(), *settings)
        refused = second.ended()
        assert refused.status == 1
        assert "another process has it open" in refused.stderr
        before = shown(first.url)
        assert len(before) == 2
        until(lambda: all(state == "running" for _, state, _ in shown(first.url)), "both are driven")
        first.kill()
    again = gateway(tmp_path, free_port(), *settings)
    with ending_all([again]):
        assert [[name, standing] for name, _, standing in shown(again.url)] == [[n, s] for n, _, s in before]
        repeated = call(f"{again.url}/v1/hot-loads", body={"snapshot": "run/0"})
        assert (repeated.status, repeated.json["id"]) == (202, made.json["id"])
        groups = {group["name"]: group["mode"] for group in call(f"{again.url}/v1/groups").json["groups"]}
        assert groups == {"eval": "pinned", "default": "manual"}
        row = call(f"{again.url}/hot_load/v1/models/hot_load")
        assert row.status == 400, "the front is there, and wants its header"


def test_the_limits_of_hot_loads_are_those_of_its_options(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model", seed=0)
    run(tmp_path / "logs", "publish", str(model), "--bucket", str(tmp_path / "bucket"), "--run", "run")
    limits = ("--deadline", "1", "--poll", "0.05", "--watch", "0.2", "--call-deadline", "0.5", "--lag-limit", "5")
    made = gateway(tmp_path, free_port(), *limits)
    with ending_all([made]):
        assert call(f"{made.url}/v1/hot-loads", body={"snapshot": "run/0"}).status == 202
        until(lambda: [state for _, state, _ in shown(made.url)] == ["failed"], "the deadline of 1 s has passed")
        (ended,) = call(f"{made.url}/v1/hot-loads").json["hot_loads"]
        assert [part["stage"] for part in ended["replicas"]] == ["unknown", "unknown"]


def test_a_pin_of_what_is_not_committed_and_an_unknown_snapshot_name_the_newest_one(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model", seed=0)
    run(tmp_path / "logs", "publish", str(model), "--bucket", str(tmp_path / "bucket"), "--run", "run")
    made = gateway(tmp_path, free_port(), "--group", "eval=pinned:run/99:r0")
    told = "there is no snapshot run/99 (the newest is run/0)"
    with ending_all([made]):
        missing = call(f"{made.url}/v1/hot-loads", body={"snapshot": "run/99"})
        assert (missing.status, missing.json["error"]["message"]) == (404, told)
        until(lambda: f"group eval is pinned to what isn't there: {told}" in made.stderr, "the pin is warned of")
