"""The benchmark of publishing on a little real data: results, not speed."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import claims
import pairs
import publish_cost
import publish_models
import publish_proofs
import publishing
from slackwater.bucket.local import LocalBucket
from slackwater.errors import CorruptError
from slackwater.weights.source import FolderSource

FIXTURE = Path(__file__).parents[1] / "data" / "adamw_pair.safetensors"
SCALE = publishing.Scale(copies=3, runs=1, crashes=2, races=3)
TOLD = {
    "model_mb", "changed_share", "anchor_mb", "anchor_seconds", "full_seconds", "delta_mb", "delta_seconds",
    "blocked_seconds", "memcpy_seconds", "memcpy_threads_seconds", "anchor_anon_mb", "delta_anon_mb",
    "peak_resident_mb",
}  # fmt: skip
NAMES = {*claims.PUBLISH_AT_MOST, *(f"{model}_{name}" for model in ("small", "large") for name in TOLD)}


@pytest.fixture(scope="module")
def pair() -> pairs.Pair:
    return pairs.read(FIXTURE)


def test_copies_of_a_model_have_its_bits_and_are_no_copies_of_each_other(pair: pairs.Pair, tmp_path: Path) -> None:
    model = publish_models.make(tmp_path, "m", pair, 2)
    for folder, states in ((model.before, pair.old), (model.after, pair.new)):
        source = FolderSource(folder)
        assert len(source.specs()) == 2 * len(states)
        for name, bits in states.items():
            assert np.array_equal(source.bits(f"copies.0.{name}"), bits)
            turned = source.bits(f"copies.1.{name}")
            assert not np.array_equal(turned, bits)
            assert np.array_equal(np.sort(turned), np.sort(bits))


def test_the_bytes_sent_and_encoded_are_those_in_the_bucket(pair: pairs.Pair, tmp_path: Path) -> None:
    model = publish_models.make(tmp_path, "m", pair, 2)
    bucket = tmp_path / "bucket"
    task = publish_cost.Task(name="m", before=str(model.before), after=str(model.after), url=str(bucket), runs=2)
    cost = publish_cost.measured(task)
    run = bucket / "bench-m"
    sizes = {path.relative_to(run).as_posix(): path.stat().st_size for path in run.rglob("*") if path.is_file()}
    blobs = sum(size for key, size in sizes.items() if key.startswith("blobs/"))
    assert cost.num_bytes == 2 * pair.num_bytes
    assert 0 < cost.encoded < cost.uploaded < 2 * cost.encoded
    assert cost.encoded < blobs <= 2 * cost.encoded + 4096  # there and back
    changed = sum(int((pair.old[name] != pair.new[name]).sum()) for name in pair.old)
    assert cost.share == pytest.approx(changed / pair.outline.num_elements)
    assert cost.anchor_uploaded > cost.num_bytes
    assert cost.blocked_s <= cost.delta_s
    assert min(cost.full_s, cost.copy_s, cost.anchor_s) > 0
    whole = sum(path.stat().st_size for path in (bucket / "full").iterdir())
    assert whole == sum(path.stat().st_size for path in model.after.glob("*.safetensors"))


def test_a_full_checkpoint_is_written_until_it_is_enough_and_the_rest_reckoned(
    pair: pairs.Pair, tmp_path: Path
) -> None:
    source = FolderSource(publish_models.make(tmp_path, "m", pair, 3).before)
    for enough, files in ((1, 1), (pair.num_bytes, 1), (2 * pair.num_bytes, 2), (1 << 40, 3)):
        bucket = LocalBucket(tmp_path / f"bucket-{enough}", create=True)
        assert publish_cost.full_seconds(bucket, source, enough) > 0
        assert len(list(bucket.list("full"))) == files


@pytest.mark.parametrize("error", [AssertionError, ValueError, CorruptError("spoilt")])
def test_a_proof_that_fails_is_counted(error: Exception, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def lose(seeds: list[int], _: Callable[[int], object], __: Path) -> None:
        if seeds[0] != 1:
            raise error

    monkeypatch.setattr(publish_proofs, "run_races", lose)
    assert publish_proofs.lost_races(tmp_path, 3) == 2


def test_the_whole_benchmark_claims_every_number(pair: pairs.Pair, tmp_path: Path) -> None:
    shown: list[object] = []
    measured = publishing.run(pair, tmp_path, SCALE, shown.append)
    assert len(shown) == 1
    assert not list(tmp_path.iterdir())
    found = publishing.claims(measured)
    told = json.loads(claims.line("publish", found))
    assert told["bench"] == "publish"
    names = [entry["name"] for entry in told["claims"]]
    assert (len(names), set(names)) == (len(NAMES), NAMES)
    assert all(("target" in entry) == (entry["name"] in claims.PUBLISH_AT_MOST) for entry in told["claims"])
    value = {item.name: item.value for item in found}
    assert (value["torn_reads"], value["lost_races_mixed"]) == (0, 0)
    assert value["large_model_mb"] == pytest.approx(3 * value["small_model_mb"])
    assert value["uploaded_vs_encoded"] == max(cost.uploaded / cost.encoded for cost in measured.costs)
    assert value["extra_mb"] < 512
    missed = {item.name: item for item in publishing.claims(replace(measured, torn_reads=1))}
    assert not missed["torn_reads"].ok
