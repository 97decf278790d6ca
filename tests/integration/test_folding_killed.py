"""Folds whose process is killed: nothing of them is visible, and the next process makes them."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest
from folding_rig import folding, publish
from publish_rig import RUN, model_folder
from publish_rig import restored as bits_at

from slackwater.bucket.local import LocalBucket
from slackwater.errors import NotFoundError
from slackwater.ids import Version
from slackwater.publish.lineage import read_manifest
from slackwater.publish.path import read_fold
from slackwater.publish.restore import restore

_CHILD: Final = """
import os, signal, sys
from pathlib import Path
from slackwater.bucket.local import LocalBucket
from slackwater.ids import RunId, Version
from slackwater.publish.folding import Folding

bucket, scratch, where = sys.argv[1:]

class Deadly(LocalBucket):
    def put_if_absent(self, key, body):
        if where == "commit":
            os.kill(os.getpid(), signal.SIGKILL)
        return super().put_if_absent(key, body)

def progress(stage, done, total):
    if stage == where:
        os.kill(os.getpid(), signal.SIGKILL)

maker = Folding(Deadly(Path(bucket)), RunId("demo"), every=4, scratch=Path(scratch), progress=progress)
maker.committed(Version(8), Version(0))
maker.wait()
"""


@pytest.mark.parametrize("where", ["apply", "encode", "commit"])
def test_a_fold_whose_process_is_killed_in_the_middle_leaves_nothing_visible(tmp_path: Path, where: str) -> None:
    bucket, scratch = LocalBucket(tmp_path / "bucket", create=True), tmp_path / "scratch"
    scratch.mkdir()
    publish(bucket, 10, model_folder(tmp_path / "model"))
    states = [bits_at(bucket, number) for number in range(10)]
    child = subprocess.run(
        [sys.executable, "-c", _CHILD, str(tmp_path / "bucket"), str(scratch), where],
        check=False, capture_output=True, timeout=100, env=os.environ,
    )  # fmt: skip
    assert child.returncode == -signal.SIGKILL, child.stderr
    with pytest.raises(NotFoundError):
        read_fold(bucket, RUN, Version(0), Version(8))
    assert [bits_at(bucket, number) for number in range(10)] == states
    with folding(bucket, tmp_path) as maker:
        maker.committed(Version(8), Version(0))
        maker.wait()
    assert read_fold(bucket, RUN, Version(0), Version(8)).state == read_manifest(bucket, RUN, Version(8)).state
    assert restore(bucket, RUN, Version(9)).version == 9
    assert bits_at(bucket, 9) == states[9]
