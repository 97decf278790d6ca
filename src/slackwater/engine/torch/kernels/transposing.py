"""Sixteen rows of sixteen words turned in registers: what AMX's tiles need before and after a product."""

from typing import Any, Final

from llvmlite import ir
from numba.core import types

from slackwater.checkpoint.jit import instruction

SIDE: Final = 16

_LONG: Final = ir.IntType(64)
_ROW: Final = ir.VectorType(ir.IntType(32), SIDE)


@instruction
def transpose(_context: Any, _source: Any, _source_stride: Any, _target: Any, _target_stride: Any) -> Any:
    """Write the columns of ``source`` as the rows of ``target``: addresses, and bytes from one row to the next."""

    def build(context: Any, builder: Any, _: Any, arguments: Any) -> Any:
        source, source_stride, target, target_stride = arguments
        rows = [builder.load(_at(builder, source, source_stride, row), align=4) for row in range(SIDE)]
        half = 1
        while half < SIDE:  # blocks of ``half`` beside the diagonal change places
            for row in range(SIDE):
                if not row & half:
                    rows[row], rows[row + half] = _exchange(builder, rows[row], rows[row + half], half)
            half *= 2
        for row, values in enumerate(rows):
            builder.store(values, _at(builder, target, target_stride, row), align=4)
        return context.get_dummy_value()

    return types.none(types.int64, types.int64, types.int64, types.int64), build


def _at(builder: Any, address: Any, stride: Any, row: int) -> Any:
    first = builder.add(address, builder.mul(stride, ir.Constant(_LONG, row)))
    return builder.inttoptr(first, _ROW.as_pointer())


def _exchange(builder: Any, one: Any, other: Any, half: int) -> tuple[Any, Any]:
    columns = range(SIDE)
    upper = [SIDE + column - half if column & half else column for column in columns]
    lower = [SIDE + column if column & half else column + half for column in columns]
    return tuple(builder.shuffle_vector(one, other, _mask(places)) for places in (upper, lower))


def _mask(places: list[int]) -> Any:
    return ir.Constant(ir.VectorType(ir.IntType(32), SIDE), places)
