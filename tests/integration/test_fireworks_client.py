"""The published ``fireworks-ai`` client drives a fleet of two replicas, with only the base URL changed."""

from pathlib import Path
from typing import Final

import pytest
from client_rig import client_python, drive, fronted

SCRIPT: Final = """
import json, sys, httpx
from fireworks.training.sdk.deployment import DeploymentManager

manager = DeploymentManager(api_key="c", base_url=sys.argv[1])


def load(identity, increment=None):
    manager.hotload("fleet", "policy", identity, incremental_snapshot_metadata=increment)
    return manager.wait_for_hotload("fleet", "policy", identity, timeout_seconds=30, poll_interval=0.05)


increment = {"previous_snapshot_identity": "demo-1", "compression_format": "arc_v2", "checksum_format": "alder32"}
seen = {"account": manager.account_id}
seen["full"] = load("demo-1")
seen["delta"] = load("demo-3", increment)
seen["back"] = load("demo-2")
seen["status"] = manager.hotload_check_status("fleet", "policy")
refused = {}
for identity, path in (("demo-9", None), ("../x", None), ("demo-1", "gs://elsewhere/")):
    try:
        manager.hotload("fleet", "policy", identity, path=path)
    except httpx.HTTPStatusError as error:
        refused[identity] = error.response.status_code
seen["refused"] = refused
print(json.dumps(seen))
"""

FAILING: Final = """
import json, sys
from fireworks.training.sdk.deployment import DeploymentManager

manager = DeploymentManager(api_key="c", base_url=sys.argv[1])
manager.hotload("fleet", "policy", "demo-1")
done = manager.wait_for_hotload("fleet", "policy", "demo-1", timeout_seconds=30, poll_interval=0.05)
print(json.dumps({"done": done, "said": manager.last_hotload_error_message}))
"""


@pytest.fixture
def python() -> Path:
    return client_python("fireworks")


async def test_it_loads_full_and_incremental_snapshots_goes_back_and_is_refused(tmp_path: Path, python: Path) -> None:
    async with fronted(tmp_path) as fleet:
        seen = await drive(python, SCRIPT, fleet.url)
        assert fleet.versions() == [2, 2]
    assert seen["account"] == "slackwater"
    assert (seen["full"], seen["delta"], seen["back"]) == (True, True, True)
    rows = seen["status"]["replicas"]
    assert {row["identity"] for row in rows} == {"r0", "r1"}
    assert {(row["current_snapshot_identity"], row["readiness"]) for row in rows} == {("demo-2", True)}
    assert seen["refused"] == {"demo-9": 404, "../x": 400, "demo-1": 400}


async def test_its_waiter_sees_a_failure_on_any_replica(tmp_path: Path, python: Path) -> None:
    async with fronted(tmp_path) as fleet:
        fleet.rigs[1].engine.faults.flip_bit = True
        seen = await drive(python, FAILING, fleet.url)
        assert fleet.versions() == [1, 0]
    assert seen["done"] is False
    assert "stage=error" in seen["said"]
