"""The limit: a model's matrix products alone, in a process of its own. No attention, norms, sampling, or books.

`engine_limit.py FOLDER OUT BATCH...`: OUT becomes a JSON list of `Limit`, one for each batch in each way.
"""

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file
from torch import Tensor

from slackwater.engine.torch.kernels import tiles
from slackwater.engine.torch.kernels.linear import Linear
from slackwater.engine.torch.kernels.team import Team

_LEAST_RUNS: Final = 3
_ENOUGH_S: Final = 1.0
_MOST_RUNS: Final = 200
_HEAD: Final = "lm_head.weight"
_EMBEDDING: Final = "model.embed_tokens.weight"
_DTYPES: Final = (torch.bfloat16, torch.float32)

Product = Callable[[Tensor], Tensor]
Form = Callable[[Tensor, int], Product]


@dataclass(frozen=True, kw_only=True, slots=True)
class Limit:
    """The fastest step of one batch in one way."""

    way: str
    """Dtype, threads, form of the weights."""
    batch: int
    """Rows of each product: one token each."""
    tokens_per_s: float


def matrices(folder: Path) -> list[Tensor]:
    """All matrices that a token is multiplied by, ``[out, in]``, the head last; tied embeddings are the head."""
    found: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found.update(load_file(file))
    head = found.pop(_HEAD, None)
    embedding = found.pop(_EMBEDDING)
    inner = [found[name] for name in sorted(found) if found[name].ndim == 2]  # noqa: PLR2004 - matrices
    return [*inner, embedding if head is None else head]


def plain(weight: Tensor, batch: int) -> Product:
    """As `torch.nn.functional.linear` does it."""
    del batch
    return lambda rows: torch.nn.functional.linear(rows, weight)


def packed(weight: Tensor, batch: int) -> Product:
    """Over a weight that oneDNN laid out anew beforehand, for this batch."""
    ops: Any = torch.ops.mkldnn
    laid = ops._reorder_linear_weight(weight, batch)  # noqa: SLF001 - the one way to it
    return lambda rows: ops._linear_pointwise(rows, laid, None, "none", [], "")  # noqa: SLF001 - likewise


def tiled(team: Team) -> Form:
    """As our engine does it where the processor has AMX, over weights as they lie."""
    linear = Linear(team)

    def form(weight: Tensor, batch: int) -> Product:
        del batch
        return lambda rows: linear.multiply(rows, weight)

    return form


def limits(folder: Path, batches: Sequence[int], threads: Sequence[int]) -> list[Limit]:
    """Measure every batch in every way."""
    found: list[Limit] = []
    for dtype in _DTYPES:
        weights = [tensor.to(dtype) for tensor in matrices(folder)]
        for count in threads:
            torch.set_num_threads(count)
            for form in (plain, packed):
                way = f"{_name(dtype)}, {form.__name__}, {count} threads"
                found.extend(_limit(way, weights, form, batch) for batch in batches)
    return [*found, *_tiled_limits(folder, batches, threads)]


def _tiled_limits(folder: Path, batches: Sequence[int], threads: Sequence[int]) -> list[Limit]:
    if not tiles.available():
        return []
    weights, found = [tensor.to(torch.bfloat16) for tensor in matrices(folder)], list[Limit]()
    for count in threads:
        team = Team(count)
        with team.awake():
            way = f"{_name(torch.bfloat16)}, our kernel, {count} threads"
            found.extend(_limit(way, weights, tiled(team), batch) for batch in batches)
        team.close()
    return found


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@torch.inference_mode()
def _limit(way: str, weights: Sequence[Tensor], form: Form, batch: int) -> Limit:
    products = [form(weight, batch) for weight in weights]
    rows = {weight.shape[1]: torch.randn(batch, weight.shape[1], dtype=weight.dtype) for weight in weights}
    inputs = [rows[weight.shape[1]] for weight in weights]
    seconds: list[float] = []
    while len(seconds) < _LEAST_RUNS or (sum(seconds) < _ENOUGH_S and len(seconds) < _MOST_RUNS):
        begun = time.perf_counter()
        for product, given in zip(products, inputs, strict=True):
            product(given)
        seconds.append(time.perf_counter() - begun)
    return Limit(way=way, batch=batch, tokens_per_s=batch / min(seconds))


def main() -> None:
    """Measure, with every thread and with one."""
    folder, out, *batches = sys.argv[1:]
    found = limits(Path(folder), [int(batch) for batch in batches], (torch.get_num_threads(), 1))
    Path(out).write_text(json.dumps([asdict(item) for item in found]), "utf-8")


if __name__ == "__main__":
    main()
