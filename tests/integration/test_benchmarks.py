"""The codec's benchmark on a little real data: results, not speed."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import claims
import codec
import deltas
import densities
import measure
import ours
import pairs
import peers
from slackwater.checkpoint.codec import Level
from slackwater.checkpoint.foreign.delta import Change
from slackwater.checkpoint.foreign.patches import Encoding, encode_bytes
from slackwater.checkpoint.outline import Outline
from slackwater.checkpoint.tensor import Bits, TensorSpec
from slackwater.errors import CorruptError, InternalError

FIXTURE = Path(__file__).parents[1] / "data" / "adamw_pair.safetensors"
PEERS = peers.all_peers()
SETS = [item.name for item in deltas.SETS]
NAMES = {
    *(f"{kind}_bits_{name}" for kind in ("fast", "wan", "order0", "exponent") for name in SETS),
    "manifest_bytes", "manifest_bytes_allowed", "copy_gbps",
    "fast_encode_gbps", "fast_decode_gbps", "wan_encode_gbps", "wan_decode_gbps",
    "fast_encode_vs_copy", "fast_decode_vs_copy",
    "encode_vs_xor_zstd", "decode_vs_xor_zstd", "size_vs_xor_zstd",
    "density_worst_size_vs_full", "density_worst_encode_share", "density_worst_decode_share",
    "apply_extra_mb",
}  # fmt: skip


@pytest.fixture(scope="module")
def pair() -> pairs.Pair:
    return pairs.read(FIXTURE)


def every_pattern(change: int) -> pairs.Pair:
    """A tensor with each bf16 pattern, NaN payloads and -0 among them, and one without any change."""
    old = np.arange(1 << 16, dtype=np.uint16)
    still = np.arange(100, dtype=np.uint16)
    specs = [TensorSpec(name=name, dtype="BF16", shape=bits.shape) for name, bits in (("a", old), ("b", still))]
    new: dict[str, Bits] = {"a": old ^ np.uint16(change), "b": still.copy()}
    return pairs.Pair(outline=Outline(specs), old={"a": old, "b": still}, new=new)


@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.name)
def test_each_peer_makes_the_new_bits_of_real_tensors(peer: peers.Peer, pair: pairs.Pair) -> None:
    outcome = peers.run(peer, pair, 1)  # which compares
    assert 0 < outcome.num_bytes < pair.num_bytes


@pytest.mark.parametrize("change", [0x8000, 0x0001, 0x7FC1])
@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.name)
def test_each_peer_keeps_every_pattern(peer: peers.Peer, change: int) -> None:
    peers.run(peer, every_pattern(change), 2)


@pytest.mark.parametrize("peer", PEERS[:-1], ids=lambda peer: peer.name)
def test_a_tensor_that_stays_costs_nothing_but_in_fireworks_layout(peer: peers.Peer) -> None:
    still = np.arange(100, dtype=np.uint16)
    assert peer.encode(still, still.copy()) == ()


def test_gaps_wider_than_16_bits_survive() -> None:
    old = np.zeros(200_000, dtype=np.uint16)
    new = old.copy()
    new[[0, 150_000]] = 7
    assert peers.apply_gaps(old.copy(), peers.encode_gaps(old, new)).tobytes() == new.tobytes()


@pytest.mark.parametrize(("peer", "encoding"), [(PEERS[0], "xor"), (PEERS[1], "xor"), (PEERS[3], "overwrite")])
def test_bodies_in_slimes_layout_are_those_that_we_write_for_its_readers(
    peer: peers.Peer, encoding: Encoding, pair: pairs.Pair
) -> None:
    for spec in pair.outline.specs:
        change = Change(spec=spec, old=pair.old[spec.name], new=pair.new[spec.name])
        assert peer.encode(change.old, change.new)[0] == encode_bytes(change, encoding, "zstd")


@pytest.mark.parametrize("peer", [PEERS[0], PEERS[1], PEERS[3]], ids=lambda peer: peer.name)
def test_a_peer_with_a_hash_sees_a_wrong_base(peer: peers.Peer, pair: pairs.Pair) -> None:
    name = pair.outline.specs[0].name
    body = peer.encode(pair.old[name], pair.new[name])
    with pytest.raises(CorruptError, match="hash"):
        peer.apply(pair.old[name] ^ np.uint16(1), body)


def test_a_peer_that_makes_other_bits_is_found_out(pair: pairs.Pair) -> None:
    def lose(held: Bits, body: peers.Body) -> Bits:
        assert body
        return held

    with pytest.raises(InternalError, match="doesn't make the new bits"):
        peers.run(replace(PEERS[4], apply=lose), pair, 1)


@pytest.mark.parametrize("level", ["fast", "wan"])
def test_our_delta_is_published_and_applied(level: Level, pair: pairs.Pair) -> None:
    delta = ours.publish(pair, level)
    ours.speeds(pair, delta, level, 1)  # which compares
    size = delta.size
    assert size.changed == sum(int((pair.old[name] != pair.new[name]).sum()) for name in pair.old)
    assert size.total == size.bodies + 16 * 2 + 8 * 2
    assert (size.tiles, size.tensors, size.manifest_allowed) == (2, 2, 64 * 2 + 4096)
    assert 0 < size.manifest <= size.manifest_allowed


@pytest.mark.parametrize("change", densities.KINDS.values(), ids=densities.KINDS)
def test_a_synthetic_change_changes_its_share_of_the_elements(change: densities.Change, pair: pairs.Pair) -> None:
    base = densities.part_of(pair, 1)
    assert len(base.old) == 1
    for share in (0.0, 0.1, 1.0):
        made = densities.changed(base, share, change, np.random.default_rng(0))
        (old,), (new,) = base.old.values(), made.new.values()
        assert (old != new).mean() == pytest.approx(share, abs=0.02)


def test_runs_are_counted_and_slow_work_is_run_three_times() -> None:
    begun: list[int] = []
    speed, last = measure.timed(10, 5, lambda: len(begun), before=lambda: begun.append(1))
    assert (len(speed.seconds), last) == (5, 5)
    assert speed.slowest <= speed.gbps <= speed.fastest
    assert len(measure.timed(10, 5, list[int], patience=0)[0].seconds) == 3
    assert len(measure.timed(10, 2, list[int], patience=0)[0].seconds) == 2


def test_a_claim_tells_its_target_and_whether_it_is_met() -> None:
    missed = claims.claim("fast_encode_gbps", 1.23456789)
    assert missed.entry() == {"name": "fast_encode_gbps", "value": 1.2346, "target": 2.0, "ok": False}
    assert claims.claim("apply_extra_mb", 256).ok
    assert not claims.claim("apply_extra_mb", 256.5).ok
    assert claims.claim("copy_gbps", 3).entry() == {"name": "copy_gbps", "value": 3}


def test_the_whole_benchmark_claims_every_number(pair: pairs.Pair, tmp_path: Path) -> None:
    shown: list[object] = []
    scale = codec.Scale(runs=1, density_elements=1, density_runs=1, tensors=2, shape=(64, 32))
    found = codec.claims(codec.run(lambda _: pair, tmp_path, scale, shown.append))
    told = json.loads(claims.line("codec", found))
    assert told["bench"] == "codec"
    names = [entry["name"] for entry in told["claims"]]
    assert len(names) == len(set(names))
    assert set(names) >= NAMES
    assert all(entry["value"] >= 0 for entry in told["claims"])
    assert {*claims.AT_MOST, *claims.AT_LEAST} <= set(names)
    assert len(shown) == 5
    assert not list(tmp_path.iterdir())
    value = {item.name: item.value for item in found}
    assert value["wan_bits_p142"] < value["order0_bits_p142"] + 0.5
    assert value["size_vs_xor_zstd"] < 0.5
    assert value["density_worst_size_vs_full"] <= 1.001
