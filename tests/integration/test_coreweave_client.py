"""The published ``cwtrain`` client drives a fleet of two replicas, with only the base URL changed."""

from pathlib import Path
from typing import Final

import pytest
from client_rig import client_python, drive, fronted

SCRIPT: Final = """
import json, sys, time
from cwtrain.errors import APIError
from cwtrain.infra.client import InferenceClient
from cwtrain.infra.models import IncrementalSnapshotMetadata, PromptCachePolicy, SnapshotType

client = InferenceClient("c", base_url=sys.argv[1])


def load(identity, **options):
    made = client.create_hot_load("fleet", identity, **options)
    while not (now := client.get_hot_load(made.id)).terminal:
        time.sleep(0.02)
    replicas = client.list_hot_load_replicas(made.id)
    return [now.state.name, now.identity, [[r.name, r.state.name, r.current_snapshot_identity] for r in replicas]]


seen = {"full": load("demo-1", hot_load_id="one", prompt_cache_policy=PromptCachePolicy.RESET_ALL)}
seen["delta"] = load(
    "demo-3", snapshot_type=SnapshotType.INCREMENTAL, incremental=IncrementalSnapshotMetadata("demo-1")
)
seen["again"] = client.create_hot_load("fleet", "demo-1", hot_load_id="one").state.name
listed = client.list_hot_loads("fleet", page_size=1)
seen["listed"] = [[item.identity, item.status.created_at is not None] for item in listed]
refused = {}
for name, identity, options in (
    ("unknown", "demo-9", {}),
    ("hostile", "..", {}),
    ("reused", "demo-2", {"hot_load_id": "one"}),
    ("preserve", "demo-2", {"prompt_cache_policy": PromptCachePolicy.PRESERVE}),
):
    try:
        client.create_hot_load("fleet", identity, **options)
    except APIError as error:
        refused[name] = type(error).__name__
try:
    client.cancel_hot_load("one")
except APIError as error:
    refused["ended"] = type(error).__name__
seen["refused"] = refused
print(json.dumps(seen))
"""

FAILING: Final = """
import json, sys, time
from cwtrain.infra.client import InferenceClient

client = InferenceClient("c", base_url=sys.argv[1])
made = client.create_hot_load("fleet", "demo-1")
while not (now := client.get_hot_load(made.id)).terminal:
    time.sleep(0.02)
reasons = [replica.error_reason.partition(":")[0] for replica in client.list_hot_load_replicas(made.id)]
print(json.dumps({"state": now.state.name, "reasons": reasons}))
"""

BUSY: Final = """
import json, sys
from cwtrain.errors import HotLoadInProgressError
from cwtrain.infra.client import InferenceClient

client = InferenceClient("c", base_url=sys.argv[1])
made = client.create_hot_load("fleet", "demo-1")
try:
    client.create_hot_load("fleet", "demo-2")
    busy = False
except HotLoadInProgressError:
    busy = True
print(json.dumps({"busy": busy, "state": client.cancel_hot_load(made.id).state.name}))
"""


@pytest.fixture
def python() -> Path:
    return client_python("cwtrain")


async def test_it_loads_full_and_incremental_snapshots_lists_them_and_is_refused(tmp_path: Path, python: Path) -> None:
    async with fronted(tmp_path) as fleet:
        seen = await drive(python, SCRIPT, fleet.url)
        assert fleet.versions() == [3, 3]
    assert seen["full"] == ["COMPLETED", "demo-1", [["r0", "READY", "demo-1"], ["r1", "READY", "demo-1"]]]
    assert seen["delta"] == ["COMPLETED", "demo-3", [["r0", "READY", "demo-3"], ["r1", "READY", "demo-3"]]]
    assert seen["again"] == "COMPLETED"
    assert seen["listed"] == [["demo-3", True], ["demo-1", True]]
    assert seen["refused"] == {
        "unknown": "NotFoundError",
        "hostile": "InvalidArgumentError",
        "reused": "InvalidArgumentError",
        "preserve": "UnimplementedError",
        "ended": "FailedPreconditionError",
    }


async def test_it_sees_a_failure_on_any_replica(tmp_path: Path, python: Path) -> None:
    async with fronted(tmp_path) as fleet:
        fleet.rigs[1].engine.faults.flip_bit = True
        seen = await drive(python, FAILING, fleet.url)
    assert seen == {"state": "FAILED", "reasons": ["", "swap"]}


async def test_it_sees_that_one_is_under_way(tmp_path: Path, python: Path) -> None:
    async with fronted(tmp_path) as fleet:
        fleet.rigs[0].source.hold()
        try:
            seen = await drive(python, BUSY, fleet.url)
        finally:
            fleet.rigs[0].source.go.set()
    assert seen == {"busy": True, "state": "CANCELED"}
