"""DTensors of a mesh of processes, published together through torch's own collectives."""

import subprocess
import sys
from collections.abc import Generator
from contextlib import ExitStack
from pathlib import Path

import pieces_rig
import pytest
from pieces_rig import big_model, small_tiles
from publish_rig import RUN, all_bits, model_folder, restored, stepped

from slackwater.bucket.local import LocalBucket
from slackwater.ids import Version
from slackwater.publish.lineage import read_manifest
from slackwater.weights.state_dict import StateDictSource


@pytest.fixture(autouse=True)
def tiles_are_small() -> Generator[None]:
    with small_tiles():
        yield


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return model_folder(tmp_path / "model")


ONE_OF_SEVERAL = """
import sys
import torch.distributed as dist
from pieces_rig import DOWN, NORM, big_model, small_tiles
from publish_rig import RUN, stepped
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from slackwater.bucket.local import LocalBucket
from slackwater.checkpoint.pieces import cut_axis
from slackwater.checkpoint.tensor import TensorSpec, tile_count
from slackwater.publish.exchange_torch import TorchExchange
from slackwater.publish.ranks import RankPublisher
from slackwater.weights.dtensor import read_dtensors

rank, world, home = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
dist.init_process_group("gloo", init_method=f"file://{home}/store", rank=rank, world_size=world)
mesh = init_device_mesh("cpu", (1, world), mesh_dim_names=("replicas", "shards"))

def placed(name, tensor, *placements):
    return {name: distribute_tensor(tensor, mesh, list(placements))}

def sharded(state):
    found = {}
    for name, tensor in state.items():
        spec = TensorSpec(name=name, dtype="BF16", shape=tuple(tensor.shape))
        is_even = tile_count(spec) > 1 and spec.shape[cut_axis(spec)] % 16 == 0 and "experts" not in name
        found |= placed(name, tensor, Replicate(), Shard(cut_axis(spec)) if is_even else Replicate())
    return found

with small_tiles():
    publisher = RankPublisher(LocalBucket(f"{home}/bucket"), RUN, rank, world, TorchExchange(), threads=1)
    state = big_model()
    for step in range(2):
        source = read_dtensors(sharded(state))
        assert (NORM in source.specs()) is (rank == 0)
        assert source.pieces()[DOWN].begin == 96 // world * rank, source.pieces()
        publisher.publish(source, step=step, folder_files=f"{home}/model")
        state = stepped(state, step, 1e-2)
dist.destroy_process_group()
"""


def test_two_processes_publish_dtensors_together(model: Path, tmp_path: Path) -> None:
    bucket = LocalBucket(tmp_path / "bucket", create=True)
    command = [sys.executable, "-c", ONE_OF_SEVERAL]
    with ExitStack() as stack:
        ranks = [
            stack.enter_context(
                subprocess.Popen([*command, str(rank), "2", str(model.parent)], cwd=Path(pieces_rig.__file__).parent)
            )
            for rank in range(2)
        ]
        assert [rank.wait(120) for rank in ranks] == [0, 0]
    states = [big_model(), stepped(big_model(), 0, 1e-2)]
    for version, state in enumerate(states):
        assert restored(bucket, version) == all_bits(StateDictSource(state))
    assert [read_manifest(bucket, RUN, Version(version)).kind for version in range(2)] == ["anchor", "delta"]
