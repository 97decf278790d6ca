"""How a weight becomes codes and scales, and back, block by block.

Values are taken to float32 and divided by their block's scale; codes round to the nearest, ties to even
(`codes`); scales follow their release's rule (`scales`). The same bytes come out whatever the number of
threads: nothing but maxima and element-wise steps is computed.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from slackwater.checkpoint.tensor import Bits, TensorSpec
from slackwater.errors import InvalidInputError
from slackwater.weights.quantize.blocks import (
    DEVICE_WINDOW,
    HOST_WINDOW,
    Window,
    blocked,
    from_bits,
    same_blocks,
    spread,
    unblocked,
    windows,
)
from slackwater.weights.quantize.codes import Codes
from slackwater.weights.quantize.scales import Scales, Unit

Shape = tuple[int, int]
"""Rows and columns of a weight, counted in values."""

_WEIGHT: Final = "weight"
_MATRIX: Final = 2
_FLOATS: Final = frozenset({torch.bfloat16, torch.float16, torch.float32})
_LARGEST: Final = 2.0**120
"""Magnitudes beyond are refused with infinities: near float32's end, scale times code could overflow."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """The last names and dtypes under which codes and scales are stored, in place of ``weight``."""

    codes: str
    codes_dtype: str
    scales: str
    scales_dtype: str
    unit: Unit | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Parts:
    """A quantised weight as tensors."""

    codes: torch.Tensor
    """uint8 [rows, cols / per byte]."""
    scales: torch.Tensor
    """[block rows, block columns], as stored."""
    unit: np.float32 | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Quantizer:
    """How a weight becomes codes and scales, and back."""

    name: str
    block: tuple[int, int]
    """Rows and columns that share a scale; powers of two."""
    codes: Codes
    scales: Scales
    layout: Layout

    def parts(self, weight: str, shape: Shape) -> Mapping[str, TensorSpec]:
        """The tensors that hold a weight, by name: codes, scales, and the unit where there is one.

        Raises:
            InvalidInputError: The name doesn't end in ``.weight``, or the columns don't fill whole bytes.
        """
        stem, _, leaf = weight.rpartition(".")
        if leaf != _WEIGHT or not stem:
            raise InvalidInputError(f"{weight} can't be quantised: its name doesn't end in .{_WEIGHT}")
        rows, cols = shape
        if cols % self.codes.per_byte:
            raise InvalidInputError(f"{weight}: {self.name} packs {self.codes.per_byte} columns, and it has {cols}")
        layout, (down, across) = self.layout, self._grid(shape)
        tensors: list[tuple[str, str, tuple[int, ...]]] = [
            (layout.codes, layout.codes_dtype, (rows, cols // self.codes.per_byte)),
            (layout.scales, layout.scales_dtype, (down, across)),
        ]
        if layout.unit is not None:
            tensors.append((layout.unit.leaf, "F32", layout.unit.shape))
        specs = (TensorSpec(name=f"{stem}.{leaf}", dtype=dtype, shape=size) for leaf, dtype, size in tensors)
        return {spec.name: spec for spec in specs}

    def shape_in(self, serving: Mapping[str, TensorSpec], weight: str) -> Shape | None:
        """The shape of a weight that a checkpoint holds in just this layout; None where it doesn't."""
        codes = serving.get(f"{weight.removesuffix(_WEIGHT)}{self.layout.codes}")
        if codes is None or codes.dtype != self.layout.codes_dtype or len(codes.shape) != _MATRIX:
            return None
        shape = (codes.shape[0], codes.shape[1] * self.codes.per_byte)
        fits = all(serving.get(name) == spec for name, spec in self.parts(weight, shape).items())
        return shape if fits else None

    def quantize(self, weight: str, values: torch.Tensor, held: Mapping[str, Bits] | None = None) -> Mapping[str, Bits]:
        """Quantise a weight; where its value is still that of ``held``, the bytes are held's.

        A block keeps its bytes if they decode, under the new unit where there is one, bit for bit to the block's
        values in their own dtype, or to what the new bytes decode to. So weights that nobody trained don't move,
        by whatever rule they were made.

        Args:
            weight: Its name, ending in ``.weight``.
            values: [rows, cols] of bfloat16, float16 or float32, on any device; the work is done there.
            held: The parts of the version before, by name; none for a first version.

        Returns:
            The bits of each of `parts`, on the host.

        Raises:
            InvalidInputError: Another dtype or rank, values that are NaN, infinite or absurd, or parts that
                don't fit; the message names the weight.
        """
        values, amax = _checked(weight, values)
        shape: Shape = (values.shape[0], values.shape[1])
        specs = self.parts(weight, shape)
        before = None if held is None else self._load(weight, specs, held)
        made = self._empty(shape, values.device, self._choose_unit(amax, before))
        limit = HOST_WINDOW if values.device.type == "cpu" else DEVICE_WINDOW
        for window in windows(shape, self.block, limit):
            self._fill(made, window, values, before)
        return _store(specs, made)

    def dequantize(self, weight: str, shape: Shape, parts: Mapping[str, Bits]) -> torch.Tensor:
        """float32 [rows, cols] of what the parts stand for, on the host.

        Raises:
            InvalidInputError: A part is missing or of another size.
        """
        held = self._load(weight, self.parts(weight, shape), parts)
        values = torch.empty(shape)
        for window in windows(shape, self.block, HOST_WINDOW):
            codes, scales = self._window(held, window, values.device)
            found = values[window.rows, window.cols]
            found.copy_(unblocked(self._decode(codes, scales, held.unit), *found.shape))
        return values

    def _grid(self, shape: Shape) -> tuple[int, int]:
        return -(-shape[0] // self.block[0]), -(-shape[1] // self.block[1])

    def _choose_unit(self, amax: float, before: _Parts | None) -> np.float32 | None:
        if self.layout.unit is None:
            return None
        return self.layout.unit.choose(amax, self.codes.maximum, None if before is None else before.unit)

    def _factor(self, unit: np.float32 | None) -> float:
        return 1.0 if self.layout.unit is None or unit is None else self.layout.unit.factor(unit)

    def _fill(self, made: _Parts, window: Window, values: torch.Tensor, before: _Parts | None) -> None:
        """Quantise one window into ``made``."""
        given = blocked(values[window.rows, window.cols], self.block)
        held = None if before is None else self._window(before, window, values.device)
        codes, scales = self._encode(given, made.unit, held)
        place = made.codes[window.of_packed(self.codes.per_byte)]
        place.copy_(unblocked(codes, *place.shape))
        made.scales[window.blocks].copy_(scales)

    def _encode(
        self, given: torch.Tensor, unit: np.float32 | None, held: tuple[torch.Tensor, torch.Tensor] | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes (blocked) and scales of blocked values."""
        exact, factor = given.float(), self._factor(unit)
        if held is None:
            return self._encode_anew(exact, factor)
        old = self._decode(*held, unit)
        keep = same_blocks(old.to(given.dtype), given)
        if bool(keep.all()):
            return held
        codes, scales = self._encode_anew(exact, factor)
        keep |= same_blocks(old, self._decode(codes, scales, unit))
        return torch.where(spread(keep), held[0], codes), torch.where(keep, held[1], scales)

    def _encode_anew(self, exact: torch.Tensor, factor: float) -> tuple[torch.Tensor, torch.Tensor]:
        scales = self.scales.encode(exact.abs().amax((1, 3)), self.codes.maximum * factor)
        return self.codes.encode(exact / spread(self.scales.decode(scales) * factor)), scales

    def _decode(self, codes: torch.Tensor, scales: torch.Tensor, unit: np.float32 | None) -> torch.Tensor:
        return self.codes.decode(codes) * spread(self.scales.decode(scales) * self._factor(unit))

    def _window(self, parts: _Parts, window: Window, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes (blocked) and scales of one window."""
        height, width = self.block
        codes = parts.codes[window.of_packed(self.codes.per_byte)].to(device)
        return blocked(codes, (height, width // self.codes.per_byte)), parts.scales[window.blocks].to(device)

    def _empty(self, shape: Shape, device: torch.device, unit: np.float32 | None) -> _Parts:
        return _Parts(
            codes=torch.empty((shape[0], shape[1] // self.codes.per_byte), dtype=torch.uint8, device=device),
            scales=torch.empty(self._grid(shape), dtype=self.scales.stored, device=device),
            unit=unit,
        )

    def _load(self, weight: str, specs: Mapping[str, TensorSpec], parts: Mapping[str, Bits]) -> _Parts:
        for name, spec in specs.items():
            if name not in parts or parts[name].size != spec.num_elements:
                raise InvalidInputError(f"{weight}: {self.name} needs {name} as {spec.dtype} {list(spec.shape)}")
        codes, scales, *unit = (parts[name] for name in specs)
        of_codes, of_scales, *_ = (spec.shape for spec in specs.values())
        return _Parts(
            codes=from_bits(codes).view(of_codes),
            scales=from_bits(scales).view(self.scales.stored).view(of_scales),
            unit=unit[0].view(np.float32)[0] if unit else None,
        )


def _store(specs: Mapping[str, TensorSpec], made: _Parts) -> Mapping[str, Bits]:
    found = [made.codes.cpu().numpy(), made.scales.cpu().numpy()]
    if made.unit is not None:
        found.append(np.array([made.unit]))
    pairs = zip(specs.items(), found, strict=True)
    return {name: array.reshape(-1).view(spec.bits_dtype) for (name, spec), array in pairs}


def _checked(weight: str, values: torch.Tensor) -> tuple[torch.Tensor, float]:
    """The values, without gradient, and their largest magnitude."""
    if values.dtype not in _FLOATS or values.dim() != _MATRIX:
        raise InvalidInputError(
            f"{weight} is {values.dtype} {list(values.shape)}: no matrix of floats",
            hint="pass it as bfloat16, float16 or float32, two-dimensional",
        )
    values = values.detach().contiguous()
    if not values.numel():
        return values, 0.0
    lowest, highest = torch.aminmax(values)
    amax = float(torch.maximum(-lowest, highest))
    if not amax <= _LARGEST:  # a NaN is not
        raise InvalidInputError(
            f"{weight} holds NaN, infinity or a magnitude beyond 2**120",
            hint="don't publish this step: the training has diverged",
        )
    return values, amax
