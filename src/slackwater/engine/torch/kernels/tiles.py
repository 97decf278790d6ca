"""Intel's AMX in compiled kernels: eight tiles of 16 rows of 64 bytes, and their bf16 product.

Instructions by their LLVM intrinsics (``llvm.x86.tileloadd64`` and its like); what they do is in Intel's Software
Developer's Manual, volume 1, chapter 18. Linux lets a process use tiles once it has asked to.
"""

import ctypes
import sys
from functools import cache
from typing import Any, Final

import llvmlite.binding as llvm
import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba.core import types

from slackwater.checkpoint.jit import instruction

ROWS: Final = 16
"""Rows of a tile, and columns of a product."""
DEPTH: Final = 32
"""Bf16 numbers of a row that a product sums over."""

_ARCH_PRCTL: Final = 158
_REQUEST_PERMISSION: Final = 0x1023
_TILE_DATA: Final = 18

_BYTE: Final = ir.IntType(8)
_LONG: Final = ir.IntType(64)
_POINTER: Final = _BYTE.as_pointer()


@cache
def available() -> bool:
    """Whether this machine has them and the system lets this process use them."""
    if sys.platform != "linux" or not llvm.get_host_cpu_features().get("amx-bf16"):
        return False
    return ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) == 0


def shapes() -> npt.NDArray[np.uint8]:
    """What `configure` takes: every tile at its largest, ``[64]``."""
    config = np.zeros(64, dtype=np.uint8)
    config[0] = 1
    config[16:32].view(np.uint16)[:] = 2 * DEPTH
    config[48:56] = ROWS
    return config


def _call(builder: Any, name: str, *arguments: Any) -> None:
    kind = ir.FunctionType(ir.VoidType(), [argument.type for argument in arguments])
    function = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
    builder.call(function, arguments)


def _at(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, _POINTER)


def _number(tile: Any) -> Any:
    return ir.Constant(_BYTE, tile.literal_value)


@instruction
def configure(_context: Any, _address: Any) -> Any:
    """Give this thread tiles, as `shapes` at an address say."""

    def build(context: Any, builder: Any, _: Any, arguments: Any) -> Any:
        _call(builder, "llvm.x86.ldtilecfg", _at(builder, arguments[0]))
        return context.get_dummy_value()

    return types.none(types.int64), build


@instruction
def release(_context: Any) -> Any:
    """Give the tiles back."""

    def build(context: Any, builder: Any, _: Any, __: Any) -> Any:
        _call(builder, "llvm.x86.tilerelease")
        return context.get_dummy_value()

    return types.none(), build


@instruction
def zero(_context: Any, tile: Any) -> Any:
    """Make a tile, given by a literal number, zeros."""

    def build(context: Any, builder: Any, _: Any, __: Any) -> Any:
        _call(builder, "llvm.x86.tilezero", _number(tile))
        return context.get_dummy_value()

    return types.none(tile), build


@instruction
def load(_context: Any, tile: Any, _address: Any, _stride: Any) -> Any:
    """Read a tile's rows, which begin ``stride`` bytes apart."""

    def build(context: Any, builder: Any, _: Any, arguments: Any) -> Any:
        _call(builder, "llvm.x86.tileloadd64", _number(tile), _at(builder, arguments[1]), arguments[2])
        return context.get_dummy_value()

    return types.none(tile, types.int64, types.int64), build


@instruction
def store(_context: Any, tile: Any, _address: Any, _stride: Any) -> Any:
    """Write a tile's rows, likewise."""

    def build(context: Any, builder: Any, _: Any, arguments: Any) -> Any:
        _call(builder, "llvm.x86.tilestored64", _number(tile), _at(builder, arguments[1]), arguments[2])
        return context.get_dummy_value()

    return types.none(tile, types.int64, types.int64), build


@instruction
def multiply(_context: Any, into: Any, rows: Any, columns: Any) -> Any:
    """Add a product to the float32 tile ``into [16, 16]``.

    ``rows [16, 32]`` are bf16; ``columns`` hold pairs that belong to one sum beside each other, ``[16, 16, 2]``.
    """

    def build(context: Any, builder: Any, _: Any, __: Any) -> Any:
        _call(builder, "llvm.x86.tdpbf16ps", _number(into), _number(rows), _number(columns))
        return context.get_dummy_value()

    return types.none(into, rows, columns), build
