"""The codec's benchmark: `make bench-codec`. Sizes and speeds on real deltas, beside what others ship.

Data: `deltas`, made once per machine. States lie in this process's memory and are warm; speeds are dense bytes of the
whole model per second of the median run, on one thread. Claims ``..._vs_xor_zstd`` compare with the loops that slime
publishes, ``..._vs_tuned_xor_zstd`` with the same bytes made as fast as we can. The last line is one JSON object.
"""

import argparse
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import applying
import deltas
import densities
import first_use
import mapped
import measure
import ours
import pairs
import peers
import tables
from claims import Claim, claim, line
from pairs import Pair

USUAL: Final = "p142"
"""The set that speeds are measured on."""
_MEGA: Final = 1e6


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """How much is measured."""

    runs: int = 9
    """Of our own codec, of a copy, and of peers that aren't slow."""
    density_elements: int = 16 << 20
    density_runs: int = 3
    tensors: int = mapped.TENSORS
    """Of the mapped checkpoint."""
    shape: tuple[int, int] = mapped.SHAPE
    """Of each one."""


QUICK: Final = Scale(runs=1, density_elements=1 << 20, density_runs=1, tensors=2, shape=(2048, 2048))
"""Enough to see that everything works."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """Everything that was measured."""

    sizes: Mapping[str, ours.Sizes]
    copy: measure.Speed
    digests: measure.Speed
    fast: ours.Speeds
    wan: ours.Speeds
    peers: tuple[peers.Outcome, ...]
    densities: tuple[densities.Point, ...]
    applied: tuple[applying.Applied, ...]


def run(load: Callable[[str], Pair], work: Path, scale: Scale, show: Callable[[object], None]) -> Measured:
    """Measure everything.

    Args:
        load: Gives a set of `deltas.SETS` by its name.
        work: A folder on a disk, for the mapped checkpoint.
        scale: How much.
        show: Takes each table when it is done.
    """
    sizes = {item.name: ours.sizes(load(item.name)) for item in deltas.SETS}
    show(tables.sizes(sizes))
    pair = load(USUAL)
    copy, digests = ours.copying(pair, scale.runs), ours.digesting(pair, scale.runs)
    fast, wan = (ours.speeds(pair, ours.publish(pair, level), level, scale.runs) for level in densities.LEVELS)
    show(tables.speeds(copy, digests, fast, wan))
    ran = tuple(peers.run(peer, pair, scale.runs) for peer in peers.all_peers())
    show(tables.peers(sizes[USUAL], fast, wan, ran))
    points = tuple(densities.sweep(pair, scale.density_elements, scale.density_runs))
    show(tables.densities(points))
    applied = tuple(mapped.measure(work, scale.tensors, scale.shape))
    show(tables.applied(applied))
    return Measured(
        sizes=sizes, copy=copy, digests=digests, fast=fast, wan=wan, peers=ran, densities=points, applied=applied
    )


def claims(measured: Measured) -> list[Claim]:
    """What the measurements say, by name."""
    return [
        *_size_claims(measured.sizes),
        *_speed_claims(measured),
        *_peer_claims(measured),
        *_density_claims(measured.densities),
        claim("apply_extra_mb", max(item.extra for item in measured.applied) / _MEGA),
    ]


def _size_claims(sizes: Mapping[str, ours.Sizes]) -> list[Claim]:
    found: list[Claim] = []
    for name, size in sizes.items():
        found += [
            claim(f"fast_bits_{name}", size.fast.bits),
            claim(f"wan_bits_{name}", size.wan.bits),
            claim(f"order0_bits_{name}", size.bounds.order0),
            claim(f"exponent_bits_{name}", size.bounds.by_exponent),
        ]
    every = [size for both in sizes.values() for size in (both.fast, both.wan)]
    largest = max(every, key=lambda size: size.manifest - size.manifest_allowed)
    return [
        *found,
        Claim(name="manifest_bytes", value=largest.manifest, target=largest.manifest_allowed),
        claim("manifest_bytes_allowed", largest.manifest_allowed),
    ]


def _speed_claims(measured: Measured) -> list[Claim]:
    fast, wan, copy = measured.fast, measured.wan, measured.copy.gbps
    return [
        claim("fast_encode_gbps", fast.encode.gbps),
        claim("fast_decode_gbps", fast.decode.gbps),
        claim("wan_encode_gbps", wan.encode.gbps),
        claim("wan_decode_gbps", wan.decode.gbps),
        claim("copy_gbps", copy),
        claim("fast_encode_vs_copy", fast.encode.gbps / copy),
        claim("fast_decode_vs_copy", fast.decode.gbps / copy),
        claim("two_digests_gbps", measured.digests.gbps),
    ]


def _peer_claims(measured: Measured) -> list[Claim]:
    fast, (xor, tuned, *_) = measured.fast, measured.peers
    return [
        claim("encode_vs_xor_zstd", fast.encode.gbps / xor.encode.gbps),
        claim("decode_vs_xor_zstd", fast.decode.gbps / xor.decode.gbps),
        claim("size_vs_xor_zstd", measured.sizes[USUAL].fast.total / xor.num_bytes),
        claim("encode_vs_tuned_xor_zstd", fast.encode.gbps / tuned.encode.gbps),
        claim("decode_vs_tuned_xor_zstd", fast.decode.gbps / tuned.decode.gbps),
    ]


def _density_claims(points: tuple[densities.Point, ...]) -> list[Claim]:
    fast, wan = (densities.worst(points, level) for level in densities.LEVELS)
    return [
        claim("density_worst_size_vs_full", max(fast.size, wan.size)),
        claim("density_worst_encode_share", fast.encode),
        claim("density_worst_decode_share", fast.decode),
        claim("wan_density_worst_encode_share", wan.encode),
        claim("wan_density_worst_decode_share", wan.decode),
    ]


def main() -> None:
    """Measure, print tables, and print the claims as the last line."""
    parser = argparse.ArgumentParser(description="measure the codec on real deltas, beside what others ship")
    parser.add_argument("--quick", action="store_true", help="one run of everything: to see that it works")
    quick = parser.parse_args().quick
    scale = QUICK if quick else Scale()
    folder = deltas.ensure(lambda text: print(text, file=sys.stderr, flush=True))
    show = tables.printer()
    before = measure.load()
    show(measure.machine())
    show(tables.first_use(first_use.measure()))
    found = claims(run(pairs.load, folder.parent, scale, show))
    if quick:  # speeds of one run are no speeds
        found = [item if item.is_exact else replace(item, target=None) for item in found]
    show(f"load average over a minute: {before:.2f} before, {measure.load():.2f} after")
    show(tables.claims(found))
    print(line("codec", found))


if __name__ == "__main__":
    main()
