"""What benchmarks claim: numbers by name, the targets that they are held to, and the last line's JSON."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal

AT_MOST: Final[Mapping[str, float]] = MappingProxyType(
    {
        "fast_bits_p019": 12.6,
        "fast_bits_p050": 11.1,
        "fast_bits_p142": 9.65,
        "fast_bits_p356": 8.45,
        "wan_bits_p019": 8.7,
        "wan_bits_p050": 7.75,
        "wan_bits_p142": 6.9,
        "wan_bits_p356": 6.2,
        "size_vs_xor_zstd": 0.5,
        "density_worst_size_vs_full": 1.001,
        "apply_extra_mb": 256,
    }
)
"""Targets of what has to be small, of the codec."""

PUBLISH_AT_MOST: Final[Mapping[str, float]] = MappingProxyType(
    {
        "blocked_vs_memcpy": 3,
        "uploaded_vs_encoded": 1.02,
        "delta_vs_full_seconds": 0.2,
        "extra_mb": 512,
        "torn_reads": 0,
        "lost_races_mixed": 0,
    }
)
"""Targets of what has to be small, of publishing."""

AT_LEAST: Final[Mapping[str, float]] = MappingProxyType(
    {
        "fast_encode_gbps": 2.0,
        "fast_decode_gbps": 4.0,
        "wan_encode_gbps": 0.7,
        "wan_decode_gbps": 0.7,
        "encode_vs_xor_zstd": 2.5,
        "decode_vs_xor_zstd": 3.0,
        "density_worst_encode_share": 1 / 3,
        "density_worst_decode_share": 1 / 3,
    }
)
"""Targets of what has to be large, of the codec."""

SWAP_AT_MOST: Final[Mapping[str, float]] = MappingProxyType(
    {
        "pause_vs_scatter_limit_p019": 2.5,
        "pause_vs_scatter_limit_p142": 2,
        "aborted": 0,
        "mixed_weights": 0,
        "stale_kv": 0,
        "false_labels": 0,
        "extra_host_bytes_vs_delta": 12,
    }
)
"""Targets of what has to be small, of swapping."""

SWAP_AT_LEAST: Final[Mapping[str, float]] = MappingProxyType(
    {
        "pause_vs_nan_patch_p019": 30,
        "pause_vs_nan_patch_p142": 5,
        "pause_vs_dense_copy_p019": 5,
        "pause_vs_dense_copy_p142": 0.9,
    }
)
"""Targets of what has to be large, of swapping."""

ENGINE_AT_MOST: Final[Mapping[str, float]] = MappingProxyType(
    {
        "logprob_cost": 0.1,
        "wrong_answers": 0,
        "logprob_fp32_most": 1e-4,
        "logprob_bf16_mean": 0.005,
        "logprob_bf16_p99": 0.05,
        "invariant_parted": 0,
    }
)
"""Targets of what has to be small, of the embedded engine."""

ENGINE_AT_LEAST: Final[Mapping[str, float]] = MappingProxyType(
    {"vs_vllm_cpu": 1.0, "vs_transformers_generate": 1.5, "vs_transformers_cb": 1.5}
)
"""Targets of what has to be large, of the embedded engine."""

_DIGITS: Final = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """A number that was measured, and what it is held to."""

    name: str
    value: float
    target: float | None = None
    """None where the number is only told."""
    side: Literal["at most", "at least"] = "at most"
    """On which side of the target it has to lie."""

    @property
    def ok(self) -> bool:
        """Whether the target is met; true without one."""
        if self.target is None:
            return True
        return self.value <= self.target if self.side == "at most" else self.value >= self.target

    @property
    def is_exact(self) -> bool:
        """Whether it counts bytes: the same in every run."""
        return "bits" in self.name or "bytes" in self.name or "size" in self.name

    def entry(self) -> dict[str, str | float | bool]:
        """The claim as a JSON object's members."""
        told: dict[str, str | float | bool] = {"name": self.name, "value": _short(self.value)}
        return told if self.target is None else {**told, "target": _short(self.target), "ok": self.ok}


def claim(
    name: str, value: float, at_most: Mapping[str, float] = AT_MOST, at_least: Mapping[str, float] = AT_LEAST
) -> Claim:
    """A claim held to its target of ``at_most`` or ``at_least``, where it has one."""
    if name in at_least:
        return Claim(name=name, value=value, target=at_least[name], side="at least")
    return Claim(name=name, value=value, target=at_most.get(name))


def line(bench: str, claims: Sequence[Claim]) -> str:
    """One JSON object with all claims: a benchmark's last line."""
    return json.dumps({"bench": bench, "claims": [item.entry() for item in claims]})


def _short(value: float) -> float:
    return value if isinstance(value, int) else float(f"{value:.{_DIGITS}g}")
