"""Where a checkpoint's tensors lie in a runtime: version 1, for runtimes that hold them as they are.

Fused, stacked or sharded runtimes will map one name to several destinations; the question stays the same.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from slackwater.checkpoint.tensor import TensorSpec
from slackwater.errors import UnsupportedError

_NAMED: Final = 5
"""Most tensors that an error lists by name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Destination:
    """Where a tensor begins: its element *i* is element ``offset + i`` of the parameter."""

    parameter: str
    offset: int
    """Elements, in flat row-major order."""


def place(
    checkpoint: Mapping[str, TensorSpec],
    runtime: Mapping[str, TensorSpec],
    *,
    ties: Mapping[str, str] | None = None,
) -> dict[str, Destination]:
    """Map each checkpoint tensor to the runtime's parameter of the same name, shape and dtype.

    Args:
        checkpoint: What the checkpoint holds, by name.
        runtime: What the runtime holds, by name; tied parameters once, under their canonical name.
        ties: Alias to canonical name, such as ``lm_head.weight`` to ``model.embed_tokens.weight``. An alias
            in the checkpoint is dropped: its bits are the canonical tensor's.

    Raises:
        UnsupportedError: A tensor is missing, unexpected, or of another shape or dtype.
    """
    held = {name: spec for name, spec in checkpoint.items() if name not in (ties or {})}
    _refuse("lacks", runtime.keys() - held.keys(), "publish every tensor that the model's config asks for")
    _refuse("has unexpected", held.keys() - runtime.keys(), "check that config.json and the tensors fit together")
    unfit = (name for name, spec in held.items() if not _fits(spec, runtime[name]))
    _refuse("has another shape or dtype in", unfit, "store every tensor in the one dtype that config.json names")
    return {name: Destination(parameter=name, offset=0) for name in held}


def _fits(stored: TensorSpec, wanted: TensorSpec) -> bool:
    return (stored.shape, stored.dtype) == (wanted.shape, wanted.dtype)


def _refuse(what: str, names: Iterable[str], hint: str) -> None:
    found = sorted(names)
    if not found:
        return
    more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
    raise UnsupportedError(
        f"this engine can't place the checkpoint: it {what} {', '.join(found[:_NAMED])}{more}", hint=hint
    )
