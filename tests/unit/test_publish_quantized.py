"""A trainer's bf16 export becomes a delta in the release's own dtypes: every layout, end to end through a bucket."""

from pathlib import Path

import numpy as np
import pytest
from release_layouts import TABLES, Release, release

from slackwater.checkpoint.groups import group_key
from slackwater.ids import RunId, Version
from slackwater.publish.lineage import read_manifest
from slackwater.publish.publisher import Publisher
from slackwater.publish.restore import restore
from slackwater.testing.bucket import MemoryBucket
from slackwater.weights.quantized import QuantizedSource
from slackwater.weights.source import FolderSource
from slackwater.weights.state_dict import StateDictSource

RUN = RunId("run")


@pytest.mark.parametrize("layout", sorted(TABLES))
def test_a_step_is_published_in_the_serving_dtypes_and_unchanged_blocks_stay(layout: str, tmp_path: Path) -> None:
    made, bucket = release(layout), MemoryBucket()
    made.write(tmp_path)
    publisher = Publisher(bucket, RUN)
    publisher.publish(FolderSource(tmp_path), step=0)

    def serving(trained: Release) -> QuantizedSource:
        return QuantizedSource(StateDictSource(trained.export), publisher.held_specs(), publisher.held_bits)

    same = publisher.publish(serving(made), step=1)
    assert same.changed == 0, "requantising what was not trained changes nothing"

    moved = publisher.publish(serving(made.after_step(lr=1e-4)), step=2)
    assert 0 < moved.changed < moved.total
    manifest = read_manifest(bucket, RUN, Version(2))
    assert set(manifest.quantizers) == {quantizer.name for quantizer in made.quantizers.values()}
    table = restore(bucket, RUN, Version(2)).table
    by_group: dict[str, set[int]] = {}
    for body in manifest.listed():
        for tile in body.tiles:
            by_group.setdefault(group_key(table.outline.place(tile.number)[0].name), set()).add(body.object)
    assert all(len(objects) == 1 for objects in by_group.values()), "a group lies in one object"
    assert table.digest == manifest.state
    restored = restore(bucket, RUN, Version(2)).bits
    for name in publisher.held_specs():
        np.testing.assert_array_equal(restored[name], publisher.held_bits(name))
