"""Compiled kernels: plain loops over the caller's numpy arrays, which numba turns into machine code.

A kernel allocates nothing, keeps nothing and releases the GIL. Its machine code is kept on the disk after the first use
on a machine. Inside a kernel bounds are not checked: its caller has checked the sizes of every array that it passes.

In numba an unsigned and a signed 64-bit integer make a float, so kernels keep both kinds apart: counters and positions
are signed, words are unsigned, and each conversion is written out.
"""

from collections.abc import Callable
from typing import Any, Final, ParamSpec, TypeVar, cast

import numba
import numpy as np
from llvmlite import ir
from numba import carray  # pyright: ignore[reportPrivateImportUsage] : documented there
from numba.core import types
from numba.extending import intrinsic, overload

_P = ParamSpec("_P")
_R = TypeVar("_R")
_entries: Final[list[Any]] = []
"""Kept alive: their addresses are in use."""
_REORDERED: Final = frozenset({"reassoc", "contract", "nsz", "arcp"})


def kernel(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Compile a function at its first call, for the array types that it is called with.

    Where neither the package's folder nor the user's cache can be written, the code is kept in memory alone, and each
    process compiles anew; ``NUMBA_CACHE_DIR`` names another place.
    """
    return _compiled(function)


def summing_kernel(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """As `kernel`, for sums of floats: their order is chosen once, when it is compiled, so that they are vectorised.

    NaN and infinity keep their meaning.
    """
    return _compiled(function, fastmath=set(_REORDERED), error_model="numpy")


def _compiled(function: Callable[_P, _R], **options: Any) -> Callable[_P, _R]:
    try:
        return cast("Callable[_P, _R]", numba.njit(function, nogil=True, cache=True, **options))
    except RuntimeError:  # "no locator available": numba looks for a place while it decorates
        return cast("Callable[_P, _R]", numba.njit(function, nogil=True, **options))


def instruction(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make a function of numba's types, and of a context before them, the maker of an instruction that kernels can use.

    See ``numba.extending.intrinsic``; literal arguments come as literal types.
    """
    return cast("Callable[..., Any]", intrinsic(prefer_literal=True)(function))


def entry(function: Callable[[int, int, int], None]) -> int:
    """Compile a function of three words, to be called by its address for as long as this process lives.

    Returns:
        The address.
    """
    signature = types.void(types.int64, types.int64, types.int64)
    try:
        compiled: Any = numba.cfunc(signature, cache=True)(function)
    except RuntimeError:  # as above
        compiled = numba.cfunc(signature)(function)
    _entries.append(compiled)
    return int(compiled.address)


@intrinsic
def _cttz(_context: Any, _word: Any) -> Any:
    def build(_: Any, builder: Any, __: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 0))

    return types.uint64(types.uint64), build


@intrinsic
def _ctlz(_context: Any, _word: Any) -> Any:
    def build(_: Any, builder: Any, __: Any, arguments: Any) -> Any:
        return builder.ctlz(arguments[0], ir.Constant(ir.IntType(1), 0))

    return types.uint64(types.uint64), build


@intrinsic
def _ctpop(_context: Any, _word: Any) -> Any:
    def build(_: Any, builder: Any, __: Any, arguments: Any) -> Any:
        return builder.ctpop(arguments[0])

    return types.uint64(types.uint64), build


@intrinsic
def _differing(_context: Any, old: Any, new: Any, _begin: Any) -> Any:
    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        block = ir.VectorType(ir.IntType(old.dtype.bitwidth), 64).as_pointer()
        loaded: list[Any] = []
        for kind, array in zip(signature.args[:2], arguments[:2], strict=True):
            first = builder.gep(context.make_array(kind)(context, builder, array).data, [arguments[2]])
            loaded.append(builder.load(builder.bitcast(first, block), align=1))
        return builder.bitcast(builder.icmp_unsigned("!=", *loaded), ir.IntType(64))

    return types.uint64(old, new, types.int64), build


@intrinsic
def _pointer(_context: Any, _address: Any) -> Any:
    def build(_: Any, builder: Any, __: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), build


@kernel
def array_at(address: int, size: int, dtype: Any) -> Any:
    """``size`` elements of ``dtype`` at an address of this process's memory, as an array of their own.

    For tables of addresses that a kernel walks in one call. Nothing is checked and nothing is kept alive: both are the
    duty of whoever made the table.
    """
    return carray(_pointer(address), (size,), dtype)  # pyright: ignore[reportCallIssue] : numba's own types


def float_of(bits: Any) -> Any:
    """In a kernel: a stored number as float32, bf16 being kept as uint16."""
    raise NotImplementedError(bits)


@overload(float_of, inline="always")
def _float_of(bits: Any) -> Any:
    def bf16(bits: Any) -> Any:
        return np.uint32(np.uint32(bits) << np.uint32(16)).view(np.float32)

    def float32(bits: Any) -> Any:
        return bits

    return bf16 if bits == types.uint16 else float32


@kernel
def differing(old: Any, new: Any, begin: int) -> Any:
    """A word with a bit for each of 64 elements from the ``begin``-th on: whether it differs."""
    return _differing(old, new, begin)  # pyright: ignore[reportCallIssue] : numba's own types


@kernel
def ones(word: Any) -> int:
    """One bits of a 64-bit word."""
    return np.int64(_ctpop(np.uint64(word)))  # pyright: ignore[reportReturnType,reportCallIssue] : numba's own types


@kernel
def trailing_zeros(word: Any) -> int:
    """Zero bits below the lowest one bit of a 64-bit word; 64 for zero."""
    return np.int64(_cttz(np.uint64(word)))  # pyright: ignore[reportReturnType,reportCallIssue] : numba's own types


@kernel
def leading_zeros(word: Any) -> int:
    """Zero bits above the highest one bit of a 64-bit word; 64 for zero."""
    return np.int64(_ctlz(np.uint64(word)))  # pyright: ignore[reportReturnType,reportCallIssue] : numba's own types
