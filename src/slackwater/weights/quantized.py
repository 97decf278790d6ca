"""A trainer's export shown as the release's own tensors: quantised by the release's rule, so that deltas are too."""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from slackwater.checkpoint.tensor import Bits, TensorSpec
from slackwater.errors import InvalidInputError, NotFoundError
from slackwater.weights.quantize.blocks import from_bits
from slackwater.weights.quantize.formats import find_quantizer
from slackwater.weights.quantize.quantizer import Quantizer, Shape
from slackwater.weights.source import TensorSource, pieces_of

_FLOATS: Final[Mapping[str, torch.dtype]] = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
_UPPER_HALF: Final = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class _Weight:
    """A weight that is quantised on its way through."""

    name: str
    dtype: torch.dtype
    shape: Shape
    quantizer: Quantizer


class QuantizedSource:
    """An export in the training dtypes, seen in the dtypes, names and shapes of the anchor.

    A weight that the anchor holds as codes and scales is quantised when one of its parts is read, the whole weight
    at once; its parts are kept until another weight is asked for, so read parts of one weight in a row, as rising
    names do. BF16 becomes F32 where the anchor holds F32, which is exact. Equal tensors pass through. Tensors that
    the export lacks stay absent: they are unchanged.

    Args:
        source: What the trainer exports.
        serving: What the anchor holds, by name.
        held: The bits of the version before, by the anchor's names: where a block's value is the same, its bytes
            stay (see `Quantizer.quantize`). None for a first version.

    Attributes:
        quantizers: The quantiser of each tensor that one makes, codes and scales alike, by the anchor's names.

    Raises:
        InvalidInputError: The export has pieces of tensors; or a tensor is unknown to the anchor, of another shape, or
            of a dtype that isn't served and can't become what is; the message names it.
    """

    def __init__(
        self, source: TensorSource, serving: Mapping[str, TensorSpec], held: Callable[[str], Bits] | None = None
    ) -> None:
        if pieces_of(source):
            raise InvalidInputError(
                "a weight is quantised whole, and this export has pieces of some", hint="put them together before"
            )
        self._source: Final = source
        self._held: Final = held
        self._widened: Final[set[str]] = set()
        self._weights: Final[dict[str, _Weight]] = {}
        specs: dict[str, TensorSpec] = {}
        for spec in source.specs().values():
            for part in self._admit(spec, serving):
                if part in specs:
                    raise InvalidInputError(
                        f"{part} is in the export, and so is the weight that it would be made from",
                        hint="export a weight either in floats or as codes and scales",
                    )
                specs[part] = serving[part]
        self._specs: Final = dict(sorted(specs.items()))
        self.quantizers: Final[Mapping[str, Quantizer]] = {
            part: weight.quantizer for part, weight in sorted(self._weights.items())
        }
        self._lock: Final = threading.Lock()
        self._last: tuple[str, Mapping[str, Bits]] = ("", {})

    def specs(self) -> Mapping[str, TensorSpec]:
        """See `TensorSource.specs`: those of the anchor."""
        return self._specs

    def bits(self, name: str) -> Bits:
        """See `TensorSource.bits`.

        Raises:
            InvalidInputError: The weight is NaN, infinite or absurd somewhere.
        """
        if name not in self._specs:
            raise NotFoundError(f"the export makes no {name}")
        if name in self._weights:
            return self._parts(self._weights[name])[name]
        bits = self._source.bits(name)
        return _widen(bits) if name in self._widened else bits

    def _admit(self, spec: TensorSpec, serving: Mapping[str, TensorSpec]) -> tuple[str, ...]:
        """The anchor's tensors that one of the export stands for."""
        wanted = serving.get(spec.name)
        if wanted == spec:
            return (spec.name,)
        if wanted is not None and wanted.shape == spec.shape and (spec.dtype, wanted.dtype) == ("BF16", "F32"):
            self._widened.add(spec.name)
            return (spec.name,)
        found = find_quantizer(serving, spec.name) if spec.dtype in _FLOATS else None
        if found is None or spec.shape != found[1]:
            raise _unfit(spec, wanted, None if found is None else found[1])
        quantizer, shape = found
        weight = _Weight(name=spec.name, dtype=_FLOATS[spec.dtype], shape=shape, quantizer=quantizer)
        parts = tuple(quantizer.parts(spec.name, shape))
        self._weights.update(dict.fromkeys(parts, weight))
        return parts

    def _parts(self, weight: _Weight) -> Mapping[str, Bits]:
        with self._lock:
            if self._last[0] != weight.name:
                self._last = ("", {})  # the old parts go before the new ones are made
                self._last = (weight.name, self._quantize(weight))
            return self._last[1]

    def _quantize(self, weight: _Weight) -> Mapping[str, Bits]:
        values = from_bits(self._source.bits(weight.name)).view(weight.dtype).view(weight.shape)
        parts = weight.quantizer.parts(weight.name, weight.shape)
        held = None if self._held is None else {part: self._held(part) for part in parts}
        return weight.quantizer.quantize(weight.name, values, held)


def _widen(bits: Bits) -> Bits:
    """BF16 to F32: a bfloat16 is the upper half of the float32 of the same value, NaN payloads too."""
    return bits.astype("<u4") << np.uint32(_UPPER_HALF)


def _unfit(spec: TensorSpec, wanted: TensorSpec | None, shape: Shape | None) -> InvalidInputError:
    """Why a tensor of the export is none of the anchor's; ``shape``: of the weight that the anchor holds quantised."""
    what = f"{spec.name} is {spec.dtype} {list(spec.shape)} in the export"
    if shape is not None:
        return InvalidInputError(f"{what}, and the anchor's codes are of {list(shape)}", hint="export the whole weight")
    if wanted is None:
        return InvalidInputError(
            f"{what}, and the anchor has no such tensor", hint="export the release's own tensor names, and none besides"
        )
    what = f"{what} and {wanted.dtype} {list(wanted.shape)} in the anchor"
    if wanted.shape == spec.shape and {spec.dtype, wanted.dtype} <= _FLOATS.keys():
        return InvalidInputError(
            what, hint=f"cast it to {wanted.dtype} in the trainer, which should train on what it publishes"
        )
    return InvalidInputError(
        what, hint="export it as the anchor holds it, or in floats if the anchor holds codes and scales of a known kind"
    )
