"""Words that threads share in compiled kernels."""

import platform
from typing import Any, Final

from llvmlite import ir
from numba.core import types

from slackwater.checkpoint.jit import instruction

let_others: Final[Any] = types.ExternalFunction("sched_yield", types.int32())
"""Have the system run another thread, if one waits for this core."""

_PAUSES: Final = platform.machine() in ("x86_64", "AMD64")


def _word(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    array = context.make_array(signature.args[0])(context, builder, arguments[0])
    return builder.gep(array.data, [arguments[1]])


@instruction
def add(_context: Any, words: Any, _at: Any, _value: Any) -> Any:
    """Add to ``words[at]``; what was there before."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.atomic_rmw("add", _word(context, builder, signature, arguments), arguments[2], "seq_cst")

    return types.int64(words, types.int64, types.int64), build


@instruction
def read(_context: Any, words: Any, _at: Any) -> Any:
    """What ``words[at]`` holds now, and with it all that its writer wrote before."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load_atomic(_word(context, builder, signature, arguments), "seq_cst", 8)

    return types.int64(words, types.int64), build


@instruction
def write(_context: Any, words: Any, _at: Any, _value: Any) -> Any:
    """Set ``words[at]``, after all that this thread wrote before."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.store_atomic(arguments[2], _word(context, builder, signature, arguments), "seq_cst", 8)
        return context.get_dummy_value()

    return types.none(words, types.int64, types.int64), build


@instruction
def breathe(_context: Any) -> Any:
    """Tell the processor that this thread waits for a word."""

    def build(context: Any, builder: Any, _: Any, __: Any) -> Any:
        if _PAUSES:
            kind = ir.FunctionType(ir.VoidType(), [])
            name = "llvm.x86.sse2.pause"
            builder.call(builder.module.globals.get(name) or ir.Function(builder.module, kind, name), [])
        return context.get_dummy_value()

    return types.none(), build


@instruction
def call(_context: Any, _address: Any, _job: Any, _block: Any, _thread: Any) -> Any:
    """Call the compiled function at an address, which takes three words and returns nothing."""

    def build(context: Any, builder: Any, _: Any, arguments: Any) -> Any:
        word = ir.IntType(64)
        kind = ir.FunctionType(ir.VoidType(), [word, word, word]).as_pointer()
        builder.call(builder.inttoptr(arguments[0], kind), arguments[1:])
        return context.get_dummy_value()

    return types.none(types.int64, types.int64, types.int64, types.int64), build
